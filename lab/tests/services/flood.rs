//! Datagrams with forged sources come to a Service faster than its node's table has room for: whoever begins a connection of TCP
//! gets in, and those that are established go on.

use crate::outside::{EXTERNAL, HALF, PORT, Server, World, by_tcp, connect, finish};
use sinabro_common::api::{ConnectionStats, Request, Response};
use sinabro_lab::{
    amount::amount,
    node::SERVICES_FLAGS,
    raise::Raise,
    traffic::{
        flood::lose_what_goes_nowhere,
        packet::{self, Datagram},
    },
};
use std::{
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Datagrams at a time: 5,000 a second.
const BURST: u64 = 50;
const PAUSE: Duration = Duration::from_millis(10);
/// Each source sends twice: what is answered is a stream from then on (`lifetime::STREAM_NS`), and lives for two minutes.
const AGAIN_AFTER: Duration = Duration::from_millis(2500);
/// A hundred clients a second.
const CLIENTS: Duration = Duration::from_millis(10);

/// Addresses that lead nowhere ([`lose_what_goes_nowhere`]) are too few of IPv4; these are for benchmarks (RFC 2544 §C.2.2).
fn source(family: usize, number: u64) -> IpAddr {
    match family {
        0 => Ipv4Addr::from_bits(0xc612_0000 | (number % 0x2_0000) as u32).into(),
        _ => {
            let [high, low] = [number >> 8, number].map(|part| part as u16 & 0xff);
            Ipv6Addr::new(0x2001, 0xdb8, 0xbad, 0, 0, (number >> 16) as u16, high, low).into()
        }
    }
}

/// Sends until it is told to stop, to one address of each family by turns.
fn flood(world: &World, stop: &AtomicBool, sent: &AtomicU64) {
    let outside = world.lab.outside().place();
    let interface = packet::interface(outside, "eth0").unwrap();
    let router = packet::interface(world.lab.router().place(), "out0").unwrap();
    let socket = packet::socket(outside, interface, 0).unwrap();
    let of_round = BURST / 2;
    let late = of_round * (AGAIN_AFTER.as_millis() / PAUSE.as_millis()) as u64;
    let began = Instant::now();
    for round in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        for at in 0..of_round {
            let number = round * of_round + at;
            for number in [Some(number), number.checked_sub(late)]
                .into_iter()
                .flatten()
            {
                let family = (number % 2) as usize;
                let datagram = Datagram {
                    src_mac: interface.mac,
                    dst_mac: router.mac,
                    src: source(family, number / 2),
                    dst: EXTERNAL[family][0].parse().unwrap(),
                    dst_port: PORT,
                    payload: b"who are you",
                    may_be_cut: false,
                };
                // What finds no room in the queue is lost.
                let went = socket.send(&datagram.frame().unwrap()).is_ok();
                sent.fetch_add(u64::from(went), Ordering::Relaxed);
            }
        }
        let due = PAUSE * (round as u32 + 1);
        thread::sleep(due.saturating_sub(began.elapsed()));
    }
}

/// New clients by turns in both families: how many there were, and how many did not get in.
fn clients(world: &World, time: Duration) -> (u32, u32) {
    let outside = world.lab.outside().place();
    let began = Instant::now();
    let (mut all, mut failed) = (0, 0);
    while began.elapsed() < time {
        let to = SocketAddr::new(EXTERNAL[all as usize % 2][0].parse().unwrap(), PORT);
        failed += u32::from(by_tcp(outside, to, 5).is_err());
        all += 1;
        thread::sleep((CLIENTS * all).saturating_sub(began.elapsed()));
    }
    (all, failed)
}

fn stats(world: &World) -> ConnectionStats {
    match world.lab.node(1).ask(Request::ConnectionStats).unwrap() {
        Response::ConnectionStats(stats) => stats,
        other => panic!("{other:?}"),
    }
}

/// Room that the flood fills in seconds.
const CONNECTIONS: u64 = 16_384;

/// Each of four parts for ten seconds; with SINABRO_THOROUGH for ten minutes in all.
#[test]
fn forged_datagrams_keep_no_client_out_under_load_nightly() {
    let room = format!("--connections={CONNECTIONS}");
    let flags = [&SERVICES_FLAGS[..], &[&room]].concat();
    let world = World::with(&flags);
    lose_what_goes_nowhere(world.lab.router().place()).unwrap();
    let router = world.lab.router().place();
    router
        .command(&["ip", "route", "add", "blackhole", "198.18.0.0/15"])
        .unwrap();
    let node = world.lab.node(1);
    let time = Duration::from_secs(amount(10, 150).into());
    let silent = node.add_pod("silent").unwrap();
    let _silent = silent
        .addresses()
        .map(|address| Server::that_answers(false, silent.place(), address));
    let answers = world.places().map(|(_, at)| at)[..2].to_vec();
    for (what, endpoints) in [
        ("answers", answers),
        ("is silent", vec![silent.addresses()]),
    ] {
        world.lead_to(&endpoints);
        let established: Vec<_> = (0..8).map(|number| begin(&world, number)).collect();
        let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| flood(&world, &stop, &sent));
            let _raise = Raise(&stop);
            let part = |agent: &str| {
                let before = sent.load(Ordering::Relaxed);
                let (all, failed) = clients(&world, time);
                let sent = sent.load(Ordering::Relaxed) - before;
                println!("{what}, agent {agent}: {failed} of {all} clients, {sent} datagrams");
                (all, failed)
            };
            let mut parts = vec![part("there")];
            // The datagrams come to the table, and fill what they may.
            let stats = stats(&world);
            node.kill_agent().unwrap();
            parts.push(part("away"));
            for (all, failed) in parts {
                assert!(failed * 100 <= all, "{what}: {failed} of {all} clients");
            }
            assert!(stats.connections > CONNECTIONS / 4, "{what}: {stats:?}");
        });
        node.start_agent_with(&flags).unwrap();
        node.wait_ready().unwrap();
        for (number, mut stream) in established.into_iter().enumerate() {
            if let Err(error) = finish(&mut stream) {
                world.fail(&format!("{what}, established {number}: {error}"));
            }
        }
    }
}

fn begin(world: &World, number: usize) -> TcpStream {
    let to = SocketAddr::new(EXTERNAL[number % 2][0].parse().unwrap(), PORT);
    let mut stream = connect(world.lab.outside().place(), to);
    stream.write_all(&HALF).unwrap();
    stream
}
