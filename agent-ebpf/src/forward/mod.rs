//! Between pods and what is outside of the cluster without the stack: from a pod's link to the uplink ([`leave`]), from the uplink
//! into the pod ([`arrive`]), between uplink and pods of other nodes ([`across`]). Routes are the kernel's, and neighbours;
//! netfilter, and its tracking of connections, sees neither direction.
//!
//! The uplink's own programs see each packet as if the stack had sent it: all of [`crate::nat`] is as it was. What needs no more than
//! the translation that its record has gets it at the pod's link, so that its headers are read once.
//!
//! Taken are connections that have a record here and so are not netfilter's: what the uplink masquerades, and what clients outside
//! have with Services. Left to the stack is what has none (whoever came by a `hostPort`, or to a pod's own address),
//! and what a router has to handle ([`deliver::is_plain`](crate::stage::deliver::is_plain)).

pub mod across;
pub mod arrive;
pub mod leave;

use crate::{
    family::{AF_INET, AF_INET6},
    overlay, rewrite,
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_FIB_LOOKUP_OUTPUT},
    helpers::bpf_fib_lookup,
};
use sinabro_common::abi::{
    Addr,
    config::{FLAG_FORWARD, NodeConfig},
};

/// Whether packets may go past the stack here.
#[inline(always)]
pub fn takes(config: &NodeConfig) -> bool {
    config.flags & FLAG_FORWARD != 0 && overlay::takes_with_services(config)
}

/// BPF_FIB_LKUP_RET_SUCCESS: a plain route that leads on, and a neighbour that is known.
pub const LEADS_ON: i64 = 0;

/// What the kernel's routes are asked, and what they say: `struct bpf_fib_lookup` (linux/bpf.h).
#[repr(C)]
pub struct Way {
    /// AF_INET or AF_INET6; of the next hop, when answered.
    family: u8,
    proto: u8,
    src_port: [u8; 2],
    dst_port: [u8; 2],
    /// Zero: the packet's own length is compared with the MTU.
    len: u16,
    /// The interface that the packet came by; which it leaves by, when answered.
    pub ifindex: u32,
    /// Of IPv4, its type of service in the first byte.
    service: [u8; 4],
    /// IPv4 addresses are in the first four bytes.
    src: [u8; 16],
    /// The next hop, when answered.
    dst: [u8; 16],
    vlan: [u8; 4],
    macs: [[u8; 6]; 2],
}

impl Way {
    /// Whether the kernel knows the MAC address of a machine on an interface's link, to which this is the way then.
    #[inline(always)]
    pub fn knows_neighbour(&mut self, skb: *mut __sk_buff, ifindex: u32, address: &Addr) -> bool {
        self.of_node(&Addr::UNSPECIFIED, address);
        self.leads_on(skb, ifindex, BPF_FIB_LOOKUP_OUTPUT)
    }

    /// The way of what is sent between nodes, by their tunnel addresses.
    #[inline(always)]
    pub fn of_node(&mut self, from: &Addr, to: &Addr) {
        self.proto = 0;
        self.src_port = [0; 2];
        self.dst_port = [0; 2];
        self.service = [0; 4];
        self.between(to.as_v4().is_none(), from, to);
    }

    /// Whether an answer is the way by a next hop, which is of the family that was asked for.
    #[inline(always)]
    pub fn is_by(&self, gateway: &Addr) -> bool {
        match gateway.as_v4() {
            Some(_) => {
                let [a, b, c, d, ..] = self.dst;
                self.family == AF_INET as u8 && rewrite::word(gateway).to_ne_bytes() == [a, b, c, d]
            }
            None => self.family == AF_INET6 as u8 && self.dst == gateway.0,
        }
    }

    /// The way from one address to another of its family.
    #[inline(always)]
    fn between(&mut self, v6: bool, src: &Addr, dst: &Addr) {
        if v6 {
            self.family = AF_INET6 as u8;
            self.src = src.0;
            self.dst = dst.0;
        } else {
            self.family = AF_INET as u8;
            self.src[..4].copy_from_slice(&rewrite::word(src).to_ne_bytes());
            self.dst[..4].copy_from_slice(&rewrite::word(dst).to_ne_bytes());
        }
    }

    #[inline(always)]
    fn leads_on(&mut self, skb: *mut __sk_buff, ifindex: u32, flags: u32) -> bool {
        self.ask(skb, ifindex, flags) == LEADS_ON
    }

    /// Asks of what is in here, and writes the answer; BPF_FIB_LKUP_RET_*. Without flags the packet came by that interface,
    /// with BPF_FIB_LOOKUP_OUTPUT it leaves by it.
    #[inline(always)]
    pub fn ask(&mut self, skb: *mut __sk_buff, ifindex: u32, flags: u32) -> i64 {
        self.len = 0;
        self.vlan = [0; 4];
        self.ifindex = ifindex;
        // SAFETY: the context is valid for as long as the program runs, and this is what the helper reads and writes.
        unsafe {
            bpf_fib_lookup(
                skb.cast(),
                core::ptr::from_mut(self).cast(),
                size_of::<Self>() as i32,
                flags,
            )
        }
    }
}
