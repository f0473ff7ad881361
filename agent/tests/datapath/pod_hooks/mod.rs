//! `pod_out` and `pod_in` on single packets.

use crate::{
    kit::{self, Pod},
    packet::{self, ACK, IP4, IP6, Ip, SYN, TCP, UDP, see},
    run::{DROP, PASS, Programs, REDIRECT},
};
use sinabro_agent::datapath::Datapath;
use sinabro_common::{abi::drop::DropReason, names::HOST_MAC};
use std::net::IpAddr;

struct World {
    datapath: Datapath,
    programs: Programs,
    a: Pod,
    b: Pod,
}

fn world<T: Send>(test: impl FnOnce(World) -> T + Send) -> T {
    kit::fresh(|| {
        let datapath = kit::load();
        let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
        test(World {
            programs: Programs::of(&datapath),
            datapath,
            a,
            b,
        })
    })
}

impl World {
    /// What `pod_out` says to a frame from pod a.
    fn out(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        self.programs.run("pod_out", self.a.ifindex, frame)
    }

    fn frame_of_a(&self, ip: &Ip) -> Vec<u8> {
        packet::eth(HOST_MAC, self.a.mac, ip.kind(), &ip.bytes())
    }

    fn passes(&self, frame: &[u8], what: &str) {
        let (verdict, out) = self.out(frame);
        assert_eq!((verdict, &out[..]), (PASS, frame), "{what}");
    }

    /// The frame is dropped, and for this reason.
    fn dropped(&self, frame: &[u8], reason: DropReason, what: &str) {
        let before = kit::dropped(&self.datapath, reason);
        let Some((verdict, _)) = self.programs.try_run("pod_out", self.a.ifindex, frame) else {
            return;
        };
        assert_eq!(verdict, DROP, "{what}");
        assert_eq!(
            kit::dropped(&self.datapath, reason) - before,
            1,
            "{what}: {:?}",
            self.datapath.drops()
        );
    }

    fn pairs(&self) -> [(IpAddr, IpAddr); 2] {
        [(self.a.v4, self.b.v4), (self.a.v6, self.b.v6)]
    }
}

fn far(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => "203.0.113.7".parse().unwrap(),
        IpAddr::V6(_) => "2001:db8::7".parse().unwrap(),
    }
}

#[test]
fn a_pods_own_packets_pass_and_are_counted() {
    world(|w| {
        let mut bytes = 0;
        for (src, _) in w.pairs() {
            for ip in [
                packet::tcp((src, 4000), (far(src), 80), SYN, b"x"),
                packet::udp((src, 4000), (far(src), 53), b"xyz"),
                packet::icmp(src, far(src), if src.is_ipv4() { 8 } else { 128 }, 7),
                packet::other(src, far(src), 132),
                packet::other(src, far(src), 47),
            ] {
                let frame = w.frame_of_a(&ip);
                w.passes(&frame, &format!("{src} protocol {}", ip.proto));
                bytes += frame.len() as u64;
            }
        }
        let counters = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        assert_eq!((counters.tx_packets, counters.tx_bytes), (10, bytes));
        assert_eq!(counters.rx_packets, 0);
    });
}

#[test]
fn other_sources_are_dropped() {
    world(|w| {
        for (src, dst) in w.pairs() {
            let good = packet::udp((src, 1), (dst, 2), b"");
            let mac = packet::eth(HOST_MAC, w.b.mac, good.kind(), &good.bytes());
            w.dropped(&mac, DropReason::SourceMac, "the other pod's MAC address");
            for forged in [dst, far(src)] {
                for to in [dst, far(src)] {
                    let ip = packet::udp((forged, 1), (to, 2), b"");
                    w.dropped(
                        &w.frame_of_a(&ip),
                        DropReason::SourceAddr,
                        "a forged source",
                    );
                }
            }
        }
        let zero: IpAddr = "0.0.0.0".parse().unwrap();
        let ip = packet::udp((zero, 68), ("255.255.255.255".parse().unwrap(), 67), b"");
        w.dropped(&w.frame_of_a(&ip), DropReason::SourceAddr, "no IPv4 source");
        let counters = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        assert_eq!(counters.tx_packets, 0);
    });
}

/// The address that the kernel makes of a hardware address (RFC 4291, appendix A).
fn link_local(m: [u8; 6]) -> IpAddr {
    let identifier = [m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]];
    let mut address = [0; 16];
    address[..2].copy_from_slice(&[0xfe, 0x80]);
    address[8..].copy_from_slice(&identifier);
    address.into()
}

#[test]
fn neighbour_discovery_passes_and_nothing_else_from_such_sources() {
    world(|w| {
        let unspecified: IpAddr = "::".parse().unwrap();
        let own_local = link_local(w.a.mac);
        let other_local: IpAddr = "fe80::1234".parse().unwrap();
        let multicast: IpAddr = "ff02::1:ff00:5".parse().unwrap();
        let gateway: IpAddr = sinabro_common::names::GATEWAY_V6.into();
        let send = |src, dst| w.frame_of_a(&packet::icmp(src, dst, 135, 0));

        for (src, dst) in [
            (unspecified, multicast),
            (own_local, multicast),
            (own_local, gateway),
            (w.a.v6, gateway),
            (w.a.v6, multicast),
        ] {
            w.passes(&send(src, dst), &format!("{src} to {dst}"));
        }
        for (src, dst) in [
            (unspecified, gateway),
            (unspecified, w.b.v6),
            (own_local, w.b.v6),
            (other_local, multicast),
            (other_local, gateway),
            (far(w.a.v6), multicast),
        ] {
            w.dropped(
                &send(src, dst),
                DropReason::SourceAddr,
                &format!("{src} to {dst}"),
            );
        }
    });
}

#[test]
fn arp_speaks_of_the_pods_own_address_only() {
    world(|w| {
        let (IpAddr::V4(a), IpAddr::V4(b)) = (w.a.v4, w.b.v4) else {
            unreachable!()
        };
        let send = |mac, arp: &[u8]| packet::eth([0xff; 6], mac, packet::ARP, arp);
        let good = packet::arp(w.a.mac, a, b);
        w.passes(&send(w.a.mac, &good), "its own");
        w.dropped(&send(w.b.mac, &good), DropReason::SourceMac, "frame");
        let arp = packet::arp(w.b.mac, a, b);
        w.dropped(&send(w.a.mac, &arp), DropReason::SourceMac, "sender MAC");
        let arp = packet::arp(w.a.mac, b, a);
        w.dropped(&send(w.a.mac, &arp), DropReason::SourceAddr, "sender");
        let mut odd = good.clone();
        odd[4] = 8;
        w.dropped(&send(w.a.mac, &odd), DropReason::Malformed, "lengths");
        for len in 14..14 + good.len() {
            let frame = send(w.a.mac, &good);
            w.dropped(
                &frame[..len],
                DropReason::Malformed,
                &format!("{len} bytes"),
            );
        }
    });
}

#[test]
fn what_is_neither_ip_nor_arp_is_dropped() {
    world(|w| {
        let ip = packet::udp((w.a.v4, 1), (w.b.v4, 2), b"").bytes();
        for kind in [0x8100u16, 0x88a8, 0x8863, 0x88cc, 0x0026] {
            let inner = [&[0, 1, 8, 0][..], &ip].concat();
            let frame = packet::eth(HOST_MAC, w.a.mac, kind, &inner);
            w.dropped(&frame, DropReason::SourceAddr, &format!("{kind:#06x}"));
        }
    });
}

#[test]
fn a_link_without_a_record_is_dropped() {
    world(|w| {
        let frame = w.frame_of_a(&packet::udp((w.a.v4, 1), (w.b.v4, 2), b""));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        w.dropped(&frame, DropReason::UnknownLink, "a detached pod");
    });
}

#[test]
fn every_truncation_is_malformed() {
    world(|w| {
        let (v4, v6) = (w.pairs()[0], w.pairs()[1]);
        let mut tcp4 = packet::tcp((v4.0, 1), (v4.1, 2), SYN, b"data");
        tcp4.options = vec![1; 8];
        let mut udp6 = packet::udp((v6.0, 1), (v6.1, 2), b"data");
        udp6.options = vec![0; 16];
        let mut first6 = packet::tcp((v6.0, 1), (v6.1, 2), SYN, b"data");
        first6.fragment = 1;
        for ip in [
            tcp4,
            udp6,
            first6,
            packet::udp((v4.0, 1), (far(v4.0), 2), b""),
            packet::icmp(v4.0, v4.1, 8, 1),
            packet::icmp(v6.0, v6.1, 128, 1),
            packet::other(v4.0, v4.1, 132),
        ] {
            let frame = w.frame_of_a(&ip);
            for len in 14..frame.len() {
                let what = format!("{} protocol {}, {len} bytes", ip.src, ip.proto);
                w.dropped(&frame[..len], DropReason::Malformed, &what);
            }
        }
    });
}

#[test]
fn headers_that_contradict_themselves_are_malformed() {
    world(|w| {
        let (src, dst) = w.pairs()[0];
        let good = w.frame_of_a(&packet::tcp((src, 1), (dst, 2), SYN, b"data"));
        let edit = |at: usize, value: u8| {
            let mut frame = good.clone();
            frame[at] = value;
            frame
        };
        w.dropped(&edit(14, 0x65), DropReason::Malformed, "version 6 in IPv4");
        w.dropped(&edit(14, 0x44), DropReason::Malformed, "header of 16 bytes");
        w.dropped(
            &edit(14, 0x4f),
            DropReason::Malformed,
            "header past the packet",
        );
        w.dropped(
            &edit(17, 19),
            DropReason::Malformed,
            "shorter than its header",
        );
        w.dropped(&edit(17, 200), DropReason::Malformed, "longer than it is");
        w.dropped(&edit(17, 30), DropReason::Malformed, "no room for TCP");
        w.dropped(
            &edit(46, 0x40),
            DropReason::Malformed,
            "TCP header of 16 bytes",
        );
        w.dropped(
            &edit(46, 0xf0),
            DropReason::Malformed,
            "TCP header past the packet",
        );

        let (src, dst) = w.pairs()[1];
        let good = w.frame_of_a(&packet::udp((src, 1), (dst, 2), b"data"));
        let mut frame = good.clone();
        frame[14] = 0x45;
        w.dropped(&frame, DropReason::Malformed, "version 4 in IPv6");
        let mut frame = good.clone();
        frame[19] = 200;
        w.dropped(&frame, DropReason::Malformed, "longer than it is");
    });
}

#[test]
fn same_node_traffic_is_redirected_one_hop_on() {
    world(|w| {
        let mut bytes = 0;
        let mut packets = 0;
        for (src, dst) in w.pairs() {
            let echo = if src.is_ipv4() { 8 } else { 128 };
            for ip in [
                packet::tcp((src, 4000), (dst, 80), SYN | ACK, b"hello"),
                packet::udp((src, 4000), (dst, 53), b"hello"),
                packet::icmp(src, dst, echo, 77),
            ] {
                let frame = w.frame_of_a(&ip);
                let before = see(&frame);
                let (verdict, out) = w.out(&frame);
                assert_eq!(verdict, REDIRECT, "{src} protocol {}", ip.proto);
                let mut expected = before.clone();
                expected.dst_mac = w.b.mac;
                expected.src_mac = HOST_MAC;
                expected.ttl -= 1;
                assert_eq!(see(&out), expected);
                bytes += frame.len() as u64;
                packets += 1;
            }
        }
        let a = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        let b = w.datapath.pod_counters(w.b.ifindex).unwrap().unwrap();
        assert_eq!((a.tx_packets, a.tx_bytes), (packets, bytes));
        assert_eq!((b.rx_packets, b.rx_bytes), (packets, bytes));
        assert_eq!((a.rx_packets, b.tx_packets), (0, 0));
    });
}

#[test]
fn what_needs_a_router_goes_to_the_stack() {
    world(|w| {
        for (src, dst) in w.pairs() {
            let good = packet::udp((src, 4000), (dst, 53), b"hello");
            assert_eq!(w.out(&w.frame_of_a(&good)).0, REDIRECT);

            for ttl in [0, 1] {
                let ip = Ip {
                    ttl,
                    ..good.clone()
                };
                w.passes(&w.frame_of_a(&ip), "its last hop");
            }
            // More fragments; then a later one, whose first bytes are no ports.
            let (first, later) = match src {
                IpAddr::V4(_) => (0x2000, 0x0005),
                IpAddr::V6(_) => (0x0001, 0x0028),
            };
            for fragment in [first, later] {
                let ip = Ip {
                    fragment,
                    ..good.clone()
                };
                w.passes(&w.frame_of_a(&ip), "a fragment");
            }
            let ip = Ip {
                options: vec![1; 8],
                ..good.clone()
            };
            w.passes(&w.frame_of_a(&ip), "options");
            let unreachable = if src.is_ipv4() { 3 } else { 1 };
            let ip = packet::icmp(src, dst, unreachable, 0);
            w.passes(&w.frame_of_a(&ip), "an ICMP error");
            let frame = packet::eth([0xff; 6], w.a.mac, good.kind(), &good.bytes());
            w.passes(&frame, "a broadcast frame");
            let frame = packet::eth(w.b.mac, w.a.mac, good.kind(), &good.bytes());
            w.passes(&frame, "a frame past the gateway");
            let ip = packet::udp((src, 1), (src, 2), b"");
            w.passes(&w.frame_of_a(&ip), "to itself");
        }
        let mut config = kit::node_config();
        config.flags = 0;
        w.datapath.set_node_config(config).unwrap();
        let (src, dst) = w.pairs()[0];
        w.passes(
            &w.frame_of_a(&packet::udp((src, 1), (dst, 2), b"")),
            "not wanted",
        );
    });
}

#[test]
fn replies_to_what_the_stack_delivered_go_back_through_it() {
    world(|w| {
        for (src, dst) in w.pairs() {
            for proto in [TCP, UDP] {
                let make = |from: (IpAddr, u16), to: (IpAddr, u16)| match proto {
                    TCP => packet::tcp(from, to, ACK, b""),
                    _ => packet::udp(from, to, b""),
                };
                let reply = w.frame_of_a(&make((src, 80), (dst, 4000)));
                assert_eq!(w.out(&reply).0, REDIRECT);

                // Comes to pod a through the stack.
                let ip = make((dst, 4000), (src, 80));
                let frame = packet::eth(w.a.mac, HOST_MAC, ip.kind(), &ip.bytes());
                let (verdict, out) = w.programs.run("pod_in", w.a.ifindex, &frame);
                assert_eq!((verdict, out), (PASS, frame));

                w.passes(&reply, "a reply");
                let other = w.frame_of_a(&make((src, 80), (dst, 4001)));
                assert_eq!(w.out(&other).0, REDIRECT, "another flow");
            }
        }
        let a = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        assert_eq!(a.rx_packets, 4);
    });
}

#[test]
fn nothing_delivered_to_a_pod_is_ever_dropped() {
    world(|w| {
        let (v4, v6) = (w.pairs()[0], w.pairs()[1]);
        for (kind, ip) in [
            (IP4, packet::tcp((v4.1, 1), (v4.0, 2), SYN, b"x").bytes()),
            (IP6, packet::udp((v6.1, 1), (v6.0, 2), b"x").bytes()),
            (packet::ARP, vec![0; 28]),
            (0x8100, vec![1; 60]),
        ] {
            let frame = packet::eth(w.a.mac, HOST_MAC, kind, &ip);
            for len in 14..=frame.len() {
                let frame = &frame[..len];
                if let Some((verdict, out)) = w.programs.try_run("pod_in", w.a.ifindex, frame) {
                    assert_eq!((verdict, &out[..]), (PASS, frame));
                }
            }
        }
    });
}

#[test]
fn no_router_speaks_from_a_pod() {
    world(|w| {
        let local = link_local(w.a.mac);
        let to: [IpAddr; 3] = ["ff02::1", "fe80::5342:1", "ff02::2"].map(|a| a.parse().unwrap());
        for dst in to {
            for kind in [134, 137] {
                let mut ip = packet::icmp(local, dst, kind, 0);
                ip.ttl = 255;
                let reason = DropReason::RouterMessage;
                w.dropped(&w.frame_of_a(&ip), reason, "whole");
                // Behind an extension header.
                ip.options = vec![0, 0, 1, 4, 0, 0, 0, 0];
                w.dropped(&w.frame_of_a(&ip), reason, "behind options");
                // In fragments, whose later ones do not say what they are.
                ip.fragment = 1;
                w.dropped(&w.frame_of_a(&ip), reason, "first fragment");
                ip.fragment = 8;
                w.dropped(&w.frame_of_a(&ip), reason, "later fragment");
            }
            for kind in [133, 135, 136, 128, 143] {
                w.passes(
                    &w.frame_of_a(&packet::icmp(local, dst, kind, 0)),
                    "of a host",
                );
            }
        }
        let from_global = packet::icmp(w.a.v6, to[0], 134, 0);
        w.dropped(
            &w.frame_of_a(&from_global),
            DropReason::RouterMessage,
            "global source",
        );

        let mut redirect = packet::icmp(w.a.v4, far(w.a.v4), 5, 0);
        let reason = DropReason::RouterMessage;
        w.dropped(&w.frame_of_a(&redirect), reason, "IPv4 redirect");
        w.dropped(
            &w.frame_of_a(&packet::icmp(w.a.v4, w.b.v4, 5, 0)),
            reason,
            "to a pod",
        );
        redirect.options = vec![1; 4];
        w.dropped(&w.frame_of_a(&redirect), reason, "with options");
        redirect.fragment = 0x2000;
        w.dropped(&w.frame_of_a(&redirect), reason, "first fragment");
        w.passes(
            &w.frame_of_a(&packet::icmp(w.a.v4, far(w.a.v4), 3, 0)),
            "an error",
        );
    });
}

#[test]
fn an_ipv6_packet_has_no_mapped_address() {
    world(|w| {
        let mapped = |v4: IpAddr| match v4 {
            IpAddr::V4(v4) => IpAddr::V6(v4.to_ipv6_mapped()),
            v6 => v6,
        };
        let reason = DropReason::Malformed;
        // To another pod's IPv4 address, and from its own.
        let ip = packet::udp((w.a.v6, 1), (mapped(w.b.v4), 2), b"");
        w.dropped(&w.frame_of_a(&ip), reason, "destination");
        let ip = packet::udp((mapped(w.a.v4), 1), (w.b.v6, 2), b"");
        w.dropped(&w.frame_of_a(&ip), reason, "source");
        let ip = packet::udp((mapped(w.a.v4), 1), (mapped(w.b.v4), 2), b"");
        w.dropped(&w.frame_of_a(&ip), reason, "both");
    });
}

#[test]
fn the_nodes_loopback_is_out_of_reach() {
    world(|w| {
        let loopback = ["127.0.0.1", "127.1.2.3", "::1"];
        for dst in loopback.map(|a| a.parse::<IpAddr>().unwrap()) {
            let src = if dst.is_ipv4() { w.a.v4 } else { w.a.v6 };
            for ip in [
                packet::tcp((src, 1), (dst, 10_250), SYN, b""),
                packet::udp((src, 1), (dst, 53), b""),
            ] {
                w.dropped(&w.frame_of_a(&ip), DropReason::Loopback, &dst.to_string());
            }
        }
        let near = packet::udp((w.a.v4, 1), ("128.0.0.1".parse().unwrap(), 53), b"");
        w.passes(&w.frame_of_a(&near), "no loopback address");
    });
}
