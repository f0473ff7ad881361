//! No port is left towards a remote end, although all flows that have one are over: nobody has looked since.

use crate::{
    done::answered,
    kit::{FAMILIES, Way, World, far},
};
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

fn refused(world: &World) -> u64 {
    world.dropped("nat_ports_exhausted")
}

#[test]
fn who_finds_no_port_has_the_agent_look_for_those_that_are_over() {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        for way in Way::in_turn(family) {
            let world = World::by(way, 2, &[], &[RANGE, KEPT]);
            finds_a_port(&world, family, &format!("{way:?}, {in_family}"));
        }
    }
}

fn finds_a_port(world: &World, family: usize, what: &str) {
    let server = world
        .beyond
        .run(|| Ok(UdpSocket::bind(SocketAddr::new(far()[family], 53))?))
        .unwrap();
    let before = world.sweeps();
    eventually("a look in its time", || world.sweeps() > before);
    let before = world.sweeps();
    for _ in 0..PORTS {
        answered(world.pod(1), &server);
    }
    thread::sleep(OVER);
    assert_eq!((world.sweeps(), refused(world)), (before, 0), "{what}");
    let waited = answered(world.pod(2), &server);
    println!("{what}: of {PORTS} ports none was left for {waited:?}");
    assert!(refused(world) > 0, "{what}: a port was left");
    assert!(waited < LONGEST, "{what}: {waited:?}");
}
