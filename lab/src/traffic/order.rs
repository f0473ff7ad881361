//! Datagrams that are sent as fast as they go, each with its number: which of them arrive behind one that was sent later.
//!
//! Their sender stays on one processor, so that they wait in the same queues, one behind the other, as long as they go one way.

use super::{PATIENCE, path::Path, readable, seat::Ends};
use anyhow::{Context as _, Result, anyhow, ensure};
use std::{
    io::ErrorKind,
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Bytes of a datagram; its number is in the first eight.
const LEN: usize = 64;
/// What the last ones on their way have to arrive in.
const LAST: Duration = Duration::from_millis(50);

/// How datagrams arrived, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    pub arrived: u64,
    /// Those that arrived behind one that was sent later.
    pub overtaken: u64,
    /// How many were sent later than one of these until the last that arrived before it.
    pub farthest: u64,
    pub twice: u64,
}

/// What has arrived so far.
#[derive(Debug, Default)]
struct Seen {
    order: Order,
    /// One more than the greatest number.
    next: u64,
    /// The last ones before it, by their number, as bits of a ring.
    ring: Vec<u64>,
}

/// So many numbers back it is known which have arrived.
const BACK: u64 = 1 << 16;

impl Seen {
    fn arrive(&mut self, number: u64) {
        self.ring.resize(BACK as usize / 64, 0);
        // Of those in between none has arrived, and their places are others'.
        for between in (self.next..=number).take(BACK as usize) {
            self.ring[place(between).0] &= !place(between).1;
        }
        let (word, bit) = place(number);
        let behind = (self.next.saturating_sub(1)).saturating_sub(number);
        if behind < BACK && self.ring[word] & bit != 0 {
            self.order.twice += 1;
            return;
        }
        if behind < BACK {
            self.ring[word] |= bit;
        }
        self.order.arrived += 1;
        if number < self.next {
            self.order.overtaken += 1;
            self.order.farthest = self.order.farthest.max(behind);
        }
        self.next = self.next.max(number + 1);
    }
}

fn place(number: u64) -> (usize, u64) {
    let at = number % BACK;
    ((at / 64) as usize, 1 << (at % 64))
}

/// Datagrams by one way until [`Numbered::finish`].
pub struct Numbered {
    name: String,
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<Result<u64>>>,
    receiver: Option<JoinHandle<Result<Order>>>,
}

impl Numbered {
    pub fn start(path: &Path) -> Result<Self> {
        let open = || -> Result<_> {
            let (from, to) = path.datagrams()?;
            to.set_nonblocking(true)?;
            Ok((from, to))
        };
        let (from, to) = open().with_context(|| path.name.clone())?;
        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicBool::new(false));
        let sender = {
            let (path, stop, done) = (path.clone(), stop.clone(), done.clone());
            thread::spawn(move || {
                let ends = Ends::apart(&path.from, &path.to, path.address)?;
                let sent = ends.client.run(|| send(&from, &stop));
                done.store(true, Ordering::Release);
                sent
            })
        };
        let receiver = {
            let path = path.clone();
            thread::spawn(move || {
                let ends = Ends::apart(&path.from, &path.to, path.address)?;
                ends.server.run(|| receive(&to, &done))
            })
        };
        Ok(Self {
            name: path.name.clone(),
            stop,
            sender: Some(sender),
            receiver: Some(receiver),
        })
    }

    /// Ends it: how many were sent, and how they arrived.
    pub fn finish(mut self) -> Result<(u64, Order)> {
        fn join<T>(thread: Option<JoinHandle<Result<T>>>) -> Result<T> {
            let thread = thread.ok_or_else(|| anyhow!("already finished"))?;
            thread.join().map_err(|_| anyhow!("a thread panicked"))?
        }
        self.stop.store(true, Ordering::Relaxed);
        let (sent, order) = (join(self.sender.take()), join(self.receiver.take()));
        let both = || -> Result<_> { Ok((sent?, order?)) };
        both().with_context(|| self.name.clone())
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn send(socket: &UdpSocket, stop: &AtomicBool) -> Result<u64> {
    let mut sent = 0_u64;
    let mut message = [0; LEN];
    while !stop.load(Ordering::Relaxed) {
        message[..8].copy_from_slice(&sent.to_ne_bytes());
        socket.send(&message).context("cannot send")?;
        sent += 1;
    }
    Ok(sent)
}

fn receive(socket: &UdpSocket, done: &AtomicBool) -> Result<Order> {
    let mut seen = Seen::default();
    let mut message = [0; LEN];
    let mut silence = Instant::now() + PATIENCE;
    loop {
        // Asked before the queue is found empty: what was sent before is in there, or on its way.
        let finished = done.load(Ordering::Acquire);
        match socket.recv(&mut message) {
            Ok(LEN) => {
                let mut number = [0; 8];
                number.copy_from_slice(&message[..8]);
                seen.arrive(u64::from_ne_bytes(number));
            }
            Ok(len) => anyhow::bail!("a datagram of {len} bytes arrived"),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if readable(socket, Instant::now() + LAST)? {
                    silence = Instant::now() + PATIENCE;
                } else if finished {
                    return Ok(seen.order);
                }
                ensure!(Instant::now() < silence, "nothing arrives");
            }
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(numbers: impl IntoIterator<Item = u64>) -> Order {
        let mut seen = Seen::default();
        numbers.into_iter().for_each(|number| seen.arrive(number));
        seen.order
    }

    #[test]
    fn what_is_lost_is_not_overtaken() {
        let in_order = Order {
            arrived: 4,
            ..Order::default()
        };
        assert_eq!(order([0, 1, 5, 9]), in_order);
        assert_eq!(order([0, BACK, 3 * BACK, 4 * BACK + 1]), in_order);
    }

    #[test]
    fn what_arrives_behind_a_later_one_is_overtaken() {
        let overtaken = Order {
            arrived: 6,
            overtaken: 3,
            farthest: 4,
            twice: 0,
        };
        assert_eq!(order([0, 5, 1, 3, 4, 6]), overtaken);
    }

    #[test]
    fn what_arrives_twice_is_no_other() {
        for numbers in [[0, 1, 2, 3, 3], [0, 3, 1, 2, 1], [0, 1, 2, 3, 0]] {
            let Order { arrived, twice, .. } = order(numbers);
            assert_eq!((arrived, twice), (4, 1), "{numbers:?}");
        }
        // In the place of one that is long gone.
        assert_eq!(order([3, BACK + 3]).twice, 0);
    }
}
