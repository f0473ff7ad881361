//! Calls of a CNI plugin as a runtime makes them: environment, configuration on standard
//! input, JSON on standard output.

use crate::{node::Node, traffic::readable};
use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use serde_json::{Value, json};
use std::{
    fs::File,
    io::{Read as _, Seek as _, Write as _},
    os::fd::{FromRawFd as _, OwnedFd},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Runtimes give up after minutes; nothing here should take as long.
const DEADLINE: Duration = Duration::from_secs(60);

/// The interface name that Kubernetes runtimes ask for.
pub const IFNAME: &str = "eth0";

/// One call.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    pub plugin: &'a Path,
    pub command: &'a str,
    pub container_id: &'a str,
    pub netns: Option<&'a str>,
    pub args: Option<&'a str>,
    pub config: &'a Value,
}

/// What came back.
#[derive(Clone, Debug)]
pub struct Answer {
    pub code: Option<i32>,
    /// The result, or the specification's error object; null if there was no output.
    pub json: Value,
    pub stderr: String,
}

impl Answer {
    pub fn ok(&self) -> bool {
        self.code == Some(0)
    }

    /// The result of a call that must have succeeded.
    pub fn success(self) -> Result<Value> {
        if self.ok() {
            return Ok(self.json);
        }
        bail!(
            "exit code {:?}, CNI error {}, standard error: {}",
            self.code,
            self.json,
            self.stderr.trim()
        )
    }

    /// `code` of the specification's error object.
    pub fn error_code(&self) -> Option<u64> {
        self.json.get("code").and_then(Value::as_u64)
    }
}

/// The network configuration of the lab's pods.
pub fn config() -> Value {
    json!({
        "cniVersion": "1.1.0",
        "name": "lab",
        "type": "sinabro",
        // As the agent writes it.
        "capabilities": {"portMappings": true},
    })
}

impl Call<'_> {
    /// Makes the call on a node.
    pub fn run(&self, node: &Node) -> Result<Answer> {
        let what = || {
            format!(
                "CNI {} of {} on {}",
                self.command,
                self.container_id,
                node.name()
            )
        };
        let mut command = self.command()?;
        node.namespace()
            .run(|| {
                let mut child = command.spawn().context("cannot start the plugin")?;
                await_end(&mut child, Instant::now() + DEADLINE)?;
                answer(child)
            })
            .with_context(what)
    }

    /// The process to start, on whatever thread is inside the node.
    pub fn command(&self) -> Result<Command> {
        // A file, not a pipe: nobody needs to feed it while the plugin runs.
        let mut input = memory_file()?;
        input.write_all(&serde_json::to_vec(self.config)?)?;
        input.rewind()?;
        let mut command = Command::new(self.plugin);
        let dir = self.plugin.parent().unwrap_or(Path::new("/"));
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("CNI_COMMAND", self.command)
            .env("CNI_PATH", dir)
            .env("CNI_CONTAINERID", self.container_id)
            .env("CNI_IFNAME", IFNAME)
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(netns) = self.netns {
            command.env("CNI_NETNS", netns);
        }
        if let Some(args) = self.args {
            command.env("CNI_ARGS", args);
        }
        Ok(command)
    }
}

/// Collects what an ended plugin wrote; less than a pipe holds.
pub fn answer(child: Child) -> Result<Answer> {
    let output = child.wait_with_output()?;
    let json = match output.stdout.trim_ascii() {
        [] => Value::Null,
        text => serde_json::from_slice(text)
            .with_context(|| format!("not JSON: {}", String::from_utf8_lossy(text)))?,
    };
    Ok(Answer {
        code: output.status.code(),
        json,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Waits for a process through its pidfd; kills it at the deadline.
pub fn await_end(child: &mut Child, deadline: Instant) -> Result<()> {
    // SAFETY: no pointers; the result is checked before it is owned.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) })
        .context("cannot watch a process")?;
    // SAFETY: the kernel has just made this descriptor for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    if readable(&fd, deadline)? {
        return Ok(());
    }
    let _ = child.kill();
    let mut stderr = String::new();
    if let Some(pipe) = &mut child.stderr {
        let _ = pipe.read_to_string(&mut stderr);
    }
    child.wait()?;
    bail!("no end in sight, killed; standard error: {}", stderr.trim())
}

pub(crate) fn memory_file() -> Result<File> {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let fd = nix::sys::memfd::memfd_create(c"lab", flags).context("cannot make a memory file")?;
    Ok(fd.into())
}
