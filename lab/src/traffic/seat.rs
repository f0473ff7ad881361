//! Where the ends of a measured connection are: in which network, on which CPU.
//!
//! An end that wanders between CPUs changes the figures more than what is measured.

use super::{PATIENCE, bind};
use crate::place::Place;
use anyhow::{Context as _, Result, anyhow};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::ClockId,
    unistd::Pid,
};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    ops::AddAssign,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

#[derive(Clone, Copy, Debug)]
pub struct Seat<'a> {
    pub place: &'a Place,
    pub cpu: usize,
}

impl Seat<'_> {
    /// Runs `f` on a thread there. Threads that it starts are there, too.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.place.run(|| {
            sched_setaffinity(Pid::from_raw(0), &cpu_set(self.cpu)?)
                .with_context(|| format!("cannot stay on CPU {}", self.cpu))?;
            f()
        })
    }
}

/// A client, a server and its address.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    pub client: Seat<'a>,
    pub server: Seat<'a>,
    pub address: IpAddr,
    /// What the client asks instead, of whatever port, where something on the way leads from there to the server.
    pub frontend: Option<IpAddr>,
}

impl<'a> Ends<'a> {
    /// Each end on a CPU of its own, as far as there are two.
    pub fn apart(client: &'a Place, server: &'a Place, address: IpAddr) -> Result<Self> {
        Ok(Self::on(two_cpus()?, [client, server], address))
    }

    /// Client and server, each on its CPU.
    pub fn on(cpus: [usize; 2], places: [&'a Place; 2], address: IpAddr) -> Self {
        let seat = |end: usize| Seat {
            place: places[end],
            cpu: cpus[end],
        };
        Self {
            client: seat(0),
            server: seat(1),
            address,
            frontend: None,
        }
    }

    /// Where the client finds a socket of the server.
    pub fn target(&self, bound: SocketAddr) -> SocketAddr {
        SocketAddr::new(self.frontend.unwrap_or(bound.ip()), bound.port())
    }

    /// A listener whose connections give up after a silence of [`PATIENCE`].
    pub fn listen(&self, port: u16) -> Result<TcpListener> {
        let listen = || -> Result<_> {
            let listener = bind::tcp((self.address, port))?;
            // Accepted sockets inherit it.
            socket2::SockRef::from(&listener).set_read_timeout(Some(PATIENCE))?;
            Ok(listener)
        };
        let server = self.server.place;
        let listener = server.run(listen);
        listener.with_context(|| format!("cannot listen on port {port} in {}", server.name()))
    }

    /// Runs both ends at once; a failure of either is the pair's.
    pub(super) fn run<C: Send, S: Send>(
        &self,
        client: impl FnOnce() -> Result<C> + Send,
        server: impl FnOnce() -> Result<S> + Send,
    ) -> Result<(C, S)> {
        thread::scope(|scope| {
            let server = scope.spawn(|| self.server.run(server));
            let client = self.client.run(client).context("client");
            let server = server.join().map_err(|_| anyhow!("the server panicked"))?;
            match (client, server.context("server")) {
                (Ok(client), Ok(server)) => Ok((client, server)),
                (Err(client), Err(server)) => Err(client.context(format!("{server:#}"))),
                (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
            }
        })
        .with_context(|| {
            let (client, server) = (self.client.place.name(), self.server.place.name());
            format!("{client} → {server} {}", self.address)
        })
    }
}

/// What was done in a while.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    /// Bytes or requests.
    pub count: u64,
    pub time: Duration,
    /// Of the threads of both ends. What the kernel does for them in their own system calls, up
    /// to the other end's receive queue, is in it, unless the kernel accounts for interrupts
    /// apart (CONFIG_IRQ_TIME_ACCOUNTING).
    pub cpu: Duration,
}

impl Measured {
    pub fn per_second(&self) -> f64 {
        self.count as f64 / self.time.as_secs_f64()
    }
}

impl AddAssign for Measured {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.time += other.time;
        self.cpu += other.cpu;
    }
}

/// The first two CPUs that this process may use, for clients and for servers; the same one twice
/// if it has but one.
pub fn two_cpus() -> Result<[usize; 2]> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("cannot ask for the CPUs")?;
    let mut cpus = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let first = cpus.next().context("there is no CPU")?;
    Ok([first, cpus.next().unwrap_or(first)])
}

pub(crate) fn cpu_set(cpu: usize) -> Result<CpuSet> {
    let mut set = CpuSet::new();
    set.set(cpu)
        .with_context(|| format!("there is no CPU {cpu}"))?;
    Ok(set)
}

/// CPU time of the calling thread.
pub(super) fn thread_cpu() -> Result<Duration> {
    let time = ClockId::CLOCK_THREAD_CPUTIME_ID.now();
    Ok(time.context("cannot ask for a thread's CPU time")?.into())
}

/// The sum of what several threads counted, and of their CPU time.
pub(super) fn by_threads(
    threads: usize,
    f: impl Fn() -> Result<u64> + Sync,
) -> Result<(u64, Duration)> {
    let one = || -> Result<_> {
        let cpu = thread_cpu()?;
        Ok((f()?, thread_cpu()? - cpu))
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let mut sum = (0, Duration::ZERO);
        for thread in threads {
            let (count, cpu) = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            sum = (sum.0 + count, sum.1 + cpu);
        }
        Ok(sum)
    })
}

/// Calls `f` with a flag that goes up after `time`: looking at it costs less than at a clock.
pub(super) fn timed<T>(time: Duration, f: impl FnOnce(&AtomicBool) -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(time);
            stop.store(true, Ordering::Relaxed);
        });
        f(&stop)
    })
}
