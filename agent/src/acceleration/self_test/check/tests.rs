//! That the check sees what it is there to see: connections in memory that do something wrong.

use super::*;
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// What a connection does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// A message overtakes the one before it, once there are many.
    Overtakes,
    /// What is sent as soon as connected comes twice.
    Repeats,
    /// Takes whatever is sent, whether or not the other end reads.
    Hoards,
    /// The same of a socket with small buffers only.
    HoardsSmall,
    /// Stops once a reader fell behind.
    Stops,
    /// Sends back what it is sent.
    Echoes,
    /// What comes last before the end is not passed on.
    Forgets,
}

/// What is on its way in one direction.
#[derive(Default)]
struct Queue {
    bytes: VecDeque<u8>,
    /// Of the message that was sent last.
    last: usize,
    messages: usize,
    is_finished: bool,
    was_full: bool,
}

struct Ends {
    flaw: Flaw,
    room: usize,
    out: Arc<Mutex<Queue>>,
    into: Arc<Mutex<Queue>>,
    is_over: Arc<AtomicBool>,
}

fn would_block<T>() -> io::Result<T> {
    Err(io::ErrorKind::WouldBlock.into())
}

impl End for Ends {
    fn send(&self, message: &[u8], wait: bool) -> io::Result<usize> {
        loop {
            if self.is_over.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let mut queue = match self.flaw {
                Flaw::Echoes => self.into.lock().unwrap(),
                _ => self.out.lock().unwrap(),
            };
            let room = self.room.saturating_sub(queue.bytes.len());
            if room > 0 {
                let len = room.min(message.len());
                let message = &message[..len];
                queue.messages += 1;
                if self.flaw == Flaw::Overtakes && queue.messages % 50 == 0 {
                    let at = queue.bytes.len().saturating_sub(queue.last);
                    let before = queue.bytes.split_off(at);
                    queue.bytes.extend(message);
                    queue.bytes.extend(before);
                } else {
                    queue.bytes.extend(message);
                }
                if self.flaw == Flaw::Repeats && queue.messages == 1 {
                    queue.bytes.extend(message);
                }
                queue.last = len;
                return Ok(len);
            }
            queue.was_full = true;
            drop(queue);
            if !wait {
                return would_block();
            }
            thread::yield_now();
        }
    }

    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut queue = self.into.lock().unwrap();
        if queue.was_full && self.flaw == Flaw::Stops {
            return would_block();
        }
        if queue.is_finished && self.flaw == Flaw::Forgets {
            let (whole, last) = (queue.bytes.len(), queue.last);
            queue.bytes.truncate(whole.saturating_sub(last));
            queue.last = 0;
        }
        let len = into.len().min(queue.bytes.len());
        if len == 0 && !queue.is_finished {
            return would_block();
        }
        for (place, byte) in into.iter_mut().zip(queue.bytes.drain(..len)) {
            *place = byte;
        }
        Ok(len)
    }

    fn wait(&self, _: bool) -> io::Result<()> {
        thread::yield_now();
        Ok(())
    }

    fn is_held_back(&self) -> io::Result<bool> {
        Ok(true)
    }

    fn finish(&self) -> io::Result<()> {
        self.out.lock().unwrap().is_finished = true;
        Ok(())
    }

    fn abort(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

impl Connect for Flaw {
    type End = Ends;

    fn pair(
        &self,
        kind: Kind,
        early: &dyn Fn(&Ends) -> Result<(), Fault>,
    ) -> Result<[Ends; 2], Fault> {
        let [up, down] = [(); 2].map(|()| Arc::<Mutex<Queue>>::default());
        let is_over = Arc::<AtomicBool>::default();
        let end = |out: &Arc<Mutex<Queue>>, into: &Arc<Mutex<Queue>>| Ends {
            flaw: *self,
            room: match (self, kind.small) {
                (Self::Hoards, _) | (Self::HoardsSmall, true) => usize::MAX,
                (_, true) => 32 << 10,
                (_, false) => 1 << 20,
            },
            out: out.clone(),
            into: into.clone(),
            is_over: is_over.clone(),
        };
        let ends = [end(&up, &down), end(&down, &up)];
        early(&ends[0])?;
        Ok(ends)
    }
}

#[test]
fn connections_without_a_flaw_pass() {
    check(&Flaw::None).unwrap();
}

#[test]
fn bytes_in_another_order_are_noticed() {
    for flaw in [Flaw::Overtakes, Flaw::Repeats, Flaw::Echoes] {
        let found = check(&flaw).unwrap_err();
        assert!(matches!(found, Fault::Order { .. }), "{flaw:?}: {found}");
    }
}

#[test]
fn a_sender_that_nothing_holds_back_is_noticed() {
    for (flaw, of) in [
        (Flaw::Hoards, MOST_WAITING),
        (Flaw::HoardsSmall, MOST_WAITING_SMALL),
    ] {
        let found = check(&flaw).unwrap_err();
        let Fault::BackPressure { limit, .. } = found else {
            panic!("{flaw:?}: {found}");
        };
        assert_eq!(limit, of);
    }
}

#[test]
fn bytes_that_do_not_arrive_are_noticed_and_nothing_waits_for_ever() {
    for flaw in [Flaw::Stops, Flaw::Forgets] {
        let began = Instant::now();
        let found = check(&flaw).unwrap_err();
        assert!(matches!(found, Fault::Late { .. }), "{flaw:?}: {found}");
        println!("{flaw:?} after {:?}: {found}", began.elapsed());
    }
}
