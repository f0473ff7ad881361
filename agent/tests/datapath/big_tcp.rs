//! Segments that are too large for the length field of their IP header ("BIG TCP"): that says zero, and the frame's length counts.
//!
//! As the parsers read them: BPF_PROG_TEST_RUN takes no frame of more than a page.

use crate::packet::{self, ACK, Ip, TCP};
use sinabro_ebpf::parse::{self, Fragment, bytes, eth, ip4, ip6, l4};
use std::mem::MaybeUninit;

/// The most that the field can say.
const MAX: u32 = 0xffff;
/// Of these the least that it cannot say.
const LARGE: [u32; 3] = [MAX + 1, 70_000, 500_000];

fn segment(v6: bool) -> Ip {
    let (src, dst) = match v6 {
        false => ("10.1.0.5", "192.0.2.9"),
        true => ("fd00:1::5", "2001:db8::9"),
    };
    let at = |address: &str, port| (address.parse().unwrap(), port);
    packet::tcp(at(src, 4000), at(dst, 443), ACK, b"")
}

struct Frame {
    head: Vec<u8>,
    len: u32,
}

impl Frame {
    /// Its header says so of its length, and behind the link's header are so many bytes, the first of which can be read.
    fn of(ip: &Ip, says: u16, len: u32) -> Self {
        let mut head = packet::eth([0; 6], [0; 6], ip.kind(), &ip.bytes());
        let field = if ip.src.is_ipv4() { 16 } else { 18 };
        head[field..field + 2].copy_from_slice(&says.to_be_bytes());
        let len = eth::LEN + len;
        Self { head, len }
    }

    fn bytes(&self) -> bytes::Frame<'_> {
        let Self { head, len } = self;
        bytes::Frame { head, len: *len }
    }

    /// How far behind the link's header its segment begins, and how long it is; nothing if no segment is found.
    fn segment(&self) -> Option<(u32, u32)> {
        let frame = self.bytes();
        let kind = [self.head[12], self.head[13]];
        let ip = parse::Ip::read(&frame, kind).unwrap();
        if kind == eth::IP6 {
            // The uplink's programs read into a place of theirs.
            let mut place = MaybeUninit::uninit();
            let there = ip6::read_into(&frame, eth::LEN, true, &mut place);
            assert_eq!(there, ip.is_some());
            // SAFETY: the reader said that it is there.
            let other = there.then(|| unsafe { place.assume_init() });
            let found = |ip: parse::Ip| (ip.l4, ip.l4_len);
            assert_eq!(other.map(found), ip.map(found));
        }
        let ip = ip?;
        assert!((ip.proto, ip.fragment) == (TCP, Fragment::No));
        let ports = l4::read(&frame, &ip)?;
        assert_eq!(ports.src_port, 4000u16.to_be_bytes());
        assert_eq!(ports.dst_port, 443u16.to_be_bytes());
        Some((ip.l4 - eth::LEN, ip.l4_len))
    }
}

#[test]
fn an_ipv4_packet_without_a_length_is_as_long_as_its_frame() {
    let mut with_options = segment(false);
    with_options.options = vec![1; 12];
    for (ip, header) in [(segment(false), 20), (with_options, 32)] {
        for len in LARGE {
            let frame = Frame::of(&ip, 0, len);
            assert_eq!(frame.segment(), Some((header, len - header)));
        }
        // The field has room for these.
        for len in [MAX, 1500, header + 20] {
            assert_eq!(Frame::of(&ip, 0, len).segment(), None, "{len}");
        }
        // What is behind a packet that says how long it is, is not its own.
        let padded = Frame::of(&ip, 100, MAX + 1);
        assert_eq!(padded.segment(), Some((header, 100 - header)));
    }
}

/// Linux 7 sends them as they are, what is older with a header that says how long they are.
#[test]
fn an_ipv6_packet_without_a_length_is_as_long_as_its_frame() {
    let plain = segment(true);
    for behind in LARGE {
        let frame = Frame::of(&plain, 0, 40 + behind);
        assert_eq!(frame.segment(), Some((40, behind)));
        // RFC 2675 §2: behind the fixed header are so many bytes, this one's among them.
        let [a, b, c, d] = behind.to_be_bytes();
        let mut jumbo = segment(true);
        jumbo.extensions = vec![(packet::HOP_BY_HOP, vec![0, 0, 0xc2, 4, a, b, c, d])];
        let frame = Frame::of(&jumbo, 0, 40 + behind);
        assert_eq!(frame.segment(), Some((48, behind - 8)));
    }
    // An empty packet, and padding.
    for behind in [MAX, 1500, 20] {
        assert_eq!(Frame::of(&plain, 0, 40 + behind).segment(), None);
    }
    let padded = Frame::of(&plain, 100, 40 + MAX + 1);
    assert_eq!(padded.segment(), Some((40, 100)));
}

#[test]
fn what_an_error_quotes_without_a_length_names_no_ports() {
    let quoted = Frame::of(&segment(false), 0, 500);
    assert!(ip4::read(&quoted.bytes(), eth::LEN, false).is_none());
    let quoted = Frame::of(&segment(true), 0, 500);
    let ip = ip6::read(&quoted.bytes(), eth::LEN, false).unwrap();
    assert!(l4::read_quoted(&quoted.bytes(), &ip).is_none());
}
