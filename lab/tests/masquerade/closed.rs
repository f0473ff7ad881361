//! A pod opens and closes connections as fast as it can.

use crate::kit::{FAMILIES, World, far};
use sinabro_lab::traffic::{PATIENCE, accept, connect};
use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

/// One pod has half of it.
const ROOM: &str = "--connections=2048";
const MANY: usize = 3000;
/// Its segment is sent again after one second, and after two more. It would be two minutes until the first is forgotten.
const LONGEST: Duration = Duration::from_secs(8);

/// How long it takes to connect; the pod closes first.
fn once(from: &sinabro_lab::Pod, server: &TcpListener, to: SocketAddr) -> Duration {
    let began = Instant::now();
    let client: TcpStream = from.place().run(|| Ok(connect(to)?)).unwrap();
    let took = began.elapsed();
    let (served, _) = accept(server, Instant::now() + PATIENCE).unwrap();
    drop(client);
    drop(served);
    took
}

#[test]
fn closed_connections_make_room_for_those_to_come() {
    let by_the_stack = World::with(1, &[], &[ROOM]);
    let past_it = World::direct_with(1, &[ROOM]);
    for world in [by_the_stack, past_it] {
        for (family, name) in FAMILIES.iter().enumerate() {
            let to = SocketAddr::new(far()[family], 80);
            let server = world.beyond.run(|| Ok(TcpListener::bind(to)?)).unwrap();
            let times = (0..MANY).map(|_| once(world.pod(1), &server, to));
            let longest = times.max().unwrap();
            eprintln!("{name}: the longest of {MANY} waited for {longest:?}");
            assert!(longest < LONGEST, "{name}: {longest:?}");
        }
    }
}
