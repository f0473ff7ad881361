//! Whose a port at the node's address is, if more than one could have it: docs/masquerade.md has the order.

use super::*;
use sinabro_common::abi::service::FRONTEND_NODE_PORT;
use std::net::UdpSocket;

/// Has the node what a socket needs: its address, and a way to who is asked.
fn on_the_node(like: IpAddr, peer: IpAddr) {
    let bits = if like.is_ipv4() { 32 } else { 128 };
    let family = if like.is_ipv4() { "-4" } else { "-6" };
    let here = kit::this_place();
    kit::ip(&here, "link set lo up");
    kit::ip(&here, &format!("addr replace {}/{bits} dev lo", node(like)));
    kit::ip(
        &here,
        &format!("{family} route replace {peer}/{bits} dev lo"),
    );
}

/// A Service's port at the node's own address, of a kind.
fn at_the_node(service: &Service<'_>, at: At, flags: u32) {
    let frontend = Frontend {
        inside: service.number,
        outside: service.number,
        service: service.number,
        affinity_seconds: 0,
        flags,
    };
    let services = service.datapath.services();
    services.put_frontend(service.key(at), frontend).unwrap();
}

/// A resolver of the node asks from a port that is a Service's, too. Its answer comes from outside, or from a pod.
#[test]
fn an_answer_to_a_socket_of_the_node_is_no_services() {
    edge(|e| {
        let kinds = [FRONTEND_NODE_PORT, FRONTEND_EXTERNAL];
        let mut number = 0;
        for like in e.w.clients() {
            for flags in kinds {
                for asks_a_pod in [false, true] {
                    number += 1;
                    // An endpoint takes a client's port for one connection.
                    let port = 53 + 10 * number as u16;
                    let peer = match asks_a_pod {
                        true => (e.endpoint(like, Place::Pod).0, port),
                        false => (client(like).0, port),
                    };
                    let service = e.w.service(number, UDP);
                    let at = (node(like), 30_000 + number as u16);
                    let endpoint = e.endpoint(like, Place::OtherNodesPod);
                    service.balance(&[endpoint], 1);
                    at_the_node(&service, at, flags);
                    on_the_node(like, peer.0);
                    let goes_to = |from: At| {
                        let ip = make(UDP, from, at, 0);
                        let (verdict, out) = match asks_a_pod {
                            true => e.w.sent_by(&e.w.a, &ip),
                            false => e.run("uplink_in", 0, &framed(&ip)),
                        };
                        assert_eq!(verdict, PASS, "{:?}", e.w.datapath.drops());
                        let seen = see(&out);
                        (seen.dst, seen.ports.1)
                    };
                    let what = format!("{like}, flags {flags:#x}, asks a pod: {asks_a_pod}");
                    // Not connected: somebody may only hold the port.
                    let socket = UdpSocket::bind(at).unwrap();
                    assert_eq!(goes_to((peer.0, port + 1)), endpoint, "{what}");
                    socket
                        .connect(peer)
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_eq!(goes_to(peer), at, "{what}");
                    assert_eq!(goes_to(peer), at, "{what}");
                    // Somebody else's question is the Service's.
                    assert_eq!(goes_to((peer.0, port + 2)), endpoint, "{what}");
                    drop(socket);
                    assert_eq!(goes_to(peer), endpoint, "{what}");
                }
            }
        }
    });
}

/// Who comes to have a port, in whatever order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comes {
    /// A pod's datagram, which is masqueraded.
    Pod,
    /// A connected socket of the node.
    Socket,
    /// A Service's port at the node's address.
    Service,
}

/// All six orders: datagrams from one remote end go to one owner, and nobody who comes later takes a connection from it.
#[test]
fn whoever_comes_in_whatever_order_a_port_has_one_owner() {
    use Comes::{Pod, Service, Socket};
    edge(|e| {
        let mut number = 0;
        for like in e.w.clients() {
            for order in [
                [Pod, Socket, Service],
                [Pod, Service, Socket],
                [Socket, Pod, Service],
                [Socket, Service, Pod],
                [Service, Pod, Socket],
                [Service, Socket, Pod],
            ] {
                number += 1;
                let what = format!("{like}, {order:?}");
                let port = 61_000 + number as u16;
                let (at, peer) = ((node(like), port), (client(like).0, 2000 + number as u16));
                let pod = (e.endpoint(like, Place::Pod).0, port);
                let backend = e.endpoint(like, Place::OtherNodesPod);
                on_the_node(like, peer.0);
                let service = e.w.service(number, UDP);
                let mut socket = None;
                // The port that the pod has outside, and whose connection is translated at this one.
                let (mut given, mut translated) = (None, None);
                let mut serves = false;
                for comes in order {
                    match comes {
                        Pod => {
                            let sent = framed(&make(UDP, pod, peer, 0));
                            let (verdict, out) = e.run("uplink_out", e.w.a.ifindex, &sent);
                            assert_eq!(verdict, PASS, "{what}");
                            let port_outside = see(&out).ports.0;
                            let is_free = translated.is_none() && socket.is_none();
                            assert_eq!(port_outside == port, is_free, "{what}");
                            given = Some(port_outside);
                            translated = translated.or(is_free.then_some(pod));
                        }
                        Socket => {
                            let new = UdpSocket::bind(at).unwrap();
                            new.connect(peer).unwrap();
                            socket = Some(new);
                        }
                        Service => {
                            service.balance(&[backend], 1);
                            at_the_node(&service, at, FRONTEND_NODE_PORT);
                            serves = true;
                        }
                    }
                    let goes_to = |port| {
                        let answer = framed(&make(UDP, peer, (node(like), port), 0));
                        let (verdict, out) = e.run("uplink_in", 0, &answer);
                        assert_eq!(verdict, PASS, "{:?}", e.w.datapath.drops());
                        let seen = see(&out);
                        (seen.dst, seen.ports.1)
                    };
                    let owner = match translated {
                        Some(owner) => owner,
                        None if socket.is_some() || !serves => at,
                        None => backend,
                    };
                    for _ in 0..2 {
                        assert_eq!(goes_to(port), owner, "{what}, after {comes:?}");
                    }
                    if owner == backend {
                        translated = Some(backend);
                    }
                    if let Some(given) = given {
                        assert_eq!(goes_to(given), pod, "{what}, after {comes:?}");
                    }
                }
                drop(socket);
            }
        }
    });
}
