//! Ports towards one remote end, until none is left.

use super::*;
use aya::maps::Array;
use sinabro_agent::datapath::{ConnectionLimits, PortSet, PortsOf};
use sinabro_common::{
    abi::connection::{TakenPorts, port_table},
    algo::lifetime::Stage,
};
use std::sync::Barrier;

fn with_ports(w: &World, min: u16, max: u16) {
    let mut config = kit::node_config();
    (config.nat_port_min, config.nat_port_max) = (min, max);
    w.datapath.set_node_config(config).unwrap();
}

/// Makes the world's pods have as many connections as there is room for, none of which is over before a busy machine
/// has begun the last.
fn large() -> DatapathConfig {
    let mut limits = ConnectionLimits::default();
    limits.lifetimes[Stage::Unreplied as usize] = 3600;
    DatapathConfig {
        connections: Some(1 << 20),
        connection_limits: limits,
        ..kit::config()
    }
}

/// Begins a connection from each of these ports, and says which one each got.
fn begin(w: &World, pod: IpAddr, ports: impl Iterator<Item = u16>) -> Vec<u16> {
    ports
        .map(|port| w.sent(&make(UDP, (pod, port), (FAR, 53))).ports.0)
        .collect()
}

fn forget(of: impl Fn(u16) -> bool) -> usize {
    let (mut records, mut aliases) = (
        open::<ConnectionKey, Connection>("CONNECTIONS"),
        open("ALIASES"),
    );
    let mut count = 0;
    for (key, connection) in table() {
        let alias = connection.alias(&key).unwrap();
        if of(u16::from_be_bytes(alias.dst_port)) {
            records.remove(&key).unwrap();
            HashMap::<MapData, Tuple, Alias>::remove(&mut aliases, &alias).unwrap();
            count += 1;
        }
    }
    count
}

#[test]
fn every_port_is_found_and_no_more() {
    world_with(&large(), |w| {
        with_ports(&w, 1024, 65535);
        // The second pod's are taken, each of them, and so another is looked for.
        let mut got = begin(&w, w.a.v4, 1024..=33279);
        got.extend(begin(&w, w.b.v4, 1024..=33279));
        assert_eq!(got.iter().collect::<HashSet<_>>().len(), 64512);
        check_table();
        let next = make(UDP, (w.b.v4, 40000), (FAR, 53));
        w.dropped("uplink_out", &next, DropReason::NatPortsExhausted);
        // One is free again, as after each sweep.
        for free in [1024, 30_001, 65_535] {
            assert_eq!(forget(|port| port == free), 1);
            w.sweep_at(0);
            let port = 50_000 + free % 7;
            assert_eq!(w.sent(&make(UDP, (w.b.v4, port), (FAR, 53))).ports.0, free);
        }
        w.dropped("uplink_out", &next, DropReason::NatPortsExhausted);
    });
}

#[test]
fn ports_of_others_are_found_after_a_pod_has_kept_nearly_all_of_them() {
    world_with(&large(), |w| {
        with_ports(&w, 1024, 65535);
        begin(&w, w.a.v4, 1024..=65500);
        // The agent sees how many there are left, although no packet has looked for one.
        for _ in 0..8 {
            w.sweep_at(0);
        }
        assert_eq!(begin(&w, w.b.v4, 1024..1059).len(), 35);
        let next = make(UDP, (w.b.v4, 2000), (FAR, 53));
        w.dropped("uplink_out", &next, DropReason::NatPortsExhausted);
    });
}

/// Nobody looks for a port among those that no connection gets.
#[test]
fn a_search_begins_with_what_no_connection_gets() {
    world(|w| {
        let mut host = PortSet::default();
        host.add(TCP, 40_000..=40_127);
        host.add(UDP, 53..=53);
        host.add(UDP, 60_999..=61_001);
        w.datapath
            .set_host_ports(PortsOf::Node, host.clone())
            .unwrap();
        let data = MapData::from_pin(format!("{}/v2/RESERVED_PORTS", names::BPF_DIR)).unwrap();
        let reserved: Array<MapData, TakenPorts> = Map::Array(data).try_into().unwrap();
        for (min, max) in [(0, 65535), (1024, 65535), (1025, 61_000), (33, 33)] {
            with_ports(&w, min, max);
            for proto in [TCP, UDP, SCTP, ICMP] {
                let mut expected = TakenPorts::NONE;
                (0..=u16::MAX)
                    .filter(|port| !(min..=max).contains(port) || host.contains(proto, *port))
                    .for_each(|port| expected.take(port));
                let found = reserved.get(&port_table(proto), 0).unwrap();
                assert!(found == expected, "{proto}, {min} to {max}");
            }
        }
    });
}

#[test]
fn two_processors_find_every_port() {
    world_with(&large(), |w| {
        with_ports(&w, 61000, 61999);
        let barrier = Barrier::new(2);
        let run = |pod: IpAddr| {
            barrier.wait();
            // None of these is one of them.
            begin(&w, pod, 1..=500)
        };
        let (a, b) = std::thread::scope(|scope| {
            let other = scope.spawn(|| run(w.b.v4));
            let one = run(w.a.v4);
            (one, other.join().unwrap())
        });
        assert_eq!(a.iter().chain(&b).collect::<HashSet<_>>().len(), 1000);
        check_table();
    });
}

/// What a packet from outside has to guess who wants to be taken for an answer (RFC 6056 §3): neither what another node chose
/// nor what was chosen before tells of the next.
#[test]
fn nobody_foresees_which_ports_are_chosen() {
    // Not to be had, and another pod's.
    for own in [1..=32, 62000..=62031u16] {
        let [one, other] = [(); 2].map(|()| {
            let mut chosen = Vec::new();
            world(|w| {
                begin(&w, w.a.v4, own.clone());
                chosen = begin(&w, w.b.v4, own.clone());
            });
            chosen
        });
        if one.is_empty() {
            // Worlds are not made on this kernel.
            return;
        }
        let same = one.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same <= 2, "{one:?} and {other:?}");
        for chosen in [one, other] {
            assert!(chosen.iter().all(|port| !own.contains(port)));
            let steps = chosen.windows(2).map(|two| two[1].wrapping_sub(two[0]));
            assert!(steps.collect::<HashSet<_>>().len() > 28, "{chosen:?}");
            let rises = chosen.windows(2).filter(|two| two[0] < two[1]).count();
            assert!((4..=27).contains(&rises), "{chosen:?}");
        }
    }
}
