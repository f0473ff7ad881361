//! What was sent and when it arrived, message by message, and what follows from that.

use std::{ops::Range, time::Duration};

/// Nanoseconds of CLOCK_REALTIME, the clock of the kernel's receive timestamps.
pub type Stamp = i64;

/// One direction of one path. The place in each list is a message's sequence number.
#[derive(Debug, Default)]
pub struct Series {
    sent: Vec<Stamp>,
    arrived: Vec<Option<Stamp>>,
    count: usize,
    again: u64,
}

/// A time during which nothing that was sent got through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// When the first message was sent that had to wait, or never arrived.
    pub at: Stamp,
    pub length: Duration,
}

impl Gap {
    fn end(self) -> Stamp {
        self.at + nanos(self.length)
    }
}

impl Series {
    /// Notes that a message is being sent; its sequence number.
    pub fn send(&mut self, now: Stamp) -> u64 {
        self.sent.push(now);
        self.arrived.push(None);
        self.sent.len() as u64 - 1
    }

    pub fn arrive(&mut self, sequence: u64, now: Stamp) {
        let slot = usize::try_from(sequence).ok();
        match slot.and_then(|slot| self.arrived.get_mut(slot)) {
            Some(slot @ None) => {
                *slot = Some(now);
                self.count += 1;
            }
            Some(Some(_)) => self.again += 1,
            // Not this meter's: ports are its own, so nobody sends such a thing but by mistake.
            None => {}
        }
    }

    pub fn sent(&self) -> usize {
        self.sent.len()
    }

    pub fn arrived(&self) -> usize {
        self.count
    }

    /// Messages that arrived more than once.
    pub fn again(&self) -> u64 {
        self.again
    }

    /// For each message sent in `window`, how long it was until it or a later one arrived. It is
    /// the network's time alone: a sender that gets no processor sends less, and waits no longer.
    /// `end` is when the watch ended; nothing arrived after it.
    pub fn waits(&self, window: Range<Stamp>, end: Stamp) -> Vec<Gap> {
        let mut next = end;
        let mut waits = Vec::new();
        for (sent, arrived) in self.sent.iter().zip(&self.arrived).rev() {
            next = arrived.unwrap_or(next).min(next);
            if window.contains(sent) {
                let waited = u64::try_from(next - sent).unwrap_or(0);
                waits.push(Gap {
                    at: *sent,
                    length: Duration::from_nanos(waited),
                });
            }
        }
        waits
    }
}

/// Times during which the machine itself stood still, in order and without overlap.
#[derive(Debug, Default)]
pub struct Stalls(Vec<Gap>);

impl Stalls {
    /// From the waits of messages that only the machine can have held up.
    pub fn new(waits: impl IntoIterator<Item = Gap>, above: Duration) -> Self {
        let mut waits: Vec<Gap> = waits.into_iter().filter(|gap| gap.length > above).collect();
        waits.sort_unstable_by_key(|gap| gap.at);
        let mut stalls: Vec<Gap> = Vec::new();
        for wait in waits {
            match stalls.last_mut() {
                Some(last) if last.end() >= wait.at => {
                    let end = last.end().max(wait.end());
                    last.length = Duration::from_nanos((end - last.at) as u64);
                }
                _ => stalls.push(wait),
            }
        }
        Self(stalls)
    }

    /// What is left of a gap without the times at which the machine stood still.
    pub fn without(&self, gap: Gap) -> Duration {
        let overlap = |stall: &Gap| (stall.end().min(gap.end()) - stall.at.max(gap.at)).max(0);
        let stalled: Stamp = self.0.iter().map(overlap).sum();
        gap.length
            .saturating_sub(Duration::from_nanos(stalled as u64))
    }
}

pub fn nanos(time: Duration) -> Stamp {
    Stamp::try_from(time.as_nanos()).unwrap_or(Stamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Stamp = 1_000_000;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// Sent every millisecond; each arrives after so many, or never.
    fn series(delays: &[Option<Stamp>]) -> Series {
        let mut series = Series::default();
        for (at, delay) in (0..).zip(delays) {
            let sequence = series.send(at * MS);
            if let Some(delay) = delay {
                series.arrive(sequence, (at + delay) * MS);
            }
        }
        series
    }

    fn longest(series: &Series) -> Gap {
        let mut waits = series.waits(0..100 * MS, 100 * MS);
        waits.sort_by_key(|gap| gap.length);
        waits.pop().unwrap_or(Gap {
            at: 0,
            length: ms(0),
        })
    }

    #[test]
    fn a_gap_is_from_the_first_that_had_to_wait_to_the_next_arrival() {
        let lossy = series(&[Some(0), Some(0), None, None, None, Some(0)]);
        let gap = Gap {
            at: 2 * MS,
            length: ms(3),
        };
        assert_eq!(longest(&lossy), gap);
        // The same outage, by a queue that keeps what it holds up.
        let late = series(&[Some(0), Some(0), Some(3), Some(2), Some(1), Some(0)]);
        assert_eq!(longest(&late), gap);
        assert_eq!((lossy.arrived(), late.arrived()), (3, 6));
    }

    #[test]
    fn a_message_that_is_overtaken_is_late_but_no_gap() {
        let overtaken = series(&[Some(9), Some(0), Some(0)]);
        assert_eq!(longest(&overtaken).length, ms(1));
    }

    #[test]
    fn what_never_arrives_is_a_gap_to_the_end() {
        let dead = series(&[Some(0), None]);
        assert_eq!(longest(&dead).length, ms(99));
    }

    #[test]
    fn a_silent_sender_makes_no_gap() {
        let mut series = Series::default();
        for at in [0, 50 * MS] {
            let sequence = series.send(at);
            series.arrive(sequence, at + MS);
        }
        assert_eq!(longest(&series).length, ms(1));
    }

    #[test]
    fn copies_and_strangers_are_told_from_arrivals() {
        let mut series = series(&[Some(0)]);
        series.arrive(0, 5);
        series.arrive(7, 5);
        series.arrive(u64::MAX, 5);
        assert_eq!((series.arrived(), series.again()), (1, 1));
    }

    #[test]
    fn only_what_the_machine_did_meanwhile_is_forgiven() {
        let gap = |at: Stamp, length: u64| Gap {
            at: at * MS,
            length: ms(length),
        };
        let stalls = Stalls::new([gap(30, 10), gap(10, 5), gap(12, 6), gap(60, 1)], ms(1));
        assert_eq!(stalls.0, [gap(10, 8), gap(30, 10)]);
        assert_eq!(stalls.without(gap(0, 5)), ms(5));
        assert_eq!(stalls.without(gap(0, 50)), ms(32));
        assert_eq!(stalls.without(gap(14, 20)), ms(12));
        assert_eq!(stalls.without(gap(33, 2)), ms(0));
    }
}
