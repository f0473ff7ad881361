//! The first things that must be so.

use super::{ask, connect, enrolled, pattern, read_exact, transfer, world};
use crate::{kit, logs};
use aya::maps::{HashMap, Map, MapData};
use sinabro_common::{
    abi::{
        Addr,
        acceleration::{ConnectionKey, Enrolled, MAX_SOCKETS},
    },
    names,
};
use std::{
    io::{ErrorKind, Read as _, Write},
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

#[test]
fn enrolled_connections_carry_every_byte_in_order() {
    world(true, true, |w| {
        for (n, at) in [w.b.v4, w.b.v6].into_iter().enumerate() {
            let (client, server) = connect(&w.b, at, &w.a, 7000 + n as u16);
            assert_eq!(enrolled().len(), 2, "both ends");
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let other = thread::spawn(move || transfer(back.0, back.1, 7, 8 << 20));
            transfer(client, server, 3, 8 << 20);
            other.join().unwrap();
            kit::eventually("forgetting closed sockets", || enrolled().is_empty());
        }
    });
}

#[test]
fn enrolled_data_does_not_pass_the_pods_links() {
    world(true, true, |w| {
        let sent = || {
            w.datapath()
                .pod_counters(w.a.ifindex)
                .unwrap()
                .unwrap()
                .tx_bytes
        };
        let before = sent();
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        for n in 0..1000u16 {
            let data = pattern(n as u8, 1000);
            client.write_all(&data).unwrap();
            assert_eq!(read_exact(&mut server, 1000), data);
        }
        assert!(sent() - before < 100_000, "{}", sent() - before);
        let counted = w.counters(&w.a);
        assert_eq!(counted.enrolled, 1);
        assert_eq!(counted.passed_bytes, counted.passed_messages);
    });
}

#[test]
fn a_full_table_is_said_once_and_connections_go_through_tcp() {
    world(true, true, |w| {
        let path = Path::new(names::BPF_DIR).join("ENROLLED");
        let mut map: HashMap<_, ConnectionKey, Enrolled> =
            Map::HashMap(MapData::from_pin(path).unwrap())
                .try_into()
                .unwrap();
        let filler = |n: u32| ConnectionKey {
            netns: 0,
            pad: 0,
            local: Addr::v4([198, 51, 100, 1]),
            remote: Addr::v4([198, 51, 100, 2]),
            local_port: n as u16,
            remote_port: 9,
        };
        for n in 0..MAX_SOCKETS {
            map.insert(filler(n), Enrolled { cookie: 1, sk: 0 }, 0)
                .unwrap();
        }
        let began = Instant::now();
        // Twenty sockets that are refused.
        for port in 7000..7010 {
            let (client, server) = connect(&w.b, w.b.v4, &w.a, port);
            transfer(client, server, 4, 10_000);
        }
        logs::assert_said_rarely(
            w.datapath(),
            began,
            "WARN tcp acceleration: table of sockets is full, connections between pods go through \
             tcp object=\"sock\"",
        );
    });
}

#[test]
fn nothing_is_enrolled_unless_it_is_wanted() {
    for (attached, wanted) in [(false, true), (true, false)] {
        world(attached, wanted, |w| {
            let (client, server) = connect(&w.b, w.b.v4, &w.a, 7000);
            assert_eq!(enrolled(), []);
            transfer(client, server, 1, 1 << 20);
        });
    }
}

#[test]
fn the_node_and_strangers_are_not_enrolled() {
    world(true, true, |w| {
        let local: IpAddr = Ipv4Addr::new(10, 1, 0, 1).into();
        let listener = TcpListener::bind((local, 7000)).unwrap();
        let client = w.a.run(|| TcpStream::connect((local, 7000)).unwrap());
        let (server, _) = listener.accept().unwrap();
        assert_eq!(enrolled(), []);
        transfer(client, server, 1, 1 << 20);
    });
}

#[test]
fn a_restart_keeps_enrolled_connections() {
    world(true, true, |mut w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        w.datapath = None;
        ask(&mut client, &mut server);
        w.start(true);
        ask(&mut client, &mut server);
        assert_eq!(enrolled().len(), 2);
        // Turned off: no new ones.
        w.start(false);
        ask(&mut client, &mut server);
        kit::eventually("no more enrolment", || {
            let before = enrolled().len();
            let (client, server) = connect(&w.b, w.b.v4, &w.a, 7001);
            let none = enrolled().len() == before;
            transfer(client, server, 2, 1000);
            none
        });
    });
}

#[test]
fn a_thread_that_reads_before_the_connection_is_made_gets_what_comes() {
    world(true, true, |w| {
        let to = std::net::SocketAddr::from((w.b.v4, 7000)).into();
        let socket =
            || socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        // A listener that has no room drops what asks to be connected, and is asked again.
        let listener = w.b.run(|| {
            let listener = socket();
            listener.bind(&to).unwrap();
            listener.listen(0).unwrap();
            TcpListener::from(listener)
        });
        let _first = w.a.run(|| TcpStream::connect((w.b.v4, 7000)).unwrap());
        let client = w.a.run(socket);
        let (connecting, mut reading) = (client.try_clone().unwrap(), TcpStream::from(client));
        let connector = thread::spawn(move || connecting.connect(&to).unwrap());
        let reader = thread::spawn(move || {
            // Until there is a connection being made, there is nothing to read from.
            let mut byte = [0; 4];
            loop {
                match reading.read_exact(&mut byte) {
                    Ok(()) => return byte,
                    Err(error) if error.kind() == ErrorKind::NotConnected => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        thread::sleep(Duration::from_millis(100));
        listener.accept().unwrap();
        connector.join().unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(b"data").unwrap();
        kit::eventually("reading", || reader.is_finished());
        assert_eq!(&reader.join().unwrap(), b"data");
    });
}
