//! Agents are killed again and again, at whatever they are doing, while accelerated connections
//! carry random bytes of which every one is looked at. The programs are replaced in place each time.

use sinabro_common::api::{AccelerationReport, Request, Response, TcpAcceleration};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Pod,
    kernel::unaccelerated,
    traffic::{PATIENCE, accept, connect, uninterrupted},
    wait::eventually,
};
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How often the agent is killed.
const KILLS: u64 = 12;
/// Of messages, so that some are one piece and some are many.
const LONGEST: u64 = 40_000;

/// Bytes that both ends know and nobody else could guess (xorshift64*).
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn message(&mut self) -> Vec<u8> {
        // Most are short.
        let longest = if self.next().is_multiple_of(4) {
            LONGEST
        } else {
            200
        };
        let len = 1 + self.next() % longest;
        (0..len.div_ceil(8))
            .flat_map(|_| self.next().to_le_bytes())
            .take(len as usize)
            .collect()
    }
}

/// Reads what must be the next bytes, in whatever pieces they come.
fn expect(from: &mut TcpStream, expected: &[u8], what: &str) {
    let mut got = vec![0; expected.len()];
    let (mut at, deadline) = (0, Instant::now() + PATIENCE);
    while at < got.len() {
        match uninterrupted(|| from.read(&mut got[at..])) {
            Ok(0) => panic!("{what}: the end after {at} bytes"),
            Ok(len) => at += len,
            // A read that is woken for another reason than data (tcp_bpf_recvmsg).
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {}
            Err(error) => panic!("{what}: {error}"),
        }
    }
    let differs = got.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{what}: other bytes than were sent");
}

/// A connection on which both ends send what the other knows.
struct Talk {
    exchanges: Arc<AtomicU64>,
    threads: [JoinHandle<()>; 2],
}

impl Talk {
    /// With so many messages on their way at a time.
    fn start([from, to]: &[Pod; 2], address: IpAddr, ahead: usize, end: &Arc<AtomicBool>) -> Self {
        let listener = to.place().run(|| Ok(TcpListener::bind((address, 0))?));
        let listener = listener.unwrap();
        let target = listener.local_addr().unwrap();
        let client = from.place().run(|| Ok(connect(target)?)).unwrap();
        let (server, _) = accept(&listener, Instant::now() + PATIENCE).unwrap();
        let exchanges = Arc::new(AtomicU64::new(0));
        let seed = (u64::from(target.port()) << 32) | (ahead as u64 + 1);
        let name = format!("{address}, {ahead} ahead");
        let asker = {
            let (mut client, exchanges) = (client, exchanges.clone());
            let (end, name) = (end.clone(), name.clone());
            move || {
                let (mut own, mut theirs) = (Random(seed), Random(!seed));
                while !end.load(Ordering::Relaxed) {
                    for _ in 0..ahead {
                        client.write_all(&own.message()).unwrap();
                    }
                    for _ in 0..ahead {
                        expect(&mut client, &theirs.message(), &name);
                    }
                    exchanges.fetch_add(ahead as u64, Ordering::Relaxed);
                }
            }
        };
        let answerer = move || {
            let (mut server, mut own, mut theirs) = (server, Random(!seed), Random(seed));
            loop {
                // The client may have ended between two messages.
                if at_end(&server, &name) {
                    return;
                }
                expect(&mut server, &theirs.message(), &name);
                server.write_all(&own.message()).unwrap();
            }
        };
        Self {
            exchanges,
            threads: [thread::spawn(asker), thread::spawn(answerer)],
        }
    }
}

/// Whether nothing comes any more.
fn at_end(socket: &TcpStream, what: &str) -> bool {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match socket.peek(&mut [0]) {
            Ok(len) => return len == 0,
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {}
            Err(error) => panic!("{what}: {error}"),
        }
    }
}

fn acceleration(node: &Node) -> AccelerationReport {
    match node.ask(Request::Acceleration) {
        Ok(Response::Acceleration(report)) => report,
        other => panic!("{other:?}"),
    }
}

#[test]
fn accelerated_connections_outlive_an_agent_killed_at_any_moment() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    let start = || {
        node.start_agent_with(&["--tcp-acceleration=opt-in"])
            .unwrap();
    };
    start();
    node.wait_ready().unwrap();
    if let Some(lacks) = unaccelerated() {
        println!("skipped: no acceleration, {lacks}");
        return;
    }
    let pods =
        ["fast-a", "fast-b"].map(|id| node.add_pod_wishing(id, TcpAcceleration::Enabled).unwrap());
    let end = Arc::new(AtomicBool::new(false));
    let addresses = pods[1].addresses().into_iter();
    let talks: Vec<_> = addresses
        .flat_map(|address| [1, 1, 30].map(|ahead| Talk::start(&pods, address, ahead, &end)))
        .collect();
    let must_flow = |when: &str| {
        let before: Vec<u64> = talks
            .iter()
            .map(|talk| talk.exchanges.load(Ordering::Relaxed))
            .collect();
        eventually(&format!("exchanges {when}"), || {
            let mut both = talks.iter().zip(&before);
            both.all(|(talk, before)| talk.exchanges.load(Ordering::Relaxed) > *before + 20)
        });
    };
    let sent = || node.endpoint(&pods[0]).unwrap().unwrap().tx_packets;
    must_flow("before");
    let before = sent();
    let mut random = Random(KILLS);
    for kill in 0..KILLS {
        node.kill_agent().unwrap();
        must_flow("without an agent");
        start();
        // Every other one is killed while it starts: loading, swapping programs, restoring.
        if kill % 2 == 0 {
            thread::sleep(Duration::from_millis(random.next() % 400));
        } else {
            node.wait_ready().unwrap();
            must_flow("after a start");
        }
    }
    node.kill_agent().unwrap();
    start();
    node.wait_ready().unwrap();
    must_flow("in the end");
    let packets = sent() - before;
    let exchanges: u64 = talks
        .iter()
        .map(|talk| talk.exchanges.load(Ordering::Relaxed))
        .sum();
    // Those that keep thirty messages ahead may find a queue full, and go through TCP then.
    let report = acceleration(node);
    println!("{exchanges} exchanges, {packets} packets on the link; {report:?}");
    assert!(packets < exchanges / 2, "{packets} packets for {exchanges}");
    end.store(true, Ordering::Relaxed);
    for talk in talks {
        for thread in talk.threads {
            thread.join().unwrap();
        }
    }
    // Nothing is left of what they were charged with, whoever saw them end.
    eventually("all memory to be given back", || {
        acceleration(node).memory.unwrap().used == 0
    });
}
