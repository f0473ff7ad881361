//! Fragments that come in before the first of their packet.

use super::{protocols::families, *};
use crate::run::REDIRECT;
use sinabro_common::abi::{
    connection::{Fragment, FragmentKey},
    fragment::{EARLY_BYTES, EarlyFragment, EarlyKey, MAX_EARLY_FRAGMENTS},
};
use sinabro_lab::wait::meet;
use std::{hint, sync::atomic::AtomicU32, thread};

/// Bytes of each of the packet's parts but the last.
const PART: u16 = 72;

/// Offsets of nothing that waits.
const NONE: [u32; 0] = [];

/// The fragments of an answer of the far host's, in order, to a pod that has asked by its port 62000.
struct Answer {
    parts: Vec<Ip>,
    pod: IpAddr,
}

impl Answer {
    /// Of so many parts; the pod asks first.
    fn new(w: &World, (pod, node, far): (IpAddr, IpAddr, IpAddr), parts: u16) -> Self {
        assert_eq!(
            w.sent(&packet::udp((pod, 62000), (far, 53), b"?")).src,
            node
        );
        let part = |number: u16| {
            let data = vec![number as u8; usize::from(PART) - 8];
            let mut ip = packet::udp((far, 53), (node, 62000), &data);
            let more = number + 1 < parts;
            ip.fragment = match pod.is_ipv4() {
                true => (u16::from(more) << 13) | (number * PART / 8),
                false => (number * PART) | u16::from(more),
            };
            ip
        };
        Self {
            parts: (0..parts).map(part).collect(),
            pod,
        }
    }

    /// A part as the pod gets it.
    fn given(&self, part: usize) -> Vec<u8> {
        let mut ip = self.parts[part].clone();
        ip.dst = self.pod;
        if part == 0 {
            ip.payload = packet::udp((ip.src, 53), (self.pod, 62000), &ip.payload[8..]).payload;
        }
        World::frame(&ip)
    }
}

fn waiting() -> std::collections::HashMap<EarlyKey, EarlyFragment> {
    let map = open::<EarlyKey, EarlyFragment>("EARLY_FRAGMENTS");
    map.iter().collect::<Result<_, _>>().unwrap()
}

/// Where in their packets the fragments that wait begin.
fn offsets() -> Vec<u32> {
    let mut offsets: Vec<_> = waiting().keys().map(|key| key.offset).collect();
    offsets.sort_unstable();
    offsets
}

#[test]
fn an_id_is_another_packets_a_second_after_the_last_part() {
    world(|w| {
        for ends in families(&w) {
            let answer = Answer::new(&w, ends, 3);
            // The last overtakes one.
            for part in [0, 2, 1] {
                let given = (PASS, answer.given(part));
                assert_eq!(w.come(&answer.parts[part]), given, "{part}");
            }
            let mut notes = open::<FragmentKey, Fragment>("FRAGMENTS");
            for (key, mut note) in notes.iter().map(Result::unwrap).collect::<Vec<_>>() {
                note.seen_ns = note.seen_ns.wrapping_sub(SECOND);
                notes.insert(key, note, 0).unwrap();
            }
            // The next packet, whosever it is, comes the other way round.
            for part in [2, 1] {
                let left_alone = (PASS, World::frame(&answer.parts[part]));
                assert_eq!(w.come(&answer.parts[part]), left_alone, "{part}");
            }
            assert_eq!(offsets(), [9, 18]);
            let mut waits = open::<EarlyKey, EarlyFragment>("EARLY_FRAGMENTS");
            for key in waiting().into_keys() {
                waits.remove(&key).unwrap();
            }
        }
    });
}

#[test]
fn what_is_early_comes_in_again_behind_the_one_before_it() {
    world(|w| {
        for ends in families(&w) {
            let answer = Answer::new(&w, ends, 4);
            let frames: Vec<_> = answer.parts.iter().map(World::frame).collect();
            for part in [3, 1, 2] {
                let left_alone = (PASS, frames[part].clone());
                assert_eq!(
                    w.come(&answer.parts[part]),
                    left_alone,
                    "it may be the node's"
                );
            }
            assert_eq!(offsets(), [9, 18, 27]);
            for (key, early) in waiting() {
                let frame = &frames[key.offset as usize / 9];
                assert_eq!(early.bytes[..early.len as usize], frame[14..]);
            }
            // Each gives way to the next.
            for part in 0..3 {
                let next = (REDIRECT, frames[part + 1].clone());
                assert_eq!(w.come(&answer.parts[part]), next);
            }
            assert_eq!(w.come(&answer.parts[3]), (PASS, answer.given(3)));
            assert_eq!(offsets(), NONE);
            // Nothing waits any more.
            for part in [2, 0, 1] {
                assert_eq!(w.come(&answer.parts[part]), (PASS, answer.given(part)));
            }
            assert_eq!(offsets(), NONE);
            // What comes in again as it is for the pod is not looked at.
            for part in 0..4 {
                let given = answer.given(part);
                let verdict = w.programs.run("uplink_in", w.a.ifindex, &given);
                assert_eq!(verdict, (PASS, given));
            }
            assert_eq!(offsets(), NONE);
        }
    });
}

/// Another packet has the same id half a minute later.
#[test]
fn what_waited_for_too_long_is_not_sent() {
    const TOO_LONG: u64 = 31 * SECOND;
    world(|w| {
        for ends in families(&w) {
            let answer = Answer::new(&w, ends, 2);
            for (age, verdict) in [(TOO_LONG, PASS), (TOO_LONG - 2 * SECOND, REDIRECT)] {
                w.come(&answer.parts[1]);
                let mut map = open::<EarlyKey, EarlyFragment>("EARLY_FRAGMENTS");
                for (key, mut early) in waiting() {
                    early.seen_ns -= age;
                    map.insert(key, early, 0).unwrap();
                }
                assert_eq!(w.come(&answer.parts[0]).0, verdict, "{age}");
                // As if nobody had seen the first.
                let mut notes = open::<FragmentKey, [u8; 24]>("FRAGMENTS");
                let known: Vec<_> = notes.keys().collect::<Result<_, _>>().unwrap();
                known.iter().for_each(|key| notes.remove(key).unwrap());
            }
        }
    });
}

/// None sends itself, nor another that is not right behind it.
#[test]
fn nothing_follows_what_contradicts_itself() {
    world(|w| {
        for ends in families(&w) {
            let answer = Answer::new(&w, ends, 4);
            let [first, second, third, _] = &answer.parts[..] else {
                panic!("four parts");
            };
            w.come(third);
            assert_eq!(w.come(first).0, PASS);
            let more = if ends.0.is_ipv4() { 0x2000 } else { 1 };
            let (mut odd, mut last, mut empty) = (second.clone(), second.clone(), third.clone());
            odd.payload.push(0);
            last.fragment &= !more;
            empty.payload.clear();
            for ip in [&odd, &last, &empty] {
                assert_eq!(w.come(ip).0, PASS);
                assert_eq!(offsets(), [18]);
            }
            assert_eq!(w.come(second).0, REDIRECT);
            assert_eq!(offsets(), NONE);
        }
    });
}

/// As a card pads short frames: the packet is what its header says.
#[test]
fn padding_is_not_kept() {
    world(|w| {
        for ends in families(&w) {
            let answer = Answer::new(&w, ends, 2);
            let frame = World::frame(&answer.parts[1]);
            let padded = [&frame[..], &[0; 20]].concat();
            w.programs.run("uplink_in", w.a.ifindex, &padded);
            assert_eq!(w.come(&answer.parts[0]), (REDIRECT, frame));
        }
    });
}

#[test]
fn what_is_no_pods_or_too_large_is_not_kept() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let answer = Answer::new(&w, (pod, node, far), 2);
            let later = &answer.parts[1];
            let header = World::frame(later).len() - 14 - later.payload.len();
            for (len, kept) in [(EARLY_BYTES - header, 1), (EARLY_BYTES - header + 1, 0)] {
                let mut large = later.clone();
                large.payload.resize(len, 7);
                assert_eq!(w.come(&large), (PASS, World::frame(&large)));
                assert_eq!(offsets().len(), kept);
                let mut map = open::<EarlyKey, EarlyFragment>("EARLY_FRAGMENTS");
                waiting().keys().for_each(|key| map.remove(key).unwrap());
            }
            // To somebody else, and by a link whose address pods do not share.
            let mut elsewhere = later.clone();
            elsewhere.dst = pod;
            w.leaves_alone_coming(&elsewhere);
            w.programs
                .run("uplink_in", w.b.ifindex, &World::frame(later));
            assert_eq!(offsets(), NONE);
            // Of the node's own the first says so, once.
            let mut own = packet::udp((far, 53), (node, 4000), &[1; 64]);
            own.fragment = answer.parts[0].fragment;
            w.leaves_alone_coming(&own);
            assert_eq!(offsets(), [0]);
            w.leaves_alone_coming(later);
            assert_eq!(offsets(), [0]);
            // A pod's packet with the same id, and the node's own again.
            assert_eq!(w.come(&answer.parts[0]), (PASS, answer.given(0)));
            assert_eq!(w.come(later), (PASS, answer.given(1)));
            assert_eq!(offsets(), NONE);
            w.leaves_alone_coming(&own);
            w.leaves_alone_coming(later);
            let mut map = open::<EarlyKey, EarlyFragment>("EARLY_FRAGMENTS");
            waiting().keys().for_each(|key| map.remove(key).unwrap());
        }
    });
}

/// However many never get a first: the newest are there.
#[test]
fn strays_drive_out_older_ones() {
    world(|w| {
        let answer = Answer::new(&w, (w.a.v4, NODE_IP, FAR), 2);
        let mut stray = World::frame(&answer.parts[1]);
        for id in 0..3 * MAX_EARLY_FRAGMENTS as u16 {
            stray[18..20].copy_from_slice(&(id + 0x2000).to_be_bytes());
            w.programs.run("uplink_in", w.a.ifindex, &stray);
        }
        let there = waiting().len();
        assert!(there <= MAX_EARLY_FRAGMENTS as usize, "{there}");
        assert!(there > MAX_EARLY_FRAGMENTS as usize / 2, "{there}");
        w.come(&answer.parts[1]);
        let next = World::frame(&answer.parts[1]);
        assert_eq!(w.come(&answer.parts[0]), (REDIRECT, next));
    });
}

/// The first and a later fragment at the same moment: either the later one finds the first's note, or the first finds
/// the later one. It is sent once.
#[test]
fn two_processors_lose_no_fragment() {
    world(|w| {
        const PACKETS: u16 = 20_000;
        for ends in families(&w) {
            let answer = Answer::new(&w, ends, 2);
            let arrived = AtomicU32::new(0);
            let run = |part: usize| -> Vec<(i32, Vec<u8>)> {
                let mut frame = World::frame(&answer.parts[part]);
                let id_at = if ends.0.is_ipv4() { 18 } else { 14 + 40 + 6 };
                let pass = |id: u16| {
                    frame[id_at..id_at + 2].copy_from_slice(&(id + 1).to_be_bytes());
                    meet(&arrived, 2 * (u32::from(id) + 1));
                    // Now the one, now the other is ahead, by more or less.
                    let ahead = (id / 2 % 128) * u16::from(usize::from(id % 2) == part);
                    (0..ahead).for_each(|_| hint::spin_loop());
                    w.programs.run("uplink_in", w.a.ifindex, &frame)
                };
                (0..PACKETS).map(pass).collect()
            };
            let (first, later) = thread::scope(|scope| {
                let first = scope.spawn(|| run(0));
                let later = scope.spawn(|| run(1));
                (first.join().unwrap(), later.join().unwrap())
            });
            let mut ways = std::collections::BTreeMap::new();
            for (id, (first, later)) in first.iter().zip(&later).enumerate() {
                let dst = |frame: &[u8]| match ends.0 {
                    IpAddr::V4(_) => frame[30..34].to_vec(),
                    IpAddr::V6(_) => frame[38..54].to_vec(),
                };
                let is_given = dst(&later.1) == dst(&answer.given(1));
                let way = match (first.0, later.0, is_given) {
                    (PASS, PASS, true) => "it found the note",
                    (REDIRECT, PASS, false) => "the first found it",
                    // It had found the note too late to be the one who sends it.
                    (REDIRECT, DROP, false) => "the first was faster",
                    // Of the first there is a copy, and the later one sends itself.
                    (DROP, PASS, true) => "it took itself back",
                    other => panic!("packet {id}: {other:?}"),
                };
                *ways.entry(way).or_insert(0) += 1;
            }
            println!("{ways:?}");
            assert_eq!(offsets(), NONE);
        }
    });
}

impl World {
    fn leaves_alone_coming(&self, ip: &Ip) {
        assert_eq!(self.come(ip), (PASS, World::frame(ip)));
    }
}
