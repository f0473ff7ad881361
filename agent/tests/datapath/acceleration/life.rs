//! What is kept of connections ends with them or with their pods, and outlives the agent.

use super::{
    World, ask, bound, connect, enrolled, enrolled_at, load, pattern, read, read_exact, sockets,
    traffic, transfer, with_timeout, world,
};
use crate::kit::{self, Pod};
use sinabro_agent::datapath::{self, PodAcceleration};
use sinabro_common::{abi::acceleration::Reason, names};
use sinabro_lab::traffic::close::close;
use sinabro_netlink::{Conn, link};
use std::{
    collections::HashSet,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    time::Duration,
};

fn nothing_is_left(why: &str) {
    kit::eventually(why, || enrolled().is_empty() && sockets() == 0);
}

#[test]
fn what_is_kept_of_a_connection_ends_with_it() {
    world(true, true, |w| {
        for at in [w.b.v4, w.b.v6] {
            let pair = || {
                let (mut client, mut server) = connect(&w.b, at, &w.a, 0);
                ask(&mut client, &mut server);
                assert_eq!((enrolled().len(), sockets()), (2, 2));
                (client, server)
            };
            drop(pair());
            nothing_is_left("closing");

            let (client, mut server) = pair();
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read(&mut server, &mut [0; 9]), 0);
            drop((server, client));
            nothing_is_left("closing one half first");

            let (client, server) = pair();
            let linger = socket2::SockRef::from(&client);
            linger.set_linger(Some(Duration::ZERO)).unwrap();
            drop(client);
            kit::eventually("a reset", || enrolled().is_empty());
            drop(server);
            nothing_is_left("a reset");

            // With data that nobody reads, both ways.
            let (mut client, mut server) = pair();
            client.write_all(&[1; 1000]).unwrap();
            server.write_all(&[2; 1000]).unwrap();
            drop((client, server));
            nothing_is_left("closing with data unread");
        }
    });
}

#[test]
fn what_is_kept_of_a_connection_ends_with_its_process() {
    world(true, true, |w| {
        let (mut client, server) = connect(&w.b, w.b.v4, &w.a, 0);
        // SAFETY: the child only waits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no arguments.
                unsafe { libc::pause() };
            }
        }
        drop(server);
        client.write_all(b"to the child").unwrap();
        assert_eq!(enrolled().len(), 2, "the child has it");
        // SAFETY: a child of this process.
        unsafe {
            assert_eq!(libc::kill(child, libc::SIGKILL), 0);
            assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        }
        let _ = client.read(&mut [0; 9]);
        drop(client);
        nothing_is_left("killing");
    });
}

/// Takes a pod away as a runtime does, though something still holds its sockets.
fn take_away(w: &World, pod: &Pod) {
    w.datapath()
        .detach_pod(pod.ifindex, &pod.link, &pod.addresses())
        .unwrap();
    let mut conn = Conn::new().unwrap();
    conn.execute(link::delete(pod.ifindex)).unwrap();
}

/// What a socket still gets through to the other: neither an error nor a hang is any.
fn says(socket: &mut TcpStream, what: &[u8]) {
    for _ in 0..3 {
        let _ = socket.write_all(what);
    }
}

#[test]
fn a_new_pod_with_an_old_ones_address_gets_nothing_of_it() {
    world(true, true, |mut w| {
        for (at_server, at_client) in [(w.b.v4, w.a.v4), (w.b.v6, w.a.v6)] {
            // The server's pod goes.
            let client = bound(&w.a, at_client, 5555);
            let listener = w.b.run(|| TcpListener::bind((at_server, 7000)).unwrap());
            let address = SocketAddr::from((at_server, 7000));
            client.connect(&address.into()).unwrap();
            let (mut server, _) = listener.accept().unwrap();
            let mut client = with_timeout(client.into());
            ask(&mut client, &mut server);
            says(&mut client, b"unread");
            assert_eq!(enrolled_at(at_server), 1);
            take_away(&w, &w.b);
            assert_eq!(enrolled(), []);

            let next = Pod::live(w.datapath(), 6);
            let old = std::mem::replace(&mut w.b, next);
            let again = w.b.run(|| TcpListener::bind((at_server, 7000)).unwrap());
            says(&mut client, b"old");
            says(&mut server, b"old");
            let second = bound(&w.a, at_client, 5556);
            second.connect(&address.into()).unwrap();
            let mut second = with_timeout(second.into());
            let mut new = with_timeout(again.accept().unwrap().0);
            assert_eq!(enrolled().len(), 2, "the new connection's");
            says(&mut client, b"old");
            says(&mut server, b"old");
            ask(&mut second, &mut new);
            ask(&mut new, &mut second);

            // Then the client's, and the next one uses its port.
            take_away(&w, &w.a);
            let next = Pod::live(w.datapath(), 5);
            let old_client = std::mem::replace(&mut w.a, next);
            says(&mut second, b"old");
            close(new).unwrap();
            let third = bound(&w.a, at_client, 5556);
            third.connect(&address.into()).unwrap();
            let mut third = with_timeout(third.into());
            let mut newest = with_timeout(again.accept().unwrap().0);
            says(&mut second, b"old");
            assert_eq!(enrolled().len(), 2, "the newest connection's");
            ask(&mut third, &mut newest);
            ask(&mut newest, &mut third);
            transfer(third, newest, 1, 100_000);
            drop((old, old_client, listener, client, server, second));
            // Sockets whose pod has no link any more wait for an answer that never comes.
            kit::eventually("the end", || enrolled().is_empty());
        }
    });
}

#[test]
fn a_restart_goes_on_redirecting_what_was_and_what_comes() {
    world(true, true, |mut w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        for round in 0..3u64 {
            for _ in 0..100 {
                ask(&mut client, &mut server);
            }
            let counted = w.all_counters();
            assert!(
                counted.redirected_messages > 150 * (round + 1),
                "{counted:?}"
            );
            assert_eq!(counted.passed_messages, [0; Reason::ALL.len()]);
            assert_eq!(counted.enrolled, 2 * (round + 1));
            w.datapath = None;
            ask(&mut client, &mut server);
            w.start(true);
            let (mut client, mut server) = connect(&w.b, w.b.v6, &w.a, 7000);
            ask(&mut client, &mut server);
        }
        // What it still knows: that it was told of the end shows that it was.
        drop((client, server));
        nothing_is_left("closing after restarts");
        let known = traffic();
        let known = known.iter().find(|(key, _)| key.addr == w.b.v4.into());
        assert!(known.unwrap().1.messages[0] > 300, "{known:?}");
    });
}

#[test]
fn connections_go_on_when_the_acceleration_is_switched_off() {
    world(true, true, |mut w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        client.write_all(b"unread").unwrap();
        w.start(false);
        assert_eq!(read_exact(&mut server, 6), b"unread");
        ask(&mut client, &mut server);
        let (mut plain, mut its_server) = connect(&w.b, w.b.v4, &w.a, 7001);
        assert_eq!(enrolled().len(), 2, "the old one's");
        ask(&mut plain, &mut its_server);
        let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let other = std::thread::spawn(move || transfer(back.0, back.1, 1, 1 << 20));
        transfer(client, server, 2, 1 << 20);
        other.join().unwrap();
        // Nobody was told of its end; the next who looks sees to it.
        w.start(true);
        kit::eventually("forgetting what ended meanwhile", || enrolled().is_empty());
        transfer(plain, its_server, 3, 100_000);
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7002);
        assert_eq!(enrolled().len(), 2);
        ask(&mut client, &mut server);
    });
}

/// The kernel keeps maps and programs for as long as sockets use them.
#[test]
fn connections_go_on_when_all_is_uninstalled() {
    world(true, true, |mut w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        client.write_all(b"unread").unwrap();
        server.write_all(b"unread").unwrap();
        w.datapath = None;
        let removed = datapath::remove(Path::new(names::BPF_DIR));
        assert!(removed.problems.is_empty(), "{removed:?}");
        assert_eq!(enrolled(), []);
        assert_eq!(read_exact(&mut server, 6), b"unread");
        assert_eq!(read_exact(&mut client, 6), b"unread");
        ask(&mut client, &mut server);
        // And installed again.
        w.start(true);
        ask(&mut client, &mut server);
        let second = connect(&w.b, w.b.v4, &w.a, 7001);
        assert_eq!(enrolled().len(), 2);
        transfer(second.0, second.1, 1, 100_000);
        transfer(client, server, 2, 100_000);
    });
}

#[test]
fn evicted_connections_go_through_tcp_and_others_do_not() {
    world(true, true, |w| {
        let c = Pod::live(w.datapath(), 7);
        let evicted = Reason::Evicted as usize;
        for (n, at) in [w.b.v4, w.b.v6].into_iter().enumerate() {
            let mut theirs = connect(&w.b, at, &w.a, 7000);
            let mut silent = connect(&w.b, at, &w.a, 7001);
            let of_c = if n == 0 { c.v4 } else { c.v6 };
            let mut others = connect(&c, of_c, &w.a, 7002);
            for (client, server) in [&mut theirs, &mut others] {
                ask(client, server);
            }
            theirs.0.write_all(b"unread").unwrap();
            let packets = || {
                w.datapath()
                    .pod_counters(w.b.ifindex)
                    .unwrap()
                    .unwrap()
                    .rx_bytes
            };
            let before = (packets(), w.counters(&w.b), w.counters(&c));
            w.datapath().evict_accelerated(&w.b.addresses()).unwrap();
            theirs.0.write_all(&pattern(1, 5000)).unwrap();
            assert_eq!(read_exact(&mut theirs.1, 6), b"unread");
            assert_eq!(read_exact(&mut theirs.1, 5000), pattern(1, 5000));
            for _ in 0..50 {
                ask(&mut theirs.0, &mut theirs.1);
                ask(&mut silent.0, &mut silent.1);
                ask(&mut others.0, &mut others.1);
            }
            assert!(packets() > before.0 + 1000, "by the pod's link");
            let now = (w.counters(&w.b), w.counters(&c));
            assert_eq!(now.0.redirected_messages, before.1.redirected_messages);
            assert!(now.0.passed_messages[evicted] > before.1.passed_messages[evicted] + 50);
            assert!(now.1.redirected_messages > before.2.redirected_messages);
            assert_eq!(now.1.passed_messages, before.2.passed_messages);
            // New ones are enrolled again.
            let (mut client, mut server) = connect(&w.b, at, &w.a, 7003);
            ask(&mut client, &mut server);
            assert_eq!(
                w.counters(&w.b).redirected_messages,
                now.0.redirected_messages + 1
            );
            transfer(theirs.0, theirs.1, 2, 100_000);
            transfer(silent.1, silent.0, 3, 100_000);
        }
    });
}

/// A pod that may not be accelerated any more, for its wish or a setting.
#[test]
fn connections_of_a_pod_that_may_no_more_go_through_tcp() {
    world(true, true, |mut w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        w.b.attach_with(w.datapath(), None);
        ask(&mut client, &mut server);
        assert_eq!(
            w.counters(&w.a).passed_messages[Reason::Evicted as usize],
            1
        );
        let (_client, _server) = connect(&w.b, w.b.v4, &w.a, 7001);
        assert!(
            enrolled()
                .iter()
                .all(|(key, _)| ![key.local_port, key.remote_port].contains(&7001))
        );
        // As it was after a restart, too.
        w.datapath = None;
        let datapath = load(&w.config, true);
        w.a.attach(&datapath);
        w.b.attach_with(&datapath, None);
        w.datapath = Some(datapath);
        ask(&mut client, &mut server);
        let error = client.read(&mut []).map_err(|error| error.kind());
        assert!(matches!(error, Ok(0) | Err(ErrorKind::WouldBlock)));
    });
}

#[test]
fn loopback_connections_are_evicted_with_their_pods() {
    world(true, true, |w| {
        let with_loopback = PodAcceleration {
            loopback: true,
            ..w.a.acceleration()
        };
        w.a.attach_with(w.datapath(), Some(with_loopback));
        let redirected = || w.counters(&w.a).redirected_messages;
        let evicted = || w.counters(&w.a).passed_messages[Reason::Evicted as usize];
        let pair = |port| connect(&w.a, "127.0.0.1".parse().unwrap(), &w.a, port);
        for by_wish in [false, true] {
            let (mut client, mut server) = pair(7000);
            let before = redirected();
            ask(&mut client, &mut server);
            assert_eq!((redirected() - before, enrolled().len()), (2, 2));
            let before = evicted();
            if by_wish {
                w.a.attach(w.datapath());
            } else {
                w.datapath().evict_accelerated(&w.a.addresses()).unwrap();
            }
            ask(&mut client, &mut server);
            assert_eq!(evicted() - before, 2);
            transfer(client, server, 1, 100_000);
            kit::eventually("the end", || enrolled().is_empty());
        }
        let (client, server) = pair(7000);
        assert_eq!(enrolled(), [], "not any more");
        transfer(client, server, 1, 100_000);
    });
}

#[test]
fn eviction_by_one_address_leaves_the_others() {
    world(true, true, |w| {
        let mut v4 = connect(&w.b, w.b.v4, &w.a, 7000);
        let mut v6 = connect(&w.b, w.b.v6, &w.a, 7000);
        w.datapath().evict_accelerated(&[w.b.v4.into()]).unwrap();
        ask(&mut v6.0, &mut v6.1);
        let counted = w.all_counters();
        assert_eq!(
            (counted.redirected_messages, counted.passed_messages),
            (2, [0; Reason::ALL.len()])
        );
        ask(&mut v4.0, &mut v4.1);
        let counted = w.all_counters();
        assert_eq!(counted.redirected_messages, 2);
        assert_eq!(counted.passed_messages[Reason::Evicted as usize], 2);
    });
}

#[test]
fn a_pod_that_vanished_while_there_was_no_agent_is_forgotten() {
    world(true, true, |mut w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        w.datapath = None;
        let mut conn = Conn::new().unwrap();
        conn.execute(link::delete(w.b.ifindex)).unwrap();
        let datapath = load(&w.config, true);
        w.a.attach(&datapath);
        datapath
            .retain_pods(&HashSet::from([w.a.link.clone()]))
            .unwrap();
        assert_eq!(enrolled(), []);
        // Not from socket to socket any more: its pod has no link.
        client.write_all(b"ping").unwrap();
        server.set_nonblocking(true).unwrap();
        let error = server.read(&mut [0; 9]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        w.datapath = Some(datapath);
        let counted = w.counters(&w.a);
        assert_eq!(counted.passed_messages[Reason::Evicted as usize], 1);
        // And who gets its address begins at zero.
        w.b = Pod::live(w.datapath(), 6);
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        assert_eq!(enrolled().len(), 2);
        ask(&mut client, &mut server);
    });
}
