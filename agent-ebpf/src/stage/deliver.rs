//! Packets go straight into the pod that they are for: what a pod of the same node sends ([`local`]), and what came by an
//! uplink ([`from_outside`]).
//!
//! Left to the stack, whose routes deliver it too: fragments, because only their first part
//! names the flow; ICMP errors about a flow that the stack has, as it may have translated it (about
//! others they go as what they quote did: netfilter would take them for invalid); options and extension headers, because a router must act on them; a TTL that
//! ends here, and what is too large for the receiver, because someone must say so.

use super::{Action, mss, report, track};
use crate::{
    PASS, connection,
    maps::ENDPOINTS,
    nat::{drop, error, is_error},
    parse::{
        Fragment, Ip, eth, icmp,
        l4::{L4, UDP_LEN},
        proto,
        skb::PACKET_HOST,
    },
    rewrite::{self, End},
    scratch::Scratch,
    service,
};
use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_ADJ_ROOM_ENCAP_L2_SHIFT, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4,
        BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_ADJ_ROOM_FIXED_GSO, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::{bpf_redirect_peer, bpf_skb_adjust_room},
    programs::TcContext,
};
use sinabro_common::abi::{
    config::{FLAG_REDIRECT_PEER, NodeConfig},
    drop::DropReason,
    endpoint::Endpoint,
};

/// Set by the agent before it loads the programs, so that the verifier leaves out what it rules out:
/// for kernels that refuse the programs with it.
#[unsafe(no_mangle)]
static WITHOUT_REDIRECT: u8 = 0;

/// Whether packets between pods of this node go past the stack.
#[inline(always)]
pub fn redirects(config: &NodeConfig) -> bool {
    // SAFETY: a variable of this program; volatile, for its value here is not the one at run time.
    let without = unsafe { core::ptr::read_volatile(&raw const WITHOUT_REDIRECT) } != 0;
    !without && config.flags & FLAG_REDIRECT_PEER != 0
}

/// Whether a packet that nobody will cut, or a datagram of those that a socket has sent by one call, does not fit into the receiver's
/// link. `bpf_redirect_peer` would deliver it all the same, and what is behind a link that is kept small, such as a virtual
/// machine's, lose it without a word, while the stack tells the sender. TCP's segments are as long as SYNs were let say.
/// `outside` is what it will be shorter by.
#[inline(always)]
pub fn is_too_large(ctx: &TcContext, scratch: &Scratch, outside: u32, receiver: &Endpoint) -> bool {
    let mtu = receiver.mtu();
    // SAFETY: the context is valid for as long as the program runs.
    let (len, segment) = unsafe { ((*ctx.skb.skb).len, (*ctx.skb.skb).gso_size) };
    let ip = &scratch.ip;
    let too_large = match (segment, ip.proto) {
        (0, _) => len > mtu + outside + eth::LEN,
        (_, proto::UDP) => ip.l4 - ip.l3 + UDP_LEN + segment > mtu,
        _ => false,
    };
    mtu != 0 && too_large
}

/// Whether no router has more to do with a packet than to count it.
#[inline(always)]
pub fn is_plain(ip: &Ip, l4: &L4) -> bool {
    let is_icmp = matches!(ip.proto, proto::ICMP | proto::ICMPV6);
    is_whole(ip) && (!is_icmp || icmp::is_echo(ip.v6, l4.icmp))
}

/// Whether it is no router's to answer, to look at options of or to pass on in parts.
#[inline(always)]
pub fn is_whole(ip: &Ip) -> bool {
    ip.ttl > 1 && !ip.options && ip.fragment == Fragment::No
}

/// Whether the packet type, which is kept on the way into the pod, is right: not of a frame to some other MAC address or to all.
#[inline(always)]
fn is_to_gateway(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { (*ctx.skb.skb).pkt_type == PACKET_HOST }
}

/// Whether neither a packet that a pod sends nor a segment that is cut from it is larger than what its way carries, with `room` more
/// before it. Who sends what is larger is told so by the stack.
#[inline(always)]
pub fn fits(ctx: &TcContext, scratch: &Scratch, carried: u32, room: u32) -> bool {
    /// The greatest length of an IPv4 packet.
    const MAX_LEN: u32 = 65_535;
    // SAFETY: the context is valid for as long as the program runs.
    let (len, segment) = unsafe { ((*ctx.skb.skb).len, (*ctx.skb.skb).gso_size) };
    if segment == 0 {
        return len <= carried + eth::LEN;
    }
    let ip = &scratch.ip;
    let header = match ip.proto {
        proto::TCP => scratch.l4.len.into(),
        _ => UDP_LEN,
    };
    ip.l4 - ip.l3 + header + segment <= carried && len + room <= MAX_LEN + eth::LEN
}

/// Whether it is a super-packet of another protocol than TCP.
#[inline(always)]
pub fn has_segments_of_its_own(ctx: &TcContext, scratch: &Scratch) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    let segment = unsafe { (*ctx.skb.skb).gso_size };
    segment != 0 && scratch.ip.proto != proto::TCP
}

/// Whether [`fits`] says nothing of the segments that are cut from a packet: those of TCP are as long as they say, and datagrams that
/// a socket has sent by one call (UDP_SEGMENT). How long others are depends on what is in them, a tunnel of the pod's own, for example.
#[inline(always)]
pub fn has_segments_of_any_length(ctx: &TcContext, scratch: &Scratch) -> bool {
    has_segments_of_its_own(ctx, scratch) && !is_of_datagrams(ctx.skb.skb)
}

/// No program is told what is to be cut from a packet. The helper that makes room for outer headers looks: it refuses super-packets that
/// are neither TCP's nor such datagrams (ENOTSUPP), then what is in a tunnel (EALREADY), and only then (EINVAL) an Ethernet header in no
/// room at all, which is asked for here. So it never changes anything. In this order since Linux 5.2, which has the flag for datagrams.
#[inline(never)]
fn is_of_datagrams(skb: *mut __sk_buff) -> bool {
    const EINVAL: i64 = 22;
    const NO_ROOM: u64 = (BPF_F_ADJ_ROOM_FIXED_GSO
        | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4
        | BPF_F_ADJ_ROOM_ENCAP_L4_UDP) as u64
        | (eth::LEN as u64) << BPF_ADJ_ROOM_ENCAP_L2_SHIFT;
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { bpf_skb_adjust_room(skb, 0, BPF_ADJ_ROOM_MAC, NO_ROOM) as i64 == -EINVAL }
}

/// Delivers what came by an uplink, is read, and has the receiver's address: it passes no queue and no program of the pod's link,
/// so what `pod_in` does is done here. `carried`: by the way back. `may_answer`: whether it may be from a Service's endpoint.
#[inline(always)]
pub fn from_outside(
    skb: *mut __sk_buff,
    scratch: &mut Scratch,
    receiver: &Endpoint,
    carried: u32,
    may_answer: bool,
) -> i32 {
    let ctx = TcContext::new(skb);
    if may_answer {
        match service::arrive::answer(skb, scratch) {
            PASS | service::TRANSLATED => {}
            dropped => return dropped,
        }
    }
    if mss::begins(&scratch.ip, &scratch.l4)
        && let Err(reason) = mss::lower(&ctx, &scratch.ip, carried)
    {
        return drop(reason);
    }
    into(&ctx, scratch, receiver)
}

/// Puts a packet into the pod that it is for.
#[inline(always)]
pub fn into(ctx: &TcContext, scratch: &Scratch, receiver: &Endpoint) -> i32 {
    if rewrite::decrement_ttl(ctx, &scratch.ip).is_err()
        || rewrite::macs(ctx, receiver.mac, receiver.host_mac).is_err()
    {
        return drop(DropReason::RewriteFailed);
    }
    report::received(ctx, receiver.ifindex);
    // SAFETY: no pointers involved; an interface that is gone makes the kernel drop the packet.
    unsafe { bpf_redirect_peer(receiver.ifindex, 0) as i32 }
}

/// The pod of this node that a packet is for, where anything depends on that.
#[inline(always)]
pub fn receiver(config: &NodeConfig, ip: &Ip) -> Option<&'static Endpoint> {
    if !redirects(config) && !service::are_ours(config) {
        return None;
    }
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    unsafe { ENDPOINTS.get(ip.dst) }
}

/// Delivers a packet to `receiver`, if it may go past the stack. `belongs`: to what, as [`track::known`] says.
#[inline(always)]
pub fn local(
    ctx: &TcContext,
    config: &NodeConfig,
    ifindex: u32,
    scratch: &mut Scratch,
    receiver: Option<&Endpoint>,
    belongs: u32,
) -> Action {
    if !redirects(config) {
        return Ok(PASS);
    }
    let Some(receiver) = receiver else {
        return Ok(PASS);
    };
    if belongs == track::STACK || receiver.ifindex == ifindex {
        return Ok(PASS);
    }
    if !may_enter(ctx, scratch, receiver) {
        return match may_tell(ctx, scratch, receiver) {
            true => Ok(TELLS),
            false => Ok(PASS),
        };
    }
    if belongs == track::ANSWER {
        match service::translate(ctx.skb.skb, scratch, End::Source) {
            service::TRANSLATED => {}
            dropped => return Ok(dropped),
        }
    }
    Ok(into(ctx, scratch, receiver))
}

/// What [`local`] says of an ICMP error that [`tell`] is to look at; no action of the kernel's.
pub const TELLS: i32 = 65;

/// Whether a packet is an ICMP error that needs no router.
#[inline(always)]
fn may_tell(ctx: &TcContext, scratch: &Scratch, receiver: &Endpoint) -> bool {
    is_to_gateway(ctx)
        && is_whole(&scratch.ip)
        && is_error(scratch)
        && !is_too_large(ctx, scratch, 0, receiver)
}

/// Delivers an ICMP error about what its receiver sent to this very pod past the stack. A stage of its own: it looks at a second header,
/// and has a stack for that.
#[inline(always)]
pub fn tell(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !error::read(skb, scratch)
        || scratch.quoted.src != scratch.ip.dst
        || scratch.quoted.dst != scratch.ip.src
    {
        return PASS;
    }
    scratch.seen.forget();
    scratch.identify_quoted();
    let is_direct = connection::find(&scratch.key).is_none();
    if !is_direct || track::without_record() != track::DIRECT {
        return PASS;
    }
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    match unsafe { ENDPOINTS.get(scratch.ip.dst) } {
        Some(receiver) => into(&TcContext::new(skb), scratch, receiver),
        None => PASS,
    }
}

/// Whether nobody has to look at a pod's packet but who receives it, and it is not too large for that.
#[inline(always)]
pub fn may_enter(ctx: &TcContext, scratch: &Scratch, receiver: &Endpoint) -> bool {
    is_to_gateway(ctx)
        && is_plain(&scratch.ip, &scratch.l4)
        && !is_too_large(ctx, scratch, 0, receiver)
}
