//! Masquerade of IPv4 on the uplink: TCP, UDP and ICMP echo.
//!
//! Invariants (see also `sinabro_common::abi::nat`):
//! - a forward entry is only ever inserted by whoever inserted the reverse entry it leads to,
//!   and both insertions fail if the key is there: one flow has one translation, and one
//!   translation has one flow;
//! - who loses the race for the forward entry takes its own reverse entry back.
//!
//! Limits: a fragmented packet that would need translation is dropped and counted, in both
//! directions; so are pods' packets of other protocols. ICMP errors are not translated.

use super::Action;
use crate::{
    PASS,
    maps::{ENDPOINTS, NAT, NON_MASQUERADE},
    parse::{
        Fragment, Ip, icmp,
        l4::{L4, TCP_ACK, TCP_RST, TCP_SYN},
        proto,
    },
    rewrite::{self, End},
};
use aya_ebpf::{
    bindings::BPF_NOEXIST,
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    maps::lpm_trie::Key,
    programs::TcContext,
};
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_CARRYING, NodeConfig},
        drop::DropReason,
        nat::{KIND_FORWARD, KIND_INBOUND, KIND_REVERSE, NatEntry, NatKey},
    },
    algo::{ct_state, hash::fnv1a, port_pick},
};

const EEXIST: i32 = -17;

/// A packet of a busy flow writes its time no more often than this.
const REFRESH_NS: u64 = 1_000_000_000;

/// Gives a pod's packet that leaves the cluster the node's address.
#[inline(always)]
pub fn masquerade(ctx: &TcContext, config: &NodeConfig, ip: &Ip, l4: Option<L4>) -> Action {
    let Some(l4) = l4 else {
        return Err(DropReason::Malformed);
    };
    if ip.fragment != Fragment::No {
        return match keeps_source(ip.dst) {
            true => Ok(PASS),
            false => Err(DropReason::NatFragment),
        };
    }
    if ip.proto == proto::ICMP && l4.icmp != icmp::V4_ECHO_REQUEST {
        // Of no flow, whatever its id. A reply answers a request that reached the pod at its
        // own address.
        return match l4.icmp == icmp::V4_ECHO_REPLY || keeps_source(ip.dst) {
            true => Ok(PASS),
            false => Err(DropReason::NatProtocol),
        };
    }
    let key = key(ip, &l4);
    let (addr, port) = match NAT.get_ptr_mut(&key) {
        Some(entry) => {
            touch(entry, ip.proto, l4.tcp_flags);
            // SAFETY: the kernel keeps the element's memory until the program ends. It may come
            // to hold another flow if this one expires at this very moment, after at least ten
            // seconds without a packet.
            let (kind, addr, port) = unsafe { ((*entry).kind, (*entry).addr, (*entry).port) };
            if kind == KIND_INBOUND {
                return Ok(PASS);
            }
            (addr, port)
        }
        None => {
            if keeps_source(ip.dst) {
                return Ok(PASS);
            }
            match ip.proto {
                proto::TCP if is_carried(config, ip, l4.tcp_flags) => {
                    return Err(DropReason::NatCarried);
                }
                proto::TCP | proto::UDP | proto::ICMP => {}
                _ => return Err(DropReason::NatProtocol),
            }
            claim(config, &key, l4.tcp_flags)?
        }
    };
    let ip = Ip {
        proto: proto_of(&key),
        ..*ip
    };
    match rewrite::endpoint(ctx, &ip, End::Source, (key.src, key.src_port), (addr, port)) {
        Ok(()) => Ok(PASS),
        Err(rewrite::Failed) => Err(DropReason::RewriteFailed),
    }
}

/// Gives a reply back to its pod, and remembers connections that come in to a pod's own address.
#[inline(always)]
pub fn reverse(ctx: &TcContext, config: &NodeConfig, ip: &Ip, l4: &L4) -> Action {
    if ip.dst == config.masquerade_v4 {
        // An echo request asks the node itself, whatever its id.
        if ip.proto == proto::ICMP && l4.icmp != icmp::V4_ECHO_REPLY {
            return Ok(PASS);
        }
        // Most of what comes to the node is not for a translated port. A later fragment has none
        // to look at and finds no entry either.
        let port = u16::from_be_bytes(l4.dst_port);
        if port < config.nat_port_min || port > config.nat_port_max {
            return Ok(PASS);
        }
        let key = key(ip, l4);
        let Some(entry) = NAT.get_ptr_mut(&key) else {
            return match is_carried(config, ip, l4.tcp_flags) {
                true => Err(DropReason::NatCarried),
                false => Ok(PASS),
            };
        };
        // SAFETY: as in `masquerade`.
        let (kind, addr, port) = unsafe { ((*entry).kind, (*entry).addr, (*entry).port) };
        if kind != KIND_REVERSE {
            return Ok(PASS);
        }
        if ip.fragment != Fragment::No {
            return Err(DropReason::NatFragment);
        }
        touch(entry, ip.proto, l4.tcp_flags);
        let from = (ip.dst, l4.dst_port);
        return match rewrite::endpoint(ctx, ip, End::Destination, from, (addr, port)) {
            Ok(()) => Ok(PASS),
            Err(rewrite::Failed) => Err(DropReason::RewriteFailed),
        };
    }
    if matches!(ip.proto, proto::TCP | proto::UDP)
        && ip.fragment != Fragment::Later
        && ENDPOINTS.get_ptr(ip.dst).is_some()
    {
        return inbound(ip, l4);
    }
    Ok(PASS)
}

/// Whether a packet that no entry was found for may be of a connection whose entry is on its way here:
/// another port would break it, and so would the node's own RST.
///
/// Without a branch for the flags: the verifier before Linux 6.4 would walk the loop over ports once
/// more for each.
#[inline(always)]
fn is_carried(config: &NodeConfig, ip: &Ip, tcp_flags: u8) -> bool {
    let begins = (tcp_flags >> TCP_SYN.trailing_zeros()) & !(tcp_flags >> TCP_ACK.trailing_zeros());
    let carrying = (config.flags >> FLAG_CARRYING.trailing_zeros()) as u8;
    ip.proto == proto::TCP && carrying & !begins & 1 != 0
}

/// A packet from outside to a pod's own address: its replies must keep that address.
#[inline(always)]
fn inbound(ip: &Ip, l4: &L4) -> Action {
    let reply = NatKey {
        src: ip.dst,
        dst: ip.src,
        src_port: l4.dst_port,
        dst_port: l4.src_port,
        proto: ip.proto,
        pad: [0; 3],
    };
    if let Some(entry) = NAT.get_ptr_mut(&reply) {
        // SAFETY: as in `masquerade`.
        unsafe {
            if (*entry).kind == KIND_INBOUND {
                let state = ct_state::next((*entry).peer_state, ip.proto, l4.tcp_flags);
                if state != (*entry).peer_state {
                    (*entry).peer_state = state;
                }
                refresh(entry);
            }
        }
        return Ok(PASS);
    }
    let ends = ip.proto == proto::TCP && l4.tcp_flags & TCP_RST != 0;
    if ends || keeps_source(ip.src) {
        return Ok(PASS);
    }
    let entry = NatEntry {
        addr: ip.dst,
        port: l4.dst_port,
        kind: KIND_INBOUND,
        state: 0,
        peer_state: ct_state::next(0, ip.proto, l4.tcp_flags),
        pad: [0; 3],
        // SAFETY: no arguments.
        last_seen_ns: unsafe { bpf_ktime_get_ns() },
    };
    match NAT.insert(&reply, &entry, BPF_NOEXIST.into()) {
        Ok(()) | Err(EEXIST) => Ok(PASS),
        Err(_) => Err(DropReason::NatTableFull),
    }
}

/// Finds a translation for a new flow and writes both its entries.
#[inline(always)]
fn claim(config: &NodeConfig, key: &NatKey, tcp_flags: u8) -> Result<(Addr, [u8; 2]), DropReason> {
    // SAFETY: no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let owner = NatEntry {
        addr: key.src,
        port: key.src_port,
        kind: KIND_REVERSE,
        state: 0,
        peer_state: 0,
        pad: [0; 3],
        last_seen_ns: now,
    };
    // A port that nobody outside can foresee (RFC 6056 §3).
    // SAFETY: no arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    let hash = fnv1a(bytes(key)) ^ random;
    let own_port = u16::from_be_bytes(key.src_port);

    let mut attempt = 0;
    let (port, reply) = loop {
        if attempt == port_pick::ATTEMPTS {
            return Err(DropReason::NatPortsExhausted);
        }
        let port = port_pick::candidate(
            hash,
            own_port,
            attempt,
            config.nat_port_min,
            config.nat_port_max,
        )
        .to_be_bytes();
        let reply = key.reply_to(config.masquerade_v4, port);
        match NAT.insert(&reply, &owner, BPF_NOEXIST.into()) {
            Ok(()) => break (port, reply),
            Err(EEXIST) => attempt += 1,
            Err(_) => return Err(DropReason::NatTableFull),
        }
    };

    let forward = NatEntry {
        addr: config.masquerade_v4,
        port,
        kind: KIND_FORWARD,
        state: ct_state::next(0, proto_of(key), tcp_flags),
        peer_state: 0,
        pad: [0; 3],
        last_seen_ns: now,
    };
    match NAT.insert(key, &forward, BPF_NOEXIST.into()) {
        Ok(()) => Ok((config.masquerade_v4, port)),
        Err(error) => {
            // Nobody else touches a claim that no forward entry leads to.
            let _ = NAT.remove(&reply);
            if error == EEXIST
                && let Some(winner) = NAT.get_ptr(key)
            {
                // SAFETY: as in `masquerade`.
                return Ok(unsafe { ((*winner).addr, (*winner).port) });
            }
            Err(DropReason::NatTableFull)
        }
    }
}

#[inline(always)]
fn key(ip: &Ip, l4: &L4) -> NatKey {
    NatKey {
        src: ip.src,
        dst: ip.dst,
        src_port: l4.src_port,
        dst_port: l4.dst_port,
        proto: ip.proto,
        pad: [0; 3],
    }
}

/// The protocol, as something that the verifier knows nothing of.
///
/// What is compared with a constant behind the loop over ports had to be the same in front of it for
/// the verifier to take two ways there for one (`mark_chain_precision`): it would walk through the
/// loop for each protocol, and on some kernels for each set of TCP's flags.
#[inline(always)]
fn proto_of(key: &NatKey) -> u8 {
    // SAFETY: a reference. The byte is read from the stack, where no register's bounds are known.
    unsafe { core::ptr::read_volatile(&raw const key.proto) }
}

#[inline(always)]
fn keeps_source(addr: Addr) -> bool {
    NON_MASQUERADE.get(Key::new(128, addr)).is_some()
}

/// Notes a packet in its direction's entry. Two CPUs may write at once: a lost bit is set again
/// by the next packet, and a lost time is less than [`REFRESH_NS`] old.
#[inline(always)]
fn touch(entry: *mut NatEntry, proto: u8, tcp_flags: u8) {
    // SAFETY: a value that the map gave, valid until the program ends.
    unsafe {
        let state = ct_state::next((*entry).state, proto, tcp_flags);
        if state != (*entry).state {
            (*entry).state = state;
        }
        refresh(entry);
    }
}

/// # Safety
///
/// `entry` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn refresh(entry: *mut NatEntry) {
    // SAFETY: the caller's promise.
    unsafe {
        let now = bpf_ktime_get_ns();
        if now.wrapping_sub((*entry).last_seen_ns) > REFRESH_NS {
            (*entry).last_seen_ns = now;
        }
    }
}

#[inline(always)]
fn bytes(key: &NatKey) -> &[u8; size_of::<NatKey>()] {
    // SAFETY: repr(C) without padding, every byte is initialised.
    unsafe { &*core::ptr::from_ref(key).cast() }
}
