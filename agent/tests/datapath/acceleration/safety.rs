//! Bytes reach the socket that they are meant for, and no other.

use super::{ask, bound, connect, enrolled, transfer, with_timeout, world};
use crate::kit::{self, Pod};
use sinabro_agent::datapath::PodAcceleration;
use sinabro_netlink::{Conn, addr::Addr as Address};
use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
};

/// A connection inside a pod, of given addresses and ports.
fn inside(pod: &Pod, from: (IpAddr, u16), to: (IpAddr, u16)) -> (TcpStream, TcpStream) {
    let client = bound(pod, from.0, from.1);
    let listener = pod.run(|| TcpListener::bind(to).unwrap());
    // While the kernel makes routes of IPv6 addresses, on its own time, it may find none of those that are there.
    kit::eventually("a route", || {
        match client.connect(&SocketAddr::from(to).into()) {
            Err(error) if error.raw_os_error() == Some(libc::ENETUNREACH) => false,
            connected => connected.map(|()| true).unwrap(),
        }
    });
    (
        with_timeout(client.into()),
        with_timeout(listener.accept().unwrap().0),
    )
}

/// Long streams both ways.
fn both_ways((client, server): (TcpStream, TcpStream), seed: u8) {
    let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let other = thread::spawn(move || transfer(back.0, back.1, seed.wrapping_add(100), 1 << 20));
    transfer(client, server, seed, 1 << 20);
    other.join().unwrap();
}

fn loopback_flows(accelerated: bool) {
    world(true, true, |w| {
        for pod in [&w.a, &w.b] {
            let loopback = PodAcceleration {
                loopback: accelerated,
                ..pod.acceleration()
            };
            pod.attach_with(w.datapath(), Some(loopback));
        }
        for (n, loopback) in ["127.0.0.1", "::1"].into_iter().enumerate() {
            let at: IpAddr = loopback.parse().unwrap();
            let call = |pod| inside(pod, (at, 7001), (at, 7000));
            let (one, other) = (call(&w.a), call(&w.b));
            assert_eq!(one.0.local_addr().unwrap(), other.0.local_addr().unwrap());
            assert_eq!(one.0.peer_addr().unwrap(), other.0.peer_addr().unwrap());
            let between = connect(&w.b, w.b.v4, &w.a, 7001 + n as u16);
            let of_loopback = enrolled().iter().filter(|(key, _)| key.netns != 0).count();
            assert_eq!(of_loopback, if accelerated { 4 } else { 0 });
            assert_eq!(enrolled().len(), of_loopback + 2);
            thread::scope(|scope| {
                scope.spawn(|| both_ways(one, 1));
                scope.spawn(|| both_ways(other, 2));
                scope.spawn(|| both_ways(between, 3));
            });
        }
        let counted = w.counters(&w.a);
        assert!(counted.redirected_bytes > 1 << 18, "{counted:?}");
        assert_eq!(counted.enrolled, if accelerated { 6 } else { 2 });
    });
}

#[test]
fn accelerated_loopback_flows_with_the_same_four_numbers_never_meet() {
    loopback_flows(true);
}

#[test]
fn plain_loopback_flows_with_the_same_four_numbers_never_meet() {
    loopback_flows(false);
}

#[test]
fn an_impostor_inside_a_pod_is_not_enrolled_and_hears_nothing() {
    world(true, true, |w| {
        let c = Pod::live(w.datapath(), 7);
        for (a, b) in [(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)] {
            let client = bound(&w.a, a, 5555);
            let listener = w.b.run(|| TcpListener::bind((b, 7000)).unwrap());
            client.connect(&SocketAddr::from((b, 7000)).into()).unwrap();
            let real = (
                with_timeout(client.into()),
                with_timeout(listener.accept().unwrap().0),
            );
            let before = enrolled();
            assert_eq!(before.len(), 2);
            // The third pod plays both of them.
            let mut conn = c.place.conn().unwrap();
            let lo = conn.link_by_name("lo").unwrap().index;
            for address in [a, b] {
                conn.execute(Address::new(lo, address.into()).nodad().add())
                    .unwrap();
            }
            // The kernel makes an IPv6 address's route on its own time.
            for address in [a, b] {
                kit::eventually("a route to the stolen address", || {
                    c.run(|| UdpSocket::bind((address, 0)).and_then(|s| s.connect((address, 9))))
                        .is_ok()
                });
            }
            let played = inside(&c, (a, 5555), (b, 7000));
            assert_eq!(enrolled(), before, "only the real ones");
            thread::scope(|scope| {
                scope.spawn(|| both_ways(played, 4));
                scope.spawn(|| both_ways(real, 5));
            });
            assert_eq!(w.counters(&c).enrolled, 0);
        }
    });
}

/// A pod's own end of a connection to an address that it stole is where it may be; the other is not.
#[test]
fn a_pod_that_stole_its_servers_address_talks_to_itself() {
    world(true, true, |w| {
        let real = connect(&w.b, w.b.v4, &w.a, 7000);
        let mut conn = w.a.place.conn().unwrap();
        let lo = conn.link_by_name("lo").unwrap().index;
        conn.execute(Address::new(lo, w.b.v4.into()).nodad().add())
            .unwrap();
        let played = inside(&w.a, (w.a.v4, 0), (w.b.v4, 7000));
        assert_eq!(super::enrolled_at(w.b.v4), 1, "of the real server only");
        both_ways(played, 6);
        conn.execute(Address::new(lo, w.b.v4.into()).delete())
            .unwrap();
        both_ways(real, 7);
    });
}

#[test]
fn the_nodes_own_sockets_are_not_enrolled_whatever_their_address() {
    world(true, true, |w| {
        let mut conn = Conn::new().unwrap();
        let lo = conn.link_by_name("lo").unwrap().index;
        for address in [w.a.v4, w.b.v4] {
            conn.execute(Address::new(lo, address.into()).nodad().add())
                .unwrap();
        }
        let listener = TcpListener::bind((w.b.v4, 7000)).unwrap();
        let client =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        client
            .bind(&SocketAddr::from((w.a.v4, 5555)).into())
            .unwrap();
        client
            .connect(&SocketAddr::from((w.b.v4, 7000)).into())
            .unwrap();
        let (mut client, mut server) = (
            with_timeout(client.into()),
            with_timeout(listener.accept().unwrap().0),
        );
        assert_eq!(enrolled(), []);
        ask(&mut client, &mut server);
    });
}

#[test]
fn a_pod_that_connects_to_its_own_address_hears_itself() {
    world(true, true, |w| {
        for at in [w.a.v4, w.a.v6] {
            both_ways(inside(&w.a, (at, 0), (at, 7000)), 8);
        }
    });
}
