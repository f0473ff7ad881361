//! A pod speaks for itself only: its own MAC address and its own IP addresses.
//!
//! From an IPv6 pod also come packets of the link itself, neighbour discovery and multicast
//! listener reports: to link-local and multicast destinations a pod may send from the
//! link-local address that its MAC address gives (RFC 4291 appendix A), and to multicast ones
//! from the unspecified address (RFC 4862 §5.4, RFC 3590).

use crate::parse::{Fragment, Ip, arp, eth, icmp, l4::L4, proto, skb};
use aya_ebpf::programs::TcContext;
use sinabro_common::abi::{Addr, drop::DropReason, endpoint::PodLink};

/// The frame comes from the pod's own MAC address, and what it carries is what the stack will
/// take it for.
#[inline(always)]
pub fn frame(ctx: &TcContext, eth: &eth::Eth, link: &PodLink) -> Result<(), DropReason> {
    if eth.src != link.mac {
        return Err(DropReason::SourceMac);
    }
    if skb::is_tagged(ctx) {
        return Err(DropReason::SourceAddr);
    }
    Ok(())
}

/// An ARP packet says nothing of other addresses than the pod's.
#[inline(always)]
pub fn arp(arp: &arp::Arp, link: &PodLink) -> Result<(), DropReason> {
    if arp.sender_mac != link.mac {
        return Err(DropReason::SourceMac);
    }
    if link.v4 == Addr::UNSPECIFIED || Addr::v4(arp.sender) != link.v4 {
        return Err(DropReason::SourceAddr);
    }
    Ok(())
}

/// An IP packet comes from the pod's own address, and is for something beyond its own loopback.
///
/// No loopback address may be on a link (RFC 1122 §3.2.1.3, RFC 4291 §2.5.3), but with
/// route_localnet, which kube-proxy sets, the kernel takes such a packet for its own.
#[inline(always)]
pub fn ip(ip: &Ip, link: &PodLink) -> Result<(), DropReason> {
    if ip.dst.is_loopback() {
        return Err(DropReason::Loopback);
    }
    if !ip.v6 {
        // The unspecified address is all zeros and no mapped address: it never matches.
        return if ip.src == link.v4 {
            Ok(())
        } else {
            Err(DropReason::SourceAddr)
        };
    }
    if ip.src == link.v6 && ip.src != Addr::UNSPECIFIED {
        return Ok(());
    }
    if ip.dst.is_of_link() && ip.src == from_mac(&link.mac) {
        return Ok(());
    }
    if ip.dst.0[0] == 0xff && ip.src == Addr::UNSPECIFIED {
        return Ok(());
    }
    Err(DropReason::SourceAddr)
}

/// A pod is no router: it tells nobody of prefixes, default routes or better next hops. A node
/// that takes router advertisements on its uplink would take them from a pod's link too.
#[inline(always)]
pub fn icmp(ip: &Ip, l4: &L4) -> Result<(), DropReason> {
    let of_router = match ip.proto {
        proto::ICMP if !ip.v6 => l4.icmp == icmp::V4_REDIRECT,
        proto::ICMPV6 if ip.v6 => {
            // In pieces none is taken anyway (RFC 6980 §5), and a later one has no type to see.
            (ip.fragment != Fragment::No && ip.dst.is_of_link())
                || matches!(l4.icmp, icmp::V6_ROUTER_ADVERTISEMENT | icmp::V6_REDIRECT)
        }
        _ => false,
    };
    if of_router {
        return Err(DropReason::RouterMessage);
    }
    Ok(())
}

/// The link-local address of an interface with this MAC address.
#[inline(always)]
fn from_mac(mac: &[u8; 6]) -> Addr {
    Addr([
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        mac[0] ^ 0x02,
        mac[1],
        mac[2],
        0xff,
        0xfe,
        mac[3],
        mac[4],
        mac[5],
    ])
}
