//! connect(2) in its forms, and what the socket says afterwards.

use super::{
    OTHER_VIP, PATIENCE, Service, TCP, UDP, VIP, VIP6, World, answer, at, both, listen, mapped,
    node, peer, real_peer, refuses, run, socket, switch, udp_server, world,
};
use crate::kit;
use sinabro_common::abi::service::{
    BACKEND_DRAINING, BACKEND_SERVING, FRONTEND_EXTERNAL, FrontendKey, Kind,
};
use sinabro_lab::Place;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::{
    collections::BTreeSet,
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::AsRawFd as _,
};

/// The other end of a connection that was just made.
fn accepted(listener: &TcpListener) -> Socket {
    let mut accepted = None;
    kit::eventually("a connection", || {
        accepted = listener.accept().ok();
        accepted.is_some()
    });
    let socket = Socket::from(accepted.unwrap().0);
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Sends a byte each way.
fn works(client: &Socket, server: &Socket) {
    for (from, to) in [(client, server), (server, client)] {
        from.send(b"x").unwrap();
        let mut got = [std::mem::MaybeUninit::uninit(); 1];
        assert_eq!(to.recv(&mut got).unwrap(), 1);
    }
}

/// connect(2) with AF_UNSPEC.
fn disconnect(socket: &Socket) {
    let unspecified = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as u16,
        sa_data: [0; 14],
    };
    // SAFETY: an address of the length that is said.
    let result = unsafe { libc::connect(socket.as_raw_fd(), &unspecified, 16) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

fn ready(socket: &Socket) {
    kit::eventually("the connection", || {
        assert!(socket.take_error().unwrap().is_none());
        socket.peer_addr().is_ok()
    });
}

type Way = fn(&Socket, SocketAddr);

fn blocking(socket: &Socket, at: SocketAddr) {
    socket.connect(&at.into()).unwrap();
}

fn nonblocking(socket: &Socket, at: SocketAddr) {
    socket.set_nonblocking(true).unwrap();
    match socket.connect(&at.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => panic!("{error}"),
        _ => ready(socket),
    }
    socket.set_nonblocking(false).unwrap();
}

/// Without a cookie of the server's: the first byte goes with a usual handshake.
fn fast_open(socket: &Socket, at: SocketAddr) {
    let sent = socket.send_to_with_flags(b"x", &at.into(), libc::MSG_FASTOPEN);
    assert_eq!(sent.unwrap(), 1);
}

/// On a socket that was connected to an endpoint itself before, and to nobody in between.
fn again(socket: &Socket, at: SocketAddr) {
    socket.connect(&at.into()).unwrap();
    disconnect(socket);
    assert_eq!(
        socket.peer_addr().unwrap_err().kind(),
        ErrorKind::NotConnected
    );
    socket.connect(&at.into()).unwrap();
}

const WAYS: [(&str, Way); 4] = [
    ("blocking", blocking),
    ("non-blocking", nonblocking),
    ("Fast Open", fast_open),
    ("again", again),
];

#[test]
fn a_socket_gets_an_endpoint_and_says_the_frontend() {
    world(|w| {
        for (n, (vip, endpoint)) in (0..).zip(both(&w.b, 80)) {
            let listener = listen(&w.b, endpoint, 8080);
            let leads_to = listener.local_addr().unwrap();
            Service::new(n, vip, TCP).lead_to(w.datapath(), &[leads_to]);
            for (whose, place) in w.clients() {
                for (how, way) in WAYS {
                    for asked in BTreeSet::from([vip, mapped(vip)]) {
                        let domain = Domain::for_address(asked);
                        let client = socket(&place, domain, Type::STREAM, None);
                        way(&client, asked);
                        let what = format!("{whose}, {how}, {asked}");
                        assert_eq!(peer(&client), asked, "{what}");
                        assert_eq!(real_peer(&place, &client), leads_to, "{what}");
                        let server = accepted(&listener);
                        match how {
                            "again" => works(&client, &accepted(&listener)),
                            "Fast Open" => {
                                let mut got = [std::mem::MaybeUninit::uninit(); 1];
                                assert_eq!(server.recv(&mut got).unwrap(), 1);
                                works(&client, &server);
                            }
                            _ => works(&client, &server),
                        }
                    }
                }
            }
        }
    });
}

/// Whoever may write a Service's `externalIPs`.
#[test]
fn no_service_has_a_pods_address() {
    world(|w| {
        for (n, address) in (0..).zip([w.b.v4, w.b.v6]) {
            let own = listen(&w.b, address, 80);
            let asked = own.local_addr().unwrap();
            let other = listen(&w.b, address, 8080);
            let service = Service {
                flags: FRONTEND_EXTERNAL,
                ..Service::new(n, asked, TCP)
            };
            service.lead_to(w.datapath(), &[other.local_addr().unwrap()]);
            for (whose, place) in w.clients() {
                let client = socket(&place, Domain::for_address(asked), Type::STREAM, None);
                client.connect(&asked.into()).unwrap();
                assert_eq!(real_peer(&place, &client), asked, "{whose}");
                works(&client, &accepted(&own));
            }
        }
    });
}

/// The programs see the first subflow connect, and the whole when it is asked, which is another socket: so it says its
/// endpoint.
#[test]
fn multipath_tcp_gets_an_endpoint() {
    world(|w| {
        let listener = listen(&w.b, w.b.v4, 8080);
        let endpoint = listener.local_addr().unwrap();
        Service::new(0, at(VIP, 80), TCP).lead_to(w.datapath(), &[endpoint]);
        for (whose, place) in w.clients() {
            let made = run(&place, || {
                Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP))
            });
            let Ok(client) = made else {
                println!("skipped: no MPTCP here");
                return;
            };
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            client.connect(&at(VIP, 80).into()).unwrap();
            works(&client, &accepted(&listener));
            assert_eq!(peer(&client), endpoint, "{whose}");
        }
    });
}

#[test]
fn what_is_no_frontend_is_left_alone() {
    world(|w| {
        let listener = listen(&w.b, w.b.v4, 80);
        let direct = listener.local_addr().unwrap();
        let other = listen(&w.b, w.b.v4, 8080);
        let others = other.local_addr().unwrap();
        // The address is one of UDP, and another port of TCP.
        Service::new(0, at(VIP, 80), UDP).lead_to(w.datapath(), &[others]);
        Service::new(1, at(VIP, 81), TCP).lead_to(w.datapath(), &[others]);
        for (whose, place) in w.clients() {
            let client = socket(&place, Domain::IPV4, Type::STREAM, None);
            client.connect(&direct.into()).unwrap();
            assert_eq!(peer(&client), direct, "{whose}");
            assert_eq!(unanswered(&place, at(VIP, 80)), at(VIP, 80), "{whose}");
            // While no setting says that there are Services.
            switch(w.datapath(), false);
            assert_eq!(unanswered(&place, at(VIP, 81)), at(VIP, 81), "{whose}");
            switch(w.datapath(), true);
            assert_eq!(unanswered(&place, at(VIP, 81)), others, "{whose}");
        }
    });
}

/// Whom a socket that may never be answered tries to reach.
pub fn unanswered(place: &Place, to: SocketAddr) -> SocketAddr {
    let client = socket(place, Domain::for_address(to), Type::STREAM, None);
    client.set_nonblocking(true).unwrap();
    match client.connect(&to.into()) {
        Ok(()) => {}
        // The node has no way there.
        Err(error) if error.raw_os_error() == Some(libc::ENETUNREACH) => return to,
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{to}"),
    }
    real_peer(place, &client)
}

fn refused(place: &Place, to: SocketAddr, what: &str) {
    let client = socket(place, Domain::for_address(to), Type::STREAM, None);
    let error = client.connect(&to.into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{what}");
    // It is an ordinary socket still.
    assert_eq!(
        client.peer_addr().unwrap_err().kind(),
        ErrorKind::NotConnected
    );
}

#[test]
fn where_nobody_is_a_client_is_refused() {
    world(|w| {
        if !refuses() {
            println!("skipped: programs cannot say what connect(2) returns");
            return;
        }
        let listener = listen(&w.b, w.b.v4, 8080);
        let endpoint = listener.local_addr().unwrap();
        for (n, vip) in (0..).zip([VIP, VIP6]) {
            let service = Service::new(n, at(vip, 80), TCP);
            service.put_frontend(w.datapath());
            let address = FrontendKey::address(at(vip, 0).ip().into());
            let services = w.datapath().services();
            let active = services.frontends().unwrap()[0].1;
            services.put_frontend(address, active).unwrap();
            for (whose, place) in w.clients() {
                service.put_set(w.datapath(), Kind::Refuse, 0);
                refused(&place, at(vip, 80), &format!("{whose}, no endpoint, {vip}"));
                refused(
                    &place,
                    mapped(at(vip, 80)),
                    &format!("{whose}, mapped, {vip}"),
                );
                refused(
                    &place,
                    at(vip, 81),
                    &format!("{whose}, another port, {vip}"),
                );
                // Who may have none of those that there are is not told.
                service.put_set(w.datapath(), Kind::Drop, 0);
                let domain = Domain::for_address(at(vip, 80));
                let client = socket(&place, domain, Type::STREAM, None);
                client.set_nonblocking(true).unwrap();
                let error = client.connect(&at(vip, 80).into()).err();
                let refused = error.is_some_and(|e| e.kind() == ErrorKind::ConnectionRefused);
                assert!(!refused, "{whose}, {vip}");
            }
        }
        // An endpoint that comes is found the next time.
        let service = Service::new(0, at(VIP, 80), TCP);
        service.lead_to(w.datapath(), &[endpoint]);
        for (whose, place) in w.clients() {
            assert_eq!(unanswered(&place, at(VIP, 80)), endpoint, "{whose}");
        }
    });
}

#[test]
fn a_socket_that_connects_elsewhere_says_so() {
    world(|w| {
        let listener = listen(&w.b, w.b.v4, 8080);
        let endpoint = listener.local_addr().unwrap();
        Service::new(0, at(VIP, 80), TCP).lead_to(w.datapath(), &[endpoint]);
        Service::new(1, at(OTHER_VIP, 80), TCP).lead_to(w.datapath(), &[endpoint]);
        for (whose, place) in w.clients() {
            let client = socket(&place, Domain::IPV4, Type::STREAM, None);
            for to in [at(VIP, 80), endpoint, at(OTHER_VIP, 80), at(VIP, 80)] {
                client.connect(&to.into()).unwrap();
                assert_eq!(peer(&client), to, "{whose}");
                works(&client, &accepted(&listener));
                disconnect(&client);
            }
        }
    });
}

#[test]
fn a_client_with_affinity_keeps_its_endpoint_while_that_is_chosen_from() {
    world(|w| {
        let listeners: Vec<TcpListener> = (0..8).map(|n| listen(&w.b, w.b.v4, 9000 + n)).collect();
        let all: Vec<SocketAddr> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        let service = Service {
            affinity_seconds: 3600,
            ..Service::new(3, at(VIP, 80), TCP)
        };
        service.lead_to(w.datapath(), &all);
        for (whose, place) in w.clients() {
            let first = unanswered(&place, at(VIP, 80));
            for _ in 0..20 {
                assert_eq!(unanswered(&place, at(VIP, 80)), first, "{whose}");
            }
            // It finishes what it has, and gets no more.
            let n = all.iter().position(|of| *of == first).unwrap() as u32;
            let draining = BACKEND_SERVING | BACKEND_DRAINING;
            service.put_backend(w.datapath(), n, first, draining);
            let others: Vec<u32> = (0..8).filter(|of| *of != n).collect();
            service.choose_from(w.datapath(), &others);
            let second = unanswered(&place, at(VIP, 80));
            assert_ne!(second, first, "{whose}");
            for _ in 0..20 {
                assert_eq!(unanswered(&place, at(VIP, 80)), second, "{whose}");
            }
            service.lead_to(w.datapath(), &all);
        }
        // Without it they are all chosen.
        Service::new(3, at(VIP, 80), TCP).lead_to(w.datapath(), &all);
        let seen: BTreeSet<_> = (0..200).map(|_| unanswered(&node(), at(VIP, 80))).collect();
        assert_eq!(seen.len(), all.len());
    });
}

/// The node's alone: a pod's would keep to an endpoint that is gone.
#[test]
fn datagram_sockets_of_the_node_are_connected_and_those_of_pods_are_not() {
    world(|w: World| {
        for (n, (vip, endpoint)) in (0..).zip(both(&w.b, 53)) {
            let server = [udp_server(&w.b, endpoint, 5353)];
            let leads_to = server[0].local_addr().unwrap();
            Service::new(n, vip, UDP).lead_to(w.datapath(), &[leads_to]);
            let (pod, node) = (&w.a.place, &node());
            for asked in BTreeSet::from([vip, mapped(vip)]) {
                let domain = Domain::for_address(asked);
                let client = socket(pod, domain, Type::DGRAM, None);
                client.connect(&asked.into()).unwrap();
                assert_eq!(real_peer(pod, &client), vip);

                let client = socket(node, domain, Type::DGRAM, None);
                client.connect(&asked.into()).unwrap();
                assert_eq!(real_peer(node, &client), leads_to);
                assert_eq!(peer(&client), asked);
                client.send(b"?").unwrap();
                assert_eq!(answer(&server), 0);
                let mut got = [std::mem::MaybeUninit::uninit(); 8];
                let (_, from): (usize, SockAddr) = client.recv_from(&mut got).unwrap();
                assert_eq!(from.as_socket().unwrap(), asked);
                // Connected to the endpoint itself, it hears that.
                let itself = match asked.ip() {
                    IpAddr::V6(_) => mapped(leads_to),
                    IpAddr::V4(_) => leads_to,
                };
                client.connect(&itself.into()).unwrap();
                assert_eq!(peer(&client), itself);
                client.send(b"?").unwrap();
                assert_eq!(answer(&server), 0);
                let (_, from): (usize, SockAddr) = client.recv_from(&mut got).unwrap();
                assert_eq!(from.as_socket().unwrap(), itself);
            }
        }
    });
}
