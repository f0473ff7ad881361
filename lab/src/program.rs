//! Programs that are not the project's own, run in a pod and on one CPU, or on a machine.

use crate::{
    cni::await_end,
    namespace::{Namespace, ended},
    node::Node,
    traffic::seat::{Seat, cpu_set},
};
use anyhow::{Context as _, Result};
use nix::{sched::sched_setaffinity, unistd::Pid};
use std::{
    os::unix::process::CommandExt as _,
    process::{Child, Command, ExitStatus, Output},
    time::Instant,
};

/// A running program; dropping it kills it.
pub struct Program {
    /// None once it was waited for.
    child: Option<Child>,
}

impl Program {
    /// Starts a program in the node's mount namespace and a pod's network and cgroup.
    pub fn start(node: &Node, seat: Seat<'_>, mut command: Command) -> Result<Self> {
        seat.place.put(&mut command);
        let cpus = cpu_set(seat.cpu)?;
        // SAFETY: only async-signal-safe system calls, on what was made before the fork.
        unsafe {
            command.pre_exec(move || {
                sched_setaffinity(Pid::from_raw(0), &cpus)?;
                Ok(())
            });
        }
        let child = node.namespace().spawn(command)?;
        Ok(Self { child: Some(child) })
    }

    /// Starts a program on a machine, in its network.
    pub fn on_machine(machine: &Namespace, command: Command) -> Result<Self> {
        let child = machine.spawn(command)?;
        Ok(Self { child: Some(child) })
    }

    /// None once it was waited for.
    pub fn pid(&self) -> Option<i32> {
        self.child.as_ref().map(|child| child.id() as i32)
    }

    /// How it ended, if it did.
    pub fn has_ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(match &mut self.child {
            Some(child) => child.try_wait()?,
            None => None,
        })
    }

    /// Waits for its end and collects what it wrote into its pipes: less than they hold.
    pub fn output(mut self, deadline: Instant) -> Result<Output> {
        let mut child = self.child.take().context("already waited for")?;
        let result = await_end(&mut child, deadline);
        ended(&child);
        result?;
        Ok(child.wait_with_output()?)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
            ended(&child);
        }
    }
}
