//! A node and its pods, and the plugin run in the node's network.

use crate::{agent::Agent, trace};
use nix::sched::CloneFlags;
use serde_json::{Value, json};
use sinabro_lab::Place;
pub use sinabro_lab::wait::eventually;
use sinabro_netlink::{
    Conn,
    route::{RouteFilter, TABLE_LOCAL},
    sysctl,
};
use std::{
    fmt::Write as _,
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};
use tempfile::TempDir;

pub const HOST_V4: &str = "192.0.2.1";
pub const HOST_V6: &str = "2001:db8::1";

pub struct Node {
    pub place: Place,
    pub dir: TempDir,
    agent: Option<Agent>,
}

pub struct Pod {
    pub place: Place,
    pub id: String,
}

impl Pod {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let id = format!("pod-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Self {
            place: Place::fresh(&id).unwrap(),
            id,
        }
    }

    /// A path that leads to the namespace as long as this exists.
    pub fn path(&self) -> String {
        format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.place.net().as_fd().as_raw_fd()
        )
    }

    pub fn conn(&self) -> Conn {
        self.place.conn().unwrap()
    }

    pub fn link(&self) -> String {
        sinabro_common::names::pod_link(&self.id, "eth0")
    }
}

impl Node {
    /// With an agent.
    pub fn new() -> Self {
        let mut node = Self::without_agent();
        node.start_agent();
        node
    }

    pub fn without_agent() -> Self {
        let place = Place::fresh("node").unwrap();
        let addresses = [format!("{HOST_V4}/32"), format!("{HOST_V6}/128")];
        let addresses = addresses.map(|address| address.parse().unwrap());
        place.set_up("lo", &addresses).unwrap();
        Self {
            place,
            dir: tempfile::tempdir().unwrap(),
            agent: None,
        }
    }

    pub fn start_agent(&mut self) {
        let path = self.dir.path().join("agent.sock");
        self.agent = Some(Agent::start(&path, self.place.net()));
    }

    pub fn stop_agent(&mut self) {
        self.agent = None;
    }

    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().unwrap()
    }

    pub fn conn(&self) -> Conn {
        self.place.conn().unwrap()
    }

    pub fn state_dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    pub fn queue_file(&self, pod: &Pod) -> PathBuf {
        let name = format!("{}.json", pod.link());
        self.dir.path().join("deletes").join(name)
    }

    /// A call as a runtime makes it.
    pub fn call(&self, verb: &str, pod: &Pod) -> Call<'_> {
        let mut call = self.bare(verb);
        for (name, value) in [
            ("CNI_CONTAINERID", pod.id.clone()),
            ("CNI_NETNS", pod.path()),
            ("CNI_IFNAME", "eth0".into()),
            (
                "CNI_ARGS",
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart;K8S_POD_UID=7;X=Y".into(),
            ),
        ] {
            call.vars.push((name.into(), value));
        }
        call
    }

    /// A call about no attachment.
    pub fn bare(&self, verb: &str) -> Call<'_> {
        Call {
            node: self,
            vars: vec![
                ("CNI_COMMAND".into(), verb.into()),
                ("CNI_PATH".into(), "/opt/cni/bin".into()),
            ],
            conf: json!({
                "cniVersion": "1.1.0",
                "name": "pods",
                "type": "sinabro",
                "stateDir": self.dir.path(),
            }),
            input: None,
            read_only_sysctls: false,
        }
    }
}

pub struct Call<'a> {
    node: &'a Node,
    vars: Vec<(String, String)>,
    conf: Value,
    input: Option<Vec<u8>>,
    read_only_sysctls: bool,
}

impl Call<'_> {
    pub fn var(mut self, name: &str, value: &str) -> Self {
        self.vars.retain(|(n, _)| n != name);
        self.vars.push((name.into(), value.into()));
        self
    }

    pub fn unset(mut self, name: &str) -> Self {
        self.vars.retain(|(n, _)| n != name);
        self
    }

    pub fn conf(mut self, key: &str, value: Value) -> Self {
        self.conf[key] = value;
        self
    }

    pub fn version(self, version: &str) -> Self {
        self.conf("cniVersion", json!(version))
    }

    /// Sends this in place of the configuration.
    pub fn input(mut self, bytes: &[u8]) -> Self {
        self.input = Some(bytes.to_vec());
        self
    }

    /// Runs the plugin where /proc/sys cannot be written.
    pub fn read_only_sysctls(mut self) -> Self {
        self.read_only_sysctls = true;
        self
    }

    pub fn spawn(&self, stdout: Stdio) -> Child {
        self.spawn_as(stdout, |_| {})
    }

    /// For `trace::kill_before`, by the calling thread.
    pub fn traced(&self) -> Child {
        self.spawn_as(Stdio::null(), |command| {
            // SAFETY: one system call.
            unsafe { command.pre_exec(|| Ok(trace::by_parent()?)) };
        })
    }

    fn spawn_as(&self, stdout: Stdio, more: impl FnOnce(&mut Command)) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sinabro"));
        command
            .env_clear()
            .envs(self.vars.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(Stdio::piped());
        self.node.place.put(&mut command);
        if self.read_only_sysctls {
            // SAFETY: only system calls on constant strings.
            unsafe { command.pre_exec(|| Ok(hide_sysctls()?)) };
        }
        more(&mut command);
        let mut child = command.spawn().unwrap();
        let conf = self.conf.to_string().into_bytes();
        // The plugin may have ended without reading.
        let _ = child
            .stdin
            .take()
            .unwrap()
            .write_all(self.input.as_ref().unwrap_or(&conf));
        child
    }

    pub fn run(&self) -> Outcome {
        let mut child = self.spawn(Stdio::piped());
        let mut outcome = Outcome::default();
        let (out, err) = (child.stdout.take(), child.stderr.take());
        out.unwrap().read_to_string(&mut outcome.stdout).unwrap();
        err.unwrap().read_to_string(&mut outcome.stderr).unwrap();
        outcome.code = child.wait().unwrap().code();
        outcome
    }
}

/// In a mount namespace of its own, so that nobody else sees it.
fn hide_sysctls() -> nix::Result<()> {
    use nix::mount::{MsFlags, mount};
    const NONE: Option<&str> = None;
    let path = "/proc/sys";
    nix::sched::unshare(CloneFlags::CLONE_NEWNS)?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
    mount(Some(path), path, NONE, MsFlags::MS_BIND, NONE)?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(NONE, path, NONE, flags, NONE)
}

#[derive(Debug, Default)]
pub struct Outcome {
    code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The result of a call that succeeded.
    pub fn result(&self) -> Value {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.json()
    }

    /// Of a call that succeeds without a word.
    pub fn silent(&self) {
        assert_eq!((self.code, &*self.stdout), (Some(0), ""), "{self:?}");
    }

    /// Code and text of a call that failed.
    pub fn error(&self) -> (u64, String) {
        assert_eq!(self.code, Some(1), "{self:?}");
        let json = self.json();
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        assert!(!text("cniVersion").is_empty() && !text("msg").is_empty());
        (
            json["code"].as_u64().unwrap(),
            format!("{} | {}", text("msg"), text("details")),
        )
    }

    /// Asserts code and a part of the text.
    pub fn fails_with(&self, code: u64, part: &str) {
        let (got, text) = self.error();
        assert_eq!(got, code, "{text}");
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// All links, addresses, routes and permanent neighbours of a namespace, as text to compare.
pub fn snapshot(place: &Place) -> String {
    let mut conn = place.conn().unwrap();
    let mut lines = Vec::new();
    for link in conn.links().unwrap() {
        lines.push(format!("link {} {} {}", link.name, link.up, link.mtu));
        for neigh in conn.neighs(link.index).unwrap() {
            if neigh.is_permanent() {
                lines.push(format!("{} {neigh:?}", link.name));
            }
        }
    }
    for addr in conn.addrs(None).unwrap() {
        // Without the flags: the kernel changes them as it detects no duplicates.
        lines.push(format!("{} {}", addr.link, addr.net));
    }
    for route in conn.routes(&RouteFilter::default()).unwrap() {
        // The kernel's own, which follow the addresses, some a moment later.
        if route.table != TABLE_LOCAL {
            lines.push(format!("{route:?}"));
        }
    }
    lines.sort();
    let mut text = String::new();
    for line in lines {
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Switches IPv6 off for links made from now on.
pub fn disable_ipv6(place: &Place) {
    let name = ["net", "ipv6", "conf", "default", "disable_ipv6"];
    place.run(|| Ok(sysctl::write(&name, "1")?)).unwrap();
}
