//! A server that closes first has the connection's ends in TIME_WAIT for a minute, and takes the first segment of another
//! client's with the same ends for an old one as often as not: the client sends it again after a second.

use super::kit::{FAMILIES, World, far};
use anyhow::Result;
use sinabro_lab::{
    Pod,
    traffic::{PATIENCE, accept, bind, stream},
};
use socket2::{Domain, Socket, Type};
use std::{
    io::Read as _,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    ops::Range,
    thread,
    time::{Duration, Instant},
};

const PORTS: Range<u16> = 20_000..20_032;

/// Connects from a port of the pod's.
fn connect(pod: &Pod, from: (IpAddr, u16), to: SocketAddr) -> Result<TcpStream> {
    pod.place().run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        bind::freed(|| socket.bind(&SocketAddr::from(from).into()))?;
        socket.connect_timeout(&to.into(), PATIENCE)?;
        Ok(socket.into())
    })
}

/// One connection from each of [`PORTS`], which the server closes: how often one began with a segment that had to be sent
/// again, and the ports that the server saw.
fn closed_by_the_server(pod: &Pod, server: &TcpListener, family: usize) -> (u32, Vec<u16>) {
    let to = server.local_addr().unwrap();
    let connection = |port| {
        let mut client = connect(pod, (pod.addresses()[family], port), to).unwrap();
        let again = stream::said(&client).unwrap().retransmitted;
        let (served, from) = accept(server, Instant::now() + PATIENCE).unwrap();
        drop(served);
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        (again, from.port())
    };
    let (again, seen): (Vec<_>, Vec<_>) = PORTS.map(connection).unzip();
    (again.iter().sum(), seen)
}

#[test]
fn a_port_that_the_server_has_in_time_wait_is_not_another_pods() {
    for world in World::by_both_ways(2) {
        for (family, name) in FAMILIES.iter().enumerate() {
            let server = || bind::tcp((far()[family], 80));
            let server = world.beyond.run(server).unwrap();
            let first = closed_by_the_server(world.pod(1), &server, family);
            assert_eq!(first, (0, PORTS.collect()), "{name}, ports are kept");
            // As long as late segments are waited for.
            thread::sleep(Duration::from_millis(1100));
            let (again, seen) = closed_by_the_server(world.pod(2), &server, family);
            assert_eq!(again, 0, "{name}, of {}", PORTS.len());
            assert!(!seen.iter().any(|port| PORTS.contains(port)), "{name}");
        }
    }
}
