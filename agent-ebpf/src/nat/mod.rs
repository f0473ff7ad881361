//! Masquerade: what pods of this node send out of the cluster gets the address of the uplink that it leaves by.
//!
//! - [`leave`]: what leaves by an uplink; [`claim`]: a translation for a new connection;
//!   [`crowd`]: which ports are taken where few are left; [`mapping`]: one port towards all remote ends;
//! - [`arrive`]: what comes in by one; [`early`]: fragments that do so before the first of their packet;
//! - [`across`]: clients of Services that came in by an uplink, on their way to pods of other nodes;
//! - [`error`]: ICMP errors, which quote packets, in both directions;
//! - [`host`]: the node's own connections, which keep their ports while no pod's has them.

pub mod across;
pub mod arrive;
pub mod claim;
pub mod crowd;
pub mod early;
pub mod error;
pub mod host;
pub mod leave;
pub mod mapping;
pub mod socket;

use crate::{
    PASS,
    maps::{CONFIG, NON_MASQUERADE, NON_MASQUERADE_BEFORE, UPLINKS},
    parse::{Fragment, icmp, proto},
    rewrite::{self, End},
    scratch::Scratch,
};
use aya_ebpf::{bindings::__sk_buff, maps::lpm_trie::Key, programs::TcContext};
use sinabro_common::{
    abi::{
        Addr,
        config::{
            FLAG_CARRYING, FLAG_MASQUERADE, FLAG_MASQUERADE_PORTLESS, FLAG_SERVICES, NodeConfig,
        },
        connection::is_portless,
        drop::DropReason,
    },
    algo::ct_state,
};

/// What a stage's function returns beside an action: a drop for a reason. No action of the kernel's is so large.
pub const DROPPED: i32 = 0x100;

/// A drop for a reason, as a number.
#[inline(always)]
pub fn drop(reason: DropReason) -> i32 {
    DROPPED + reason as i32
}

/// Destinations that pods reach with their own address.
#[inline(always)]
pub fn keeps_source(addr: Addr) -> bool {
    NON_MASQUERADE.get(Key::new(128, addr)).is_some()
}

/// Whether a TCP segment that no record was found for may be of a connection that a pod began under its own address,
/// before it was said that this destination gets the node's.
#[inline(always)]
fn is_from_before(dst: &Addr, tcp_flags: u8) -> bool {
    !ct_state::begins(proto::TCP, tcp_flags)
        && NON_MASQUERADE_BEFORE.get(Key::new(128, *dst)).is_some()
}

/// Whether an ICMP message quotes the packet that it is about.
#[inline(always)]
pub fn is_error(scratch: &Scratch) -> bool {
    match scratch.ip.proto {
        proto::ICMP | proto::ICMPV6 => {
            scratch.ip.fragment == Fragment::No && icmp::is_error(scratch.ip.v6, scratch.l4.icmp)
        }
        _ => false,
    }
}

/// Whether a packet is of a protocol whose flows are told apart by addresses alone, and keeps to its own: the node may have
/// that very flow, by a tunnel device or IPsec, also without ever having sent a packet.
#[inline(always)]
pub fn is_left_alone(config: &NodeConfig, proto: u8) -> bool {
    config.flags & FLAG_MASQUERADE_PORTLESS == 0 && is_portless(proto)
}

/// Whether a packet that no record was found for may be of a connection whose record is on its way here: another
/// port would break it, and so would the node's own RST.
#[inline(always)]
pub fn is_carried(config: &NodeConfig, scratch: &Scratch) -> bool {
    scratch.ip.proto == proto::TCP
        && config.flags & FLAG_CARRYING != 0
        && !ct_state::begins(proto::TCP, scratch.l4.tcp_flags)
}

/// Gives one end of the packet another address and port.
#[inline(always)]
fn translate(ctx: &TcContext, scratch: &Scratch, end: End, to: (&Addr, [u8; 2])) -> i32 {
    let from = match end {
        End::Source => (&scratch.ip.src, scratch.l4.src_port),
        End::Destination => (&scratch.ip.dst, scratch.l4.dst_port),
    };
    match rewrite::endpoint(ctx, &scratch.ip, end, from, to) {
        Ok(()) => PASS,
        Err(rewrite::Failed) => drop(DropReason::RewriteFailed),
    }
}

/// Finds the address that what leaves by this packet's uplink is to have; false if it has none.
#[inline(never)]
fn find_source(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    let Some(uplink) = UPLINKS.get_ptr(unsafe { (*skb).ifindex }) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    scratch.nat = unsafe {
        match scratch.ip.v6 {
            false => (*uplink).v4,
            true => (*uplink).v6,
        }
    };
    scratch.nat != Addr::UNSPECIFIED
}

/// The node's settings, if what comes in by an uplink may be for another address than it says.
#[inline(always)]
fn translating() -> Option<&'static NodeConfig> {
    CONFIG
        .get(0)
        .filter(|config| config.flags & (FLAG_MASQUERADE | FLAG_SERVICES) != 0)
}

/// The node's settings, if anything is masqueraded.
#[inline(always)]
fn masquerading() -> Option<&'static NodeConfig> {
    CONFIG
        .get(0)
        .filter(|config| config.flags & FLAG_MASQUERADE != 0)
}
