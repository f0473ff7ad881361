//! The agent's process on a node.

use crate::{
    confinement::confine,
    namespace::ended,
    node::{LOG_FILE, NODES_FILE, Node, PROGRAMS},
    residue::run,
    wait::wait_for,
};
use anyhow::{Context as _, Result, anyhow, bail};
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use sinabro_common::{
    api::StatusReport,
    fail_point::{HOLDS, REFUSED, VARIABLE},
};
use std::{
    fs::{self, OpenOptions},
    process::{Child, Command, ExitStatus, Stdio},
};

/// What tests fill is as large on every machine, unless a flag says otherwise.
const CONNECTIONS: (&str, &str) = ("SINABRO_CONNECTIONS", "131072");

/// How an agent is started.
#[derive(Clone, Copy, Default)]
pub(crate) struct Start<'a> {
    pub flags: &'a [&'a str],
    /// It follows the cluster that this leads to, not the lab's list of nodes.
    pub kubeconfig: Option<&'a str>,
    /// It has only these, and a read-only root and /proc/sys.
    pub capabilities: Option<&'a [u8]>,
    /// Where it is killed by itself.
    pub fail_point: Option<&'a str>,
    /// Where it waits, with commas between.
    pub holds: Option<&'a str>,
    /// Whose programs the kernel is to refuse.
    pub refused: Option<&'a str>,
}

pub struct Agent {
    child: Child,
    node: String,
}

impl Agent {
    pub(crate) fn start(node: &Node, way: Start<'_>) -> Result<Self> {
        let path = node.namespace().path(LOG_FILE);
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let mut command = Command::new(node.binaries().agent());
        command
            .env_clear()
            .env(PROGRAMS.0, PROGRAMS.1)
            .env(CONNECTIONS.0, CONNECTIONS.1)
            .args(["--node-name", node.name()])
            .args(match way.kubeconfig {
                Some(path) => ["--kubeconfig", path],
                None => ["--nodes", NODES_FILE],
            })
            // The machine's own directories are shared by all nodes, and not the lab's to fill.
            .args(["--cni-bin-dir", "/run/lab/cni/bin"])
            .args(["--cni-conf-dir", "/run/lab/cni/net.d"])
            .args(
                node.cgroup()
                    .map(|cgroup| format!("--cgroup-dir={}", cgroup.path().display())),
            )
            .args(way.flags)
            .envs(run::inherited())
            .envs(way.fail_point.map(|name| (VARIABLE, name)))
            .envs(way.holds.map(|points| (HOLDS, points)))
            .envs(way.refused.map(|programs| (REFUSED, programs)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if let Some(capabilities) = way.capabilities {
            confine(&mut command, capabilities);
        }
        Ok(Self {
            child: node.namespace().spawn(command)?,
            node: node.name().to_string(),
        })
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until it waits at the next point.
    pub(crate) fn wait_held(&self) -> Result<()> {
        let flags = WaitPidFlag::WUNTRACED | WaitPidFlag::WNOHANG;
        wait_for(
            &format!("the agent of {} to wait", self.node),
            || match waitpid(Pid::from_raw(self.pid()), Some(flags))? {
                WaitStatus::Stopped(..) => Ok(Some(())),
                WaitStatus::StillAlive => Ok(None),
                ended => bail!("it ended: {ended:?}"),
            },
        )
    }

    /// Lets it go on.
    pub(crate) fn go_on(&self) -> Result<()> {
        kill(Pid::from_raw(self.pid()), Signal::SIGCONT).context("cannot let it go on")
    }

    pub(crate) fn wait_ready(&mut self, node: &Node) -> Result<StatusReport> {
        let what = format!("the agent of {} to be ready", self.node);
        let waited = wait_for(&what, || {
            if let Some(status) = self.child.try_wait()? {
                // No reason to ask again.
                return Ok(Some(Err(anyhow!(
                    "the agent of {} ended ({status})",
                    self.node
                ))));
            }
            let status = node.status()?;
            if status.ready {
                return Ok(Some(Ok(status)));
            }
            let missing = status.conditions.iter().filter(|condition| !condition.ok);
            let why: Vec<_> = missing
                .map(|condition| format!("{}: {}", condition.name, condition.detail))
                .collect();
            bail!("{}", why.join(", "))
        });
        waited.and_then(|ready| ready).with_context(|| tail(node))
    }

    /// Waits for the end that it comes to by itself.
    pub(crate) fn end(mut self) -> Result<ExitStatus> {
        let what = format!("the agent of {} to end", self.node);
        let status = wait_for(&what, || Ok(self.child.try_wait()?));
        ended(&self.child);
        status
    }

    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        ended(&self.child);
        Ok(())
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.pid()), Signal::SIGTERM)?;
        let what = format!("the agent of {} to stop", self.node);
        let stopped = wait_for(&what, || Ok(self.child.try_wait()?.map(drop)));
        if stopped.is_err() {
            self.child.kill()?;
            self.child.wait()?;
        }
        ended(&self.child);
        stopped
    }
}

fn tail(node: &Node) -> String {
    let log = fs::read_to_string(node.namespace().path(LOG_FILE)).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    let last = lines[lines.len().saturating_sub(15)..].join("\n");
    format!("the agent's log ends with:\n{last}")
}
