//! No port is left towards a remote end, although all flows that have one are over.

use super::{
    done::{answered, answered_by, client},
    kit::{FAMILIES, Way, World, far},
};
use sinabro_lab::{traffic::bind, wait::eventually};
use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

const PORTS: usize = 64;
const RANGE: &str = "--masquerade-ports=61000-61063";
/// How long a question's flow is kept.
const KEPT: &str = "--connection-udp-timeout=5s";
const OVER: Duration = Duration::from_millis(5200);
/// Who finds no port asks again after a fifth of a second.
const LONGEST: Duration = Duration::from_secs(3);
/// The agent looks once in ten seconds otherwise, so not earlier than this after it is seen to have looked.
const NEXT_LOOK: Duration = Duration::from_secs(8);
/// Three seconds after the answer, and the next question comes a fifth of one later; half of the time that a port is kept otherwise.
const GIVEN: Duration = Duration::from_secs(15);
const TRIES: usize = 5;
/// Of resolvers it is known that they are asked once by a port.
const DNS: u16 = 53;
const OTHER: u16 = 5300;

fn refused(world: &World) -> u64 {
    world.dropped("nat_ports_exhausted")
}

#[test]
fn who_finds_no_port_has_the_agent_look_for_those_that_are_over_nightly() {
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
        .run(|| bind::udp(SocketAddr::new(far()[family], OTHER)))
        .unwrap();
    for _ in 0..TRIES {
        let before = world.sweeps();
        eventually("a look in its time", || world.sweeps() > before);
        let looked = Instant::now();
        // Each is kept, so that none has the port of one before it.
        let clients = [(); PORTS].map(|()| client(world.pod(1), &server));
        for client in &clients {
            answered_by(client, &server);
        }
        thread::sleep(OVER);
        let before = refused(world);
        let waited = answered(world.pod(2), &server);
        if looked.elapsed() > NEXT_LOOK {
            println!("{what}: the machine is busy, the agent may have looked meanwhile");
            continue;
        }
        println!("{what}: of {PORTS} ports none was left for {waited:?}");
        assert!(refused(world) > before, "{what}: a port was left");
        assert!(waited < LONGEST, "{what}: {waited:?}");
        return;
    }
    panic!("{what}: the machine is too busy for {PORTS} questions between two looks");
}

/// While the agent is away, too: programs see that themselves. It would be half a minute until a port is free again.
#[test]
fn questions_to_a_resolver_that_have_their_answers_give_their_ports_to_others() {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        for way in Way::in_turn(family) {
            let world = World::by(way, 2, &[], &[RANGE]);
            world.node().kill_agent().unwrap();
            let to = SocketAddr::new(far()[family], DNS);
            let server = world.beyond.run(|| bind::udp(to)).unwrap();
            let clients = [(); PORTS].map(|()| client(world.pod(1), &server));
            for client in &clients {
                answered_by(client, &server);
            }
            let waited = answered(world.pod(2), &server);
            println!(
                "{way:?}, {in_family}: of {PORTS} answered questions one gave its port after {waited:?}"
            );
            assert!(waited < GIVEN, "{way:?}, {in_family}: {waited:?}");
        }
    }
}
