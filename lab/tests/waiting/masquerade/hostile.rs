//! Pods with bad intentions, and strangers: what others have is not theirs to take, to end or to reach.

use super::{
    ends::{Ends, next_id, payload},
    kit::{FAMILIES, World, eth0, far, far_router, route_pods},
};
use sinabro_common::names;
use sinabro_lab::{
    Place,
    traffic::{
        PATIENCE, any, bind, errors,
        fragment::cut,
        icmp,
        packet::{Datagram, inject, port_unreachable},
        readable,
        segment::{Ear, SYN, Segment},
    },
};
use socket2::{Domain, Socket, Type};
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Instant,
};

fn bind(place: &Place, address: IpAddr, port: u16) -> UdpSocket {
    place.run(|| bind::udp((address, port))).unwrap()
}

#[track_caller]
fn next(socket: &UdpSocket, what: &str) -> (Vec<u8>, SocketAddr) {
    assert!(
        readable(socket, Instant::now() + PATIENCE).unwrap(),
        "{what}: nothing arrived"
    );
    let mut buffer = vec![0; 1 << 16];
    let (len, from) = socket.recv_from(&mut buffer).unwrap();
    buffer.truncate(len);
    (buffer, from)
}

/// What the outside sends to a pod's own address makes no flow of the pod's one that keeps that address.
#[test]
fn an_outside_packet_plants_nothing() {
    World::unguarded_by_both_ways(1).for_each(|world| plants_nothing(&world));
}

fn plants_nothing(world: &World) {
    const PORTS: [u16; 2] = [40_100, 40_101];
    route_pods(world);
    let pod = world.pod(1);
    // It answers nothing to anybody who comes.
    let deaf = "table inet deaf { chain in { type filter hook input priority filter;
        tcp flags & (syn | ack) == syn drop
    }
    }";
    pod.place().command(&["nft", deaf]).unwrap();
    for (family, far) in far().into_iter().enumerate() {
        let listener = world
            .beyond
            .run(|| Ok(TcpListener::bind((far, 0))?))
            .unwrap();
        let target = listener.local_addr().unwrap();
        let own = SocketAddr::new(pod.addresses()[family], PORTS[family]);
        let planted = Segment {
            src_mac: eth0(&world.beyond).mac,
            dst_mac: far_router(world),
            src: target,
            dst: own,
            sequence: 1,
            flags: SYN,
            options: &[],
            words: None,
        };
        let ear = Ear::on(pod.place(), eth0(pod.place())).unwrap();
        inject(
            &world.beyond,
            eth0(&world.beyond),
            &[planted.frame().unwrap()],
        )
        .unwrap();
        ear.hear(far.is_ipv4(), |seen| seen.src == target && seen.dst == own)
            .unwrap();
        let client = connect_from(pod.place(), own.port(), target);
        client.unwrap_or_else(|error| panic!("{}: {error:#}", FAMILIES[family]));
        let (_, seen) = sinabro_lab::traffic::accept(&listener, Instant::now() + PATIENCE).unwrap();
        assert_eq!(seen.ip(), world.own()[family]);
    }
}

/// A port of the node's that a socket of the host has, that a Service's node port has: a pod that sends
/// from the same one gets another, and what comes for the node's comes to the node's.
#[test]
fn a_pod_gets_no_port_that_the_node_uses() {
    World::by_both_ways(2).for_each(|world| gets_other_ports(&world));
}

fn gets_other_ports(world: &World) {
    const NODE_PORT: u16 = 30_080;
    let way = world.way();
    let (thief, server) = (world.pod(1), world.pod(2));
    for (family, far) in far().into_iter().enumerate() {
        let own = world.own()[family];
        let remote = bind(&world.beyond, far, 0);
        let target = remote.local_addr().unwrap();
        let answers = bind(server.place(), server.addresses()[family], 9_000);
        node_port(world, family, NODE_PORT, answers.local_addr().unwrap());
        // One that asks, and one that waits to be asked.
        let (asks, waits) = (
            bind(world.node().place(), own, 62_000),
            bind(world.node().place(), any(own), 62_001),
        );
        asks.connect(target).unwrap();
        for (name, port, socket) in [
            ("a socket that asks", 62_000, &asks),
            ("a socket that waits", 62_001, &waits),
            ("a node port", NODE_PORT, &answers),
        ] {
            let what = format!("{name}, {}", FAMILIES[family]);
            let pod = bind(thief.place(), thief.addresses()[family], port);
            pod.send_to(b"stolen?", target).unwrap();
            let (_, seen) = next(&remote, &what);
            assert_eq!(seen.ip(), own, "{what}");
            assert_ne!(seen.port(), port, "{what}");
            remote.send_to(b"for the node", (own, port)).unwrap();
            remote.send_to(b"for the pod", seen).unwrap();
            assert_eq!(next(socket, &what).0, b"for the node", "{what}");
            assert_eq!(next(&pod, &what).0, b"for the pod", "{what}");
            pod.set_nonblocking(true).unwrap();
            let more = pod.recv(&mut [0; 64]).unwrap_err();
            assert_eq!(more.kind(), ErrorKind::WouldBlock, "{what}");
        }
    }
    assert_eq!(world.way(), way, "as before the rules");
}

/// The other way round: a process of the host takes the port that a pod's flow has outside, towards the same
/// remote. Each gets what is for it.
#[test]
fn the_host_may_use_a_port_that_a_pod_has() {
    World::by_both_ways(1).for_each(|world| shares_ports_with_the_host(&world));
}

fn shares_ports_with_the_host(world: &World) {
    let (pod, host) = (world.pod(1), world.node().place());
    for (family, far) in far().into_iter().enumerate() {
        let (what, own) = (FAMILIES[family], world.own()[family]);
        let remote = bind(&world.beyond, far, 0);
        let target = remote.local_addr().unwrap();
        let first = bind(pod.place(), pod.addresses()[family], 0);
        first.send_to(b"pod", target).unwrap();
        let (_, of_pod) = next(&remote, what);
        let second = bind(host, own, of_pod.port());
        second.send_to(b"host", target).unwrap();
        let (heard, of_host) = next(&remote, what);
        assert_eq!(heard, b"host", "{what}");
        assert_ne!(of_host, of_pod, "{what}");
        for (to, socket, said) in [(of_pod, &first, b"to pod "), (of_host, &second, b"to host")] {
            remote.send_to(said, to).unwrap();
            assert_eq!(next(socket, what).0, said, "{what}");
        }
        first.send_to(b"pod", target).unwrap();
        assert_eq!(next(&remote, what).1, of_pod, "{what}");
        second.send_to(b"host", target).unwrap();
        assert_eq!(next(&remote, what).1, of_host, "{what}");
    }
}

/// The same by TCP.
#[test]
fn the_host_may_connect_from_a_port_that_a_pod_has() {
    World::by_both_ways(1).for_each(|world| lets_the_host_connect(&world));
}

fn lets_the_host_connect(world: &World) {
    for (family, far) in far().into_iter().enumerate() {
        let what = FAMILIES[family];
        let listener = world
            .beyond
            .run(|| Ok(TcpListener::bind((far, 0))?))
            .unwrap();
        let target = listener.local_addr().unwrap();
        let open = |place: &Place, port| {
            let client = connect_from(place, port, target);
            let client = client.unwrap_or_else(|error| panic!("{what}: {error:#}"));
            let (server, seen) =
                sinabro_lab::traffic::accept(&listener, Instant::now() + PATIENCE).unwrap();
            (client, server, seen)
        };
        let pod = open(world.pod(1).place(), 0);
        let host = open(world.node().place(), pod.2.port());
        assert_ne!(pod.2, host.2, "{what}");
        for ((client, server, _), said) in [(&pod, b"to pod "), (&host, b"to host")] {
            let (mut client, mut server, mut heard) = (client, server, [0; 7]);
            server.write_all(said).unwrap();
            client.read_exact(&mut heard).unwrap();
            assert_eq!(&heard, said, "{what}");
            client.write_all(said).unwrap();
            server.read_exact(&mut heard).unwrap();
            assert_eq!(&heard, said, "{what}");
        }
    }
}

fn connect_from(place: &Place, port: u16, to: SocketAddr) -> anyhow::Result<TcpStream> {
    place.run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        bind::freed(|| socket.bind(&SocketAddr::new(any(to.ip()), port).into()))?;
        socket.connect_timeout(&to.into(), PATIENCE)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(TcpStream::from(socket))
    })
}

/// As kube-proxy does it.
fn node_port(world: &World, family: usize, port: u16, server: SocketAddr) {
    let (name, own) = (["ip", "ip6"][family], world.own()[family]);
    let rules = format!(
        "table {name} kube-proxy {{
            chain pre {{ type nat hook prerouting priority dstnat;
                {name} daddr {own} udp dport {port} dnat to {server}
            }}
        }}"
    );
    world.node().place().command(&["nft", &rules]).unwrap();
}

/// An error about another pod's flow, or about none, goes nowhere; one about a pod's own does.
#[test]
fn a_pod_does_not_speak_of_anothers_flow() {
    World::by_both_ways(2).for_each(|world| lies_go_nowhere(&world));
}

fn lies_go_nowhere(world: &World) {
    let (victim, liar) = (world.pod(1), world.pod(2));
    for (family, far) in far().into_iter().enumerate() {
        let remote = bind(&world.beyond, far, 0);
        let target = remote.local_addr().unwrap();
        let client = bind(victim.place(), victim.addresses()[family], 0);
        let source = client.local_addr().unwrap();
        client.send_to(b"here I am", target).unwrap();
        let (_, known) = next(&remote, "the first");
        remote.connect(known).unwrap();
        errors::keep(&remote, far.is_ipv4()).unwrap();
        let own = liar.addresses()[family];
        let macs = [names::HOST_MAC, eth0(liar.place()).mac];
        let lie = |to: SocketAddr| {
            // The far host's packet, as the liar would have it.
            let packet = quote(target, to);
            port_unreachable(macs, (own, far), &packet).unwrap()
        };
        let lies = [source, known, SocketAddr::new(own, source.port())];
        for _ in 0..10 {
            inject(liar.place(), eth0(liar.place()), &lies.map(lie)).unwrap();
        }
        // On the same way and after them.
        icmp::ping(liar.place(), far, PATIENCE).unwrap();
        let heard = errors::pending(&remote).unwrap();
        assert_eq!(heard, None, "{}", FAMILIES[family]);
        remote.send(b"still there?").unwrap();
        assert_eq!(next(&client, "after the lies").0, b"still there?");
    }
}

/// An IP packet of UDP without data, as far as an error quotes it.
fn quote(src: SocketAddr, dst: SocketAddr) -> Vec<u8> {
    let datagram = Datagram {
        src_mac: [0; 6],
        dst_mac: [0; 6],
        src: src.ip(),
        dst: dst.ip(),
        dst_port: dst.port(),
        payload: &[],
        may_be_cut: false,
    };
    let mut packet = datagram.frame().unwrap().split_off(14);
    let port_at = if src.is_ipv4() { 20 } else { 40 };
    packet[port_at..port_at + 2].copy_from_slice(&src.port().to_be_bytes());
    packet
}

/// By the port that the node lends to a pod nobody gets in but who was asked: not another port of the same
/// host, not another host, not a neighbour on the node's own link.
#[test]
fn only_who_was_asked_may_answer() {
    World::by_both_ways(1).for_each(|world| lets_in_who_was_asked(&world));
}

fn lets_in_who_was_asked(world: &World) {
    let pod = world.pod(1);
    for (family, far) in far().into_iter().enumerate() {
        let asked = bind(&world.beyond, far, 0);
        let port = asked.local_addr().unwrap().port();
        let client = bind(pod.place(), pod.addresses()[family], 0);
        client
            .send_to(b"question", asked.local_addr().unwrap())
            .unwrap();
        let (_, known) = next(&asked, "the question");
        let other_port = bind(&world.beyond, far, 0);
        other_port.send_to(b"intrusion", known).unwrap();
        for machine in [world.lab.outside().place(), world.lab.router().place()] {
            // Its own address, and the same port.
            let stranger = bind(machine, any(far), port);
            stranger.send_to(b"intrusion", known).unwrap();
            // What it sends is there before it says that its echo came back.
            icmp::ping(machine, known.ip(), PATIENCE).unwrap();
        }
        asked.send_to(b"answer", known).unwrap();
        let (heard, from) = next(&client, FAMILIES[family]);
        assert_eq!(
            (&heard[..], from),
            (&b"answer"[..], asked.local_addr().unwrap())
        );
        assert!(!readable(&client, Instant::now()).unwrap());
    }
}

/// Two pods send packets in parts with one id to one place at the same time: the receiver, to whom both are
/// the node, puts no packet together from both.
#[test]
fn ids_of_two_pods_make_no_packet_of_both() {
    World::unguarded_by_both_ways(2).for_each(|world| keeps_ids_apart(&world));
}

fn keeps_ids_apart(world: &World) {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let victim = Ends::new(world, 1, family);
        let liar = victim.beside(world, 2);
        let good = payload(1, 2900);
        // Words in another order, which no checksum sees.
        let bad: Vec<u8> = good
            .chunks(4)
            .flat_map(|w| [w[2], w[3], w[0], w[1]])
            .collect();
        for _ in 0..20 {
            let id = next_id();
            let [a, b] = [(&victim, &good), (&liar, &bad)]
                .map(|(ends, payload)| cut(&ends.pod.frame(payload), id, 1208).unwrap());
            for (a, b) in a.into_iter().zip(b) {
                victim.pod.inject(&[a]);
                liar.pod.inject(&[b]);
            }
        }
        victim.pod.inject(&[victim.pod.frame(b"the end")]);
        // The far host's socket hears both.
        let mut heard = Vec::new();
        loop {
            let (packet, _) = next(&victim.far.socket, in_family);
            if packet == b"the end" {
                break;
            }
            heard.push(packet);
        }
        let mixed = heard
            .iter()
            .filter(|packet| **packet != good && **packet != bad);
        assert_eq!(mixed.count(), 0, "{in_family}: of {}", heard.len());
        println!("{in_family}: {} of 40 arrived", heard.len());
    }
}
