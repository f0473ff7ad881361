//! Random streams, both ways at once, over connections that are accelerated from the beginning,
//! or later, or no longer: every byte arrives, in its place.
//!
//! `SINABRO_STREAMS` asks for more connections than a normal run has, `SINABRO_SEED` for those of
//! an earlier run, whose seed each run prints.

use super::{World, enrolled, world};
use crate::kit::{self, Pod};
use sinabro_agent::datapath::PodAcceleration;
use sinabro_common::abi::acceleration::{AccelerationCounters, Reason};
use socket2::SockRef;
use std::{
    env,
    io::{self, ErrorKind, IoSlice},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream},
    os::fd::{AsRawFd, RawFd},
    sync::{
        LazyLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Longest stream, and longest message.
const LONGEST: usize = 16 << 20;
const LONGEST_MESSAGE: usize = 1 << 20;
/// At most about so many messages make a stream, and so many reads.
const MESSAGES: usize = 3000;
/// Without a byte for so long, a stream hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// What streams are cut from. Two streams hardly begin at the same place, so a byte that is lost,
/// doubled, late or another stream's is seen.
static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = Random(7);
    (0..(LONGEST + LONGEST_MESSAGE) / 8)
        .flat_map(|_| random.next().to_ne_bytes())
        .collect()
});

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// From 1 to `most`, every magnitude as often as any other.
    fn magnitude(&mut self, most: usize) -> usize {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((most as f64).powf(unit) as usize).clamp(1, most)
    }
}

/// The seed of this run's plans.
fn seed() -> u64 {
    let seed = match env::var("SINABRO_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("SINABRO_SEED={seed}");
    seed
}

/// How many connections, where a normal run has so many.
fn count(normal: usize) -> usize {
    let asked = env::var("SINABRO_STREAMS").map(|count| count.parse::<usize>().unwrap());
    asked.map_or(normal, |asked| (normal * asked).div_ceil(1000))
}

/// One direction of a connection.
struct Way {
    from: usize,
    len: usize,
    seed: u64,
    message: usize,
    piece: usize,
    /// One message (one read) in so many waits up to so many microseconds before it.
    sender_pauses: (usize, usize),
    reader_pauses: (usize, usize),
}

impl Way {
    fn plan(random: &mut Random) -> Self {
        // Half of all streams are short, so that there can be many.
        let len = if random.one_in(2) {
            random.magnitude(20_000)
        } else {
            random.magnitude(LONGEST)
        };
        let least = len.div_ceil(MESSAGES);
        let pauses = |random: &mut Random| match random.below(4) {
            0 => (20, 300),
            1 => (200, 4000),
            _ => (usize::MAX, 1),
        };
        Self {
            from: random.below(LONGEST_MESSAGE),
            len,
            seed: random.next(),
            message: least.max(random.magnitude(LONGEST_MESSAGE)),
            piece: least.max(random.magnitude(LONGEST_MESSAGE)),
            sender_pauses: pauses(random),
            reader_pauses: pauses(random),
        }
    }

    fn bytes(&self) -> &'static [u8] {
        let bytes: &'static Vec<u8> = &BYTES;
        &bytes[self.from..][..self.len]
    }
}

fn pause(random: &mut Random, (one_in, most): (usize, usize)) {
    if random.one_in(one_in) {
        thread::sleep(Duration::from_micros(random.below(most) as u64));
    }
}

/// Waits until a socket can be read or written.
fn wait_for(socket: RawFd, events: i16) {
    let mut poll = libc::pollfd {
        fd: socket,
        events,
        revents: 0,
    };
    // SAFETY: one structure.
    let ready = unsafe { libc::poll(&raw mut poll, 1, PATIENCE.as_millis() as i32) };
    assert_eq!(ready, 1, "nothing happens, events {events:#x}");
}

fn result(len: isize) -> io::Result<usize> {
    usize::try_from(len).map_err(|_| io::Error::last_os_error())
}

fn send(socket: &TcpStream, way: &Way) {
    let fd = socket.as_raw_fd();
    let random = &mut Random(way.seed);
    let waits = random.one_in(2);
    let mut rest = way.bytes();
    while !rest.is_empty() {
        pause(random, way.sender_pauses);
        let piece = &rest[..random.magnitude(way.message).min(rest.len())];
        let mut flags = libc::MSG_NOSIGNAL;
        if !waits {
            flags |= libc::MSG_DONTWAIT;
        }
        if random.one_in(10) && piece.len() < rest.len() {
            flags |= libc::MSG_MORE;
        }
        let parts = piece.split_at(random.below(piece.len() + 1));
        let sent = if random.one_in(4) {
            write_vectored(fd, &[IoSlice::new(parts.0), IoSlice::new(parts.1)], flags)
        } else {
            // SAFETY: the slice's own length.
            result(unsafe { libc::send(fd, piece.as_ptr().cast(), piece.len(), flags) })
        };
        match sent {
            Ok(len) => rest = &rest[len..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for(fd, libc::POLLOUT),
            Err(error) => panic!("sending: {error}, {} bytes to go", rest.len()),
        }
    }
    socket.shutdown(Shutdown::Write).unwrap();
}

fn write_vectored(fd: RawFd, parts: &[IoSlice<'_>], flags: i32) -> io::Result<usize> {
    // SAFETY: all zero is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len();
    // SAFETY: IoSlice is an iovec.
    result(unsafe { libc::sendmsg(fd, &raw const message, flags) })
}

/// Reads into one buffer or, cut in three, into it as three.
fn recv(fd: RawFd, into: &mut [u8], flags: i32, cuts: Option<[usize; 2]>) -> io::Result<usize> {
    let Some([first, second]) = cuts else {
        // SAFETY: the slice's own length.
        return result(unsafe { libc::recv(fd, into.as_mut_ptr().cast(), into.len(), flags) });
    };
    let (one, rest) = into.split_at_mut(first);
    let (two, three) = rest.split_at_mut(second);
    let mut parts = [one, two, three].map(|part| libc::iovec {
        iov_base: part.as_mut_ptr().cast(),
        iov_len: part.len(),
    });
    // SAFETY: all zero is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    // SAFETY: three parts of one slice.
    result(unsafe { libc::recvmsg(fd, &raw mut message, flags) })
}

fn receive(socket: &TcpStream, way: &Way) {
    let fd = socket.as_raw_fd();
    let random = &mut Random(!way.seed);
    let waits = random.one_in(2);
    let expected = way.bytes();
    let mut buffer = vec![0; way.piece];
    let mut at = 0;
    let mut progress = Instant::now();
    loop {
        pause(random, way.reader_pauses);
        let len = random.magnitude(way.piece);
        let into = &mut buffer[..len];
        let mut flags = 0;
        let peeks = random.one_in(8);
        if peeks {
            flags |= libc::MSG_PEEK;
        } else if random.one_in(8) {
            flags |= libc::MSG_WAITALL;
        }
        if !waits {
            flags |= libc::MSG_DONTWAIT;
        }
        let first = random.below(len + 1);
        let cuts = random
            .one_in(4)
            .then(|| [first, random.below(len - first + 1)]);
        match recv(fd, into, flags, cuts) {
            Ok(got) => {
                let rest = &expected[at..];
                assert!(got <= rest.len(), "{got} bytes, {} expected", rest.len());
                if buffer[..got] != rest[..got] {
                    let differs = (0..got).find(|&n| buffer[n] != rest[n]);
                    panic!("byte {} of {} differs", at + differs.unwrap(), way.len);
                }
                if got == 0 {
                    assert_eq!(at, way.len, "the end is too early");
                    return;
                }
                if !peeks {
                    at += got;
                    progress = Instant::now();
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !waits {
                    wait_for(fd, libc::POLLIN);
                }
            }
            Err(error) => panic!("reading: {error} after {at} of {} bytes", way.len),
        }
        assert!(progress.elapsed() < PATIENCE, "{at} of {} bytes", way.len);
    }
}

/// Socket options of one end.
struct Options {
    nodelay: bool,
    sndbuf: Option<usize>,
    rcvbuf: Option<usize>,
}

impl Options {
    fn plan(random: &mut Random, least: usize) -> Self {
        let size = |random: &mut Random| {
            let size = least + random.magnitude(1 << 20);
            random.one_in(4).then_some(size)
        };
        Self {
            nodelay: random.one_in(2),
            sndbuf: size(random),
            rcvbuf: size(random),
        }
    }

    fn set(&self, socket: &TcpStream) {
        socket.set_nodelay(self.nodelay).unwrap();
        let socket = SockRef::from(socket);
        if let Some(size) = self.sndbuf {
            socket.set_send_buffer_size(size).unwrap();
        }
        if let Some(size) = self.rcvbuf {
            socket.set_recv_buffer_size(size).unwrap();
        }
    }
}

/// A connection with both its directions.
struct Plan {
    v6: bool,
    /// Which pod is the server.
    reversed: bool,
    ways: [Way; 2],
    options: [Options; 2],
}

impl Plan {
    fn new(random: &mut Random, least_buffer: usize) -> Self {
        let mut options = || Options::plan(random, least_buffer);
        let options = [options(), options()];
        Self {
            v6: random.one_in(2),
            reversed: random.one_in(2),
            ways: [Way::plan(random), Way::plan(random)],
            options,
        }
    }

    fn run(&self, a: &Pod, b: &Pod) {
        let (server, client) = if self.reversed { (a, b) } else { (b, a) };
        let at = match (a.ifindex == b.ifindex, self.v6) {
            (true, true) => Ipv6Addr::LOCALHOST.into(),
            (true, false) => Ipv4Addr::LOCALHOST.into(),
            (false, true) => server.v6,
            (false, false) => server.v4,
        };
        // A port of its own, of which nothing has been learnt.
        let listener = server.run(|| TcpListener::bind((at, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let client = client.run(|| TcpStream::connect(address).unwrap());
        self.options[0].set(&client);
        let (client, [there, back]) = (&client, &self.ways);
        thread::scope(|scope| {
            scope.spawn(|| send(client, there));
            // What is sent before anybody accepts must not get lost either.
            let server = &listener.accept().unwrap().0;
            self.options[1].set(server);
            thread::scope(|scope| {
                scope.spawn(|| receive(server, there));
                scope.spawn(|| send(server, back));
                scope.spawn(|| receive(client, back));
            });
        });
    }
}

/// Runs so many connections between the two pods, some at a time, and something else beside them
/// again and again.
fn run(w: &mut World, random: &mut Random, count: usize, meanwhile: impl FnMut(&mut World, u64)) {
    let pods = [w.a.clone(), w.b.clone()];
    run_between(pods, w, random, count, meanwhile);
}

/// The same between two pods or, where they are one, inside it.
fn run_between(
    [a, b]: [Pod; 2],
    w: &mut World,
    random: &mut Random,
    count: usize,
    mut meanwhile: impl FnMut(&mut World, u64),
) {
    const AT_ONCE: usize = 12;
    LazyLock::force(&BYTES);
    // Where a buffer does not hold a few segments, TCP waits for timers.
    let least = if a.ifindex == b.ifindex {
        200_000
    } else {
        8000
    };
    let plans: Vec<Plan> = (0..count).map(|_| Plan::new(random, least)).collect();
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                /// Ends the others' wait if this one panics.
                struct Done<'a>(&'a AtomicUsize, &'a AtomicBool);
                impl Drop for Done<'_> {
                    fn drop(&mut self) {
                        self.1.fetch_or(thread::panicking(), Ordering::Relaxed);
                        self.0.fetch_add(1, Ordering::Relaxed);
                    }
                }
                let _done = Done(&done, &failed);
                while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if failed.load(Ordering::Relaxed) {
                        return;
                    }
                    plan.run(&a, &b);
                }
            });
        }
        while done.load(Ordering::Relaxed) < AT_ONCE {
            meanwhile(w, random.next());
            thread::sleep(Duration::from_millis(random.below(10) as u64));
        }
    });
}

fn redirected_and_passed(w: &World) -> (u64, u64) {
    let counted = w.all_counters();
    println!("{counted:?}");
    (counted.redirected_bytes, counted.passed_bytes.iter().sum())
}

#[test]
fn random_streams_arrive_whole_and_in_order() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        run(&mut w, random, count(600), |_, _| {});
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}

#[test]
fn random_streams_inside_a_pod_arrive_whole_and_in_order() {
    world(true, true, |mut w| {
        let with_loopback = PodAcceleration {
            loopback: true,
            ..w.a.acceleration()
        };
        w.a.attach_with(w.datapath(), Some(with_loopback));
        let random = &mut Random(seed());
        let pods = [w.a.clone(), w.a.clone()];
        run_between(pods, &mut w, random, count(100), |w, luck| {
            if luck & 15 == 0 {
                w.datapath().evict_accelerated(&w.a.addresses()).unwrap();
            }
        });
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}

#[test]
fn random_streams_survive_eviction() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        run(&mut w, random, count(150), |w, luck| {
            let pod = if luck & 1 == 0 { &w.a } else { &w.b };
            let addresses = &pod.addresses()[..1 + (luck >> 1 & 1) as usize];
            w.datapath().evict_accelerated(addresses).unwrap();
        });
        let counted = w.all_counters();
        assert!(counted.redirected_bytes > 1 << 20, "{counted:?}");
        let evicted = counted.passed_bytes[Reason::Evicted as usize];
        assert!(evicted > 1 << 20, "{counted:?}");
    });
}

#[test]
fn random_streams_survive_restarts_of_the_agent() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let (mut before, mut gained) = (0, 0);
        let count = count(200);
        run(&mut w, random, count, |w, _| {
            w.start(true);
            let now = w.all_counters().redirected_bytes;
            gained += u32::from(now > before);
            before = now;
        });
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
        assert!(gained > 0, "nothing was redirected before the end");
        let counted = w.all_counters();
        let seen = counted.enrolled + counted.skipped.iter().sum::<u64>();
        assert_eq!(seen, 2 * count as u64, "somebody always looks");
    });
}

#[test]
fn random_streams_survive_switching_the_acceleration_off_and_on() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let mut on = true;
        let count = count(200);
        run(&mut w, random, count, |w, _| {
            on = !on;
            w.start(on);
        });
        w.start(true);
        let (redirected, _) = redirected_and_passed(&w);
        assert!(redirected > 1 << 20, "{redirected}");
        let counted = w.all_counters();
        let seen = counted.enrolled + counted.skipped.iter().sum::<u64>();
        assert!(seen < 2 * count as u64, "it was never off");
    });
}

#[test]
fn random_streams_survive_a_pod_that_changes_its_mind() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let mut redirected = 0;
        run(&mut w, random, count(150), |w, luck| {
            // In between, long enough for connections to begin and to go from socket to socket.
            if luck & 7 != 0 {
                return;
            }
            redirected += w.counters(&w.a).redirected_bytes;
            let wish = |wanted| w.a.attach_with(w.datapath(), wanted);
            // Its counters begin at zero.
            wish(None);
            if luck & 0x30 != 0 {
                thread::sleep(Duration::from_micros(luck >> 32 & 0xfff));
            }
            wish(Some(w.a.acceleration()));
        });
        redirected += w.counters(&w.a).redirected_bytes;
        println!("{redirected}");
        assert!(redirected > 1 << 16, "{redirected}");
    });
}

/// A connection in the middle of a stream when its pods may be accelerated has data in TCP's
/// queues.
#[test]
fn connections_from_before_stay_plain_and_new_ones_do_not() {
    world(true, false, |mut w| {
        let random = &mut Random(seed());
        let mut plans: Vec<Plan> = (0..8).map(|_| Plan::new(random, 8000)).collect();
        for way in plans.iter_mut().flat_map(|plan| &mut plan.ways) {
            // Long enough to be in the middle.
            way.len = 4 << 20;
            way.message = 40_000;
            way.piece = 40_000;
            way.reader_pauses = (4, 4000);
        }
        let done = AtomicUsize::new(0);
        let (a, b) = (w.a.clone(), w.b.clone());
        thread::scope(|scope| {
            for plan in &plans {
                scope.spawn(|| {
                    plan.run(&a, &b);
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            kit::eventually("all in the middle", || {
                let counted = w.datapath().pod_counters(w.b.ifindex).unwrap().unwrap();
                counted.tx_bytes + counted.rx_bytes > 16 << 20
            });
            w.b.attach(w.datapath());
            thread::sleep(Duration::from_millis(20));
            assert!(done.load(Ordering::Relaxed) < plans.len(), "too short");
            assert_eq!(enrolled(), []);
            assert_eq!(w.all_counters(), AccelerationCounters::default());
        });
        run(&mut w, random, count(50), |_, _| {});
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}

#[test]
fn random_streams_arrive_where_everybody_waits_for_a_cpu() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let stop = AtomicBool::new(false);
        let busy = 2 * thread::available_parallelism().unwrap().get();
        thread::scope(|scope| {
            for _ in 0..busy {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run(&mut w, random, count(100), |_, _| {});
            }));
            stop.store(true, Ordering::Relaxed);
            result.unwrap();
        });
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}
