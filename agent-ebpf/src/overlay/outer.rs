//! The headers of a tunnel outside of a pod's packet, as the VXLAN device writes them but for the checksum over IPv6.

use crate::{
    parse::{eth, ip4, ip6, proto},
    rewrite,
    scratch::Scratch,
};
use aya_ebpf::{
    bindings::{BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6},
    helpers::bpf_get_prandom_u32,
};
use sinabro_common::abi::{Addr, next_hop::NextHop, node::Overlay};

/// Source ports are of the range that the kernel's are by default (net.ipv4.ip_local_port_range).
const FIRST_PORT: u32 = 32_768;
const PORTS: u64 = 60_999 - 32_768 + 1;
/// As the VXLAN device sets it, which has none of its own (net.ipv4.ip_default_ttl, net.ipv6.conf.*.hop_limit).
const TTL: u8 = 64;

/// What is behind the Ethernet header up to the inner IP header: IP, UDP, VXLAN, Ethernet (RFC 7348 §5).
#[repr(C)]
pub struct Outer<I> {
    ip: I,
    udp_src: [u8; 2],
    udp_dst: [u8; 2],
    udp_len: [u8; 2],
    udp_checksum: [u8; 2],
    vxlan: [u8; 8],
    inner_dst: [u8; 6],
    inner_src: [u8; 6],
    inner_kind: [u8; 2],
}

/// Length of the outer headers, by the IP version of nodes.
pub const fn room(v6: bool) -> u32 {
    match v6 {
        false => Outer::<ip4::Header>::LEN,
        true => Outer::<ip6::Header>::LEN,
    }
}

/// An IP header outside.
pub trait Outside: Sized {
    /// What has the kernel make room for it (`bpf_skb_adjust_room`).
    const ENCAP: u32;

    fn outer(scratch: &mut Scratch) -> &mut Outer<Self>;

    /// `len`: of the packet, with this header. `service`: as [`super::traffic_class`].
    fn fill(&mut self, from: &Addr, to: &Addr, service: u8, len: u16);
}

impl Outside for ip4::Header {
    const ENCAP: u32 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;

    #[inline(always)]
    fn outer(scratch: &mut Scratch) -> &mut Outer<Self> {
        &mut scratch.outer4
    }

    #[inline(always)]
    fn fill(&mut self, from: &Addr, to: &Addr, service: u8, len: u16) {
        self.version_length = 0x45;
        self.service = service;
        self.total_len = len.to_be_bytes();
        // SAFETY: takes nothing.
        self.id = (unsafe { bpf_get_prandom_u32() } as u16).to_ne_bytes();
        // As the device does it: a router that has to cut it may.
        self.fragment = [0; 2];
        self.ttl = TTL;
        self.proto = proto::UDP;
        self.src = rewrite::word(from).to_ne_bytes();
        self.dst = rewrite::word(to).to_ne_bytes();
        let words = [
            [self.version_length, self.service],
            self.total_len,
            self.id,
            [self.ttl, self.proto],
            [self.src[0], self.src[1]],
            [self.src[2], self.src[3]],
            [self.dst[0], self.dst[1]],
        ];
        let last = u16::from_ne_bytes([self.dst[2], self.dst[3]]);
        let sum = words.iter().fold(u32::from(last), |sum, word| {
            sum + u32::from(u16::from_ne_bytes(*word))
        });
        // Eight pairs: the first fold leaves 17 bits at most.
        let sum = (sum & 0xffff) + (sum >> 16);
        self.checksum = (!((sum + (sum >> 16)) as u16)).to_ne_bytes();
    }
}

impl Outside for ip6::Header {
    const ENCAP: u32 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;

    #[inline(always)]
    fn outer(scratch: &mut Scratch) -> &mut Outer<Self> {
        &mut scratch.outer6
    }

    #[inline(always)]
    fn fill(&mut self, from: &Addr, to: &Addr, service: u8, len: u16) {
        self.start.version = [0x60 | service >> 4, service << 4, 0, 0];
        self.start.payload_len = (len - size_of::<Self>() as u16).to_be_bytes();
        self.start.next = proto::UDP;
        self.start.hop_limit = TTL;
        self.src = from.0;
        self.dst = to.0;
    }
}

impl<I> Outer<I> {
    pub const LEN: u32 = size_of::<Self>() as u32;
}

impl<I: Outside> Outer<I> {
    /// All of it, for a packet of a family and `len` bytes with these headers, to a node's tunnel address. Packets with one hash have
    /// one source port.
    #[inline(always)]
    pub fn fill(
        &mut self,
        overlay: &Overlay,
        (to, next): (&Addr, &NextHop),
        inner_v6: bool,
        (service, hash, len): (u8, u32, u16),
    ) {
        self.ip.fill(&overlay.local, to, service, len);
        let port = FIRST_PORT + ((u64::from(hash ^ hash << 16) * PORTS) >> 32) as u32;
        self.udp_src = (port as u16).to_be_bytes();
        self.udp_dst = overlay.port;
        self.udp_len = (len - size_of::<I>() as u16).to_be_bytes();
        // None: the inner packet has its own (RFC 7348 §5; over IPv6 RFC 6935 §5, to who says that he takes it). One of a super-packet would
        // have to be another for each segment.
        self.udp_checksum = [0; 2];
        self.vxlan = overlay.vxlan;
        self.inner_dst = next.remote_mac;
        self.inner_src = next.own_mac;
        self.inner_kind = match inner_v6 {
            true => eth::IP6,
            false => eth::IP4,
        };
    }
}

const _: () = assert!(room(false) == 50 && room(true) == 70);
