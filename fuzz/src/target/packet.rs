//! Frames as the programs of pod links and uplinks read them.

use sinabro_ebpf::parse::{
    Fragment, Ip, arp, bytes::Frame, eth, ip4, ip6, l4, l4::L4, proto, tcp_options,
};
use std::{hint, mem::MaybeUninit};

pub fn run(bytes: &[u8]) -> bool {
    let frame = Frame::whole(bytes);
    let Some(eth) = eth::read(&frame) else {
        assert!(bytes.len() < eth::LEN as usize);
        return false;
    };
    assert_eq!(
        (&bytes[..6], &bytes[6..12], &bytes[12..14]),
        (&eth.dst[..], &eth.src[..], &eth.kind[..])
    );
    if let Some(arp) = arp::read(&frame) {
        assert_eq!(
            (&bytes[28..32], &bytes[38..42]),
            (&arp.sender[..], &arp.target[..])
        );
    }
    quoted(bytes, eth.kind);
    let read = Ip::read(&frame, eth.kind);
    if let Some(read) = read.as_ref().filter(|_| eth.kind == eth::IP6) {
        both_ways(&frame, read.as_ref());
    }
    let Some(Some(ip)) = read else {
        return false;
    };
    let l4 = l4::read(&frame, &ip);
    check(bytes, eth.kind, &ip, l4.as_ref());
    if ip.proto == proto::TCP && ip.fragment == Fragment::No && l4.is_some() {
        // Inside the header that was found right, behind their kinds and lengths.
        let header = &bytes[ip.l4 as usize..(ip.l4 + ip.l4_len) as usize];
        let options = &header[20..usize::from(header[12] >> 4) * 4];
        if let Some(mss) = tcp_options::mss(&frame, ip.l4) {
            let at = mss.offset as usize - 20;
            assert_eq!(options[at - 2..at], [2, 4]);
            assert_eq!(options[at..at + 2], mss.value);
        }
        if let Some(shift) = tcp_options::window_shift(&frame, ip.l4) {
            let mut three = options.windows(3);
            assert!(three.any(|option| option == [3, 3, shift]));
        }
    }

    // What is behind the packet is padding (RFC 894): the same without it.
    let end = (ip.l4 + ip.l4_len) as usize;
    let shorter = Frame::whole(&bytes[..end]);
    let again = Ip::read(&shorter, eth.kind).flatten();
    let again = again.expect("a packet without its padding is the same packet");
    assert_eq!(facts(&ip), facts(&again));
    let l4_again = l4::read(&shorter, &again);
    assert_eq!(l4.as_ref().map(ports), l4_again.as_ref().map(ports));

    // A TCP segment to some ports behind an extension header; each comparison is a step.
    let Some(l4) = l4 else { return false };
    let [port, _] = l4.dst_port;
    ip.v6
        && hint::black_box(ip.proto) == proto::TCP
        && hint::black_box(ip.l4) >= eth::LEN + 40 + 8
        && hint::black_box(port) & 0xf0 == 0x50
        && hint::black_box(port) & 0x0f == 0x03
}

/// The uplink's programs read IPv6 headers into a place of theirs: the same as all others.
fn both_ways(frame: &Frame<'_>, read: Option<&Ip>) {
    let mut place = MaybeUninit::uninit();
    let there = ip6::read_into(frame, eth::LEN, true, &mut place);
    assert_eq!(there, read.is_some());
    if let Some(read) = read {
        // SAFETY: the reader said that it is there.
        assert_eq!(facts(unsafe { place.assume_init_ref() }), facts(read));
    }
}

/// As the packet that an ICMP error quotes: it may end anywhere, and what is read is there.
fn quoted(bytes: &[u8], kind: [u8; 2]) {
    let frame = Frame::whole(bytes);
    let at = eth::LEN;
    let (ip, whole) = match kind {
        eth::IP4 => (ip4::read(&frame, at, false), ip4::read(&frame, at, true)),
        eth::IP6 => (ip6::read(&frame, at, false), ip6::read(&frame, at, true)),
        _ => return,
    };
    let Some(ip) = ip else {
        assert!(whole.is_none());
        return;
    };
    if let Some(whole) = whole {
        assert_eq!(facts(&ip), facts(&whole), "a whole packet is read as such");
    }
    assert!((ip.l4 + ip.l4_len) as usize <= bytes.len());
    if let Some(l4) = l4::read_quoted(&frame, &ip)
        && matches!(ip.proto, proto::TCP | proto::UDP | proto::SCTP)
    {
        assert!(ip.l4_len >= 8);
        let there = &bytes[ip.l4 as usize..][..4];
        assert_eq!(there, [l4.src_port, l4.dst_port].concat());
    }
}

/// Everything that was read lies in the frame, and in the packet that its header announces.
fn check(bytes: &[u8], kind: [u8; 2], ip: &Ip, l4: Option<&L4>) {
    let at = |offset: u32, len: usize| &bytes[offset as usize..][..len];
    assert_eq!(ip.v6, kind == eth::IP6);
    let header = if ip.v6 { 40 } else { 20 };
    assert!(ip.l4 >= eth::LEN + header);
    assert!((ip.l4 + ip.l4_len) as usize <= bytes.len());
    assert_eq!(ip.options, ip.l4 > eth::LEN + header);
    match ip.v6 {
        true => {
            assert_eq!(at(22, 32), [ip.src.0, ip.dst.0].concat());
            assert_eq!(at(21, 1), [ip.ttl]);
            // No IPv6 packet is taken for one of an IPv4 address.
            for address in [ip.src, ip.dst] {
                let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
                assert_ne!(address.0[..12], mapped);
            }
        }
        false => {
            // Mapped, as the keys of all maps are.
            for (address, there) in [(ip.src, at(26, 4)), (ip.dst, at(30, 4))] {
                assert_eq!(address.0[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
                assert_eq!(&address.0[12..], there);
            }
            assert_eq!((at(22, 1), at(23, 1)), (&[ip.ttl][..], &[ip.proto][..]));
        }
    }
    let Some(l4) = l4 else { return };
    if ip.fragment == Fragment::Later {
        assert_eq!(ports(l4), ([0; 2], [0; 2], 0, 0));
    } else if matches!(
        ip.proto,
        proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP
    ) {
        assert!(ip.l4_len >= 8);
        assert_eq!(at(ip.l4, 4), [l4.src_port, l4.dst_port].concat());
    }
}

fn facts(ip: &Ip) -> impl PartialEq + std::fmt::Debug {
    let fragment = match ip.fragment {
        Fragment::No => 0,
        Fragment::First => 1,
        Fragment::Later => 2,
    };
    let flags = (ip.v6, ip.options, fragment);
    (
        ip.src.0, ip.dst.0, ip.l4, ip.l4_len, ip.proto, ip.ttl, flags,
    )
}

fn ports(l4: &L4) -> ([u8; 2], [u8; 2], u8, u8) {
    (l4.src_port, l4.dst_port, l4.tcp_flags, l4.icmp)
}
