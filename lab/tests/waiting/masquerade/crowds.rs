//! Many flows to one address and port: none is taken for another, none is refused while a port is free.

use super::kit::{FAMILIES, Way, World, far};
use anyhow::Result;
use sinabro_lab::{
    Place, Pod,
    amount::amount,
    traffic::{
        crowd::{Crowd, Kind},
        identity, questions,
    },
};
use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
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
fn many_pods_speak_to_one_remote_port_nightly() {
    const PORTS: std::ops::Range<u16> = 40_000..40_016;
    let pods = amount(20, 200) as usize;
    for world in World::by_both_ways(pods) {
        speak_to_one_port(&world, PORTS);
    }
}

fn speak_to_one_port(world: &World, ports: std::ops::Range<u16>) {
    let all = world.pods().len() * ports.len();
    for (family, in_family) in FAMILIES.iter().enumerate() {
        for kind in KINDS {
            let mut crowd = crowd(world, world.pods(), kind, family);
            crowd.open(ports.clone(), 0).unwrap();
            // Once more, each as the same.
            crowd.open(ports.clone(), 0).unwrap();
            let addresses: BTreeSet<_> = crowd.known().map(|known| known.ip()).collect();
            assert_eq!(
                addresses,
                BTreeSet::from([world.own()[family]]),
                "{in_family}"
            );
            // Of datagrams, ports of the first may be others' when the last came.
            assert!(kind == Kind::Datagrams || crowd.known().count() == all);
        }
    }
}

/// Of pods, and as many processes of the host.
const CLIENTS: usize = 4;

/// Processes of the host speak with the same remote port as pods do, by ports that the kernel chooses.
#[test]
fn connections_of_the_host_and_of_pods_are_not_mixed_up() {
    let each = amount(250, 25_000);
    for world in World::by_both_ways(CLIENTS) {
        for (family, far) in far().into_iter().enumerate() {
            let at = SocketAddr::new(far, 0);
            let server = identity::Server::start(&world.beyond, at, 8).unwrap();
            let visit = |place: &Place, who, is_right: IsRight<'_>| {
                identity::visit(place, server.address(), who, each, is_right)
            };
            all_speak(&world, family, &visit);
            let all = 2 * CLIENTS as u64 * u64::from(each);
            assert_eq!(server.finish().unwrap(), all);
        }
    }
}

/// The same by datagrams.
#[test]
fn questions_of_the_host_and_of_pods_are_not_mixed_up() {
    /// All of them are more than there are ports, and each would have its one for half a minute.
    const KEPT: &str = "--connection-udp-timeout=5s";
    let each = amount(500, 25_000);
    for way in Way::BOTH {
        let world = World::guarded(way, CLIENTS, &[KEPT]);
        for (family, far) in far().into_iter().enumerate() {
            let again = AtomicUsize::new(0);
            let at = SocketAddr::new(far, 0);
            let server = questions::Server::start(&world.beyond, at).unwrap();
            let ask = |place: &Place, who, is_right: IsRight<'_>| {
                let times = questions::ask(place, server.address(), who, each, is_right)?;
                again.fetch_add(times, Ordering::Relaxed);
                Ok(())
            };
            all_speak(&world, family, &ask);
            let all = 2 * CLIENTS * each as usize;
            assert_eq!(server.finish().unwrap(), all);
            println!(
                "{way:?}, {}: {again:?} of {all} asked again",
                FAMILIES[family]
            );
        }
    }
}

/// Whether the server may know a client that has the one end by the other.
type IsRight<'a> = &'a (dyn Fn(SocketAddr, SocketAddr) -> bool + Sync);

/// All pods and as many processes of the host at once, each by a number of its own.
fn all_speak(
    world: &World,
    family: usize,
    speak: &(dyn Fn(&Place, u32, IsRight<'_>) -> Result<()> + Sync),
) {
    let (node, host) = (world.own()[family], world.node().place());
    let results: Vec<_> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (who, pod) in (0..).zip(world.pods()) {
            let is_node = move |_, seen: SocketAddr| seen.ip() == node;
            threads.push(scope.spawn(move || speak(pod.place(), who, &is_node)));
            // Its port may be a pod's at the moment: then it gets another, as netfilter would give it one.
            let is_own = |own: SocketAddr, seen: SocketAddr| own.ip() == seen.ip();
            threads.push(scope.spawn(move || speak(host, 100 + who, &is_own)));
        }
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for result in results {
        result.unwrap_or_else(|error| panic!("{}: {error:#}", FAMILIES[family]));
    }
}

/// Nearly as many flows at once as there are ports.
#[test]
fn flows_to_one_destination_fill_the_ports_nightly() {
    const PODS: u16 = 4;
    let (ports, flows) = match amount(0, 1) {
        0 => (50_000..=51_023, 1_000),
        // Without the node ports.
        _ => (1_600..=65_535, 60_000),
    };
    let flag = format!("--masquerade-ports={}-{}", ports.start(), ports.end());
    let flows_of = (0..FAMILIES.len()).flat_map(|family| KINDS.map(|kind| (family, kind)));
    let by_ways = flows_of.flat_map(|(family, kind)| {
        let ways = Way::in_turn(family + kind as usize);
        ways.map(move |way| (way, family, kind))
    });
    for (way, family, kind) in by_ways {
        let what = format!("{way:?}, {kind:?}, {}", FAMILIES[family]);
        // The host's own end before them. A table for each: what one family takes of it leaves room for less than as
        // much again.
        let world = World::by(
            way,
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
fn ports_of_ended_connections_are_used_again_nightly() {
    const PODS: u16 = 4;
    const EACH: u16 = 125;
    const ROUNDS: u16 = 12;
    for way in Way::BOTH {
        let world = World::guarded(way, PODS.into(), &["--masquerade-ports=61000-61999"]);
        for family in 0..FAMILIES.len() {
            let mut crowd = crowd(&world, world.pods(), Kind::Connections, family);
            for round in 0..ROUNDS {
                let first = 10_000 + round * EACH;
                crowd.open(first..first + EACH, 0).unwrap();
                crowd.close(first..first + EACH, 0).unwrap();
            }
        }
    }
}

/// As many in a second as are promised, for a minute with SINABRO_THOROUGH: all are answered, and none was refused, not even for a
/// moment. A machine that is too slow for that begins fewer in a second, which is printed.
#[test]
fn five_thousand_connections_in_a_second_are_begun_to_one_destination_nightly() {
    const PODS: u16 = 4;
    const EACH: u16 = 25;
    const EVERY: Duration = Duration::from_millis(20);
    /// After so many rounds each pod has its first ports again.
    const AGAIN: u32 = 250;
    let rounds = amount(60, 3_000);
    for way in Way::BOTH {
        let world = World::guarded(way, PODS.into(), &["--masquerade-ports=1024-65535"]);
        for (family, in_family) in FAMILIES.iter().enumerate() {
            let what = format!("{way:?}, {in_family}");
            let mut crowd = crowd(&world, world.pods(), Kind::Connections, family);
            let (started, mut answered) = (Instant::now(), 0);
            for round in 0..rounds {
                thread::sleep((started + EVERY * round).saturating_duration_since(Instant::now()));
                let first = 10_000 + (round % AGAIN) as u16 * EACH;
                let (ports, number) = (first..first + EACH, (round / AGAIN) as u8);
                crowd.open(ports.clone(), number).unwrap();
                answered += crowd.known().count();
                crowd.close(ports, number).unwrap();
            }
            let took = started.elapsed();
            assert_eq!(
                answered,
                rounds as usize * usize::from(PODS * EACH),
                "{what}"
            );
            for reason in ["nat_ports_exhausted", "nat_table_full", "connection_share"] {
                assert_eq!(world.dropped(reason), 0, "{what}: {reason}");
            }
            let rate = answered as f64 / took.as_secs_f64();
            println!("{what}: {answered} connections, {rate:.0} in a second");
        }
    }
}
