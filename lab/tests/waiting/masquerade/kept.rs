//! A pod keeps nearly all ports towards a remote end, so that no packet has looked for one and nothing says which are taken:
//! others find those that are left.

use super::{
    crowds::crowd,
    kit::{FAMILIES, Way, World},
};
use sinabro_lab::{
    Pod,
    traffic::{any, bind, crowd::Kind, readable},
};
use std::{
    collections::BTreeSet,
    net::{SocketAddr, UdpSocket},
    ops::Range,
    time::{Duration, Instant},
};

const RANGE: &str = "--masquerade-ports=20000-23999";
/// One in two hundred is left: who tries ports at random finds none of them in two searches of three, and each search notes no
/// more than one in fifty.
const KEPT: Range<u16> = 20_000..23_980;
/// Of others, each of which is taken, and fewer than are left.
const OTHERS: Range<u16> = 20_000..20_012;
/// All of these flows are there for as long as the test takes.
const FOR_LONG: [&str; 2] = [
    "--connection-udp-timeout=24h",
    "--connection-udp-timeout-stream=24h",
];
/// Who is not answered asks again after as long as TCP does the first time (RFC 6298 §2.1).
const AGAIN: Duration = Duration::from_secs(1);
/// One question more, and a machine that has other things to do.
const LONGEST: Duration = Duration::from_secs(3);
/// Between two looks at who was answered.
const LOOK: Duration = Duration::from_millis(5);
/// Nobody waits for ever.
const TRIES: usize = 60;

/// What it took until all had a port.
struct Found {
    refused_at_first: usize,
    tries: usize,
    longest: Duration,
}

#[test]
fn ports_that_are_left_are_found_beside_a_pod_that_has_kept_nearly_all_nightly() {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        for way in Way::in_turn(family) {
            let what = format!("{way:?}, {in_family}");
            let with_agent = find(way, family, true);
            with_agent.print(&format!("{what}, with the agent"));
            assert!(with_agent.refused_at_first > 0, "{what}: ports were known");
            assert!(with_agent.longest < LONGEST, "{what}");
            find(way, family, false).print(&format!("{what}, without"));
        }
    }
}

fn find(way: Way, family: usize, with_agent: bool) -> Found {
    let world = World::by(way, 2, &[], &[&[RANGE], &FOR_LONG[..]].concat());
    let mut crowd = crowd(&world, &world.pods()[..1], Kind::Datagrams, family);
    crowd.open(KEPT, 0).unwrap();
    let known: BTreeSet<_> = crowd.known().map(|known| known.port()).collect();
    assert_eq!(known, KEPT.collect(), "a port was not kept");
    let at = crowd.target();
    let server = world.beyond.run(|| bind::udp(at)).unwrap();
    let drops = || world.dropped("nat_ports_exhausted");
    assert_eq!(drops(), 0, "a port was looked for");
    if !with_agent {
        world.node().kill_agent().unwrap();
        return ask(world.pod(2), &server);
    }
    let found = ask(world.pod(2), &server);
    assert!(drops() >= found.refused_at_first as u64);
    found
}

/// All others ask at once, and again until each is answered.
fn ask(pod: &Pod, server: &UdpSocket) -> Found {
    let to = server.local_addr().unwrap();
    let client = |port| {
        let client = pod
            .place()
            .run(|| bind::udp(SocketAddr::new(any(to.ip()), port)));
        let client = client.unwrap();
        client.connect(to).unwrap();
        client.set_nonblocking(true).unwrap();
        client
    };
    let hears = |client: &UdpSocket| client.recv(&mut [0; 8]).is_ok();
    let mut waiting: Vec<_> = OTHERS.map(client).collect();
    let mut given = BTreeSet::new();
    let mut found = Found {
        refused_at_first: 0,
        tries: 0,
        longest: Duration::ZERO,
    };
    let began = Instant::now();
    while !waiting.is_empty() {
        assert!(found.tries < TRIES, "{} found no port", waiting.len());
        found.tries += 1;
        for client in &waiting {
            client.send(b"?").unwrap();
        }
        let until = Instant::now() + AGAIN;
        while !waiting.is_empty() && Instant::now() < until {
            if readable(server, Instant::now() + LOOK).unwrap() {
                let (_, from) = server.recv_from(&mut [0; 8]).unwrap();
                server.send_to(b"!", from).unwrap();
                given.insert(from.port());
            }
            let before = waiting.len();
            waiting.retain(|client| !hears(client));
            if waiting.len() < before {
                found.longest = began.elapsed();
            }
        }
        if found.tries == 1 {
            found.refused_at_first = waiting.len();
        }
    }
    assert_eq!(given.len(), OTHERS.len());
    assert!(given.iter().all(|port| !KEPT.contains(port)), "{given:?}");
    found
}

impl Found {
    fn print(&self, what: &str) {
        let Self {
            refused_at_first,
            tries,
            longest,
        } = self;
        println!(
            "{what}: {refused_at_first} of {} refused at first, all had a port after {tries} tries and {longest:?}",
            OTHERS.len()
        );
    }
}
