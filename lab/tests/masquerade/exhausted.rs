//! No port is left towards a remote end, although all flows that have one are over: nobody has looked since.

use crate::{
    done::answered,
    kit::{FAMILIES, World, far},
};
use sinabro_common::api::{MetricsReport, Request, Response};
use sinabro_lab::wait::eventually;
use std::{
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

const PORTS: usize = 64;
const RANGE: &str = "--masquerade-ports=61000-61063";
/// How long a question's flow is kept.
const KEPT: &str = "--connection-udp-timeout=5s";
const OVER: Duration = Duration::from_millis(5200);
/// Who finds no port asks again after a fifth of a second. The agent looks once in ten seconds otherwise, and has just done so.
const LONGEST: Duration = Duration::from_secs(3);

fn metrics(world: &World) -> MetricsReport {
    match world.node().ask(Request::Metrics).unwrap() {
        Response::Metrics(metrics) => *metrics,
        other => panic!("{other:?}"),
    }
}

/// How often connections were looked over.
fn sweeps(world: &World) -> u64 {
    metrics(world).connections.unwrap().sweeps
}

fn refused(world: &World) -> u64 {
    let drops = metrics(world).drops.into_iter();
    let of_ports = drops.filter(|drop| drop.reason == "nat_ports_exhausted");
    of_ports.map(|drop| drop.packets).sum()
}

#[test]
fn who_finds_no_port_has_the_agent_look_for_those_that_are_over() {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let world = World::with(2, &[], &[RANGE, KEPT]);
        let server = world
            .beyond
            .run(|| Ok(UdpSocket::bind(SocketAddr::new(far()[family], 53))?))
            .unwrap();
        let before = sweeps(&world);
        eventually("a look in its time", || sweeps(&world) > before);
        let before = sweeps(&world);
        for _ in 0..PORTS {
            answered(world.pod(1), &server);
        }
        thread::sleep(OVER);
        assert_eq!((sweeps(&world), refused(&world)), (before, 0));
        let waited = answered(world.pod(2), &server);
        println!("{in_family}: of {PORTS} ports none was left for {waited:?}");
        assert!(refused(&world) > 0, "a port was left");
        assert!(waited < LONGEST, "{in_family}: {waited:?}");
    }
}
