//! Datagrams that pods send many of by one call (UDP_SEGMENT), and get many of by one (UDP_GRO), as QUIC's libraries do.

use super::{
    forwarding::{forwarded, greet},
    kit::{FAMILIES, Way, World, far, narrow, routers},
};
use sinabro_lab::{
    Place, Pod,
    lab::UNDERLAY_MTU,
    traffic::{
        PATIENCE, any,
        bursts::{self, ALL, Burst, End, Take},
        errors,
        offload::{self, Datagrams},
        path::Path,
        snmp, udp,
    },
    wire::Wire,
};
use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

const NARROW: u32 = 1400;
const HEADERS: [usize; 2] = [20 + 8, 40 + 8];
const ETH: usize = 14;
/// As large as the sender's way carries.
const FULL: Burst = Burst {
    size: None,
    datagrams: 20,
    last: 0,
};

/// All exchanges by a way: each datagram arrives once and whole, from the node and back, and nothing is damaged. What the stack has
/// handed on of each, and the most that the server and the client got at once.
fn exchanges(world: &World, check: impl Fn(Take, u64, [usize; 2])) {
    let pod = world.pod(1).place();
    let places = [pod, &world.beyond];
    greet(world);
    let damaged = || places.map(|place| snmp::damaged(place).unwrap());
    let before = damaged();
    for (family, far) in far().into_iter().enumerate() {
        for take in Take::BOTH {
            let handed = forwarded(world);
            let path = Path::new(FAMILIES[family], pod, &world.beyond, far);
            let seen = bursts::exchange(&path, &ALL, take).unwrap();
            assert_eq!(seen.client.ip(), world.own()[family]);
            check(take, forwarded(world) - handed, seen.at_once);
        }
    }
    assert_eq!(damaged(), before);
}

/// No link of this lab cuts them: they are one packet to the end, where the socket cuts what it gives one by one.
#[test]
fn bursts_pass_both_ways() {
    for way in Way::BOTH {
        let world = World::guarded(way, 1, &[]);
        exchanges(&world, |take, handed, at_once| {
            let by_stack = if way == Way::Stack { 2 * ALL.len() } else { 0 };
            assert_eq!(handed, by_stack as u64, "{way:?}, {take:?}");
            let most = if take == Take::Gathered { 64 } else { 1 };
            assert_eq!(at_once, [most; 2], "{way:?}, {take:?}");
        });
    }
}

/// The wire to the node carries bytes: datagrams are cut before it, and have their checksums. Behind it the uplink puts them together,
/// in each of the ways that there are, or not.
#[test]
fn bursts_pass_a_wire_both_ways() {
    for way in Way::BOTH {
        let world = World::guarded(way, 1, &[]);
        let wire = Wire::to(&world.lab, 1).unwrap();
        for how in Datagrams::ALL {
            offload::gather_datagrams(world.node().place(), "eth0", how).unwrap();
            exchanges(&world, |take, handed, [_, by_pod]| {
                let what = format!("{way:?}, {how:?}, {take:?}");
                assert_eq!(handed == 0, way == Way::Direct, "{what}");
                assert_eq!(wire.largest(), UNDERLAY_MTU as usize + ETH, "{what}");
                let joined = (how, take) == (Datagrams::Joined, Take::Gathered);
                assert_eq!(by_pod > 1, joined, "{what}: {by_pod}");
            });
        }
    }
}

/// Sockets of a pod and of the far host, each connected to what it knows of the other.
fn pair(pod: &Pod, beyond: &Place, far: IpAddr) -> [End; 2] {
    const HELLO: Burst = Burst {
        size: Some(100),
        datagrams: 1,
        last: 0,
    };
    let server = End::open(beyond, SocketAddr::new(far, 0), Take::Single).unwrap();
    let client = End::open(pod.place(), SocketAddr::new(any(far), 0), Take::Single).unwrap();
    let target = server.socket().local_addr().unwrap();
    client.socket().connect(target).unwrap();
    let sent = client.send(0, HELLO).unwrap();
    let (from, _) = server.take(0, &sent).unwrap();
    server.socket().connect(from).unwrap();
    [client, server]
}

/// What one end sends is too large for the way to the other: it hears of it, by whom, and what it sends then arrives.
fn learns(ends: [&End; 2], from: IpAddr, mtu: u32, what: &str) {
    let [sender, receiver] = ends;
    udp::never_cut(sender.socket(), from).unwrap();
    errors::keep(sender.socket(), from.is_ipv4()).unwrap();
    sender.send(1000, FULL).unwrap();
    let heard = errors::error(sender.socket(), Instant::now() + PATIENCE);
    let heard = heard.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(heard.is_too_big(), "{what}: {heard:?}");
    assert_eq!((heard.from, heard.mtu), (from, mtu), "{what}");
    let headers = HEADERS[usize::from(from.is_ipv6())];
    assert_eq!(sender.full().unwrap(), mtu as usize - headers, "{what}");
    let sent = sender.send(2000, FULL).unwrap();
    receiver.take(2000, &sent).unwrap();
}

#[test]
fn who_sends_bursts_hears_what_a_link_on_the_way_carries() {
    for way in Way::BOTH {
        let world = World::guarded(way, 1, &[]);
        narrow(&world, NARROW);
        for (family, far) in far().into_iter().enumerate() {
            let [client, server] = pair(world.pod(1), &world.beyond, far);
            let what = format!("{way:?}, {}", FAMILIES[family]);
            learns([&client, &server], routers()[family][0], NARROW, &what);
        }
    }
}

/// The node's kernel would say so of each datagram; of many in one packet programs have to find out.
#[test]
fn who_sends_bursts_hears_what_a_pods_link_carries() {
    for way in Way::BOTH {
        let world = World::guarded(way, 1, &[]);
        let node = world.node();
        let args = [("SINABRO_LOCAL_MTU", "off")];
        let small = node.add_pod_with("small", &args).unwrap();
        let mtu = node.endpoint(&small).unwrap().unwrap().mtu.unwrap();
        for (family, far) in far().into_iter().enumerate() {
            let [client, server] = pair(&small, &world.beyond, far);
            let what = format!("{way:?}, {}", FAMILIES[family]);
            learns([&server, &client], world.own()[family], mtu, &what);
        }
    }
}
