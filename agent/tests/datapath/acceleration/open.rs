//! How connections begin.

use super::{
    ask, bound, connect, enrolled, pattern, read_exact, set, sockets, traffic, transfer,
    unknown_port, with_timeout, world,
};
use crate::kit::{self, Pod};
use sinabro_common::abi::acceleration::Reason;
use sinabro_netlink::sysctl;
use std::{
    io::{ErrorKind, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
};

/// What a client sends at once may be on its way before the server's end is enrolled: then it goes
/// through TCP, and all that follows it.
#[test]
fn what_is_sent_together_with_connecting_arrives_in_order() {
    const CONNECTIONS: usize = 2000;
    world(true, true, |w| {
        let listener =
            w.b.run(|| TcpListener::bind((w.b.v4, unknown_port())).unwrap());
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                w.a.run(|| {
                    for n in 0..CONNECTIONS {
                        let data = pattern(n as u8, 300);
                        let mut client = with_timeout(TcpStream::connect(address).unwrap());
                        for piece in data.chunks(100) {
                            client.write_all(piece).unwrap();
                        }
                        assert_eq!(read_exact(&mut client, 300), data);
                        client.write_all(&data).unwrap();
                        assert_eq!(read_exact(&mut client, 4), b"done");
                    }
                });
            });
            for n in 0..CONNECTIONS {
                let mut server = with_timeout(listener.accept().unwrap().0);
                let data = pattern(n as u8, 300);
                assert_eq!(read_exact(&mut server, 300), data);
                for piece in data.chunks(100) {
                    server.write_all(piece).unwrap();
                }
                assert_eq!(read_exact(&mut server, 300), data);
                server.write_all(b"done").unwrap();
            }
        });
        let (a, b) = (w.counters(&w.a), w.counters(&w.b));
        println!("clients: {a:?}\nservers: {b:?}");
        assert!(a.enrolled > 0 && b.redirected_messages > 0);
        for counted in [a, b] {
            let passed: u64 = counted.passed_messages.iter().sum();
            let late = counted.passed_messages[Reason::NotPaired as usize];
            assert_eq!(passed, late, "{counted:?}");
        }
    });
}

#[test]
fn data_that_waits_for_accept_is_read_in_order() {
    world(true, true, |w| {
        for at in [w.b.v4, w.b.v6] {
            let listener = w.b.run(|| TcpListener::bind((at, unknown_port())).unwrap());
            let address = listener.local_addr().unwrap();
            let data = pattern(9, 100_000);
            let mut clients: Vec<TcpStream> = (0..20)
                .map(|_| {
                    w.a.run(|| with_timeout(TcpStream::connect(address).unwrap()))
                })
                .collect();
            for client in &mut clients {
                for piece in data.chunks(7001) {
                    client.write_all(piece).unwrap();
                }
            }
            for client in &mut clients {
                let (mut server, _) = listener.accept().unwrap();
                assert_eq!(read_exact(&mut server, data.len()), data);
                ask(client, &mut server);
                ask(&mut server, client);
            }
        }
        assert!(w.counters(&w.a).redirected_bytes > 0);
    });
}

/// RFC 9293, 3.5: both ends connect, nobody listens. Their first SYNs are dropped, so that each
/// is waiting when the other's second one comes.
#[test]
fn ends_that_connect_to_each_other_at_once_understand_each_other() {
    const PAIRS: u16 = 20;
    world(true, true, |w| {
        for (here, there) in [(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)] {
            for pod in [&w.a, &w.b] {
                pod.attach_as(w.datapath(), [2, 0, 0, 0, 0, 99]);
            }
            let connect = |pod: &Pod, from: IpAddr, to: IpAddr| -> Vec<socket2::Socket> {
                let one = |n| {
                    let socket = bound(pod, from, 6000 + n);
                    socket.set_nonblocking(true).unwrap();
                    let to = SocketAddr::from((to, 6000 + n));
                    let error = socket.connect(&to.into()).unwrap_err();
                    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS));
                    socket
                };
                (0..PAIRS).map(one).collect()
            };
            let pairs = connect(&w.a, here, there)
                .into_iter()
                .zip(connect(&w.b, there, here));
            let pairs: Vec<_> = pairs.collect();
            for pod in [&w.a, &w.b] {
                pod.attach(w.datapath());
            }
            for (one, other) in pairs {
                for socket in [&one, &other] {
                    kit::eventually("connecting", || socket.peer_addr().is_ok());
                    socket.set_nonblocking(false).unwrap();
                }
                let ends = [one, other].map(|socket| with_timeout(socket.into()));
                let [mut one, mut other] = ends;
                ask(&mut one, &mut other);
                ask(&mut other, &mut one);
                transfer(one, other, 1, 10_000);
            }
        }
        let counted = w.all_counters();
        println!("{counted:?}");
        assert_eq!(counted.enrolled, 4 * u64::from(PAIRS));
    });
}

/// As most servers listen: their sockets are of IPv6 and have mapped addresses.
#[test]
fn listeners_on_every_address_serve_accelerated_connections() {
    world(true, true, |w| {
        let listener = w.b.run(|| TcpListener::bind("[::]:0").unwrap());
        let port = listener.local_addr().unwrap().port();
        let mapped = |at: IpAddr| match at {
            IpAddr::V4(at) => at.to_ipv6_mapped().into(),
            v6 => v6,
        };
        for (n, at) in [w.b.v4, w.b.v6, mapped(w.b.v4)].into_iter().enumerate() {
            let client = w.a.run(|| TcpStream::connect((at, port)).unwrap());
            let mut client = with_timeout(client);
            let mut server = with_timeout(listener.accept().unwrap().0);
            assert_eq!(enrolled().len(), 2);
            ask(&mut client, &mut server);
            let counted = w.all_counters();
            assert_eq!(counted.enrolled, 2 * (n as u64 + 1));
            assert_eq!(counted.passed_messages[Reason::NotPaired as usize], 0);
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            transfer(client, server, 1, 100_000);
            transfer(back.0, back.1, 2, 100_000);
            kit::eventually("the end", || enrolled().is_empty());
        }
    });
}

/// The server's socket is there only once the client has sent something.
#[test]
fn servers_that_wait_for_data_before_they_accept_get_it_first() {
    world(true, true, |w| {
        for n in 0..20u8 {
            // Another each time: of one whose connections do not pair it would be learnt.
            let listener =
                w.b.run(|| TcpListener::bind((w.b.v4, unknown_port())).unwrap());
            let seconds = 5i32.to_ne_bytes();
            set(
                &listener,
                libc::IPPROTO_TCP,
                libc::TCP_DEFER_ACCEPT,
                &seconds,
            )
            .unwrap();
            let address = listener.local_addr().unwrap();
            let data = pattern(n, 3000);
            let mut client =
                w.a.run(|| with_timeout(TcpStream::connect(address).unwrap()));
            client.write_all(&data[..1000]).unwrap();
            client.write_all(&data[1000..]).unwrap();
            let mut server = with_timeout(listener.accept().unwrap().0);
            assert_eq!(read_exact(&mut server, data.len()), data);
            ask(&mut client, &mut server);
            transfer(server, client, n, 20_000);
        }
        let late = w.counters(&w.a).passed_messages[Reason::NotPaired as usize];
        assert!(late >= 20 * 2, "{late}");
        assert!(w.counters(&w.b).redirected_bytes > 20 * 10_000);
    });
}

/// With SYN cookies there is nothing of a connection at the server until the handshake's end.
#[test]
fn connections_that_begin_with_cookies_are_enrolled_too() {
    world(true, true, |w| {
        w.b.run(|| sysctl::write(&["net", "ipv4", "tcp_syncookies"], "2").unwrap());
        for at in [w.b.v4, w.b.v6] {
            for n in 0..20 {
                let (mut client, mut server) = connect(&w.b, at, &w.a, 0);
                assert_eq!(enrolled().len(), 2);
                ask(&mut client, &mut server);
                transfer(client, server, n, 20_000);
                kit::eventually("the end", || enrolled().is_empty());
            }
        }
    });
}

/// A connection's four numbers may be another's as soon as it was reset.
#[test]
fn the_same_four_numbers_again_are_another_connection() {
    world(true, true, |w| {
        let listener = w.b.run(|| TcpListener::bind((w.b.v4, 7000)).unwrap());
        let address = SocketAddr::from((w.b.v4, 7000));
        let mut servers = Vec::new();
        for n in 0..300u32 {
            let client = bound(&w.a, w.a.v4, 5555);
            // The socket before is closed, but a process that another test starts has it until it is another program.
            kit::eventually("the four numbers", || {
                match client.connect(&address.into()) {
                    Err(error) if error.kind() == ErrorKind::AddrNotAvailable => false,
                    result => {
                        result.unwrap();
                        true
                    }
                }
            });
            client.set_linger(Some(std::time::Duration::ZERO)).unwrap();
            let mut client = with_timeout(client.into());
            let mut server = with_timeout(listener.accept().unwrap().0);
            for _ in 0..4 {
                client.write_all(&n.to_be_bytes()).unwrap();
                server.write_all(&n.to_be_bytes()).unwrap();
            }
            // None of them was sent to an earlier one; the last two are never read.
            for stream in [&mut client, &mut server] {
                assert_eq!(read_exact(stream, 4), n.to_be_bytes());
                assert_eq!(read_exact(stream, 4), n.to_be_bytes());
            }
            // The server's ends are closed later than the next ones are made.
            servers.push(server);
            if servers.len() > 7 {
                servers.remove(0);
            }
        }
        drop(servers);
        kit::eventually("the end", || enrolled().is_empty() && sockets() == 0);
        let counted = w.all_counters();
        assert_eq!(
            counted.passed_messages,
            [0; Reason::ALL.len()],
            "{counted:?}"
        );
        assert!(counted.redirected_messages >= 8 * 250, "{counted:?}");
    });
}

#[test]
fn a_socket_that_connects_to_itself_hears_itself() {
    world(true, true, |w| {
        let socket = bound(&w.a, w.a.v4, 5555);
        socket
            .connect(&SocketAddr::from((w.a.v4, 5555)).into())
            .unwrap();
        let mut socket = with_timeout(socket.into());
        let data = pattern(2, 50_000);
        for piece in data.chunks(5000) {
            socket.write_all(piece).unwrap();
        }
        assert_eq!(read_exact(&mut socket, data.len()), data);
    });
}

/// connect(2) with AF_UNSPEC ends a connection; the socket may then make another.
#[test]
fn a_socket_that_connects_again_is_another() {
    world(true, true, |w| {
        let disconnect = |stream: &TcpStream| {
            use std::os::fd::AsRawFd as _;
            // SAFETY: all zero is an address without a family.
            let address: libc::sockaddr = unsafe { std::mem::zeroed() };
            let len = size_of_val(&address) as u32;
            // SAFETY: that many bytes.
            let result = unsafe { libc::connect(stream.as_raw_fd(), &raw const address, len) };
            assert_eq!(result, 0);
        };
        let node: IpAddr = Ipv4Addr::new(10, 1, 0, 1).into();
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        for round in 0..4 {
            // Unread, and not for whoever is next.
            server.write_all(b"old").unwrap();
            disconnect(&client);
            drop(server);
            kit::eventually("forgetting both", || enrolled().is_empty());
            let to_pod = round % 2 == 0;
            let listener = match to_pod {
                true => {
                    w.b.run(|| TcpListener::bind((w.b.v4, unknown_port())).unwrap())
                }
                false => TcpListener::bind((node, 0)).unwrap(),
            };
            let address = listener.local_addr().unwrap();
            socket2::SockRef::from(&client)
                .connect(&address.into())
                .unwrap();
            server = with_timeout(listener.accept().unwrap().0);
            assert_eq!(enrolled().len(), if to_pod { 2 } else { 0 });
            ask(&mut client, &mut server);
        }
        // Of what was no pod's server nothing is learnt.
        let port = client.local_addr().unwrap().port();
        disconnect(&client);
        assert!(traffic().iter().all(|(server, _)| server.port != port));
        drop((client, server));
        kit::eventually("no sockets", || sockets() == 0);
    });
}
