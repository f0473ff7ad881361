//! One port outside for a pod's UDP port, as peers behind other NATs need it (RFC 4787).

use super::kit::{World, far};
use sinabro_common::api::{ConnectionReport, ConnectionsPage, Mapped, Request, Response};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Place,
    raise::Raise,
    traffic::{PATIENCE, bind, readable},
    wait::eventually,
};
use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

pub const FLAG: &str = "--masquerade-udp-mapping=endpoint-independent";
/// Pods have others: no port stays as it is.
const PORTS: &str = "--masquerade-ports=61000-61999";
/// What pods send from.
const OWN: u16 = 5004;

fn world(pods: usize, flags: &[&str]) -> World {
    let world = World::with(pods, &[], &[&[PORTS], flags].concat());
    world.guard();
    world
}

/// Ends the agent, and starts another with these flags.
fn restart(world: &World, flags: &[&str]) {
    let node = world.node();
    node.kill_agent().unwrap();
    node.start_agent_with(&[&[PORTS], flags].concat()).unwrap();
    node.wait_ready().unwrap();
}

/// Two sockets of the far host, one of another address of its, and one of a host on the way to it.
fn remotes(world: &World, family: usize) -> Vec<UdpSocket> {
    let other = ["198.51.100.11/24", "2001:db8:3::11/64"][family];
    let other: ipnet::IpNet = other.parse().unwrap();
    world.beyond.set_up("eth0", &[other]).unwrap();
    let beyond = far()[family];
    let near = world.lab.outside_addresses().unwrap()[family];
    let outside = world.lab.outside().place();
    [
        (&world.beyond, beyond),
        (&world.beyond, beyond),
        (&world.beyond, other.addr()),
        (outside, near),
    ]
    .map(|(place, address)| bind(place, address, 0))
    .into()
}

fn bind(place: &Place, address: IpAddr, port: u16) -> UdpSocket {
    place.run(|| bind::udp((address, port))).unwrap()
}

fn socket(world: &World, pod: usize, family: usize, port: u16) -> UdpSocket {
    let pod = world.pod(pod);
    bind(pod.place(), pod.addresses()[family], port)
}

fn at(socket: &UdpSocket) -> SocketAddr {
    socket.local_addr().unwrap()
}

fn receive(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let came = readable(socket, Instant::now() + PATIENCE).unwrap();
    assert!(came, "nothing came to {}", at(socket));
    let mut buffer = [0; 64];
    let (len, from) = socket.recv_from(&mut buffer).unwrap();
    (buffer[..len].to_vec(), from)
}

/// As whom a remote end sees a pod's socket, which gets the answer.
fn seen(from: &UdpSocket, to: &UdpSocket) -> SocketAddr {
    from.send_to(b"who am I?", at(to)).unwrap();
    let (_, known) = receive(to);
    to.send_to(known.to_string().as_bytes(), known).unwrap();
    let (answer, by) = receive(from);
    assert_eq!((answer, by), (known.to_string().into_bytes(), at(to)));
    known
}

fn rows(world: &World) -> Vec<ConnectionReport> {
    let filter = Default::default();
    let request = Request::Connections { filter, from: None };
    match world.node().ask(request).unwrap() {
        Response::Connections(ConnectionsPage { connections, next }) => {
            assert_eq!(next, None);
            connections
        }
        other => panic!("{other:?}"),
    }
}

fn of(world: &World, mapped: Mapped) -> Vec<ConnectionReport> {
    let rows = rows(world).into_iter();
    rows.filter(|row| row.mapping == Some(mapped)).collect()
}

#[test]
fn every_remote_end_sees_one_address_and_port() {
    let world = world(2, &[FLAG]);
    for family in [0, 1] {
        let remotes = remotes(&world, family);
        let pods = [1, 2].map(|pod| socket(&world, pod, family, OWN));
        let known = pods.each_ref().map(|pod| {
            let first = seen(pod, &remotes[0]);
            for remote in &remotes {
                assert_eq!(seen(pod, remote), first);
            }
            assert_eq!(first.ip(), world.own()[family]);
            first
        });
        assert_ne!(known[0], known[1]);
        // Another socket is another mapping.
        let other = socket(&world, 1, family, OWN + 1);
        assert!(!known.contains(&seen(&other, &remotes[0])));
    }
    assert_eq!(of(&world, Mapped::Mapping).len(), 6);
    assert_eq!(of(&world, Mapped::Apart), []);
    let listed = world.node().ctl(&["connections", "list"]).unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.contains(&format!(":{OWN}  *  ")), "{listed}");
}

/// RFC 4787 §5: the filter is one of address and port, as it is without the setting.
#[test]
fn strangers_do_not_get_in() {
    let world = world(1, &[FLAG]);
    for family in [0, 1] {
        let remotes = remotes(&world, family);
        let pod = socket(&world, 1, family, OWN);
        let known = seen(&pod, &remotes[0]);
        // The same host by another port, and others.
        for stranger in &remotes[1..] {
            stranger.connect(known).unwrap();
            stranger.send(b"let me in").unwrap();
            // The node itself refuses it: at that port it has nobody.
            assert!(readable(stranger, Instant::now() + PATIENCE).unwrap());
            let refused = stranger.recv(&mut [0; 16]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        }
        remotes[0].send_to(b"last", known).unwrap();
        assert_eq!(receive(&pod), (b"last".to_vec(), at(&remotes[0])));
        // Once the pod has spoken to it, it does.
        assert_eq!(seen(&pod, &remotes[1]), known);
    }
}

/// Each learns its own address and port from a third party, tells the other, and both send.
#[test]
fn two_peers_behind_two_nodes_meet() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    let world = World::in_lab(lab, 1, &[PORTS, FLAG]);
    let second = world.lab.node(2);
    second.start_agent_with(&[PORTS, FLAG]).unwrap();
    second.wait_ready().unwrap();
    let other = second.add_pod("other").unwrap();
    for family in [0, 1] {
        let server = bind(&world.beyond, far()[family], 0);
        let sockets = [
            socket(&world, 1, family, OWN),
            bind(other.place(), other.addresses()[family], OWN),
        ];
        let known = sockets.each_ref().map(|socket| seen(socket, &server));
        assert_ne!(known[0].ip(), known[1].ip());
        // The first may find the other's door closed, and opens its own by that.
        sockets[0].send_to(b"anybody?", known[1]).unwrap();
        eventually("the first to hear the second", || {
            sockets[1].send_to(b"here", known[0]).unwrap();
            let soon = Instant::now() + Duration::from_millis(200);
            readable(&sockets[0], soon).unwrap()
        });
        assert_eq!(receive(&sockets[0]), (b"here".to_vec(), known[1]));
        sockets[0].send_to(b"there", known[1]).unwrap();
        loop {
            let (heard, from) = receive(&sockets[1]);
            assert_eq!(from, known[0]);
            if heard == b"there" {
                break;
            }
        }
    }
}

#[test]
fn a_socket_of_the_node_keeps_its_port() {
    // The one that the pod's would keep.
    let world = World::with(1, &[], &[FLAG]);
    for family in [0, 1] {
        let remotes = remotes(&world, family);
        let of_node = bind(world.node().place(), world.own()[family], OWN);
        let pod = socket(&world, 1, family, OWN);
        let known = seen(&pod, &remotes[0]);
        assert_ne!(known.port(), OWN);
        for remote in &remotes {
            assert_eq!(seen(&of_node, remote), at(&of_node));
            assert_eq!(seen(&pod, remote), known);
        }
        // And one that comes when a mapping has its port: the pod's next peer sees another.
        let pod = socket(&world, 1, family, OWN + 1);
        assert_eq!(seen(&pod, &remotes[0]).port(), OWN + 1);
        let late = bind(world.node().place(), world.own()[family], OWN + 1);
        assert_ne!(seen(&pod, &remotes[1]).port(), OWN + 1);
        assert_eq!(seen(&late, &remotes[1]), at(&late));
        assert_eq!(seen(&pod, &remotes[0]).port(), OWN + 1);
        assert_eq!(of(&world, Mapped::Apart).len(), 1 + family);
    }
}

/// As long as one of its connections is in use, and no longer.
#[test]
fn a_mapping_outlives_the_connections_that_end_before_others() {
    let world = world(
        1,
        &[
            FLAG,
            "--connection-udp-timeout=5s",
            "--connection-udp-timeout-stream=5s",
        ],
    );
    for family in [0, 1] {
        let remotes = remotes(&world, family);
        let pod = socket(&world, 1, family, OWN);
        let known = seen(&pod, &remotes[0]);
        assert_eq!(seen(&pod, &remotes[1]), known);
        eventually("the silent connection to end", || {
            assert_eq!(seen(&pod, &remotes[0]), known);
            of(&world, Mapped::Mapped).len() == 1
        });
        assert_eq!(seen(&pod, &remotes[2]), known);
        eventually("the mapping to end", || rows(&world).is_empty());
    }
}

/// A client that asks and waits for each answer, from one port to one remote end, until it is to end.
fn ask_all_the_time(pod: &UdpSocket, to: &UdpSocket, end: &AtomicBool, asked: &AtomicU32) {
    let known = seen(pod, to);
    while !end.load(Ordering::Relaxed) {
        assert_eq!(seen(pod, to), known);
        asked.fetch_add(1, Ordering::Relaxed);
    }
}

/// The setting is turned on and off, and agents are killed, while a pod asks all the time.
#[test]
fn live_flows_and_mappings_stay_whatever_becomes_of_the_agent() {
    let world = world(1, &[]);
    let remotes = [0, 1].map(|family| remotes(&world, family));
    let busy = [0, 1].map(|family| socket(&world, 1, family, OWN + 1));
    let own = [0, 1].map(|family| socket(&world, 1, family, OWN));
    let servers = [0, 1].map(|family| bind(&world.beyond, far()[family], 0));
    let (end, asked) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let _raise = Raise(&end);
        for (pod, server) in busy.iter().zip(&servers) {
            scope.spawn(|| ask_all_the_time(pod, server, &end, &asked));
        }
        let turns = |flags: &[&str]| {
            let before = asked.load(Ordering::Relaxed);
            restart(&world, flags);
            eventually("traffic to go on", || {
                asked.load(Ordering::Relaxed) > before + 100
            });
        };
        turns(&[FLAG]);
        let known = [0, 1].map(|family| seen(&own[family], &remotes[family][0]));
        // The mapping is in the kernel, and the next agent finds it.
        turns(&[FLAG]);
        for family in [0, 1] {
            assert_eq!(seen(&own[family], &remotes[family][1]), known[family]);
        }
        turns(&[]);
        for family in [0, 1] {
            for remote in &remotes[family][..2] {
                assert_eq!(seen(&own[family], remote), known[family]);
            }
            // A remote end sees its own again.
            seen(&own[family], &remotes[family][2]);
        }
        assert_eq!(of(&world, Mapped::Mapping).len(), 2);
        turns(&[FLAG]);
        for family in [0, 1] {
            assert_eq!(seen(&own[family], &remotes[family][3]), known[family]);
        }
    });
}
