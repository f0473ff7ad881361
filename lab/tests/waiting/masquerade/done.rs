//! A pod opens and closes connections as fast as it can, or asks questions.

use super::kit::{FAMILIES, World, far};
use sinabro_lab::{
    Pod,
    traffic::{PATIENCE, accept, any, connect, readable},
};
use std::{
    io,
    net::{SocketAddr, TcpListener, UdpSocket},
    time::{Duration, Instant},
};

/// One pod has half of it.
const ROOM: &str = "--connections=2048";
const MANY: usize = 3000;
/// Half as many again as it may have.
const MANY_WITHOUT: usize = 1500;
/// The first segment is sent again after one second, and after two more. It would be two minutes until the first connection is
/// forgotten, and half of one until the first question.
const LONGEST: Duration = Duration::from_secs(8);
/// Who asks does so again.
const AGAIN: Duration = Duration::from_millis(200);

/// How long it takes to connect; the pod closes first.
fn connected(from: &Pod, server: &TcpListener) -> Duration {
    let (began, to) = (Instant::now(), server.local_addr().unwrap());
    let client = from.place().run(|| Ok(connect(to)?)).unwrap();
    let took = began.elapsed();
    let (served, _) = accept(server, Instant::now() + PATIENCE).unwrap();
    drop(client);
    drop(served);
    took
}

/// How long it takes until a question from a new port has its answer.
pub fn answered(from: &Pod, server: &UdpSocket) -> Duration {
    answered_by(&client(from, server), server)
}

pub fn client(from: &Pod, server: &UdpSocket) -> UdpSocket {
    let to = server.local_addr().unwrap();
    let client = from.place().run(|| Ok(UdpSocket::bind((any(to.ip()), 0))?));
    let client = client.unwrap();
    client.connect(to).unwrap();
    client
}

pub fn answered_by(client: &UdpSocket, server: &UdpSocket) -> Duration {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        client.send(b"?").unwrap();
        let asked = Instant::now();
        while readable(server, asked + AGAIN).unwrap() {
            let (_, from) = server.recv_from(&mut [0; 8]).unwrap();
            server.send_to(b"!", from).unwrap();
            // An earlier one's may have come late.
            if readable(client, asked + AGAIN).unwrap() {
                return began.elapsed();
            }
        }
    }
    began.elapsed()
}

/// By the stack and past it, in both families: of [`MANY`] that a pod begins one after the other, none waits long. Nor of those that
/// it begins with a full share while the agent is away.
fn none_waits_long<S: Send>(
    serve: fn(SocketAddr) -> io::Result<S>,
    once: fn(&Pod, &S) -> Duration,
) {
    let by_the_stack = World::with(1, &[], &[ROOM]);
    let past_it = World::direct_with(1, &[ROOM]);
    for world in [by_the_stack, past_it] {
        let longest = |family: usize, name: &str, many| {
            let to = SocketAddr::new(far()[family], 80);
            let server = world.beyond.run(|| Ok(serve(to)?)).unwrap();
            let times = (0..many).map(|_| once(world.pod(1), &server));
            let longest = times.max().unwrap();
            eprintln!("{name}: the longest of {many} waited for {longest:?}");
            assert!(longest < LONGEST, "{name}: {longest:?}");
        };
        for (family, name) in FAMILIES.iter().enumerate() {
            longest(family, name, MANY);
        }
        world.node().kill_agent().unwrap();
        longest(0, "without an agent", MANY_WITHOUT);
    }
}

#[test]
fn closed_connections_make_room_for_those_to_come() {
    none_waits_long(TcpListener::bind, connected);
}

#[test]
fn questions_that_have_their_answers_make_room_for_those_to_come_nightly() {
    none_waits_long(UdpSocket::bind, answered);
}
