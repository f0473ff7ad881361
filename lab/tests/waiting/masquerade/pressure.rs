//! Agents that come and go while pods flood: what is there is not harmed, and what is begun by others is served.

use super::{
    crowds::crowd,
    ends::{Ends, next_id, payload},
    fragments::ORDERS,
    kit::{FAMILIES, Way, World, far},
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Place,
    raise::Raise,
    traffic::{
        crowd::Kind,
        flood::{Flood, lose_what_goes_nowhere},
        fragment::cut,
        identity::{self, Server},
        path::Path,
        unbroken::{Pace, Traffic},
    },
};
use std::{
    env,
    net::{IpAddr, SocketAddr},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Undisturbed, to be compared with.
pub const BEFORE: Duration = Duration::from_secs(6);
const PHASE: Duration = Duration::from_secs(2);
/// After so many hundred connections the same ones come again: no more than there is room for while no agent ends any,
/// however long the next one takes to start.
const AGAIN: u16 = 200;

/// Two meters at once would be in each other's way.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From the first pod to the far host, in as many families.
pub fn outside(world: &World, families: usize) -> Vec<Path> {
    (far().into_iter().zip(FAMILIES).take(families))
        .map(|(far, name)| {
            let name = format!("outside, {name}");
            Path::new(&name, world.pod(1).place(), &world.beyond, far)
        })
        .collect()
}

pub fn watch(world: &World, families: usize) -> Traffic {
    watch_all(&outside(world, families))
}

/// Traffic on these paths, which ran undisturbed for a while.
fn watch_all(paths: &[Path]) -> Traffic {
    let pace = Pace {
        pause: Duration::from_millis(10),
        clients: 1,
    };
    let traffic = Traffic::start(paths, pace).unwrap();
    traffic.watch(BEFORE);
    traffic
}

pub fn finish(traffic: Traffic, world: &World) -> String {
    traffic.finish().unwrap_or_else(|error| fail(&error, world))
}

/// With what the node has dropped and logged.
fn fail(error: &anyhow::Error, world: &World) -> ! {
    let drops = world.node().ctl(&["drops"]);
    let drops = drops.map(|output| String::from_utf8(output.stdout));
    panic!("{error:?}\n{drops:#?}\n{}", world.node().log())
}

/// Connections of the third pod, in as many families, a hundred at a time; each is answered and known by an address
/// of its own. How often.
fn come_and_go(world: &World, families: usize, stop: &AtomicBool) -> u16 {
    let pods = &world.pods()[2..3];
    let crowd = |family| crowd(world, pods, Kind::Connections, family);
    let mut crowds: Vec<_> = (0..families).map(crowd).collect();
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let first = 10_000 + (rounds % AGAIN) * 100;
        for crowd in &mut crowds {
            let opened = crowd.open(first..first + 100, 0);
            let closed = opened.and_then(|()| crowd.close(first..first + 100, 0));
            closed.unwrap_or_else(|error| fail(&error, world));
        }
        rounds = rounds.wrapping_add(1);
    }
    rounds
}

/// Agents are killed, stopped and started while pods flood, and connections come and go.
#[test]
fn agents_come_and_go_under_load() {
    let _alone = alone();
    for way in Way::in_turn(1) {
        let world = World::by(way, 3, &[], &[]);
        lose_what_goes_nowhere(world.lab.router().place()).unwrap();
        let traffic = watch(&world, 2);
        let (rounds, _) = under_pressure(&world, 2, u64::MAX, || {
            let node = world.node();
            for step in ["killed", "stopped", "killed"] {
                traffic.event(&format!("the agent was {step}")).unwrap();
                match step {
                    "killed" => node.kill_agent().unwrap(),
                    _ => node.stop_agent().unwrap(),
                }
                traffic.watch(PHASE);
                traffic
                    .must_flow(&format!("after the agent was {step}"))
                    .unwrap();
                traffic.event("the agent was started").unwrap();
                node.start_agent_with(way.flags()).unwrap();
                node.wait_ready().unwrap();
                traffic.watch(PHASE);
                traffic.must_flow("with a new agent").unwrap();
            }
        });
        let report = finish(traffic, &world);
        println!("{way:?}: {rounds} times 200 connections; {report}");
    }
}

/// Runs something while the second pod floods in as many families, with so many connections again and again, and the third pod's come and
/// go: how often those did, and how many SYNs were sent.
fn under_pressure(world: &World, families: usize, flood: u64, run: impl FnOnce()) -> (u16, u64) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let raise = Raise(&stop);
        let come_and_go = scope.spawn(|| come_and_go(world, families, &stop));
        let floods: Vec<_> = (0..families)
            .map(|family| Flood::from_pod(world.pod(2), family, flood).unwrap())
            .collect();
        run();
        let sent = floods
            .into_iter()
            .map(|flood| flood.finish().unwrap())
            .sum();
        drop(raise);
        let rounds = come_and_go.join().unwrap();
        assert!(rounds > 0);
        (rounds, sent)
    })
}

/// The programs of an earlier state of the project, which `cargo xtask test` builds from git's history.
fn earlier() -> Binaries {
    let dir = env::var_os("SINABRO_EARLIER_DIR");
    Binaries::at(dir.expect("SINABRO_EARLIER_DIR: `cargo xtask test` builds them and sets it"))
        .unwrap()
}

/// Connections to one address and port, one after the other; each has an answer of its own, and is known as who it is. How many.
fn visits(from: &Place, to: SocketAddr, who: u32, node: IpAddr, stop: &AtomicBool) -> u32 {
    const ONCE: u32 = 20;
    let mut times = 0;
    while !stop.load(Ordering::Relaxed) {
        let is_right = |_, seen: SocketAddr| seen.ip() == node;
        identity::visit(from, to, who, ONCE, is_right).unwrap();
        times += 1;
    }
    times * ONCE
}

/// Packets in parts both ways, each part a moment after the one before it, in every order; none is lost. How many.
///
/// Parts that come more than a second after their packet's last may be another packet's
/// ([`LATE_NS`](sinabro_common::algo::lifetime::LATE_NS)), so one that this thread was too late with may be lost.
fn in_every_order(ends: &Ends, stop: &AtomicBool) -> usize {
    const IN_TIME: Duration = Duration::from_millis(500);
    let mut packets = 0;
    let mut late = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        for order in ORDERS {
            for (way, from, to) in ends.ways() {
                let payload = payload(packets, 3000);
                let parts = cut(&from.frame(&payload), next_id(), 1208).unwrap();
                let began = Instant::now();
                for at in order {
                    from.inject(&parts[at..=at]);
                    thread::sleep(Duration::from_millis(1));
                }
                packets += 1;
                if began.elapsed() > IN_TIME {
                    late.push(payload);
                    continue;
                }
                let what = format!("{way}, order {order:?}, packet {packets}");
                let mut others = to.hears_up_to(&payload, &what);
                others.retain(|other| !late.contains(other));
                assert!(others.is_empty(), "{what}");
            }
        }
    }
    packets
}

/// Agents are killed, and others take their place, while pods and processes of the host send datagrams in parts, get such
/// answers, and connect to the same remote port.
#[test]
fn packets_in_parts_and_the_hosts_own_outlive_agents_under_load() {
    /// Four parts.
    const SIZE: usize = 5000;
    let _alone = alone();
    for (world, flags) in [
        (World::with(2, &[], &[]), Way::Stack.flags()),
        (World::direct(2), Way::Direct.flags()),
    ] {
        let (node, host) = (world.node(), world.node().place());
        // Not the host of those whose ids are chosen here.
        let outside = world.lab.outside().place();
        let addresses = world.lab.outside_addresses().unwrap();
        let mut paths = Vec::new();
        for (address, name) in addresses.into_iter().zip(FAMILIES) {
            for (from, who) in [(world.pod(1).place(), "pod"), (host, "host")] {
                let path = Path::new(&format!("{who}, {name}"), from, outside, address);
                paths.push(path.with_echoes(SIZE));
            }
        }
        let servers = addresses.map(|address| {
            let at = SocketAddr::new(address, 0);
            Server::start(outside, at, 2).unwrap()
        });
        let by_hand = [0, 1].map(|family| Ends::new(&world, 2, family));
        let stop = AtomicBool::new(false);
        let connections = thread::scope(|scope| {
            let raise = Raise(&stop);
            let clients: Vec<_> = (servers.iter().zip(world.own()))
                .flat_map(|(server, own)| {
                    let places = [world.pod(2).place(), host];
                    places.map(|place| (place, server.address(), own))
                })
                .zip(0..)
                .map(|((place, to, own), who)| {
                    let stop = &stop;
                    scope.spawn(move || visits(place, to, who, own, stop))
                })
                .collect();
            let by_hand: Vec<_> = (by_hand.iter())
                .map(|ends| scope.spawn(|| in_every_order(ends, &stop)))
                .collect();
            let traffic = watch_all(&paths);
            for step in ["another", "a third"] {
                traffic.event("the agent was killed").unwrap();
                node.kill_agent().unwrap();
                traffic.watch(PHASE);
                traffic.must_flow("without an agent").unwrap();
                traffic.event(&format!("{step} was started")).unwrap();
                node.start_agent_with(flags).unwrap();
                node.wait_ready().unwrap();
                traffic.watch(PHASE);
                traffic.must_flow(&format!("with {step}")).unwrap();
            }
            println!("{}", finish(traffic, &world));
            drop(raise);
            let packets: Vec<_> = by_hand.into_iter().map(|one| one.join().unwrap()).collect();
            println!("packets in every order: {packets:?}");
            let counts = clients.into_iter().map(|client| client.join().unwrap());
            counts.collect::<Vec<_>>()
        });
        println!("connections: {connections:?}");
        assert!(connections.iter().all(|count| *count > 0));
    }
}

/// What pods had with an agent of the last release they have with this one, by the same ports.
#[test]
fn flows_outlive_an_upgrade_since_release() {
    let _alone = alone();
    let now = Binaries::find().unwrap();
    let lab = Lab::new(earlier(), 1, Lifetime::Process).unwrap();
    let world = World::in_lab(lab, 2, &[]);
    let node = world.node();
    let mut crowds = [
        (Kind::Datagrams, 0),
        (Kind::Connections, 0),
        (Kind::Datagrams, 1),
        (Kind::Connections, 1),
    ]
    .map(|(kind, family)| {
        let mut crowd = crowd(&world, world.pods(), kind, family);
        crowd.open(40_000..40_500, 0).unwrap();
        crowd
    });
    node.kill_agent().unwrap();
    node.set_binaries(now);
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    for crowd in &mut crowds {
        crowd.open(40_000..40_500, 0).unwrap();
    }
}

/// The same while a pod floods and connections come and go: none is missed, and none is refused. By programs by which packets
/// go by the stack, and by those by which they go past it.
#[test]
fn an_upgrade_since_release_under_load_breaks_nothing() {
    let _alone = alone();
    for way in Way::BOTH {
        let now = Binaries::find().unwrap();
        let lab = Lab::new(earlier(), 1, Lifetime::Process).unwrap();
        lab.node(1)
            .write_services("{kind: List, items: []}\n")
            .unwrap();
        let world = World::in_lab(lab, 3, way.flags());
        let node = world.node();
        if way == Way::Direct {
            world.wait_for_way("direct");
        }
        lose_what_goes_nowhere(world.lab.router().place()).unwrap();
        let traffic = watch(&world, 2);
        let (rounds, sent) = under_pressure(&world, 2, u64::MAX, || {
            traffic.event("the agent was killed").unwrap();
            node.kill_agent().unwrap();
            traffic.watch(PHASE);
            traffic.must_flow("without an agent").unwrap();
            traffic.event("the next version was started").unwrap();
            node.set_binaries(now);
            node.start_agent_with(way.flags()).unwrap();
            node.wait_ready().unwrap();
            if way == Way::Direct {
                world.wait_for_way("direct");
            }
            traffic.watch(PHASE);
            traffic.must_flow("with the next version").unwrap();
        });
        let report = finish(traffic, &world);
        println!("{way:?}: {sent} SYNs, {rounds} times 200 connections; {report}");
    }
}
