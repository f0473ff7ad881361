//! Where a program keeps what it has read of a packet: 512 bytes of stack hold neither two headers nor a record.
//!
//! What is in a map is also nothing that the verifier keeps apart: it walks each stage once, not once for each
//! protocol and set of flags that the stages before left behind.
//!
//! A function whose name ends in `_global` is verified by itself, once, whoever calls it with whatever in registers
//! and on the stack (`agent/build/globals.rs` makes it one). What has a loop, or is called from one or in many places,
//! is worth it. It takes nothing but the context and numbers, and finds the scratch by itself: callers
//! [`lend`](Scratch::lend) it theirs. Numbers go in and out through `black_box`: what the compiler knows of them from
//! all callers it would not check again, and what no caller needs it would not give, and the verifier knows neither.

use crate::{
    PASS,
    flow::Seen,
    forward::Way,
    overlay::outer::Outer,
    parse::{
        Ip, ip4, ip6,
        l4::{self, L4, TCP_SYN, Tcp},
        skb::Frame,
        tcp_options,
    },
    service::refuse::Answer,
};
use aya_ebpf::{bindings::__sk_buff, macros::map, maps::PerCpuArray, programs::TcContext};
use core::{arch::asm, hint::black_box, mem::MaybeUninit};
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Alias, Connection, ConnectionKey, FLAG_CLIENT_IS_HIGH, FLAG_EMBRYONIC, FLAG_INBOUND,
            Finished, Fragment, FragmentKey, Tuple,
        },
        fragment::EarlyKey,
        service::{Affinity, AffinityKey, FrontendKey, Set},
    },
    algo::{ct_state, tcp_window},
};

/// Not pinned: it goes with the programs of its object.
#[map]
static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

#[repr(C)]
pub struct Scratch {
    pub ip: Ip,
    /// All zeros if it is malformed.
    pub l4: L4,
    pub well_formed: bool,
    /// What an ICMP error quotes.
    pub quoted: Ip,
    pub quoted_l4: L4,
    /// Where a walk along extension headers is (`parse::skb`).
    pub rest: ip6::Rest,
    /// The packet's, or that of the packet that it quotes.
    pub tuple: Tuple,
    pub key: ConnectionKey,
    pub from_high: bool,
    /// What the next packet of its flow may be compared with.
    pub seen: Seen,
    /// The packet's with its real destination.
    pub real: Tuple,
    /// Tunnel address of the node whose pod's packet came, in a tunnel or without.
    pub sender: Addr,
    /// Tunnel address of the node to which the way is asked for (`overlay::route`).
    pub peer: Addr,
    /// The address that what leaves is to have.
    pub nat: Addr,
    /// Whose share its connection is in, if it is a new one,
    pub payer: u32,
    /// or whether it has a record already, which is to say how it is masqueraded,
    pub has_record: bool,
    /// and whether it may leave as it is where there is no room for another.
    pub may_pass: bool,
    /// Whether the port of a connection that is over will do.
    pub may_take_over: bool,
    /// Where its protocol's ports begin in `HOST_PORTS`,
    pub host_ports: u32,
    /// and all ones if both directions have one id, which is its port.
    pub id_mask: u16,
    /// What the search for a port has to do with mappings (`nat::mapping`),
    pub search: u32,
    /// what the record says of it,
    pub mapping_flags: u16,
    /// and the alias of the mapping to the port that is tried.
    pub mapping_alias: Tuple,
    /// What decides which ports are tried.
    pub random: u64,
    /// What the keys of the aliases of all ports have in common ([`Tuple::crowd`]).
    pub crowd_key: Tuple,
    /// What is about to be written.
    pub connection: Connection,
    pub other_key: ConnectionKey,
    /// A connection that is over (`connection::finished`),
    pub finished: Finished,
    pub ended: u32,
    /// the place (`connection::newcomer`) from which one has just gone, and one; zero: none,
    pub place: u32,
    /// one that makes way for another (`connection::ending`), what its client sends and what it gets as answers.
    pub ending: ConnectionKey,
    pub ending_sends: Tuple,
    pub ending_gets: Tuple,
    pub alias_key: Tuple,
    pub alias: Alias,
    pub fragment_key: FragmentKey,
    pub fragment: Fragment,
    pub early_key: EarlyKey,
    /// The client of Services is outside of the cluster.
    pub is_outside: bool,
    /// Which Service the packet is to, if to any,
    pub frontend_key: FrontendKey,
    /// of which one endpoint is chosen,
    pub set: Set,
    /// by who the client is, or else by chance,
    pub is_consistent: bool,
    /// and which one its client has had before, for how many seconds.
    pub service: u32,
    pub affinity_seconds: u32,
    pub affinity_key: AffinityKey,
    pub affinity: Affinity,
    /// Why none is found,
    pub reason: i32,
    /// and what is said to the client.
    pub answer: Answer,
    /// Headers of a tunnel that a packet gets, over either family,
    pub outer4: Outer<ip4::Header>,
    pub outer6: Outer<ip6::Header>,
    /// and the traffic class of those that it came with.
    pub outer_class: u8,
    /// Which way the kernel's routes lead.
    pub way: Way,
    /// What is known of whose the packet's connection is (`forward::leave`).
    pub whose: u32,
    /// Of TCP: its header, and what a SYN says of its windows (`tcp_window::Numbers::shift`). Last: what is in front lies as words can copy
    /// it.
    pub tcp: Tcp,
    pub shift: u8,
}

impl Scratch {
    /// Calls a global function. Has what was written be there for it, which finds the scratch by itself ([`borrow`]), and what
    /// it writes be read behind it: the compiler takes what a reference leads to for this function's own.
    #[inline(always)]
    pub fn lend(&mut self, to: impl FnOnce() -> i32) -> i32 {
        // SAFETY: a register is copied to itself. That memory is not said to be left alone is what it is for.
        unsafe { asm!("{0} = {0}", inout(reg) core::ptr::from_mut(self) => _, options(nostack)) };
        black_box(to())
    }

    /// The packet's tuple, key and direction, from its headers.
    #[inline(always)]
    pub fn identify(&mut self) {
        set_ends(&mut self.tuple, &self.ip, &self.l4);
        self.from_high = self.tuple.write_key(&mut self.key);
    }

    /// The same of the packet that an ICMP error quotes.
    #[inline(always)]
    pub fn identify_quoted(&mut self) {
        set_ends(&mut self.tuple, &self.quoted, &self.quoted_l4);
        self.from_high = self.tuple.write_key(&mut self.key);
    }

    /// Where the packet's tuple has an alias for its destination: the key of the record that it leads to.
    #[inline(always)]
    pub fn resolve(&mut self) {
        let Self {
            real, tuple, alias, ..
        } = self;
        real.src = tuple.src;
        real.dst = alias.addr;
        real.src_port = tuple.src_port;
        real.proto = tuple.proto;
        real.set_dst_port(alias.port);
        self.from_high = self.real.write_key(&mut self.key);
    }

    /// Makes `connection` one that begins with this packet.
    #[inline(always)]
    pub fn begin(&mut self, flags: u16, payer: u32, now: u64) {
        let state = ct_state::next(0, self.key.proto, self.l4.tcp_flags);
        let connection = &mut self.connection;
        connection.last_seen_ns = now;
        connection.began_ns = now;
        connection.seen_ticks = crate::connection::ticks();
        connection.payer = payer;
        let embryonic = match flags & FLAG_INBOUND {
            0 => FLAG_EMBRYONIC,
            _ => 0,
        };
        if self.from_high {
            connection.states = [0, state];
            connection.flags = flags | embryonic | FLAG_CLIENT_IS_HIGH;
        } else {
            connection.states = [state, 0];
            connection.flags = flags | embryonic;
        }
        self.begin_windows();
    }

    /// [`tcp_window::Numbers::shift`].
    #[inline(always)]
    pub fn announced(&self) -> u8 {
        match self.l4.tcp_flags & TCP_SYN {
            0 => 0,
            _ => self.shift,
        }
    }

    /// Not yet what the sender expects: its packets may come by an alias, and not be read for that. A function, for its
    /// callers have no stack to spare.
    #[inline(never)]
    fn begin_windows(&mut self) {
        let window = tcp_window::opened(self.announced());
        self.connection.receive_windows = match self.from_high {
            false => [window, 0],
            true => [0, window],
        };
    }
}

#[inline(always)]
fn set_ends(tuple: &mut Tuple, ip: &Ip, l4: &L4) {
    tuple.src = ip.src;
    tuple.dst = ip.dst;
    tuple.src_port = l4.src_port;
    tuple.dst_port = l4.dst_port;
    tuple.proto = ip.proto;
}

/// This processor's. A program has it to itself: it is not preempted by one of its kind, which runs with
/// softirqs off.
#[inline(always)]
pub fn get() -> Option<&'static mut Scratch> {
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: see above; zeros, with which the map begins, are a value of every field.
    Some(unsafe { &mut *scratch })
}

/// What a global function does with the scratch that its caller lends.
#[inline(always)]
pub fn borrow(stage: impl FnOnce(&mut Scratch) -> i32) -> i32 {
    black_box(get().map_or(PASS, stage))
}

/// A function that is verified by itself: the first calls the second, which does the third with the scratch that it finds.
macro_rules! verified_once {
    ($(#[$doc:meta])* pub fn $name:ident = $global:ident($stage:ident);) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
            scratch.lend(|| $global(skb))
        }

        #[inline(never)]
        fn $global(skb: *mut __sk_buff) -> i32 {
            scratch::borrow(|scratch| $stage(skb, scratch))
        }
    };
}
pub(crate) use verified_once;

/// Reads the IP header at an offset; false if it is malformed.
#[inline(never)]
pub fn read_ip4<F: Frame>(skb: *mut __sk_buff, scratch: &mut Scratch, at: u32) -> bool {
    match ip4::read(&F::new(skb), at, true) {
        Some(ip) => {
            scratch.ip = ip;
            true
        }
        None => false,
    }
}

/// As [`read_ip4`].
#[inline(never)]
pub fn read_ip6<F: Frame>(skb: *mut __sk_buff, scratch: &mut Scratch, at: u32) -> bool {
    // SAFETY: an Ip may be written over.
    let to = unsafe { &mut *(&raw mut scratch.ip).cast::<MaybeUninit<Ip>>() };
    ip6::read_into(&F::new(skb), at, true, to)
}

/// [`tcp_window::Numbers::shift`] of a SYN whose TCP header is at an offset.
#[inline(never)]
fn shift_global(skb: *mut __sk_buff, tcp: u32) -> u32 {
    let shift = tcp_options::window_shift(&TcContext::new(skb), black_box(tcp));
    black_box(u32::from(tcp_window::announced(shift)))
}

/// Reads the transport header; false, and all zeros, if it is malformed.
#[inline(never)]
pub fn read_l4<F: Frame>(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    scratch.well_formed = match l4::read_with(&F::new(skb), &scratch.ip, &mut scratch.tcp) {
        Some(l4) => {
            scratch.l4 = l4;
            if l4.tcp_flags & TCP_SYN != 0 {
                scratch.shift = black_box(shift_global(skb, scratch.ip.l4)) as u8;
            }
            true
        }
        // What is no value in an Option is no bytes either, and the verifier lets nobody copy those.
        None => {
            scratch.l4 = L4::default();
            false
        }
    };
    scratch.well_formed
}
