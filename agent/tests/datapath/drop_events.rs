//! What programs tell of the packets that they drop.

use crate::{
    kit::{self, Outside, Pod},
    packet::{self, IP4},
    run::{DROP, Programs},
};
use sinabro_agent::datapath::{Datapath, DropEvents};
use sinabro_common::{
    abi::drop::{DropEvent, DropReason, EVENT_HEAD, EVENTS_PER_SECOND, Hook},
    names::HOST_MAC,
};
use std::net::IpAddr;

struct World {
    datapath: Datapath,
    programs: Programs,
    pod: Pod,
    rings: Vec<DropEvents>,
}

fn world<T: Send>(test: impl FnOnce(&mut World) -> T + Send) -> T {
    kit::fresh(|| {
        let datapath = kit::load();
        let pod = Pod::silent(&datapath, 5);
        test(&mut World {
            programs: Programs::of(&datapath),
            rings: datapath.take_drop_events(),
            datapath,
            pod,
        })
    })
}

/// What was told since the last time.
fn told(rings: &mut [DropEvents]) -> Vec<DropEvent> {
    let each = rings.iter_mut();
    each.flat_map(|ring| std::iter::from_fn(|| ring.next_event()))
        .collect()
}

impl World {
    /// A packet with a source that is not the pod's.
    fn forged(&self, payload: &[u8]) -> Vec<u8> {
        let from: IpAddr = "203.0.113.7".parse().unwrap();
        let ip = packet::udp((from, 7), (self.pod.v4, 9), payload);
        packet::eth(HOST_MAC, self.pod.mac, ip.kind(), &ip.bytes())
    }

    fn send(&self, frame: &[u8]) {
        let (verdict, _) = self.programs.run("pod_out", self.pod.ifindex, frame);
        assert_eq!(verdict, DROP);
    }
}

#[test]
fn a_drop_is_told_with_the_packet() {
    world(|w| {
        for payload in [0, 1, 50, 86, 87, 1000] {
            let frame = w.forged(&vec![0x5a; payload]);
            w.send(&frame);
            let events = told(&mut w.rings);
            let [event] = &events[..] else {
                panic!("{events:?}");
            };
            let head = frame.len().min(EVENT_HEAD);
            assert_eq!(event.reason, DropReason::SourceAddr as u32);
            assert_eq!(event.hook, Hook::PodOut as u8);
            assert_eq!(event.ifindex, w.pod.ifindex);
            assert_eq!(event.kind, [8, 0]);
            assert_eq!(event.left_out, 0);
            assert_eq!(event.len as usize, frame.len());
            assert_eq!(event.head_len as usize, head);
            assert_eq!(event.head[..head], frame[..head]);
            assert!(event.head[head..].iter().all(|&byte| byte == 0));
            let now = sinabro_agent::datapath::monotonic_ns();
            assert!((1..=now).contains(&event.time_ns));
        }
    });
}

#[test]
fn what_passes_is_not_told() {
    world(|w| {
        let to: IpAddr = "203.0.113.7".parse().unwrap();
        let ip = packet::udp((w.pod.v4, 7), (to, 9), b"");
        let frame = packet::eth(HOST_MAC, w.pod.mac, ip.kind(), &ip.bytes());
        w.programs.run("pod_out", w.pod.ifindex, &frame);
        w.programs.run("pod_in", w.pod.ifindex, &frame);
        assert_eq!(told(&mut w.rings), []);
    });
}

/// However long nobody reads and however many are dropped: each is counted, a few are told, and what is
/// left out is known.
#[test]
fn a_flood_is_told_of_at_a_bounded_rate() {
    world(|w| {
        let frame = w.forged(b"");
        let count = |w: &World| kit::dropped(&w.datapath, DropReason::SourceAddr);
        let began = sinabro_agent::datapath::monotonic_ns();
        let sent = 5000;
        for _ in 0..sent {
            w.send(&frame);
        }
        assert_eq!(count(w), sent);
        let events = told(&mut w.rings);
        let cpus = std::thread::available_parallelism().unwrap().get() as u64;
        let seconds = 1 + (sinabro_agent::datapath::monotonic_ns() - began).div_ceil(1_000_000_000);
        let most = u64::from(EVENTS_PER_SECOND) * seconds * cpus;
        assert!(
            (u64::from(EVENTS_PER_SECOND)..=most).contains(&(events.len() as u64)),
            "{}",
            events.len()
        );

        // Another reason is not held back by it.
        let mac = [2, 0, 0, 0, 0, 9];
        let ip = packet::udp((w.pod.v4, 7), (w.pod.v4, 9), b"");
        w.send(&packet::eth(HOST_MAC, mac, ip.kind(), &ip.bytes()));
        let other = told(&mut w.rings);
        assert_eq!(other.len(), 1, "{other:?}");
        assert_eq!(other[0].reason, DropReason::SourceMac as u32);

        // Once more may be told, what was left out is said, CPU by CPU.
        let mut all = events;
        kit::eventually("everything is accounted for", || {
            w.send(&frame);
            all.extend(told(&mut w.rings));
            let left_out: u64 = all.iter().map(|event| u64::from(event.left_out)).sum();
            let accounted = left_out + all.len() as u64;
            let dropped = count(w);
            assert!(accounted <= dropped, "{accounted} of {dropped}");
            accounted == dropped
        });
    });
}

#[test]
fn a_program_says_which_it_is() {
    kit::fresh(|| {
        let datapath = kit::load();
        let outside = Outside::new(&datapath);
        let pod = Pod::silent(&datapath, 5);
        let programs = Programs::of(&datapath);
        let mut rings = datapath.take_drop_events();
        told(&mut rings);
        // A protocol that cannot be masqueraded.
        let ip = packet::other(pod.v4, kit::OUTSIDE.into(), 51);
        let frame = packet::eth([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 1], IP4, &ip.bytes());
        let ran = programs.run_from("uplink_out", outside.uplink, pod.ifindex, &frame);
        let (verdict, _) = ran.unwrap();
        assert_eq!(verdict, DROP);
        let events = told(&mut rings);
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(events[0].hook, Hook::UplinkOut as u8);
        assert_eq!(events[0].reason, DropReason::NatProtocol as u32);
        // Each has one reader.
        assert!(datapath.take_drop_events().is_empty());
    });
}
