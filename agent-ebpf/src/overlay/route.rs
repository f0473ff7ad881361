//! Whether the kernel's routes lead to a node as they did when the agent asked.
//!
//! The agent follows them, but it may have been killed when one changes, and a way of before may lead nowhere. So the kernel is asked
//! again while packets go there, every [`REFRESH_TICKS`](connection::is_due): each node has a place for when it was, and who has the
//! same place asks more often.

use super::way_of_requests;
use crate::{
    connection,
    forward::LEADS_ON,
    maps::CONFIG,
    scratch::{self, Scratch, verified_once},
    stage::tunnel,
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_FIB_LKUP_RET_NO_NEIGH},
    macros::map,
    maps::Array,
};
use sinabro_common::abi::Addr;

/// A power of two.
const PLACES: u32 = 4096;

/// When the way to a node was found to be the kernel's.
#[repr(C)]
struct Asked {
    /// Its tunnel address, in words.
    tunnel: [u32; 4],
    ticks: u32,
}

/// Not pinned: what is asked once more does no harm. Two processors that write to a place at once may leave a part each, which is
/// another node's for no longer than until the next question.
#[map]
static ASKED: Array<Asked> = Array::with_max_entries(PLACES, 0);

/// Whether the kernel's routes still lead to a node by the way that `NEXT_HOPS` has.
#[inline(always)]
pub fn leads_still(skb: *mut __sk_buff, scratch: &mut Scratch, tunnel: &Addr) -> bool {
    let words = tunnel.words();
    let Some(asked) = ASKED.get_ptr(place(words)) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    let (of, ticks) = unsafe { ((*asked).tunnel, (*asked).ticks) };
    if of == words && !connection::is_due(connection::ticks(), ticks) {
        // Whoever remembers the answer does not do so for longer.
        scratch.seen.ticks = ticks;
        return true;
    }
    scratch.peer = *tunnel;
    ask(skb, scratch) != 0
}

verified_once! {
    /// Asks the kernel for the way to `scratch.peer`; zero if it is another.
    pub fn ask = ask_global(asked);
}

#[inline(always)]
fn asked(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Scratch { peer, way, .. } = scratch;
    let Some(next) = way_of_requests(peer) else {
        return 0;
    };
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return 0;
    };
    // SAFETY: the context is valid for as long as the program runs.
    let ifindex = unsafe { (*skb).ifindex };
    way.of_node(&overlay.local, peer);
    match way.ask(skb, ifindex, 0) {
        LEADS_ON => {}
        // Whoever sends by it asks for the neighbour. Before Linux 5.18 the answer does not say by which interface then.
        NO_NEIGHBOUR => {}
        _ => return 0,
    }
    let is_by_uplink = way.ifindex == next.ifindex || way.ifindex == ifindex;
    if !is_by_uplink || !way.is_by(&next.gateway) {
        return 0;
    }
    let words = peer.words();
    let Some(asked) = ASKED.get_ptr_mut(place(words)) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        (*asked).tunnel = words;
        (*asked).ticks = connection::ticks();
    }
    1
}

const NO_NEIGHBOUR: i64 = BPF_FIB_LKUP_RET_NO_NEIGH as i64;

/// Nodes' addresses differ in their last bits.
#[inline(always)]
fn place(words: [u32; 4]) -> u32 {
    u32::from_be(words[3]) & (PLACES - 1)
}
