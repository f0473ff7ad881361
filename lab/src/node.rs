//! A node: its namespaces, its entry in the list of nodes, its agent and its pods' sandboxes.

use crate::{
    agent::{Agent, Start},
    cgroup::Cgroup,
    lab::Binaries,
    namespace::Namespace,
    place::Place,
    wait::wait_for,
};
use anyhow::{Context as _, Result, bail, ensure};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Serialize;
use sinabro_common::{
    api::{Reply, ReplyEnvelope, Request, RequestEnvelope, Response, StatusReport, VERSION, frame},
    atomic_file::AtomicFile,
    names,
};
use sinabro_netlink::{Conn, NetNs};
use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The lab's own files on a node: on its private tmpfs, so that they vanish with it.
pub const FILES: &str = "/run/lab";
/// The list of nodes that the agent reads.
pub const NODES_FILE: &str = "/run/lab/nodes.yaml";
/// The Services that an agent follows if it is told to.
pub const SERVICES_FILE: &str = "/run/lab/services.yaml";
/// Has an agent translate the Services of [`SERVICES_FILE`].
pub const SERVICES_FLAGS: [&str; 2] = [
    "--service-proxy=on",
    "--services-file=/run/lab/services.yaml",
];
/// Has an agent leave all packets between nodes to the kernel's stack.
pub const KERNEL_FLAG: &str = "--data-path=kernel";
/// What the agent logged, all its runs one after the other.
pub const LOG_FILE: &str = "/run/lab/agent.log";
/// Where agents keep programs: the machine's own /var is shared by all nodes. A variable, since
/// earlier versions know no flag of that name.
pub const PROGRAMS: (&str, &str) = ("SINABRO_PROGRAMS_DIR", "/run/lab/programs");

/// One entry of the nodes file. JSON is YAML, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeEntry {
    pub name: String,
    pub addresses: Vec<IpAddr>,
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<IpNet>,
    /// Whether it takes what other nodes' pods send without a tunnel. Agents of before know no such field.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub native: bool,
    /// Whether it takes UDP over IPv6 without a checksum, likewise.
    #[serde(
        rename = "udp6ZeroChecksum",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub zero_checksum: bool,
}

impl NodeEntry {
    /// What node n`number` is born with.
    pub fn numbered(number: u8) -> Self {
        Self {
            name: format!("n{number}"),
            addresses: underlay_addresses(number).to_vec(),
            pod_cidrs: pod_cidrs(number),
            native: false,
            zero_checksum: false,
        }
    }
}

/// IPv4 and IPv6 address of a node on the underlay.
pub fn underlay_addresses(number: u8) -> [IpAddr; 2] {
    let last = 10 + number;
    [
        Ipv4Addr::new(172, 30, 0, last).into(),
        Ipv6Addr::new(0xfd00, 0x172, 0x30, 0, 0, 0, 0, last.into()).into(),
    ]
}

/// 10.244.N.0/24 and fd00:10:244:N::/64.
pub fn pod_cidrs(number: u8) -> Vec<IpNet> {
    let v4 = Ipv4Addr::new(10, 244, number, 0);
    let v6 = Ipv6Addr::new(0xfd00, 0x10, 0x244, number.into(), 0, 0, 0, 0);
    // Both lengths are within their families' bounds.
    vec![
        Ipv4Net::new_assert(v4, 24).into(),
        Ipv6Net::new_assert(v6, 64).into(),
    ]
}

pub struct Node {
    agent: Mutex<Option<Agent>>,
    entry: Mutex<NodeEntry>,
    binaries: Mutex<Binaries>,
    cgroup: Mutex<Option<Cgroup>>,
    // After the agent: it lives in these namespaces.
    namespace: Namespace,
}

impl Node {
    pub(crate) fn new(namespace: Namespace, entry: NodeEntry, binaries: Binaries) -> Result<Self> {
        let files = namespace.path(FILES);
        fs::create_dir(&files).with_context(|| format!("cannot make {}", files.display()))?;
        Ok(Self {
            agent: Mutex::new(None),
            entry: Mutex::new(entry),
            binaries: Mutex::new(binaries),
            cgroup: Mutex::new(None),
            namespace,
        })
    }

    pub fn name(&self) -> &str {
        self.namespace.name()
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The node's own network, as opposed to its pods'.
    pub fn place(&self) -> &Place {
        self.namespace.place()
    }

    pub fn binaries(&self) -> Binaries {
        locked(&self.binaries).clone()
    }

    /// Has the node run other programs from now on: its next agent, its next call of the plugin.
    pub fn set_binaries(&self, binaries: Binaries) {
        *locked(&self.binaries) = binaries;
    }

    /// Where its agents attach what runs for sockets; None: where they do by themselves.
    pub fn cgroup(&self) -> Option<Cgroup> {
        locked(&self.cgroup).clone()
    }

    /// Has agents that are started from now on attach that to a cgroup, in which sandboxes made from now on are.
    pub fn set_cgroup(&self, cgroup: Cgroup) {
        *locked(&self.cgroup) = Some(cgroup);
    }

    pub fn entry(&self) -> NodeEntry {
        locked(&self.entry).clone()
    }

    /// Changes what [`crate::Lab::publish`] says about this node.
    pub fn set_entry(&self, entry: NodeEntry) {
        *locked(&self.entry) = entry;
    }

    /// Has it be known by its IPv6 address first, from when the lab is next published on.
    pub fn lead_with_ipv6(&self) {
        locked(&self.entry)
            .addresses
            .sort_by_key(|address| address.is_ipv4());
    }

    /// The node's address of each family, IPv4 first.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.entry().addresses
    }

    /// A state file of the node, as seen from outside.
    pub fn state(&self, path: impl AsRef<Path>) -> PathBuf {
        self.namespace.path(Path::new(names::STATE_DIR).join(path))
    }

    /// Writes the nodes file, in one step as far as a reader can tell.
    pub fn write_nodes(&self, entries: &[NodeEntry]) -> Result<()> {
        let path = self.namespace.path(NODES_FILE);
        let write = || -> Result<()> {
            let text = serde_json::to_vec_pretty(entries)?;
            Ok(AtomicFile::new(&path).replace(&text)?)
        };
        write().with_context(|| format!("cannot write the nodes file of {}", self.name()))
    }

    /// Writes [`SERVICES_FILE`], in one step, too.
    pub fn write_services(&self, text: &str) -> Result<()> {
        let path = self.namespace.path(SERVICES_FILE);
        let written = AtomicFile::new(&path).replace(text.as_bytes());
        written.with_context(|| format!("cannot write the Services of {}", self.name()))
    }

    // --- the agent ---

    /// Starts the agent; [`Node::wait_ready`] waits until it serves.
    pub fn start_agent(&self) -> Result<()> {
        self.start_agent_with(&[])
    }

    /// Starts the agent with further flags.
    pub fn start_agent_with(&self, flags: &[&str]) -> Result<()> {
        self.start(Start {
            flags,
            ..Start::default()
        })
    }

    /// Starts an agent that follows a cluster of Kubernetes, with a kubeconfig of the node's.
    pub fn start_agent_of_cluster(&self, kubeconfig: &str, flags: &[&str]) -> Result<()> {
        self.start(Start {
            flags,
            kubeconfig: Some(kubeconfig),
            ..Start::default()
        })
    }

    /// Starts an agent that is killed when it comes to a point (`sinabro_common::fail_point`);
    /// [`Node::agent_end`] waits for that.
    pub fn start_agent_failing_at(&self, fail_point: &str, flags: &[&str]) -> Result<()> {
        self.start(Start {
            flags,
            fail_point: Some(fail_point),
            ..Start::default()
        })
    }

    /// Starts an agent that waits at points, with commas between, each until [`Node::let_agent_go_on`].
    pub fn start_agent_held_at(&self, points: &str, flags: &[&str]) -> Result<()> {
        self.start(Start {
            flags,
            holds: Some(points),
            ..Start::default()
        })
    }

    /// Waits until the agent waits at a point.
    pub fn wait_held(&self) -> Result<()> {
        let agent = locked(&self.agent);
        agent.as_ref().context("no agent was started")?.wait_held()
    }

    pub fn let_agent_go_on(&self) -> Result<()> {
        let agent = locked(&self.agent);
        agent.as_ref().context("no agent was started")?.go_on()
    }

    /// Starts an agent with programs that the kernel refuses (`sinabro_common::fail_point::REFUSED`).
    pub fn start_agent_refused(&self, programs: &str, flags: &[&str]) -> Result<()> {
        self.start(Start {
            flags,
            refused: Some(programs),
            ..Start::default()
        })
    }

    /// Starts the agent as in an unprivileged container that has these capabilities.
    pub fn start_confined_agent(&self, flags: &[&str], capabilities: &[u8]) -> Result<()> {
        self.start(Start {
            flags,
            capabilities: Some(capabilities),
            ..Start::default()
        })
    }

    fn start(&self, way: Start<'_>) -> Result<()> {
        let mut agent = locked(&self.agent);
        if agent.is_some() {
            bail!("the agent of {} is running", self.name());
        }
        *agent = Some(Agent::start(self, way)?);
        Ok(())
    }

    /// Waits until the agent says it is ready.
    pub fn wait_ready(&self) -> Result<StatusReport> {
        let mut agent = locked(&self.agent);
        let agent = agent.as_mut().context("no agent was started")?;
        agent.wait_ready(self)
    }

    /// What the agent says of itself.
    pub fn status(&self) -> Result<StatusReport> {
        match self.ask(Request::Status)? {
            Response::Status(status) => Ok(*status),
            other => bail!("asked for the status, got {other:?}"),
        }
    }

    /// Waits until packets to the outside go by a way, as the agent says.
    pub fn wait_for_way(&self, beginning: &str) -> Result<()> {
        self.wait_for_mode("forwarding", |way| way.starts_with(beginning))
    }

    /// Waits until packets to all other nodes go past the stack, as the agent says.
    pub fn wait_for_direct_overlay(&self) -> Result<()> {
        self.wait_for_mode("overlay", is_direct)
    }

    /// Waits until the agent translates Services, and what `sinabroctl services` says of this one is as wished.
    pub fn wait_for_service(&self, service: &str, is_it: impl Fn(&str) -> bool) -> Result<()> {
        self.wait_for_mode("serviceProxy", |way| way.split(',').next() == Some("on"))?;
        wait_for(&format!("{} to know {service}", self.name()), || {
            let said = self.ctl(&["services", service])?;
            let said = String::from_utf8(said.stdout)?;
            ensure!(is_it(&said), "it says: {said}");
            Ok(Some(()))
        })
    }

    /// Waits until a mode of the agent is as wished.
    pub fn wait_for_mode(&self, mode: &str, is_it: impl Fn(&str) -> bool) -> Result<()> {
        wait_for(&format!("another {mode}"), || {
            let status = self.status()?;
            let way = status.modes.get(mode).map(String::as_str);
            let is = way.is_some_and(&is_it);
            ensure!(is, "{mode} of {} is {way:?}", self.name());
            Ok(Some(()))
        })
    }

    /// Waits until the agent has ended by itself, and says how.
    pub fn agent_end(&self) -> Result<ExitStatus> {
        match locked(&self.agent).take() {
            Some(agent) => agent.end(),
            None => bail!("no agent runs on {}", self.name()),
        }
    }

    /// SIGKILL: no chance to say goodbye.
    pub fn kill_agent(&self) -> Result<()> {
        match locked(&self.agent).take() {
            Some(agent) => agent.kill(),
            None => bail!("no agent runs on {}", self.name()),
        }
    }

    /// SIGTERM, and waits for the end.
    pub fn stop_agent(&self) -> Result<()> {
        match locked(&self.agent).take() {
            Some(agent) => agent.stop(),
            None => bail!("no agent runs on {}", self.name()),
        }
    }

    pub fn agent_pid(&self) -> Option<i32> {
        locked(&self.agent).as_ref().map(Agent::pid)
    }

    /// Everything the agent logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.namespace.path(LOG_FILE)).unwrap_or_default()
    }

    /// Puts one question to the agent's socket.
    pub fn ask(&self, request: Request) -> Result<Response> {
        let ask = || -> Result<Response> {
            let mut stream = UnixStream::connect(self.state(names::SOCKET))?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            stream.set_write_timeout(Some(Duration::from_secs(10)))?;
            let envelope = RequestEnvelope {
                version: VERSION,
                request,
            };
            frame::write(&mut stream, &envelope)?;
            match frame::read::<ReplyEnvelope>(&mut stream)?.reply {
                Reply::Ok(response) => Ok(response),
                Reply::Error(error) => Err(error.into()),
            }
        };
        ask().with_context(|| format!("cannot ask the agent of {}", self.name()))
    }

    /// Runs a command in the node's network; an error if it fails.
    pub fn command(&self, command: &[&str]) -> Result<()> {
        self.place().command(command)
    }

    /// Runs `sinabroctl` on the node.
    pub fn ctl(&self, arguments: &[&str]) -> Result<Output> {
        self.namespace.run(|| {
            let mut command = Command::new(self.binaries().ctl());
            command
                .args(arguments)
                .env_clear()
                .env(PROGRAMS.0, PROGRAMS.1);
            command.output().context("cannot run sinabroctl")
        })
    }

    // --- sandboxes ---

    /// Makes a pod's network namespace as a runtime does: /run/netns/ID, loopback up.
    pub fn make_sandbox(&self, id: &str) -> Result<Place> {
        let made = self.namespace.run(|| {
            let netns = NetNs::create_at(netns_path(id))?;
            Place::begin(&format!("{}/{id}", self.name()), netns)
        });
        let place = made.with_context(|| format!("cannot make sandbox {id} on {}", self.name()))?;
        Ok(place.within(self.cgroup()))
    }

    /// Whether a place is a sandbox of this node.
    pub fn has(&self, place: &Place) -> bool {
        let id = place.name().strip_prefix(self.name());
        id.is_some_and(|id| id.starts_with('/'))
    }

    /// Takes the name of a pod's network namespace away; the kernel removes it, links included,
    /// once no [`Place`] refers to it any more.
    pub fn remove_sandbox(&self, id: &str) -> Result<()> {
        self.namespace
            .run(|| Ok(NetNs::remove_at(netns_path(id))?))
            .with_context(|| format!("cannot remove sandbox {id} on {}", self.name()))
    }

    /// A netlink connection in the node's network.
    pub fn netlink(&self) -> Result<Conn> {
        self.place().conn()
    }
}

/// Where a sandbox's network namespace is, inside the node.
pub fn netns_path(id: &str) -> String {
    format!("/run/netns/{id}")
}

/// A lock whose holder panicked still holds plain data.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a mode `overlay` says that all nodes are reached past the stack, whoever translates Services.
fn is_direct(way: &str) -> bool {
    matches!(way, "direct" | "direct, beside kube-proxy")
}
