//! Whether connections keep what TCP promises: bytes arrive complete and in the order in which they
//! were sent, and a reader that does not read holds back the sender.
//!
//! Each direction of an accelerated connection begins with the other socket and goes on through TCP
//! once its reader fell behind, so each script has readers that do.

use std::{
    io, thread,
    time::{Duration, Instant},
};

/// How long bytes may be on their way without any arriving.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a sender without room waits for room at most, where nothing says that none will come.
const MOMENT: Duration = Duration::from_millis(25);
/// Bytes that may wait for a reader: as much as the kernel gives by itself, and more than a socket
/// with buffers of 16 KiB ever holds.
const MOST_WAITING: u64 = 8 << 20;
const MOST_WAITING_SMALL: u64 = 512 << 10;
/// Longest message.
const LONGEST: usize = 4 << 20;
/// Bytes after which the stream repeats itself: a prime, so that no two messages look alike.
const PERIOD: usize = 1_048_573;

#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("bytes arrive in another order than sent: {what}, byte {place}")]
    Order { what: &'static str, place: u64 },
    #[error("a slow reader does not hold back its sender: {what}, more than {limit} bytes wait")]
    BackPressure { what: &'static str, limit: u64 },
    #[error("bytes do not arrive: {what}, byte {place}")]
    Late { what: &'static str, place: u64 },
    #[error("cannot use a connection: {what}")]
    Io {
        what: &'static str,
        source: io::Error,
    },
}

impl Fault {
    /// Whether it says something of the connection. Bytes that are late may be so on a busy machine.
    pub fn is_found(&self) -> bool {
        matches!(self, Self::Order { .. } | Self::BackPressure { .. })
    }
}

/// For `map_err`.
pub fn failed(what: &'static str) -> impl Fn(io::Error) -> Fault {
    move |source| Fault::Io { what, source }
}

/// One end of a connection.
pub trait End: Sync {
    /// Sends a message. One that waits sends at least a part, unless nothing moves for long.
    fn send(&self, message: &[u8], wait: bool) -> io::Result<usize>;
    /// Receives what is there, without waiting.
    fn receive(&self, into: &mut [u8]) -> io::Result<usize>;
    /// Waits a moment until something can be received, or sent.
    fn wait(&self, to_send: bool) -> io::Result<()>;
    /// After a refused send: whether what was sent waits for the reader alone.
    fn is_held_back(&self) -> io::Result<bool>;
    /// Sends nothing more.
    fn finish(&self) -> io::Result<()>;
    /// Ends calls that wait.
    fn abort(&self);
}

/// How a connection is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kind {
    /// With TCP_FASTOPEN_CONNECT: connecting with the first data.
    pub fast_open: bool,
    /// With small buffers on the way from client to server.
    pub small: bool,
}

/// Makes connections.
pub trait Connect {
    type End: End;
    /// A client and a server. `early` is done by the client before the server has accepted.
    fn pair(
        &self,
        kind: Kind,
        early: &dyn Fn(&Self::End) -> Result<(), Fault>,
    ) -> Result<[Self::End; 2], Fault>;
}

/// All of it.
///
/// # Errors
/// The first thing that is not as it should be.
pub fn check(connect: &impl Connect) -> Result<(), Fault> {
    let stream = Stream::new();
    for _ in 0..40 {
        first_messages(connect, &stream, Kind::default())?;
    }
    let fast_open = Kind {
        fast_open: true,
        ..Kind::default()
    };
    // The second connection may know the server's cookie.
    for _ in 0..2 {
        first_messages(connect, &stream, fast_open)?;
    }
    both_ways(connect, &stream)?;
    message_sizes(connect, &stream)?;
    behind_and_again(connect, &stream)?;
    held_back(connect, &stream)
}

/// Bytes that tell their place.
struct Stream(Vec<u8>);

impl Stream {
    fn new() -> Self {
        let mut bytes = Vec::with_capacity(PERIOD + LONGEST);
        let mut word = 0x9e37_79b9_7f4a_7c15_u64;
        while bytes.len() < PERIOD {
            // xorshift64 (Marsaglia 2003).
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.truncate(PERIOD);
        while bytes.len() < PERIOD + LONGEST {
            let more = PERIOD.min(PERIOD + LONGEST - bytes.len());
            bytes.extend_from_within(..more);
        }
        Self(bytes)
    }

    fn part(&self, place: u64, len: usize) -> &[u8] {
        let start = (place % PERIOD as u64) as usize;
        &self.0[start..start + len.min(LONGEST)]
    }
}

/// One direction of a connection.
struct Way<'a, E> {
    stream: &'a Stream,
    what: &'static str,
    from: &'a E,
    to: &'a E,
    /// Places in the stream.
    sent: u64,
    received: u64,
    slow: bool,
}

impl<'a, E: End> Way<'a, E> {
    /// From the first of two ends to the second, and back. They begin at different places, so that
    /// bytes in the wrong direction are noticed.
    fn each(stream: &'a Stream, what: &'static str, [client, server]: &'a [E; 2]) -> [Self; 2] {
        let way = |from, to, place| Self {
            stream,
            what,
            from,
            to,
            sent: place,
            received: place,
            slow: false,
        };
        [way(client, server, 0), way(server, client, 500_009)]
    }

    /// Sends messages of these sizes, and waits for room.
    fn send(&mut self, sizes: &[usize]) -> Result<(), Fault> {
        self.sent = write(self.stream, self.from, self.sent, sizes)?;
        Ok(())
    }

    /// Sends messages until there is no room, or `most` bytes wait; whether there was no room.
    fn fill(&mut self, size: usize, most: u64) -> Result<bool, Fault> {
        let most = self.sent + most;
        let (mut was_held, mut since) = (false, None);
        while self.sent < most {
            match self.from.send(self.stream.part(self.sent, size), false) {
                Ok(sent) => {
                    self.sent += sent as u64;
                    (was_held, since) = (false, None);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let since = since.get_or_insert_with(Instant::now);
                    if was_held || since.elapsed() > MOMENT {
                        return Ok(true);
                    }
                    was_held = self.from.is_held_back().map_err(failed("ask"))?;
                    if !was_held {
                        self.from.wait(true).map_err(failed("poll"))?;
                    }
                }
                Err(error) => return Err(failed("send")(error)),
            }
        }
        Ok(false)
    }

    /// Receives up to a place of the stream.
    fn receive(&mut self, up_to: u64) -> Result<(), Fault> {
        let mut buffer = vec![0; if self.slow { 40_000 } else { 1 << 16 }];
        while self.received < up_to {
            let most = buffer.len().min((up_to - self.received) as usize);
            match self.next(&mut buffer[..most])? {
                0 => return Err(self.late()),
                len => self.check(&buffer[..len])?,
            }
            if self.slow {
                thread::sleep(Duration::from_micros(300));
            }
        }
        Ok(())
    }

    /// The next bytes; none at the end.
    fn next(&self, into: &mut [u8]) -> Result<usize, Fault> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.to.receive(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() > until {
                        return Err(self.late());
                    }
                    self.to.wait(false).map_err(failed("poll"))?;
                }
                other => return other.map_err(failed("receive")),
            }
        }
    }

    fn check(&mut self, data: &[u8]) -> Result<(), Fault> {
        let expected = self.stream.part(self.received, data.len());
        if data == expected {
            self.received += data.len() as u64;
            return Ok(());
        }
        let mut pairs = data.iter().zip(expected);
        let at = pairs.position(|(found, right)| found != right);
        Err(Fault::Order {
            what: self.what,
            place: self.received + at.unwrap_or(0) as u64,
        })
    }

    /// What was sent, and then the end.
    fn end(&mut self) -> Result<(), Fault> {
        self.from.finish().map_err(failed("shutdown"))?;
        self.receive(self.sent)?;
        match self.next(&mut [0; 16])? {
            0 => Ok(()),
            _ => Err(Fault::Order {
                what: self.what,
                place: self.received,
            }),
        }
    }

    fn late(&self) -> Fault {
        Fault::Late {
            what: self.what,
            place: self.received,
        }
    }
}

/// Sends messages of these sizes from a place of the stream; the place after them.
fn write(stream: &Stream, to: &impl End, from: u64, sizes: &[usize]) -> Result<u64, Fault> {
    let mut place = from;
    for &size in sizes {
        let mut rest = stream.part(place, size);
        place += rest.len() as u64;
        while !rest.is_empty() {
            let sent = to.send(rest, true).map_err(failed("send"))?;
            rest = &rest[sent..];
        }
    }
    Ok(place)
}

/// Several directions at once, each with a thread that sends and one that receives.
fn at_once<E: End>(ways: &mut [Way<'_, E>], sizes: &[usize]) -> Result<(), Fault> {
    thread::scope(|scope| {
        let mut sending = Vec::new();
        let mut receiving = Vec::new();
        for way in ways {
            let (stream, from, place) = (way.stream, way.from, way.sent);
            sending.push(scope.spawn(move || write(stream, from, place, sizes)));
            let total: usize = sizes.iter().sum();
            way.sent += total as u64;
            receiving.push(scope.spawn(move || {
                way.receive(way.sent).inspect_err(|_| {
                    way.from.abort();
                    way.to.abort();
                })
            }));
        }
        let panicked = |_| Err(failed("look at")(io::Error::other("a thread panicked")));
        // What was received tells more than that a sender was ended.
        let received = receiving
            .into_iter()
            .map(|t| t.join().unwrap_or_else(panicked));
        received.collect::<Result<(), _>>()?;
        let sent = sending.into_iter().map(|t| {
            let sent = t.join().map(|sent| sent.map(drop));
            sent.unwrap_or_else(panicked)
        });
        sent.collect()
    })
}

fn pair<C: Connect>(connect: &C) -> Result<[C::End; 2], Fault> {
    connect.pair(Kind::default(), &|_| Ok(()))
}

/// The client sends before the server has accepted, the server before it has read.
fn first_messages(connect: &impl Connect, stream: &Stream, kind: Kind) -> Result<(), Fault> {
    let early = [1000; 4];
    let ends = connect.pair(kind, &|client| write(stream, client, 0, &early).map(drop))?;
    let [mut up, mut down] = Way::each(stream, "messages sent as soon as connected", &ends);
    up.sent = 4000;
    down.send(&early)?;
    up.send(&[1000])?;
    up.receive(up.sent)?;
    down.receive(down.sent)
}

/// Small and large messages, slow and fast readers.
fn both_ways(connect: &impl Connect, stream: &Stream) -> Result<(), Fault> {
    const TOTAL: usize = 1 << 20;
    let lists: [&[usize]; 4] = [
        &[1, 3, 70_000, 17, 4096, 100],
        &[65_536],
        &[100, 1, 1000],
        &[200_000, 5],
    ];
    for (n, list) in lists.into_iter().enumerate() {
        let round: usize = list.iter().sum();
        let sizes = list.repeat(TOTAL / round + 1);
        let ends = pair(connect)?;
        let mut ways = Way::each(stream, "messages in both directions", &ends);
        (ways[0].slow, ways[1].slow) = (n % 2 == 0, n > 1);
        at_once(&mut ways, &sizes)?;
    }
    Ok(())
}

/// One message after the other.
fn message_sizes(connect: &impl Connect, stream: &Stream) -> Result<(), Fault> {
    let ends = pair(connect)?;
    let mut ways = Way::each(stream, "messages of many sizes", &ends);
    for size in [1, 2, 65_535, 65_536, 65_537, 1 << 20, LONGEST, 1] {
        at_once(&mut ways, &[size])?;
    }
    Ok(())
}

/// A reader that falls behind and catches up, again and again.
fn behind_and_again(connect: &impl Connect, stream: &Stream) -> Result<(), Fault> {
    for direction in 0..2 {
        let ends = pair(connect)?;
        let mut ways = Way::each(stream, "a reader that falls behind", &ends);
        let way = &mut ways[direction];
        for size in [5000, 70_000, 1000, 300_000] {
            way.fill(size, 2 << 20)?;
            // Not to the end: what follows comes behind what is still there.
            way.receive(way.sent - (way.sent - way.received) / 16)?;
            way.receive(way.sent)?;
            way.send(&[10])?;
        }
        way.end()?;
    }
    Ok(())
}

/// A reader that does not read.
fn held_back(connect: &impl Connect, stream: &Stream) -> Result<(), Fault> {
    for (small, limit) in [(false, MOST_WAITING), (true, MOST_WAITING_SMALL)] {
        let kind = Kind {
            small,
            ..Kind::default()
        };
        let ends = connect.pair(kind, &|_| Ok(()))?;
        let what = if small {
            "small buffers"
        } else {
            "one that does not read"
        };
        let [mut way, _] = Way::each(stream, what, &ends);
        if !way.fill(10_000, limit)? {
            return Err(Fault::BackPressure { what, limit });
        }
        way.receive(way.sent)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
