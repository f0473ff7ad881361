//! Where the packets of a flow go, as one of them was judged a moment ago.
//!
//! To judge what a pod sends to another takes up to five lookups, and five more where it comes in on another node, with the same answers
//! from one packet to the next. What they led to counts for packets with the same ends that come by the same link,
//!
//! - until the agent changes what is looked up, or a connection gets a record that may be between these ends
//!   (`sinabro_common::abi::flow`): the numbers are read before anything is looked up, and raised after it has changed;
//! - for [`REFRESH_TICKS`](connection::is_due), for who was to raise a number may have been killed.
//!
//! It does not count for what begins or ends a connection of TCP, nor while programs of two layouts run. What depends on more than the ends, such
//! as a packet's MAC address, its length and its TTL, is looked at in each.
//!
//! Each processor remembers for itself: nobody reads what another one is writing. Of the flows that have one place it is the busiest one, and
//! brief ones are not remembered: to write what is never read costs more than the lookups ([`algo::flow`](sinabro_common::algo::flow)).

use crate::{
    connection,
    maps::FLOW_EPOCHS,
    parse::{
        Fragment,
        l4::{TCP_FIN, TCP_RST, TCP_SYN},
        proto,
    },
    scratch::Scratch,
};
use aya_ebpf::{bindings::__sk_buff, maps::PerCpuArray};
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_CARRYING, FLAG_MIXED, NodeConfig},
        connection::{ConnectionKey, Tuple},
        flow::{OF_AGENT, epoch_of},
    },
    algo::flow::{PLACES, Vote, of_ends, place, place_of_direction, vote},
};

/// A flow of each place, and in one value which that is. An object that remembers has both maps for itself, and they go with it.
pub type Flows<W> = PerCpuArray<Flow<W>>;
pub type Votes = PerCpuArray<[Vote; PLACES as usize]>;

/// One more than there are places: for the way of what is not remembered.
pub const FLOWS: u32 = PLACES + 1;

/// Set by the agent before it loads the programs: how many places there are on this machine, a power of two.
#[unsafe(no_mangle)]
static FLOW_PLACES: u32 = PLACES;

#[repr(C)]
pub struct Flow<W> {
    ends: Tuple,
    seen: Seen,
    way: W,
}

/// By which link a packet came, and when.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Seen {
    /// Zero: where the packet goes is not remembered.
    link: u32,
    place: u32,
    agent: u32,
    connections: u32,
    /// When what changes without a number was looked up.
    pub ticks: u32,
}

/// Notes a packet that is read, and the numbers as they are before anything is looked up for it.
#[inline(always)]
pub fn see(skb: *mut __sk_buff, config: &NodeConfig, scratch: &mut Scratch, votes: &'static Votes) {
    let Scratch { ip, l4, seen, .. } = scratch;
    // SAFETY: a variable of this program; volatile, for its value here is not the one at run time.
    let places = unsafe { core::ptr::read_volatile(&raw const FLOW_PLACES) };
    seen.link = 0;
    seen.place = places;
    // What ends a connection comes once, and those of one request have hardly more packets than these.
    let goes_on = ip.fragment == Fragment::No
        && match ip.proto {
            proto::TCP => l4.tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST) == 0,
            other => other == proto::UDP,
        };
    let is_mixed = config.flags & (FLAG_MIXED | FLAG_CARRYING) != 0;
    if !goes_on || is_mixed || !scratch.well_formed {
        return;
    }
    let (src, dst) = ((&ip.src, l4.src_port), (&ip.dst, l4.dst_port));
    let of_ends = of_ends(src, dst);
    let place_here = place_of_direction(of_ends, src, dst) & (places - 1) & (PLACES - 1);
    let Some(votes) = votes.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: this processor's own, and one of as many as there are places.
    let is_enough = unsafe {
        let at = votes.cast::<Vote>().add(place_here as usize);
        let (now, is_enough) = vote(at.read(), of_ends);
        at.write(now);
        is_enough
    };
    if !is_enough {
        return;
    }
    seen.place = place_here;
    // SAFETY: the context is valid for as long as the program runs.
    seen.link = unsafe { (*skb).ifindex };
    seen.agent = epoch(OF_AGENT);
    seen.connections = epoch(epoch_of(place(of_ends)));
    seen.ticks = connection::ticks();
}

/// Which way the flow of the packet that was [seen](see) goes, if that is remembered.
#[inline(always)]
pub fn way<W>(flows: &'static Flows<W>, scratch: &Scratch) -> Option<&'static W> {
    if !scratch.seen.is_remembered() {
        return None;
    }
    let flow = place_of(flows, scratch)?;
    flow.goes_on(scratch).then_some(&flow.way)
}

/// Where the way of the packet that was [seen](see) is remembered, if it is to be.
#[inline(always)]
pub fn to_remember<W>(flows: &'static Flows<W>, scratch: &Scratch) -> Option<&'static mut Flow<W>> {
    match scratch.seen.is_remembered() {
        true => place_of(flows, scratch),
        false => None,
    }
}

/// The place of the flow of the packet that was [seen](see), or that of what is not remembered.
#[inline(always)]
pub fn place_of<W>(flows: &'static Flows<W>, scratch: &Scratch) -> Option<&'static mut Flow<W>> {
    let flow = flows.get_ptr_mut(scratch.seen.place)?;
    // SAFETY: this processor's own, and a program is not preempted by one of its object.
    Some(unsafe { &mut *flow })
}

/// A record may be between a connection's ends that had none: to be called once it is written.
#[inline(always)]
pub fn has_record(key: &ConnectionKey) {
    let place = place(of_ends(
        (&key.low, key.low_port),
        (&key.high, key.high_port),
    ));
    if let Some(epoch) = FLOW_EPOCHS.get_ptr_mut(epoch_of(place)) {
        // Two processors that raise it at once may do so by one: either's record was there before.
        // SAFETY: a value that the map just gave, which is written whole.
        unsafe { epoch.write_volatile(epoch.read_volatile().wrapping_add(1)) };
    }
}

#[inline(always)]
fn epoch(at: u32) -> u32 {
    // SAFETY: a value that the map just gave. Volatile: it is to be read here, before the lookups.
    FLOW_EPOCHS
        .get_ptr(at)
        .map_or(0, |epoch| unsafe { epoch.read_volatile() })
}

impl Seen {
    /// Whether where the packet goes is remembered, now or by what is found out for it.
    #[inline(always)]
    pub fn is_remembered(&self) -> bool {
        self.link != 0
    }

    /// Has the packet's flow not be remembered.
    #[inline(always)]
    pub fn forget(&mut self) {
        self.link = 0;
    }
}

impl<W> Flow<W> {
    /// Whether the packet that was [seen](see) goes on this flow, the same way.
    #[inline(always)]
    fn goes_on(&self, scratch: &Scratch) -> bool {
        let Scratch { ip, l4, seen, .. } = scratch;
        let (known, ends) = (&self.seen, &self.ends);
        let ports = |port: [u8; 2], other: [u8; 2]| {
            let [a, b] = port;
            let [c, d] = other;
            u64::from(u32::from_ne_bytes([a, b, c, d]))
        };
        // In one number: the verifier walks the rest once for each condition.
        let differs = differ(&ends.src, &ip.src)
            | differ(&ends.dst, &ip.dst)
            | ports(ends.src_port, ends.dst_port) ^ ports(l4.src_port, l4.dst_port)
            | u64::from(ends.proto ^ ip.proto)
            | u64::from(known.link ^ seen.link)
            | u64::from(known.agent ^ seen.agent)
            | u64::from(known.connections ^ seen.connections);
        differs == 0 && !connection::is_due(seen.ticks, known.ticks)
    }

    /// Which way it goes.
    #[inline(always)]
    pub fn way(&self) -> &W {
        &self.way
    }

    /// Forgets the flow, and has another way be written.
    #[inline(always)]
    pub fn renew(&mut self) -> &mut W {
        self.seen.forget();
        &mut self.way
    }

    /// Remembers that the packet that was [seen](see) goes the way that was written, if it is to be remembered.
    #[inline(always)]
    pub fn keep(&mut self, scratch: &Scratch) {
        let Scratch { ip, l4, seen, .. } = scratch;
        self.ends.src = ip.src.by_words();
        self.ends.dst = ip.dst.by_words();
        self.ends.src_port = l4.src_port;
        self.ends.dst_port = l4.dst_port;
        self.ends.proto = ip.proto;
        self.seen = *seen;
    }
}

/// Zero if both are the same.
#[inline(always)]
fn differ(one: &Addr, other: &Addr) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (one.words(), other.words());
    u64::from(a ^ e | b ^ f | c ^ g | d ^ h)
}
