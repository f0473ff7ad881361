//! One direction of a connection: what is sent and read, in which pieces, and when.

use std::{
    io::{self, ErrorKind, IoSlice},
    net::{Shutdown, TcpStream},
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
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
pub static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = Random(7);
    (0..(LONGEST + LONGEST_MESSAGE) / 8)
        .flat_map(|_| random.next().to_ne_bytes())
        .collect()
});

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// From 1 to `most`, every magnitude as often as any other.
    pub fn magnitude(&mut self, most: usize) -> usize {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((most as f64).powf(unit) as usize).clamp(1, most)
    }
}

/// One direction of a connection.
pub struct Way {
    from: usize,
    pub len: usize,
    seed: u64,
    pub message: usize,
    pub piece: usize,
    /// One message (one read) in so many waits up to so many microseconds before it.
    sender_pauses: (usize, usize),
    pub reader_pauses: (usize, usize),
    /// While it is set, no more than half is read.
    pub held: Arc<AtomicBool>,
}

impl Way {
    pub fn plan(random: &mut Random) -> Self {
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
            held: Arc::default(),
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

pub fn send(socket: &TcpStream, way: &Way) {
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

pub fn receive(socket: &TcpStream, way: &Way) {
    let fd = socket.as_raw_fd();
    let random = &mut Random(!way.seed);
    let waits = random.one_in(2);
    let expected = way.bytes();
    let mut buffer = vec![0; way.piece];
    let mut at = 0;
    let mut progress = Instant::now();
    loop {
        pause(random, way.reader_pauses);
        while at >= way.len / 2 && way.held.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
            progress = Instant::now();
        }
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
