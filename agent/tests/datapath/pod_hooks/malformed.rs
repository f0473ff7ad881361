//! Packets that are cut short, contradict themselves, or have addresses that are none.

use super::*;

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
