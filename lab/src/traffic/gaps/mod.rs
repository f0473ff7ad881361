//! How long traffic stood still: a datagram every millisecond and a TCP request every second one
//! on each path, each accounted for by its number; of a path with echoes, a datagram every second millisecond, and what comes back.
//!
//! A gap is the network's: the time from the sending of a message until it, or one sent after it,
//! arrives by the kernel's receive timestamp (SO_TIMESTAMPNS). Threads of the meter that get no
//! processor do not lengthen it. They run ahead of all others (SCHED_FIFO) all the same, or the
//! meter would not look when something happens; how much it saw is in its report.
//!
//! What holds up the machine holds up everything, so one more path leads over a cable between two
//! namespaces of the meter's own, where nothing else is: while that one stands still, a gap of
//! another path is not that path's. Between two messages of that one the meter's own threads tell:
//! time in which they wanted to run and did not is the machine's, too. What remains is compared with the same path's longest gap
//! before the first event: [`ALLOWED`] more, and nothing lost, or it is an error that says when
//! and after which event.

mod flow;
mod report;
mod series;

pub use report::Watched;

use super::path::Path;
use crate::place::Place;
use anyhow::{Result, anyhow};
use flow::Flow;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::{
    sys::time::TimeSpec,
    time::{ClockId, ClockNanosleepFlags, clock_nanosleep},
};
use report::STALL;
use series::{Gap, Stamp, nanos};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// How much longer than before a path's longest gap may be while something is done to it.
pub const ALLOWED: Duration = Duration::from_millis(10);

/// Between two datagrams of a path.
const TICK: Duration = Duration::from_millis(1);
/// Requests are sent every so many ticks, if the one before was answered; so are datagrams that come back, in any case.
const TICKS_PER_REQUEST: u64 = 2;
/// Until what was sent last has arrived, or is lost.
const LAST: Duration = Duration::from_secs(2);

/// Watches paths until [`Meter::finish`].
pub struct Meter {
    flows: Arc<Vec<Flow>>,
    events: Mutex<Vec<(Stamp, String)>>,
    started: Stamp,
    stop: Arc<AtomicBool>,
    /// Each with the times in which it did not run.
    threads: Vec<JoinHandle<Result<Vec<Gap>>>>,
}

impl Meter {
    pub fn start(paths: &[Path]) -> Result<Self> {
        let mut flows = Vec::from(Flow::both(&control()?)?);
        flows.iter_mut().for_each(|flow| flow.is_control = true);
        for path in paths {
            flows.extend(Flow::both(path)?);
        }
        let flows = Arc::new(flows);
        let stop = Arc::new(AtomicBool::new(false));
        // Before the threads, so that their errors are the caller's.
        let epoll = watch_all(&flows)?;
        let start =
            |name: &str, run: fn(&[Flow], &Epoll, &AtomicBool) -> Result<Vec<Gap>>, epoll| {
                let (flows, stop) = (flows.clone(), stop.clone());
                let thread = thread::Builder::new().name(name.into());
                thread.spawn(move || {
                    real_time(1)?;
                    run(&flows, &epoll, &stop)
                })
            };
        let none = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let threads = vec![
            start("meter-ear", hear, epoll)?,
            start("meter-tick", |flows, _, stop| tick(flows, stop), none)?,
        ];
        Ok(Self {
            flows,
            events: Mutex::default(),
            started: now()?,
            stop,
            threads,
        })
    }

    /// Watches for a while in which nothing is done: the time that a later one is compared with.
    pub fn watch(&self, time: Duration) {
        thread::sleep(time);
    }

    /// Something is done now. The first event ends the time of comparison.
    pub fn event(&self, what: &str) -> Result<()> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push((now()?, what.into()));
        Ok(())
    }

    /// Ends the watch; what was seen.
    pub fn finish(mut self) -> Result<Watched> {
        let end = now()?;
        for flow in self.flows.iter() {
            flow.end();
        }
        // What does not arrive is an outcome, not an error of the meter's.
        let _ = crate::wait::wait_within(LAST, "the last messages to arrive", || {
            Ok(self.flows.iter().all(Flow::is_complete).then_some(()))
        });
        let heard = now()?;
        self.stop.store(true, Ordering::Relaxed);
        let mut absences = Vec::new();
        for thread in self.threads.drain(..) {
            let joined = thread.join();
            absences.extend(joined.map_err(|_| anyhow!("a meter's thread panicked"))??);
        }
        let events = std::mem::take(
            self.events
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        let watch = self.started..end;
        Ok(Watched::new(&self.flows, events, absences, watch, heard))
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Sends on all flows, one after the other, every [`TICK`]. What was missed is not made up for.
fn tick(flows: &[Flow], stop: &AtomicBool) -> Result<Vec<Gap>> {
    let clock = ClockId::CLOCK_MONOTONIC;
    let mut next = Duration::from(clock.now()?);
    let mut absences = Vec::new();
    for number in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let due = Duration::from(clock.now()?).saturating_sub(next);
        let round = Round::begun(due)?;
        for flow in flows {
            timed(&mut absences, || flow.send(number))?;
        }
        absences.extend(round.end()?);
        next = (next + TICK).max(clock.now()?.into());
        let until = TimeSpec::from_duration(next);
        // An interrupted sleep makes an early tick.
        let _ = clock_nanosleep(clock, ClockNanosleepFlags::TIMER_ABSTIME, &until);
    }
    Ok(absences)
}

fn watch_all(flows: &[Flow]) -> Result<Epoll> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    for (number, flow) in flows.iter().enumerate() {
        for (side, socket) in flow.ears().into_iter().enumerate() {
            let data = (number * 2 + side) as u64;
            epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, data))?;
        }
    }
    Ok(epoll)
}

/// Receives on all flows.
fn hear(flows: &[Flow], epoll: &Epoll, stop: &AtomicBool) -> Result<Vec<Gap>> {
    let mut absences = Vec::new();
    let mut events = vec![EpollEvent::empty(); 64];
    while !stop.load(Ordering::Relaxed) {
        let ready = match epoll.wait(&mut events, EpollTimeout::from(50_u8)) {
            Err(nix::errno::Errno::EINTR) => continue,
            other => other?,
        };
        let round = Round::begun(Duration::ZERO)?;
        for event in &events[..ready] {
            let (flow, side) = (event.data() as usize / 2, event.data() as usize % 2);
            timed(&mut absences, || flows[flow].hear(side, epoll))?;
        }
        absences.extend(round.end()?);
    }
    Ok(absences)
}

/// Both ends of a cable that nothing else uses.
fn control() -> Result<Path> {
    let [from, to] = ["control", "control-peer"].map(Place::fresh);
    let (from, to) = (from?, to?);
    let ends = [1, 2].map(|number| ("eth0", [2, 0x1a, 0xb0, 0, 2, number]));
    from.cable(ends[0], 1500, &to, ends[1])?;
    for (place, address) in [(&from, "198.18.0.1/30"), (&to, "198.18.0.2/30")] {
        place.set_up("eth0", &[address.parse()?])?;
    }
    let address = "198.18.0.2".parse()?;
    Ok(Path::new("a cable of its own", &from, &to, address))
}

/// Ahead of all threads of usual scheduling.
fn real_time(sched_priority: i32) -> Result<()> {
    let first = libc::sched_param { sched_priority };
    // SAFETY: the structure outlives the call; 0 is the calling thread.
    let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const first) };
    nix::errno::Errno::result(set)
        .map(drop)
        .map_err(|errno| anyhow!("the meter's threads cannot run ahead of others: {errno}"))
}

/// What a thread of the meter does in one go.
struct Round {
    due: Stamp,
    /// Of the thread, on a processor.
    ran: Duration,
}

impl Round {
    /// Of a thread that was to wake up some time ago.
    fn begun(late: Duration) -> Result<Self> {
        Ok(Self {
            due: now()? - nanos(late),
            ran: ran()?,
        })
    }

    /// The time in which the thread wanted to run and did not, if it is worth telling. What it did
    /// in the kernel, which is the network's, is no part of it.
    fn end(self) -> Result<Option<Gap>> {
        let passed = u64::try_from(now()? - self.due).unwrap_or(0);
        let length = Duration::from_nanos(passed).saturating_sub(ran()?.saturating_sub(self.ran));
        let at = self.due;
        Ok((length > STALL).then_some(Gap { at, length }))
    }
}

/// Nothing that a thread calls waits for the network. What takes so long nevertheless was held up by the machine, also if that says that the
/// thread ran: a virtual one whose processor was taken away for a while, by a quota, is not told of all of it. It is the one flow whose message
/// was on its way into the network that would seem to have stood still.
fn timed(absences: &mut Vec<Gap>, call: impl FnOnce() -> Result<()>) -> Result<()> {
    let at = now()?;
    call()?;
    let length = Duration::from_nanos(u64::try_from(now()? - at).unwrap_or(0));
    absences.extend((length > ALLOWED).then_some(Gap { at, length }));
    Ok(())
}

fn ran() -> Result<Duration> {
    Ok(ClockId::CLOCK_THREAD_CPUTIME_ID.now()?.into())
}

fn now() -> Result<Stamp> {
    let time = ClockId::CLOCK_REALTIME.now()?;
    Ok(time.tv_sec() * 1_000_000_000 + time.tv_nsec())
}

#[cfg(test)]
mod alone;
