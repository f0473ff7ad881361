//! What accelerated connections cost the kernel: charged to who connects, within limits, for as
//! long as the memory is taken, and no longer.

use super::{
    World, ask, bound, connect, connect_enrolled, read_exact, sockets, unknown_port, world,
    world_with,
};
use crate::kit;
use aya::maps::{HashMap, Map, MapData};
use sinabro_agent::datapath::{DatapathConfig, QueueLimits};
use sinabro_common::{
    abi::acceleration::{Charge, ChargeKey, NODE_ACCOUNT, Reason, Skip},
    algo::queue,
    names,
};
use sinabro_lab::traffic::close::close;
use socket2::SockRef;
use std::{
    io::Write,
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::AsRawFd,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

mod alone;

const BASE: u64 = queue::cost(0) as u64;

/// Every step that is charged.
fn charges() -> Vec<(ChargeKey, Charge)> {
    let path = Path::new(names::BPF_DIR).join("QUEUE_CHARGES");
    let map: HashMap<_, ChargeKey, Charge> = Map::HashMap(MapData::from_pin(path).unwrap())
        .try_into()
        .unwrap();
    map.iter().collect::<Result<_, _>>().unwrap()
}

fn used(w: &World, key: u32) -> u64 {
    w.datapath().queue_usage(key).unwrap().unwrap().used
}

/// As often as it takes to see that a socket is gone.
fn sweep(w: &World) {
    for _ in 0..2 {
        w.datapath().sweep_accelerated().unwrap();
    }
}

fn nothing_is_charged(w: &World, why: &str) {
    kit::eventually(why, || charges().is_empty());
    for key in [NODE_ACCOUNT, w.a.ifindex, w.b.ifindex] {
        assert_eq!(used(w, key), 0, "{why}: account {key}");
    }
}

/// Sends messages of one byte until so many are on their way or no more are taken.
fn send(socket: &TcpStream, messages: usize) -> usize {
    let take = || {
        // SAFETY: one byte.
        let sent = unsafe {
            libc::send(
                socket.as_raw_fd(),
                b"x".as_ptr().cast(),
                1,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        sent == 1
    };
    (0..messages).take_while(|_| take()).count()
}

fn limited(pod: u64, node: u64) -> DatapathConfig {
    DatapathConfig {
        queue_limits: Some(QueueLimits { pod, node }),
        ..kit::config()
    }
}

#[test]
fn unread_messages_are_charged_step_by_step_and_given_back_when_read() {
    world(true, true, |w| {
        for at in [w.b.v4, w.b.v6] {
            let (client, mut server) = connect(&w.b, at, &w.a, 7000);
            let two = 2 * BASE;
            assert_eq!(used(&w, w.a.ifindex), two, "both ends, to who connects");
            assert_eq!(used(&w, w.b.ifindex), 0);
            for (messages, level) in [(8, 0), (9, 1), (64, 1), (65, 2), (512, 2), (513, 3)] {
                let before = client.take_error().unwrap();
                assert!(before.is_none());
                send(&client, messages - waiting(&server));
                let steps: u64 = (1..=level).map(|level| u64::from(queue::cost(level))).sum();
                assert_eq!(used(&w, w.a.ifindex), two + steps, "{messages} messages");
                assert_eq!(used(&w, NODE_ACCOUNT), two + steps);
            }
            assert_eq!(w.counters(&w.a).passed_messages, [0; Reason::ALL.len()]);
            read_exact(&mut server, 513);
            // A message for each step.
            for left in [2, 1, 0, 0] {
                send(&client, 1);
                read_exact(&mut server, 1);
                let steps: u64 = (1..=left).map(|level| u64::from(queue::cost(level))).sum();
                assert_eq!(used(&w, w.a.ifindex), two + steps);
            }
            drop((client, server));
            nothing_is_charged(&w, "closed");
        }
    });
}

/// Bytes, here messages, that wait to be read.
fn waiting(socket: &TcpStream) -> usize {
    let mut bytes = vec![0; 10_000];
    // SAFETY: the buffer's own length.
    let len = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            bytes.as_mut_ptr().cast(),
            bytes.len(),
            libc::MSG_PEEK | libc::MSG_DONTWAIT,
        )
    };
    usize::try_from(len).unwrap_or(0)
}

#[test]
fn where_the_budget_ends_messages_go_through_tcp_and_all_arrive() {
    let limits = [
        (limited(2 * BASE + 60_000, 1 << 30), Reason::PodLimit),
        (limited(1 << 30, 2 * BASE + 60_000), Reason::NodeLimit),
    ];
    for (config, reason) in limits {
        world_with(config, true, true, |w| {
            let (client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
            // One step of 56 messages fits.
            assert_eq!(send(&client, 3000), 3000);
            read_exact(&mut server, 3000);
            drop((client, server));
            nothing_is_charged(&w, "closed");
            let counted = w.counters(&w.a);
            assert_eq!(counted.redirected_messages, 64);
            assert_eq!(counted.passed_messages[reason as usize], 3000 - 64);
        });
    }
    let limits = [
        (limited(2 * BASE + 1, 1 << 30), Skip::PodLimit),
        (limited(1 << 30, 2 * BASE + 1), Skip::NodeLimit),
    ];
    for (config, skip) in limits {
        world_with(config, true, true, |w| {
            let mut first = connect(&w.b, w.b.v4, &w.a, 7000);
            let mut second = connect(&w.b, w.b.v4, &w.a, 7001);
            for (client, server) in [&mut first, &mut second] {
                ask(client, server);
            }
            for pod in [&w.a, &w.b] {
                let counted = w.counters(pod);
                assert_eq!(counted.enrolled, 1);
                assert_eq!(counted.skipped[skip as usize], 1);
            }
            drop(first);
            nothing_is_charged(&w, "closed");
            let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7002);
            ask(&mut client, &mut server);
            assert_eq!(w.counters(&w.a).enrolled, 2, "there is room again");
        });
    }
}

/// Resets the connection instead of ending it.
fn reset(socket: TcpStream) {
    SockRef::from(&socket)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(socket);
}

/// However the sender leaves, what it sent is still there.
#[test]
fn messages_are_charged_for_as_long_as_their_reader_keeps_them() {
    world(true, true, |w| {
        let shut_down = |socket: TcpStream| socket.shutdown(Shutdown::Both).unwrap();
        for how in ["closed", "reset", "shut down"] {
            let (client, mut server) = connect_enrolled(&w, w.b.v4);
            let sent = send(&client, 3000);
            assert_eq!(sent, 3000, "{how}: {:?}", w.all_counters());
            match how {
                "closed" => close(client).unwrap(),
                "reset" => reset(client),
                _ => shut_down(client),
            }
            let redirected = waiting(&server) as u64;
            assert!(
                redirected > 2000,
                "{how}: {redirected}, {:?}",
                w.all_counters()
            );
            sweep(&w);
            let kept = used(&w, w.a.ifindex);
            assert!(
                kept >= 4096 << 10,
                "{how}: {kept} for {redirected} messages, {:?}",
                w.all_counters()
            );
            assert_eq!(read_exact(&mut server, 10), b"xxxxxxxxxx");
            drop(server);
            kit::eventually("the end", || {
                sweep(&w);
                charges().is_empty()
            });
            nothing_is_charged(&w, how);
        }
    });
}

/// A connection that nobody accepted has a queue, too.
#[test]
fn what_nobody_accepted_is_charged_until_its_listener_closes() {
    world(true, true, |w| {
        for reset_first in [false, true] {
            let listener =
                w.b.run(|| TcpListener::bind((w.b.v4, unknown_port())).unwrap());
            let address = listener.local_addr().unwrap();
            let client = w.a.run(|| TcpStream::connect(address).unwrap());
            assert_eq!(send(&client, 3000), 3000);
            let full = used(&w, w.a.ifindex);
            assert!(full > 4096 << 10, "{full}");
            if reset_first {
                reset(client);
                sweep(&w);
                assert!(used(&w, w.a.ifindex) > 4096 << 10, "reset, not accepted");
            } else {
                drop(client);
            }
            drop(listener);
            kit::eventually("the end", || {
                sweep(&w);
                charges().is_empty()
            });
            nothing_is_charged(&w, "the listener is closed");
        }
    });
}

/// connect(2) with AF_UNSPEC ends a connection and keeps the socket.
fn disconnect(socket: &impl AsRawFd) {
    let unspecified = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as u16,
        sa_data: [0; 14],
    };
    // SAFETY: one structure.
    let result = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            &raw const unspecified,
            size_of_val(&unspecified) as u32,
        )
    };
    assert_eq!(result, 0);
}

#[test]
fn a_socket_that_connects_again_and_again_is_charged_once() {
    world(true, true, |w| {
        let listener = w.b.run(|| TcpListener::bind((w.b.v4, 7000)).unwrap());
        let address = listener.local_addr().unwrap().into();
        let client = bound(&w.a, w.a.v4, 0);
        for _ in 0..10 {
            client.connect(&address).unwrap();
            let (server, _) = listener.accept().unwrap();
            // The client reads nothing of it.
            assert_eq!(send(&server, 50), 50);
            let of_client = BASE + u64::from(queue::cost(1));
            let most = 2 * of_client;
            assert!(used(&w, w.a.ifindex) <= most, "{}", used(&w, w.a.ifindex));
            disconnect(&client);
            drop(server);
            kit::eventually("the server's end", || {
                sweep(&w);
                charges().len() == 2
            });
            assert!(used(&w, w.a.ifindex) >= of_client, "the queue is there");
        }
        drop((client, listener));
        kit::eventually("the end", || {
            sweep(&w);
            charges().is_empty()
        });
        nothing_is_charged(&w, "closed");
    });
}

#[test]
fn accounts_are_the_same_after_a_restart_and_empty_after_a_time_without_programs() {
    world(true, true, |mut w| {
        let (client, server) = connect(&w.b, w.b.v4, &w.a, 7000);
        let (short, its_server) = connect(&w.b, w.b.v4, &w.a, 7001);
        send(&client, 100);
        let before = [NODE_ACCOUNT, w.a.ifindex, w.b.ifindex].map(|key| used(&w, key));
        w.start(true);
        let after = [NODE_ACCOUNT, w.a.ifindex, w.b.ifindex].map(|key| used(&w, key));
        assert_eq!(before, after);
        drop((short, its_server));
        kit::eventually("the end of the short one", || {
            used(&w, w.a.ifindex) == before[1] - 2 * BASE
        });
        // Nobody sees these end.
        w.start(false);
        close(client).unwrap();
        close(server).unwrap();
        w.start(true);
        kit::eventually("the sweep", || {
            sweep(&w);
            charges().is_empty()
        });
        nothing_is_charged(&w, "closed without programs");
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7002);
        ask(&mut client, &mut server);
        assert_eq!(used(&w, w.a.ifindex), 2 * BASE);
    });
}

#[test]
fn what_a_pod_that_is_gone_had_is_given_back_to_the_node() {
    world(true, true, |w| {
        let (client, server) = connect(&w.b, w.b.v4, &w.a, 7000);
        send(&client, 100);
        let datapath = w.datapath();
        datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        assert_eq!(datapath.queue_usage(w.a.ifindex).unwrap(), None);
        assert!(used(&w, NODE_ACCOUNT) > 2 * BASE, "its sockets are there");
        drop((client, server));
        kit::eventually("the end", || {
            sweep(&w);
            charges().is_empty()
        });
        assert_eq!(used(&w, NODE_ACCOUNT), 0);
    });
}

/// Many at once on every processor, each ending in another way, with an agent that sweeps and
/// restarts: never more than there may be, and nothing in the end.
#[test]
fn no_share_is_lost_or_spent_twice_under_concurrency() {
    let limit = 12 * BASE + 300_000;
    world_with(limited(limit, limit), true, true, |mut w| {
        let done = AtomicBool::new(false);
        let (a, b) = (&w.a, &w.b);
        let own = |n: usize| {
            let (client, server) = if n.is_multiple_of(2) { (a, b) } else { (b, a) };
            let at = if n % 4 < 2 { server.v4 } else { server.v6 };
            for round in 0..150 {
                let listener = server.run(|| TcpListener::bind((at, unknown_port())).unwrap());
                let address = listener.local_addr().unwrap();
                let socket = client.run(|| TcpStream::connect(address).unwrap());
                let accepted = (round % 7 != 0).then(|| listener.accept().unwrap().0);
                send(&socket, (round * 37) % 900);
                if let Some(accepted) = &accepted {
                    send(accepted, (round * 11) % 90);
                }
                match round % 5 {
                    0 => reset(socket),
                    1 => disconnect(&socket),
                    2 => {
                        let _ = socket.shutdown(Shutdown::Both);
                    }
                    3 => {
                        if let Some(accepted) = accepted {
                            reset(accepted);
                        }
                    }
                    _ => {
                        let mut socket = socket;
                        let _ = socket.write_all(b"bye");
                    }
                }
            }
        };
        let datapath = w.datapath.as_ref().unwrap();
        thread::scope(|scope| {
            let workers: Vec<_> = (0..4).map(|n| scope.spawn(move || own(n))).collect();
            let watcher = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let node = datapath.queue_usage(NODE_ACCOUNT).unwrap().unwrap();
                    // What is being refused is there for a moment.
                    let passing = 4 * u64::from(queue::cost(2));
                    assert!(node.used <= limit + passing, "{node:?}");
                    datapath.sweep_accelerated().unwrap();
                }
            });
            for worker in workers {
                worker.join().unwrap();
            }
            done.store(true, Ordering::Relaxed);
            watcher.join().unwrap();
        });
        kit::eventually("the end of all", || {
            sweep(&w);
            charges().is_empty() && sockets() == 0
        });
        nothing_is_charged(&w, "all closed");
        w.start(true);
        nothing_is_charged(&w, "after a restart");
        let limits = (w.counters(&w.a), w.counters(&w.b));
        println!("{limits:?}");
        assert!(limits.0.skipped[Skip::PodLimit as usize] > 0 || limits.1.redirected_messages > 0);
    });
}
