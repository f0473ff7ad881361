//! A machine of the lab: a network and a mount namespace, and ways to run things inside.
//!
//! Code runs inside on threads of this process that enter the namespaces ([`Namespace::run`],
//! [`Place::run`]); programs are started by one worker thread per namespace, because the kernel
//! ties a child's life to the thread that made it.

use crate::{
    congestion,
    holder::{self, Lifetime},
    place::{Place, on_thread},
};
use anyhow::{Context as _, Result, anyhow};
use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::{
        prctl,
        signal::{SigSet, Signal},
    },
    unistd::Pid,
};
use sinabro_netlink::NetNs;
use std::{
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread,
};

type Job = Box<dyn FnOnce() + Send>;

/// A holder process and what is known of its namespaces. Dropping it ends the holder, unless
/// the lab is kept.
pub struct Namespace {
    place: Place,
    mnt: Arc<OwnedFd>,
    pid: Pid,
    jobs: Option<Sender<Job>>,
    worker: Option<thread::JoinHandle<()>>,
    lifetime: Lifetime,
}

impl Namespace {
    /// Makes the namespaces; the network has a loopback device, down, and nothing else.
    pub fn new(name: &str, lifetime: Lifetime) -> Result<Self> {
        let (jobs, queue) = channel::<Job>();
        let (ready, started) = channel();
        let worker = thread::Builder::new()
            .name(format!("{name}-worker"))
            .spawn(move || {
                let started = holder::start(lifetime).and_then(|(holder, net, mnt)| {
                    enter(&net, &mnt)?;
                    Ok((holder, net, mnt))
                });
                let (holder, opened) = match started {
                    Ok((holder, net, mnt)) => (holder, (net, mnt)),
                    Err(error) => {
                        let _ = ready.send(Err(error));
                        return;
                    }
                };
                let pid = holder.pid;
                let _ = ready.send(Ok((pid, opened)));
                for job in queue {
                    job();
                }
                if lifetime == Lifetime::Process {
                    holder.end();
                    holder::forget(pid.as_raw());
                }
            })
            .context("cannot start a thread")?;
        let (pid, (net, mnt)) = started
            .recv()
            .context("the worker thread ended")?
            .with_context(|| format!("cannot make the namespaces of {name}"))?;
        let place = Place::new(name, net);
        congestion::set(&place)?;
        Ok(Self {
            place,
            mnt: mnt.into(),
            pid,
            jobs: Some(jobs),
            worker: Some(worker),
            lifetime,
        })
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// The holder process.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// How a path inside is reached from outside.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        Path::new("/proc")
            .join(self.pid.to_string())
            .join("root")
            .join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// Runs `f` on a thread inside both namespaces. Programs that it starts run inside, too.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_thread(self.name(), || {
            enter(self.place.net(), &self.mnt)?;
            f()
        })
    }

    /// Has a program start inside both namespaces, as a child of the thread that starts it and
    /// ended with that. [`Namespace::spawn`] is for programs that outlive their starter.
    pub fn put(&self, command: &mut Command) {
        let (net, mnt) = (self.place.net().clone(), self.mnt.clone());
        // SAFETY: only system calls, on descriptors that were opened before the fork.
        unsafe {
            command.pre_exec(move || {
                setns(&net, CloneFlags::CLONE_NEWNET)?;
                setns(&*mnt, CloneFlags::CLONE_NEWNS)?;
                Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)
            });
        }
    }

    /// Starts a program inside that lives as long as the lab. Who waits for its end tells
    /// [`ended`].
    pub fn spawn(&self, mut command: Command) -> Result<Child> {
        let lifetime = self.lifetime;
        // SAFETY: only async-signal-safe system calls.
        unsafe {
            command.pre_exec(move || {
                if lifetime == Lifetime::Process {
                    prctl::set_pdeathsig(Signal::SIGKILL)?;
                }
                nix::unistd::setsid()?;
                Ok(())
            });
        }
        unblock_signals(&mut command);
        let (reply, spawned) = channel();
        let program = command.get_program().to_owned();
        self.jobs
            .as_ref()
            .and_then(|jobs| {
                jobs.send(Box::new(move || {
                    let start = || Ok(command.spawn()?);
                    let _ = reply.send(holder::remembered(start, |child| child.id() as i32));
                }))
                .ok()
            })
            .and_then(|()| spawned.recv().ok())
            .ok_or_else(|| anyhow!("the worker thread of {} is gone", self.name()))?
            .with_context(|| format!("cannot start {} on {}", program.display(), self.name()))
    }
}

/// Has a program begin with no signal blocked: who starts it may block signals to wait for them, and this one is to get
/// its own.
pub fn unblock_signals(command: &mut Command) {
    // SAFETY: only an async-signal-safe system call.
    unsafe {
        command.pre_exec(|| Ok(SigSet::empty().thread_set_mask()?));
    }
}

/// To be called once a program that [`Namespace::spawn`] started has been waited for: its process
/// id may be another's by now.
pub(crate) fn ended(child: &Child) {
    holder::forget(child.id() as i32);
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

/// Moves the calling thread into both namespaces.
fn enter(net: &NetNs, mnt: &OwnedFd) -> Result<()> {
    // A thread that shares its working directory with others may not change mount namespace.
    unshare(CloneFlags::CLONE_FS).context("cannot unshare the working directory")?;
    setns(mnt, CloneFlags::CLONE_NEWNS).context("cannot enter the mount namespace")?;
    setns(net, CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gets_signals_that_who_starts_it_blocks() {
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGTERM);
        blocked.thread_block().unwrap();
        let mut command = Command::new("grep");
        command.args(["SigBlk", "/proc/self/status"]);
        let of = |command: &mut Command| {
            let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
            u64::from_str_radix(said.split_whitespace().last().unwrap(), 16).unwrap()
        };
        assert_ne!(of(&mut command), 0);
        unblock_signals(&mut command);
        assert_eq!(of(&mut command), 0);
        blocked.thread_unblock().unwrap();
    }
}
