//! A machine of the cluster: namespaces of every kind, held by one process that is their init.
//!
//! The machine's programs run in its namespaces and in its cgroup, so the end of its init is the
//! end of everything on it, as when power is lost. What it mounts, only it sees.

use super::{cgroup::Cgroup, layout};
use crate::workspace::output;
use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sinabro_lab::{Place, namespace::unblock_signals};
use sinabro_netlink::NetNs;
use std::{
    fs::{self, File},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Subcommand that this program runs as the init of a machine.
pub const INIT: &str = "machine-init";
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub struct Machine {
    pub name: String,
}

/// No machine starts once this process is being interrupted.
static ENDING: Mutex<bool> = Mutex::new(false);

/// Starts no machine from now on: those that are there can be taken down.
pub fn start_no_more() {
    *ENDING.lock().unwrap_or_else(PoisonError::into_inner) = true;
}

/// Starts a machine's first command and notes its init, both before an interruption or neither.
fn started(command: &mut Command, pid_file: &Path) -> Result<Child> {
    let ending = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    ensure!(!*ending, "interrupted");
    let mut outer = command.spawn().context("cannot start unshare")?;
    let children = format!("/proc/{0}/task/{0}/children", outer.id());
    // It forks when it has made the namespaces.
    loop {
        let child = fs::read_to_string(&children).unwrap_or_default();
        if !child.trim().is_empty() || outer.try_wait()?.is_some() {
            fs::write(pid_file, child.trim())?;
            return Ok(outer);
        }
        thread::sleep(Duration::from_millis(1));
    }
}

impl Machine {
    pub fn new(name: &str) -> Self {
        Self { name: name.into() }
    }

    /// Where its logs are, and what it keeps.
    pub fn dir(&self) -> Result<PathBuf> {
        Ok(layout::state()?.join(&self.name))
    }

    /// What survives a reboot.
    pub fn disk(&self) -> Result<PathBuf> {
        Ok(self.dir()?.join("disk"))
    }

    fn pid_file(&self) -> Result<PathBuf> {
        Ok(self.dir()?.join("init.pid"))
    }

    /// Its init, if it runs.
    pub fn init(&self) -> Option<i32> {
        let pid: i32 = fs::read_to_string(self.pid_file().ok()?)
            .ok()?
            .trim()
            .parse()
            .ok()?;
        // The id may be another process's by now.
        let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let mut words = command.split(|byte| *byte == 0);
        (words.any(|word| word == INIT.as_bytes())
            && words.any(|word| word == self.name.as_bytes()))
        .then_some(pid)
    }

    pub fn require(&self) -> Result<i32> {
        self.init()
            .with_context(|| format!("{} does not run", self.name))
    }

    /// Makes the namespaces; returns once the init has mounted everything.
    pub fn start(&self, hosts: &str) -> Result<()> {
        if self.init().is_some() {
            return Ok(());
        }
        let dir = self.dir()?;
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        fs::write(dir.join("hosts"), hosts)?;
        let ready = dir.join("ready");
        let _ = fs::remove_file(&ready);
        let cgroup = Cgroup::of(&self.name)?;
        cgroup.make()?;
        let log = File::create(dir.join("init.log"))?;
        let mut command = Command::new("unshare");
        command
            .args([
                "--net",
                "--mount",
                "--propagation",
                "slave",
                "--pid",
                "--fork",
                "--kill-child",
            ])
            .args(["--uts", "--ipc", "--cgroup", "--"])
            .arg(std::env::current_exe().context("cannot find the path of xtask")?)
            .args(["cluster", INIT, &self.name])
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        cgroup.found(&mut command)?;
        let mut outer = started(&mut command, &self.pid_file()?)?;
        let deadline = Instant::now() + PATIENCE;
        while !ready.exists() {
            if outer.try_wait()?.is_some() || Instant::now() > deadline {
                let _ = outer.kill();
                let said = fs::read_to_string(dir.join("init.log")).unwrap_or_default();
                bail!("cannot start {}: {}", self.name, said.trim());
            }
            thread::sleep(Duration::from_millis(10));
        }
        cgroup.settle(&[outer.id() as i32, self.require()?])?;
        // Nobody waits for it once this process has ended; until then this thread does.
        thread::spawn(move || outer.wait());
        Ok(())
    }

    /// Ends everything on the machine at once.
    pub fn stop(&self) -> Result<()> {
        if let Some(pid) = self.init() {
            kill(Pid::from_raw(pid), Signal::SIGKILL)
                .with_context(|| format!("cannot end {}", self.name))?;
            let deadline = Instant::now() + PATIENCE;
            // The kernel ends all of a pid namespace before its init is gone.
            while Path::new(&format!("/proc/{pid}")).exists() {
                ensure!(
                    Instant::now() < deadline,
                    "process {pid} of {} does not end",
                    self.name
                );
                thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = fs::remove_file(self.pid_file()?);
        Cgroup::of(&self.name)?.remove()
    }

    /// A program inside, in all of the machine's namespaces and in its cgroup.
    pub fn command(&self, program: impl AsRef<Path>) -> Result<Command> {
        let pid = self.require()?.to_string();
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &pid, "-n", "-m", "-p", "-u", "-i", "-C", "--"])
            .arg(program.as_ref());
        unblock_signals(&mut command);
        Cgroup::of(&self.name)?.join(&mut command)?;
        Ok(command)
    }

    /// A program that only sees the machine's network.
    pub fn network_command(&self, program: impl AsRef<Path>) -> Result<Command> {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.require()?.to_string(), "-n", "--"])
            .arg(program.as_ref());
        unblock_signals(&mut command);
        Ok(command)
    }

    pub fn ip(&self, arguments: &str) -> Result<()> {
        output(
            self.network_command("ip")?
                .args(arguments.split_whitespace()),
        )
        .with_context(|| format!("ip {arguments} on {}", self.name))?;
        Ok(())
    }

    /// Starts a program that goes on until the machine ends; its output goes to NAME.log.
    pub fn daemon(&self, name: &str, program: &Path, arguments: &[String]) -> Result<()> {
        let log = self.dir()?.join(format!("{name}.log"));
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = self.command(program)?;
        // What it starts itself is first looked for beside it: its own shim, not the machine's.
        let beside = program.parent().map(Path::to_path_buf);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(beside.into_iter().chain(std::env::split_paths(&path)))?;
        command
            .args(arguments)
            .env("PATH", path)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        // SAFETY: setsid(2) is async-signal-safe.
        unsafe {
            command.pre_exec(|| Ok(nix::unistd::setsid().map(drop)?));
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {name} on {}", self.name))?;
        thread::spawn(move || child.wait());
        Ok(())
    }

    /// Processes of the machine whose program's file has this name.
    pub fn processes(&self, program: &str) -> Result<Vec<i32>> {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = of(&self.require()?.to_string());
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let Ok(pid) = name.parse() else {
                continue;
            };
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let first = command.split(|byte| *byte == 0).next().unwrap_or_default();
            let file = Path::new(std::str::from_utf8(first).unwrap_or_default()).file_name();
            if file.is_some_and(|file| file == program) && of(&name) == own {
                found.push(pid);
            }
        }
        Ok(found)
    }

    /// Kills processes and waits for their end.
    pub fn kill(&self, program: &str) -> Result<()> {
        let pids = self.processes(program)?;
        ensure!(!pids.is_empty(), "no {program} runs on {}", self.name);
        for pid in &pids {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        let deadline = Instant::now() + PATIENCE;
        while !pids.iter().all(|pid| has_ended(*pid)) {
            ensure!(
                Instant::now() < deadline,
                "{program} does not end on {}",
                self.name
            );
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// A path on the machine, as this process reaches it.
    pub fn path(&self, inside: &str) -> Result<PathBuf> {
        let root = PathBuf::from(format!("/proc/{}/root", self.require()?));
        // A link to an absolute path would lead out of the machine; this is the usual one.
        let inside = inside
            .strip_prefix("/var")
            .filter(|rest| rest.starts_with("/run/"))
            .unwrap_or(inside);
        Ok(root.join(inside.trim_start_matches('/')))
    }

    /// Its network, for traffic of this process.
    pub fn place(&self) -> Result<Place> {
        let net = NetNs::open(format!("/proc/{}/ns/net", self.require()?))?;
        Ok(Place::new(&self.name, net))
    }
}

/// Whether a process has closed its files, so that the next one may listen at its ports: no command line says so, which goes before
/// them. What waits to be reaped has none any more, and of several threads the last closes them.
fn has_ended(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return true;
    };
    threads.flatten().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // Behind the name, which may have any characters.
        let state = stat.rsplit(") ").next().unwrap_or_default();
        state.is_empty() || state.starts_with(['Z', 'X'])
    })
}
