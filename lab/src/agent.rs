//! The agent's process on a node.

use crate::{
    confinement::confine,
    namespace::ended,
    node::{LOG_FILE, NODES_FILE, Node},
};
use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sinabro_common::api::{Request, Response, StatusReport};
use std::{
    fs::{self, OpenOptions},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Loading and verifying programs on a busy machine takes a while.
const START: Duration = Duration::from_secs(30);
const STOP: Duration = Duration::from_secs(10);

pub struct Agent {
    child: Child,
    node: String,
}

impl Agent {
    /// With `capabilities` it has only those, and a read-only root and /proc/sys.
    pub(crate) fn start(node: &Node, flags: &[&str], capabilities: Option<&[u8]>) -> Result<Self> {
        let path = node.namespace().path(LOG_FILE);
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let mut command = Command::new(node.binaries().agent());
        command
            .env_clear()
            .args(["--node-name", node.name(), "--nodes", NODES_FILE])
            // The machine's own directories are shared by all nodes, and not the lab's to fill.
            .args(["--cni-bin-dir", "/run/lab/cni/bin"])
            .args(["--cni-conf-dir", "/run/lab/cni/net.d"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if let Some(capabilities) = capabilities {
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

    pub(crate) fn wait_ready(&mut self, node: &Node) -> Result<StatusReport> {
        let deadline = Instant::now() + START;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "the agent of {} ended ({status}); {}",
                    self.node,
                    tail(node)
                );
            }
            let answer = node.ask(Request::Status);
            if let Ok(Response::Status(status)) = &answer
                && status.ready
            {
                return Ok((**status).clone());
            }
            if Instant::now() >= deadline {
                let why = match answer {
                    Ok(Response::Status(status)) => status
                        .conditions
                        .iter()
                        .filter(|condition| !condition.ok)
                        .map(|condition| format!("{}: {}", condition.name, condition.detail))
                        .collect::<Vec<_>>()
                        .join(", "),
                    Ok(other) => format!("unexpected answer {other:?}"),
                    Err(error) => format!("{error:#}"),
                };
                bail!(
                    "the agent of {} is not ready after {} s: {why}; {}",
                    self.node,
                    START.as_secs(),
                    tail(node)
                );
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        ended(&self.child);
        Ok(())
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.pid()), Signal::SIGTERM)?;
        let deadline = Instant::now() + STOP;
        while self.child.try_wait()?.is_none() {
            if Instant::now() >= deadline {
                self.child.kill()?;
                self.child.wait()?;
                bail!("the agent of {} did not stop within {STOP:?}", self.node);
            }
            thread::sleep(Duration::from_millis(5));
        }
        ended(&self.child);
        Ok(())
    }
}

fn tail(node: &Node) -> String {
    let log = fs::read_to_string(node.namespace().path(LOG_FILE)).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    let last = lines[lines.len().saturating_sub(15)..].join("\n");
    format!("its log ends with:\n{last}")
}
