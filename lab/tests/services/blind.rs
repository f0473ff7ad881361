//! A stranger who knows the ends of connections, and not their sequence numbers (RFC 5961 §1.1).

use crate::outside::{EXTERNAL, HALF, PORT, World, connect, finish};
use sinabro_lab::{
    traffic::{
        PATIENCE, accept,
        packet::{self, inject},
        segment::Segment,
    },
    wait::wait_for,
};
use socket2::SockRef;
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

const SEGMENTS: usize = 10_000;
/// FIN with ACK, RST with and without, and the SYN that would take the place of what is closed.
const FLAGS: [u8; 4] = [0x11, 0x04, 0x14, 0x02];
/// For longer than a reset connection is remembered.
const IDLE: Duration = Duration::from_secs(12);

/// Sends segments that have the ends of connections and any sequence numbers.
fn guess(world: &World, ends: &[(SocketAddr, SocketAddr)]) {
    let outside = world.lab.outside().place();
    let interface = packet::interface(outside, "eth0").unwrap();
    let router = packet::interface(world.lab.router().place(), "out0").unwrap();
    let frames: Vec<_> = (0..SEGMENTS)
        .map(|number| {
            let (src, dst) = ends[number % ends.len()];
            let segment = Segment {
                src_mac: interface.mac,
                dst_mac: router.mac,
                src,
                dst,
                // Spread over all there are.
                sequence: (number as u32).wrapping_mul(0x9e37_79b9),
                flags: FLAGS[number / ends.len() % FLAGS.len()],
                options: &[],
                words: None,
            };
            segment.frame().unwrap()
        })
        .collect();
    // The router's queue is no longer than that.
    for some in frames.chunks(100) {
        inject(outside, interface, some).unwrap();
        thread::sleep(Duration::from_millis(2));
    }
}

/// Of clients outside with each node's addresses, where half of the endpoints are elsewhere, and of pods with a server outside.
#[test]
fn ten_thousand_guessed_segments_end_no_idle_connection() {
    let world = World::new();
    let endpoints = world.places().map(|(_, at)| at);
    world.lead_to(&endpoints[..2]);
    let outside = world.lab.outside().place();
    let mut ends = Vec::new();
    let mut of_clients = Vec::new();
    for number in 0..16 {
        let to = SocketAddr::new(EXTERNAL[number % 2][number / 2 % 2].parse().unwrap(), PORT);
        let mut stream = connect(outside, to);
        stream.write_all(&HALF).unwrap();
        ends.push((stream.local_addr().unwrap(), to));
        of_clients.push(stream);
    }
    let mut of_pods = Vec::new();
    for address in world.lab.outside_addresses().unwrap() {
        let listener = outside
            .run(|| Ok(TcpListener::bind((address, 0))?))
            .unwrap();
        let to = listener.local_addr().unwrap();
        for pod in &world.servers {
            let client = connect(pod.place(), to);
            let (server, seen) = accept(&listener, Instant::now() + PATIENCE).unwrap();
            ends.push((to, seen));
            of_pods.push((client, server));
        }
    }
    guess(&world, &ends);
    thread::sleep(IDLE);
    for (number, stream) in of_clients.iter_mut().enumerate() {
        if let Err(error) = finish(stream) {
            world.fail(&format!("client {number}: {error}"));
        }
    }
    for (number, (client, server)) in of_pods.iter_mut().enumerate() {
        // The server first: what comes in has to find its pod.
        server.write_all(b"are you there").unwrap();
        let mut heard = [0; 13];
        if let Err(error) = client.read_exact(&mut heard) {
            world.fail(&format!("pod {number}: {error}"));
        }
    }
}

/// One that is believed is forgotten in seconds, where an established connection is remembered for a day.
#[test]
fn a_true_reset_ends_its_connection_also_with_data_under_way() {
    let world = World::new();
    let endpoints = world.places().map(|(_, at)| at);
    world.lead_to(&endpoints[..2]);
    let outside = world.lab.outside().place();
    for number in 0..16 {
        let entry = number / 2 % 2;
        let to = SocketAddr::new(EXTERNAL[number % 2][entry].parse().unwrap(), PORT);
        let mut stream = connect(outside, to);
        let from = stream.local_addr().unwrap();
        // Half of them send as much as goes, and take it back.
        let len = if number < 8 { 1 } else { 1 << 20 };
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write(&vec![b'x'; len]).unwrap();
        SockRef::from(&stream)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
        drop(stream);
        wait_for("a node to know that it is over", || {
            Ok(states(&world, entry + 1, from)?
                .iter()
                .all(|state| state == "CLOSE")
                .then_some(()))
        })
        .unwrap_or_else(|error| world.fail(&format!("{from} to {to}: {error:#}")));
    }
}

/// What a node says of the connections from there.
fn states(world: &World, node: usize, from: SocketAddr) -> anyhow::Result<Vec<String>> {
    let remote = match from.ip() {
        IpAddr::V4(_) => "0.0.0.0/0",
        IpAddr::V6(_) => "::/0",
    };
    let port = from.port().to_string();
    let args = [
        "connections",
        "list",
        "--remote",
        remote,
        "--port",
        &port,
        "-o",
        "json",
    ];
    let said: serde_json::Value = serde_json::from_slice(&world.lab.node(node).ctl(&args)?.stdout)?;
    let rows = said["connections"].as_array().cloned().unwrap_or_default();
    let state = |row: &serde_json::Value| row["state"].as_str().unwrap_or_default().to_owned();
    Ok(rows.iter().map(state).collect())
}
