//! Exchanges as applications have them, and traceroute in all its modes.

use super::kit::{FAMILIES, Way, World, far, routers};
use sinabro_lab::{
    Place,
    traffic::{
        PATIENCE, errors, icmp, readable, tcp,
        trace::{Mode, trace},
        udp,
        udplite::{self, Coverage},
    },
};
use socket2::{Domain, Socket, Type};
use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

#[test]
fn the_far_host_sees_the_node_and_its_answers_find_the_pod() {
    World::by_both_ways(2).for_each(|world| sees_the_node(&world));
}

fn sees_the_node(world: &World) {
    for (family, far) in far().into_iter().enumerate() {
        let node = world.own()[family];
        for pod in world.pods() {
            let (from, to) = (pod.place(), &world.beyond);
            let seen = [
                ("TCP", tcp::transfer(from, to, far, 1 << 20).unwrap().seen),
                ("UDP", udp::echo(from, to, far, 500, false).unwrap()),
                ("ICMP", icmp::ping_seen(from, to, far).unwrap()),
            ];
            assert!(seen.iter().all(|(_, seen)| *seen == node), "{seen:?}");
        }
    }
}

/// What firewalls of nodes have that are told of pods alone.
const STRICT: &str = "table inet strict {
    chain input { type filter hook input priority filter; policy drop;
        iif lo accept; ct state established,related accept;
        icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept; }
    chain forward { type filter hook forward priority filter; policy drop;
        ct state established,related accept; iifname \"snb*\" accept; }
}";

#[test]
fn a_firewall_that_lets_in_nothing_but_answers_lets_in_those() {
    let world = World::with(1, &[], &[]);
    let place = world.node().place();
    place.command(&["nft", STRICT]).unwrap();
    sees_the_node(&world);
    hears_of_a_closed_port(&world);
    let pod = world.pod(1).place();
    for (own, far) in world.own().into_iter().zip(far()) {
        let in_parts = udp::echo(pod, &world.beyond, far, 5000, false).unwrap();
        assert_eq!(in_parts, own);
        // Nobody else is let in.
        assert!(icmp::ping(&world.beyond, own, Duration::from_secs(1)).is_err());
    }
}

/// A port that nothing listens at.
fn closed(address: IpAddr) -> SocketAddr {
    SocketAddr::new(address, 33_434)
}

fn every_hop(mode: Mode) {
    for world in World::by_both_ways(1) {
        for (family, far) in far().into_iter().enumerate() {
            let hops = trace(world.pod(1).place(), mode, closed(far)).unwrap();
            let [own, way @ ..] = &hops[..] else {
                panic!("no hops");
            };
            // By whichever of its addresses the node speaks to its pods.
            let addresses = addresses_of_node(&world);
            assert!(addresses.contains(own), "{own} of {addresses:?}");
            let [first, second] = routers()[family];
            assert_eq!(way, [first, second, far], "{mode:?}, {}", FAMILIES[family]);
        }
    }
}

pub fn addresses_of_node(world: &World) -> Vec<IpAddr> {
    let mut conn = world.node().netlink().unwrap();
    let addresses = conn.addrs(None).unwrap();
    addresses
        .into_iter()
        .map(|found| found.net.addr())
        .collect()
}

#[test]
fn traceroute_by_datagrams_names_every_hop() {
    every_hop(Mode::Udp);
}

#[test]
fn traceroute_by_echo_requests_names_every_hop() {
    every_hop(Mode::Echo);
}

#[test]
fn traceroute_by_syns_names_every_hop() {
    every_hop(Mode::Syn);
}

#[test]
fn a_closed_port_of_the_far_host_is_heard_of() {
    World::by_both_ways(1).for_each(|world| hears_of_a_closed_port(&world));
}

fn hears_of_a_closed_port(world: &World) {
    for (family, far) in far().into_iter().enumerate() {
        let pod = world.pod(1).place();
        let heard = errors::of_closed_port(pod, closed(far), b"anybody?");
        let heard = heard.unwrap_or_else(|error| panic!("{}: {error:#}", FAMILIES[family]));
        assert!(heard.is_closed_port() && heard.from == far, "{heard:?}");
        assert_eq!(heard.quoted, b"anybody?");
        let refused = tcp::connects(pod, closed(far)).unwrap_err();
        assert!(format!("{refused:#}").contains("refused"), "{refused:#}");
    }
}

/// UDP-Lite by sockets, with a port that is kept and one that is not, in one part and in several: sums are right that cover all,
/// some, or the header alone.
#[test]
fn udp_lite_passes_both_ways_however_much_its_sum_covers() {
    const PORT: u16 = 45_000;
    if !udplite::is_known().unwrap() {
        println!("skipped: this kernel has no UDP-Lite");
        return;
    }
    // Netfilter takes each for one with a wrong sum (`udplite_error` sums with UDP's number) if it looks at sums.
    let looks = ("net.netfilter.nf_conntrack_checksum", "0");
    let tracked = World::with(2, &[looks], &[]);
    tracked.guard();
    for world in [tracked, World::with(2, &[], &[]), World::direct(2)] {
        let pods = [world.pod(1).place(), world.pod(2).place()];
        for (family, far) in far().into_iter().enumerate() {
            for coverage in [Coverage::Whole, Coverage::First(8), Coverage::First(20)] {
                for size in [1000, 3000] {
                    let to = &world.beyond;
                    let seen = udplite::exchange(&pods, PORT, to, far, coverage, size).unwrap();
                    assert!(seen.iter().all(|seen| seen.ip() == world.own()[family]));
                    assert_eq!(seen[0].port(), PORT, "ports are kept");
                    assert_ne!(seen[1].port(), PORT, "it is the other's");
                }
            }
        }
    }
}

/// Programs cannot ask for such a socket; the agent sees it as it looks around.
#[test]
fn a_port_at_which_the_node_listens_by_udp_lite_is_no_pods() {
    const PORT: u16 = 45_001;
    if !udplite::is_known().unwrap() {
        println!("skipped: this kernel has no UDP-Lite");
        return;
    }
    let world = World::with(1, &[], &[]);
    let node = world.node();
    let listen = |own| udplite::bound(SocketAddr::new(own, PORT), Coverage::Whole);
    let listeners = world.own().map(|own| node.place().run(|| listen(own)));
    node.kill_agent().unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    for far in far() {
        let (pod, to) = (world.pod(1).place(), &world.beyond);
        let seen = udplite::exchange(&[pod], PORT, to, far, Coverage::Whole, 1000).unwrap();
        assert_ne!(seen[0].port(), PORT);
    }
    assert!(listeners.iter().all(Result::is_ok));
}

/// Where netfilter drops what it has not seen the beginning of, as with kube-proxy.
#[test]
fn a_closed_port_of_a_pod_of_the_same_node_is_heard_of() {
    for world in World::by_both_ways(2) {
        let (from, to) = (world.pod(1), world.pod(2));
        for (own, address) in from.addresses().into_iter().zip(to.addresses()) {
            let closed = SocketAddr::new(address, 9);
            let ask = || {
                let socket = UdpSocket::bind((own, 0))?;
                socket.connect(closed)?;
                socket.set_read_timeout(Some(PATIENCE))?;
                socket.send(b"anybody?")?;
                Ok(socket.recv(&mut [0; 16]).map_err(|error| error.kind()))
            };
            let heard = from.place().run(ask).unwrap();
            assert_eq!(heard, Err(ErrorKind::ConnectionRefused), "{closed}");
        }
    }
}

const GRE: i32 = 47;
const ESP: i32 = 50;

/// GRE, of which a node has one flow between two addresses: by raw sockets, there and back.
#[test]
fn a_protocol_without_ports_finds_its_way_back() {
    let flags = ["--masquerade-portless=true"];
    for way in Way::BOTH {
        let world = World::guarded(way, 1, &flags);
        for (family, far) in far().into_iter().enumerate() {
            let pod = world.pod(1);
            let client = raw(pod.place(), pod.addresses()[family], GRE);
            let server = raw(&world.beyond, far, GRE);
            let said = b"\0\0\x08\0 of no header's shape";
            client
                .send_to(said, &SocketAddr::new(far, 0).into())
                .unwrap();
            let (heard, seen) = next(&server, far);
            assert_eq!((&heard[..], seen), (&said[..], world.own()[family]));
            server
                .send_to(said, &SocketAddr::new(seen, 0).into())
                .unwrap();
            let (heard, from) = next(&client, far);
            assert_eq!((&heard[..], from), (&said[..], far));
        }
    }
}

/// A pod that sends the first packet of a flow which has no ports does not take what comes for the node.
#[test]
fn the_nodes_own_tunnels_are_out_of_a_pods_reach() {
    for world in World::by_both_ways(1) {
        let (node, pod) = (world.node().place(), world.pod(1));
        for (family, far) in far().into_iter().enumerate() {
            let own = world.own()[family];
            for protocol in [GRE, ESP] {
                let what = format!("{}, protocol {protocol}", FAMILIES[family]);
                let of_node = raw(node, own, protocol);
                let of_far = raw(&world.beyond, far, protocol);
                let thief = raw(pod.place(), pod.addresses()[family], protocol);
                let there = |from: &Socket, to: IpAddr| {
                    let said = b"of no header's shape";
                    from.send_to(said, &SocketAddr::new(to, 0).into()).unwrap();
                };
                for _ in 0..3 {
                    there(&thief, far);
                    there(&of_far, own);
                    assert_eq!(next(&of_node, own).1, far, "{what}: for the node");
                    there(&of_node, far);
                    assert_eq!(next(&of_far, far).1, own, "{what}: from the node");
                }
                assert!(
                    !readable(&thief, Instant::now()).unwrap(),
                    "{what}: for the pod"
                );
            }
        }
        assert_eq!(world.dropped("nat_protocol"), 12);
    }
}

pub fn raw(place: &Place, address: IpAddr, protocol: i32) -> Socket {
    let open = || {
        let domain = Domain::for_address(SocketAddr::new(address, 0));
        let socket = Socket::new(domain, Type::RAW, Some(protocol.into()))?;
        socket.bind(&SocketAddr::new(address, 0).into())?;
        Ok(socket)
    };
    place.run(open).unwrap()
}

/// What a raw socket gets next, without IPv4's header, and from whom.
fn next(socket: &Socket, like: IpAddr) -> (Vec<u8>, IpAddr) {
    assert!(
        readable(socket, Instant::now() + PATIENCE).unwrap(),
        "nothing came"
    );
    let mut buffer = Vec::with_capacity(2048);
    let (len, from) = socket.recv_from(buffer.spare_capacity_mut()).unwrap();
    // SAFETY: so many bytes were received into it.
    unsafe { buffer.set_len(len) };
    let header = if like.is_ipv4() { 20 } else { 0 };
    (buffer.split_off(header), from.as_socket().unwrap().ip())
}
