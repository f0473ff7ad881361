//! Many flows to one address and port: none is taken for another, none is refused while a port is free.

use crate::kit::{FAMILIES, World, far};
use sinabro_lab::{
    Pod,
    amount::amount,
    traffic::{
        crowd::{Crowd, Kind},
        identity::{Server, visit},
    },
};
use std::{
    collections::BTreeSet,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

const KINDS: [Kind; 2] = [Kind::Datagrams, Kind::Connections];

/// Flows of pods to one port of the far host.
pub fn crowd(world: &World, pods: &[Pod], kind: Kind, family: usize) -> Crowd {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(7_000);
    let port = NEXT.fetch_add(1, Ordering::Relaxed);
    let at = SocketAddr::new(far()[family], port);
    let clients: Vec<_> = pods
        .iter()
        .map(|pod| (pod.place(), pod.addresses()[family]))
        .collect();
    Crowd::new(kind, &clients, &world.beyond, at, at).unwrap()
}

/// All pods use the same ports.
#[test]
fn many_pods_speak_to_one_remote_port() {
    const PORTS: std::ops::Range<u16> = 40_000..40_016;
    let pods = amount(40, 200) as usize;
    let world = World::new(pods);
    for (family, in_family) in FAMILIES.iter().enumerate() {
        for kind in KINDS {
            let mut crowd = crowd(&world, world.pods(), kind, family);
            crowd.open(PORTS, 0).unwrap();
            // Once more, each as the same.
            crowd.open(PORTS, 0).unwrap();
            let addresses: BTreeSet<_> = crowd.known().map(|known| known.ip()).collect();
            assert_eq!(
                addresses,
                BTreeSet::from([world.own()[family]]),
                "{in_family}"
            );
            // Of datagrams, ports of the first may be others' when the last came.
            let all = pods * PORTS.len();
            assert!(kind == Kind::Datagrams || crowd.known().count() == all);
        }
    }
}

/// Processes of the host connect to the same remote port as pods do, by ports that the kernel chooses.
#[test]
fn connections_of_the_host_and_of_pods_are_not_mixed_up() {
    const CLIENTS: usize = 4;
    let each = amount(500, 25_000);
    let world = World::new(CLIENTS);
    for (family, far) in far().into_iter().enumerate() {
        let server = Server::start(&world.beyond, SocketAddr::new(far, 0), 8).unwrap();
        let (target, node) = (server.address(), world.own()[family]);
        let results: Vec<_> = thread::scope(|scope| {
            let mut threads = Vec::new();
            for (who, pod) in (0..).zip(world.pods()) {
                threads.push(scope.spawn(move || {
                    visit(pod.place(), target, who, each, |_, seen| seen.ip() == node)
                }));
                let host = world.node().place();
                threads.push(scope.spawn(move || {
                    // Its port may be a pod's at the moment: then it gets another, as netfilter would give it one.
                    visit(host, target, 100 + who, each, |own, seen| {
                        own.ip() == seen.ip()
                    })
                }));
            }
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        for result in results {
            result.unwrap_or_else(|error| panic!("{}: {error:#}", FAMILIES[family]));
        }
        assert_eq!(
            server.finish().unwrap(),
            2 * CLIENTS as u64 * u64::from(each)
        );
    }
}

/// Nearly as many flows at once as there are ports.
#[test]
fn flows_to_one_destination_fill_the_ports() {
    const PODS: u16 = 4;
    let (ports, flows) = match amount(0, 1) {
        0 => (50_000..=51_023, 1_000),
        // Without the node ports.
        _ => (1_600..=65_535, 60_000),
    };
    let flag = format!("--masquerade-ports={}-{}", ports.start(), ports.end());
    let ways = (0..FAMILIES.len()).flat_map(|family| KINDS.map(|kind| (family, kind)));
    for (family, kind) in ways {
        let what = format!("{kind:?}, {}", FAMILIES[family]);
        // The host's own end before them. A table for each: what one family takes of it leaves room for less than as
        // much again.
        let world = World::with(
            PODS.into(),
            &[("net.ipv4.ip_local_port_range", "1024 1500")],
            &[
                &flag,
                // So that the first is there still when the last comes, however long that takes.
                "--connection-udp-timeout=24h",
                "--connection-udp-timeout-stream=24h",
            ],
        );
        let crowd = crowd(&world, world.pods(), kind, family);
        let mut crowd = crowd.remembered_for(Duration::from_secs(24 * 3600));
        let each = 10_000..10_000 + flows / PODS;
        let open = |crowd: &mut Crowd| {
            let opened = crowd.open(each.clone(), 0);
            opened.unwrap_or_else(|error| panic!("{what}: {error:#}"));
        };
        let started = Instant::now();
        open(&mut crowd);
        let took = started.elapsed();
        // Once more, each as the same.
        open(&mut crowd);
        let known: BTreeSet<_> = crowd.known().map(|known| known.port()).collect();
        assert_eq!(known.len(), usize::from(flows), "{what}");
        assert!(known.iter().all(|port| ports.contains(port)));
        let rate = f64::from(flows) / took.as_secs_f64();
        println!("{what}: {flows} flows, {rate:.0} in a second");
    }
}

/// Connections that end give their ports to others: far more of them than there are ports, one after
/// another, without a pause.
#[test]
fn ports_of_ended_connections_are_used_again() {
    const PODS: u16 = 4;
    const EACH: u16 = 125;
    let rounds = amount(12, 600);
    let world = World::with(
        PODS.into(),
        &[],
        &[match rounds {
            12 => "--masquerade-ports=61000-61999",
            // A port rests for a second, so fewer of them would be what limits the rate.
            _ => "--masquerade-ports=1024-65535",
        }],
    );
    world.guard();
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let mut crowd = crowd(&world, world.pods(), Kind::Connections, family);
        let started = Instant::now();
        for round in 0..rounds {
            let first = 10_000 + (round % 50) as u16 * EACH;
            let number = (round / 50) as u8;
            crowd.open(first..first + EACH, number).unwrap();
            crowd.close(first..first + EACH, number).unwrap();
        }
        let connections = rounds * u32::from(PODS * EACH);
        let rate = f64::from(connections) / started.elapsed().as_secs_f64();
        println!("{in_family}: {connections} connections, {rate:.0} in a second");
    }
}
