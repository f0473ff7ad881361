//! Sockets of the host, which the kernel is asked for.

use crate::{parse::proto, scratch::Scratch};
use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_CURRENT_NETNS, bpf_sock_tuple, bpf_sock_tuple__bindgen_ty_1,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1, bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2,
    },
    helpers::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};
use sinabro_common::abi::connection::Tuple;

/// Whether one takes what answers the translation in the alias's key: it listens at the port, or speaks with
/// the same remote end.
#[inline(never)]
pub fn takes_answers(skb: *mut __sk_buff, scratch: &mut Scratch) -> u32 {
    let key = &scratch.alias_key;
    let (mut tuple, len) = of_socket(key, scratch.ip.v6);
    // SAFETY: the context is valid for as long as the program runs, the tuple for as long as the call; what is
    // found is given back.
    unsafe {
        let found = match key.proto {
            proto::TCP => bpf_skc_lookup_tcp(skb.cast(), &mut tuple, len, NETNS, 0).cast(),
            proto::UDP => bpf_sk_lookup_udp(skb.cast(), &mut tuple, len, NETNS, 0),
            _ => return 0,
        };
        if found.is_null() {
            return 0;
        }
        bpf_sk_release(found.cast());
        1
    }
}

/// Whether a segment that came in is of a connection that one has. A socket that listens has none yet.
#[inline(never)]
pub fn has_segment(skb: *mut __sk_buff, scratch: &mut Scratch) -> u32 {
    let (tuple, len) = of_socket(&scratch.tuple, scratch.ip.v6);
    let state = state_of(skb, tuple, len, NETNS);
    // A socket that listens has none yet.
    (!matches!(state, NO_SOCKET | TCP_LISTEN)).into()
}

/// Whether a pod that sends a SYN, whose tuple is in the scratch, has another connection with these ends that is not over. `netns`: the id
/// of its network namespace in the host's. A socket that has sent a SYN may be this one's.
#[inline(never)]
pub fn of_sender(skb: *mut __sk_buff, scratch: &mut Scratch, netns: u32) -> u32 {
    let sent = &scratch.tuple;
    scratch.real.src = sent.dst;
    scratch.real.dst = sent.src;
    scratch.real.src_port = sent.dst_port;
    scratch.real.dst_port = sent.src_port;
    let (tuple, len) = of_socket(&scratch.real, scratch.ip.v6);
    let state = state_of(skb, tuple, len, netns.into());
    (!matches!(state, NO_SOCKET | TCP_SYN_SENT | TCP_TIME_WAIT | TCP_LISTEN)).into()
}

/// States of sockets, as in include/net/tcp_states.h; no socket has zero.
const NO_SOCKET: u32 = 0;
const TCP_SYN_SENT: u32 = 2;
const TCP_TIME_WAIT: u32 = 6;
const TCP_LISTEN: u32 = 10;

#[inline(always)]
fn state_of(skb: *mut __sk_buff, mut tuple: bpf_sock_tuple, len: u32, netns: u64) -> u32 {
    // SAFETY: as in `takes_answers`.
    unsafe {
        let found = bpf_skc_lookup_tcp(skb.cast(), &mut tuple, len, netns, 0);
        if found.is_null() {
            return NO_SOCKET;
        }
        let state = (*found).state;
        bpf_sk_release(found.cast());
        state
    }
}

/// Whether a datagram that came in answers what one has sent, which is connected to its sender. Others that have the port may
/// be anybody's: kube-proxy of before holds node ports so.
#[inline(never)]
pub fn is_asked(skb: *mut __sk_buff, scratch: &mut Scratch) -> u32 {
    const TCP_ESTABLISHED: u32 = 1;
    let (mut tuple, len) = of_socket(&scratch.tuple, scratch.ip.v6);
    // SAFETY: as in `takes_answers`.
    unsafe {
        let found = bpf_sk_lookup_udp(skb.cast(), &mut tuple, len, NETNS, 0);
        if found.is_null() {
            return 0;
        }
        let state = (*found).state;
        bpf_sk_release(found.cast());
        (state == TCP_ESTABLISHED).into()
    }
}

/// The program's own network.
const NETNS: u64 = BPF_F_CURRENT_NETNS as i64 as u64;

/// What the kernel is to look for a socket by that gets what comes in, and how much of it counts.
#[inline(always)]
fn of_socket(came: &Tuple, v6: bool) -> (bpf_sock_tuple, u32) {
    let (sport, dport) = (
        u16::from_ne_bytes(came.src_port),
        u16::from_ne_bytes(came.dst_port),
    );
    let mut tuple = bpf_sock_tuple {
        __bindgen_anon_1: bpf_sock_tuple__bindgen_ty_1 {
            ipv6: bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2 {
                saddr: came.src.words(),
                daddr: came.dst.words(),
                sport,
                dport,
            },
        },
    };
    if v6 {
        return (
            tuple,
            size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2>() as u32,
        );
    }
    tuple.__bindgen_anon_1.ipv4 = bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 {
        saddr: came.src.words()[3],
        daddr: came.dst.words()[3],
        sport,
        dport,
    };
    (
        tuple,
        size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1>() as u32,
    )
}
