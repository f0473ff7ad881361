//! What a pod announces with its SYNs.

use super::*;
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};

/// What every way out carries in these tests.
const PATH_MTU: u32 = 1450;

/// What is left of it for a segment.
fn most(src: IpAddr) -> u16 {
    PATH_MTU as u16 - if src.is_ipv4() { 40 } else { 60 }
}

fn world(test: impl FnOnce(World) + Send) {
    super::world(|w| {
        kit::all_carry(&w.datapath, PATH_MTU);
        test(w);
    });
}

fn mss(value: u16) -> Vec<u8> {
    [&[2, 4], &value.to_be_bytes()[..]].concat()
}

/// Options of a frame's TCP header.
fn options(frame: &[u8]) -> Vec<u8> {
    let l4 = if frame[12] == 8 { 34 } else { 54 };
    let end = l4 + usize::from(frame[l4 + 12] >> 4) * 4;
    frame[l4 + 20..end].to_vec()
}

#[test]
fn a_syn_that_leaves_announces_what_the_ways_out_carry() {
    world(|w| {
        for (src, _) in w.pairs() {
            for flags in [SYN, SYN | ACK] {
                for (announced, leaves) in [
                    (65_495, most(src)),
                    (most(src) + 1, most(src)),
                    (most(src), most(src)),
                    (536, 536),
                    (0, 0),
                ] {
                    // First, and at an odd place behind others.
                    for before in [&[][..], &[1], &[3, 3, 7], &[4, 2, 1, 8, 10]] {
                        let mut bytes = before.to_vec();
                        bytes.resize(bytes.len() + if before.len() > 4 { 8 } else { 0 }, 9);
                        let at = bytes.len();
                        bytes.extend(mss(announced));
                        let ip = packet::tcp_with((src, 4000), (far(src), 80), flags, &bytes);
                        let (verdict, out) = w.out(&w.frame_of_a(&ip));
                        assert_eq!(verdict, PASS);
                        // With the right checksum.
                        see(&out);
                        assert_eq!(
                            options(&out)[at..at + 4],
                            mss(leaves),
                            "{announced} at {at}"
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn what_stays_on_the_node_announces_what_it_likes() {
    world(|w| {
        for (src, dst) in w.pairs() {
            let ip = packet::tcp_with((src, 4000), (dst, 80), SYN, &mss(65_495));
            let (verdict, out) = w.out(&w.frame_of_a(&ip));
            assert_eq!((verdict, options(&out)), (REDIRECT, mss(65_495)));
            // Nor is anything but a SYN looked at, or the first fragment of one.
            let ip = packet::tcp_with((src, 4000), (far(src), 80), ACK, &mss(65_495));
            w.passes(&w.frame_of_a(&ip), "an established connection's");
        }
    });
}

#[test]
fn before_the_ways_out_are_known_nothing_is_changed() {
    super::world(|w| {
        let (src, _) = w.pairs()[0];
        let ip = packet::tcp_with((src, 4000), (far(src), 80), SYN, &mss(65_495));
        w.passes(&w.frame_of_a(&ip), "no MTU is known");
    });
}

/// Where the option is, by RFC 9293 alone: the value's place among the options.
fn find(options: &[u8]) -> Option<usize> {
    let mut at = 0;
    for _ in 0..8 {
        match options.get(at..at + 4)? {
            [0, ..] => return None,
            [1, ..] => at += 1,
            [2, 4, ..] => return Some(at + 2),
            [_, 0 | 1, ..] => return None,
            [_, len, ..] => at += usize::from(*len),
            _ => return None,
        }
    }
    None
}

#[test]
fn whatever_the_options_only_that_value_changes() {
    let option = prop_oneof![
        Just(vec![1]),
        any::<u16>().prop_map(mss),
        Just(vec![4, 2]),
        (3u8..40, 0u8..12).prop_map(|(kind, len)| {
            let mut bytes = vec![kind, len];
            bytes.resize(usize::from(len).max(2), 0);
            bytes
        }),
        vec(any::<u8>(), 0..6),
    ];
    let options_of_a_syn = vec(option, 0..8).prop_map(|options| {
        let mut bytes = options.concat();
        bytes.truncate(40);
        bytes
    });
    world(|w| {
        let mut runner = TestRunner::new(Config::with_cases(400));
        for (src, _) in w.pairs() {
            let outcome = runner.run(&options_of_a_syn, |bytes| {
                let ip = packet::tcp_with((src, 4000), (far(src), 80), SYN, &bytes);
                let frame = w.frame_of_a(&ip);
                let mut expected = frame.clone();
                let before = options(&frame);
                let (verdict, mut out) = w.out(&frame);
                prop_assert_eq!(verdict, PASS);
                see(&out);
                let l4 = if src.is_ipv4() { 34 } else { 54 };
                if let Some(at) = find(&before) {
                    let place = l4 + 20 + at..l4 + 20 + at + 2;
                    let value = u16::from_be_bytes([before[at], before[at + 1]]);
                    let lowered = value.min(most(src)).to_be_bytes();
                    expected[place].copy_from_slice(&lowered);
                }
                // The checksum was looked at.
                for frame in [&mut expected, &mut out] {
                    frame[l4 + 16..l4 + 18].fill(0);
                }
                prop_assert_eq!(out, expected);
                Ok(())
            });
            outcome.unwrap();
        }
    });
}
