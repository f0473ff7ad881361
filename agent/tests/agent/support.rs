//! A node for the real agent: network and mount namespaces of its own, an uplink, a state
//! directory; and the plugin's side of the socket.

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sinabro_common::{
    api::{
        ApiError, Attachment, ErrorCode, IpamReport, Owner, PodRef, Reply, ReplyEnvelope, Request,
        RequestEnvelope, Response, StatusReport, VERSION, frame,
    },
    names,
};
pub use sinabro_lab::wait::eventually;
use sinabro_netlink::{Conn, NetNs, addr::Addr, link, veth::Veth};
use std::{
    fs::{self, File},
    io::Read,
    os::unix::{net::UnixStream, process::CommandExt},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Of one exchange with the agent.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// The namespaces, held by a process that does nothing else.
pub struct Node {
    dir: tempfile::TempDir,
    holder: Child,
    pub net: NetNs,
    /// Namespace of all pods here: the agent never looks inside.
    pub pods: NetNs,
    agent: Option<Child>,
}

impl Node {
    /// A node without an agent.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bpf = dir.path().join("bpf");
        fs::create_dir(&bpf).unwrap();
        let mut command = Command::new("sleep");
        command.arg("infinity");
        let enter = move || {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            mount(Some("bpf"), &bpf, Some("bpf"), MsFlags::empty(), none)?;
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            Ok(())
        };
        // SAFETY: between fork and exec only system calls are made, and no memory is allocated
        // that another thread's lock could guard: the paths are short enough for nix's stack
        // buffer.
        unsafe { command.pre_exec(enter) };
        // exec has happened once spawn returns, so the namespaces are there.
        let holder = command
            .spawn()
            .expect("namespaces need root: run `cargo xtask test`");
        let net = NetNs::open(format!("/proc/{}/ns/net", holder.id())).unwrap();
        let node = Self {
            dir,
            holder,
            net,
            pods: NetNs::create().unwrap(),
            agent: None,
        };
        node.add_uplink();
        node.write_nodes(
            "[{name: n1, addresses: [192.0.2.1], podCIDRs: [10.9.0.0/24, 'fd09::/64']}]",
        );
        node
    }

    fn add_uplink(&self) {
        let mut conn = self.conn();
        let lo = conn.link_by_name("lo").unwrap().index;
        let veth = Veth {
            name: "up0",
            mac: [2, 0, 0, 0, 1, 1],
            mtu: 1500,
            peer_name: "up1",
            peer_mac: [2, 0, 0, 0, 1, 2],
            peer_netns: None,
        };
        let up = conn.create_veth(&veth).unwrap().index;
        conn.execute_all([
            link::set_up(lo),
            Addr::new(up, "192.0.2.1/24".parse().unwrap()).add(),
        ])
        .unwrap();
    }

    pub fn conn(&self) -> Conn {
        Conn::in_netns(&self.net).unwrap()
    }

    pub fn write_nodes(&self, text: &str) {
        // Whole at once, as an editor or a ConfigMap does.
        fs::write(self.path("nodes.new"), text).unwrap();
        fs::rename(self.path("nodes.new"), self.path("nodes.yaml")).unwrap();
    }

    /// A path below the test's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A path below the state directory.
    pub fn state(&self, name: &str) -> PathBuf {
        self.path("state").join(name)
    }

    /// A path on the node's bpffs, which only its mount namespace has.
    pub fn bpf(&self, name: &str) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        let bpf = self.path("bpf").join(name);
        root.join(bpf.strip_prefix("/").unwrap())
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sinabro-agent"));
        let flag = |name: &str, value: PathBuf| format!("--{name}={}", value.display());
        command
            .env_clear()
            .env("RUST_BACKTRACE", "1")
            .arg("--node-name=n1")
            .arg("--metrics-address=")
            .arg(flag("nodes", self.path("nodes.yaml")))
            .arg(flag("state-dir", self.path("state")))
            .arg(flag("bpf-dir", self.path("bpf/sinabro")))
            .stdin(Stdio::null());
        let of = |kind: &str| File::open(format!("/proc/{}/ns/{kind}", self.holder.id())).unwrap();
        let (net, mnt) = (of("net"), of("mnt"));
        let enter = move || {
            setns(&net, CloneFlags::CLONE_NEWNET)?;
            setns(&mnt, CloneFlags::CLONE_NEWNS)?;
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            Ok(())
        };
        // SAFETY: only system calls on descriptors opened before.
        unsafe { command.pre_exec(enter) };
        command
    }

    /// Starts the agent and waits until it serves.
    pub fn start(&mut self) {
        self.start_with(&[]);
        self.wait_ready();
    }

    pub fn wait_ready(&self) {
        eventually("the node is ready", || {
            self.status().is_some_and(|s| s.node_addresses.len() == 1)
        });
    }

    /// Starts the agent and waits until its socket answers.
    pub fn start_with(&mut self, args: &[&str]) {
        assert!(self.agent.is_none());
        let mut child = self.command().args(args).spawn().unwrap();
        eventually("the socket answers", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("the agent ended with {status}");
            }
            self.status().is_some()
        });
        self.agent = Some(child);
    }

    /// Status, if somebody answers.
    pub fn status(&self) -> Option<StatusReport> {
        let mut plugin = Plugin::try_connect(self.state(names::SOCKET))?;
        match plugin.call(Request::Status) {
            Ok(Response::Status(status)) => Some(*status),
            _ => None,
        }
    }

    pub fn agent_pid(&self) -> u32 {
        self.agent.as_ref().unwrap().id()
    }

    /// kill -9.
    pub fn kill(&mut self) {
        let mut child = self.agent.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// SIGTERM; whether it ended well.
    pub fn stop(&mut self) -> bool {
        self.signal(Signal::SIGTERM);
        let mut child = self.agent.take().unwrap();
        let mut status = None;
        eventually("the agent ends", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().success()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.agent_pid() as i32), signal).unwrap();
    }

    pub fn connect(&self) -> Plugin {
        Plugin::try_connect(self.state(names::SOCKET)).expect("the agent listens")
    }

    pub fn ipam(&self) -> IpamReport {
        match self.connect().call(Request::Ipam) {
            Ok(Response::Ipam(report)) => report,
            other => panic!("{other:?}"),
        }
    }

    /// What the plugin makes between Allocate and Activate, as far as the agent cares.
    pub fn add_link(&self, attachment: &Attachment) -> u32 {
        let veth = Veth {
            name: &attachment.link,
            mac: attachment.host_mac.0,
            mtu: attachment.mtu,
            // All pods share a namespace here.
            peer_name: &attachment.link.replace("snb", "pod"),
            peer_mac: attachment.mac.0,
            peer_netns: Some(&self.pods),
        };
        self.conn().create_veth(&veth).unwrap().index
    }

    pub fn delete_link(&self, name: &str) {
        self.conn().execute(link::delete_by_name(name)).unwrap();
    }

    pub fn links(&self) -> Vec<String> {
        let links = self.conn().links().unwrap().into_iter().map(|l| l.name);
        links.filter(|name| names::is_pod_link(name)).collect()
    }

    /// A whole ADD.
    pub fn add(&self, id: &str) -> Attachment {
        let mut plugin = self.connect();
        let attachment = plugin.allocate(id).unwrap();
        let ifindex = self.add_link(&attachment);
        plugin.activate(id, ifindex).unwrap();
        attachment
    }

    pub fn check(&self, id: &str) -> Result<Attachment, ApiError> {
        attachment(self.connect().call(Request::Check { owner: owner(id) }))
    }

    pub fn leases(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.state(names::LEASES_DIR))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        names
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for child in self.agent.iter_mut().chain([&mut self.holder]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The plugin's end of a connection.
pub struct Plugin(pub UnixStream);

impl Plugin {
    pub fn try_connect(path: PathBuf) -> Option<Self> {
        let stream = UnixStream::connect(path).ok()?;
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Some(Self(stream))
    }

    pub fn call(&mut self, request: Request) -> Result<Response, ApiError> {
        let envelope = RequestEnvelope {
            version: VERSION,
            request,
        };
        // A peer that is gone shows in the missing reply.
        let _ = frame::write(&mut self.0, &envelope);
        self.reply()
    }

    pub fn reply(&mut self) -> Result<Response, ApiError> {
        let envelope: ReplyEnvelope = frame::read(&mut self.0)
            .map_err(|error| ApiError::new(ErrorCode::Internal, format!("no reply: {error}")))?;
        match envelope.reply {
            Reply::Ok(response) => Ok(response),
            Reply::Error(error) => Err(error),
        }
    }

    pub fn allocate(&mut self, id: &str) -> Result<Attachment, ApiError> {
        attachment(self.call(allocate(id)))
    }

    pub fn activate(&mut self, id: &str, ifindex: u32) -> Result<Attachment, ApiError> {
        attachment(self.call(Request::Activate {
            owner: owner(id),
            ifindex,
            netns_cookie: None,
        }))
    }

    pub fn release(&mut self, id: &str) -> Result<Response, ApiError> {
        self.call(Request::Release { owner: owner(id) })
    }

    /// Whether the agent has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0))
    }
}

fn attachment(outcome: Result<Response, ApiError>) -> Result<Attachment, ApiError> {
    match outcome? {
        Response::Attachment(attachment) => Ok(attachment),
        other => panic!("{other:?}"),
    }
}

pub fn owner(id: &str) -> Owner {
    Owner {
        container_id: id.into(),
        ifname: "eth0".into(),
    }
}

pub fn allocate(id: &str) -> Request {
    Request::Allocate {
        owner: owner(id),
        network: "pods".into(),
        netns: format!("/run/netns/{id}"),
        pod: PodRef::default(),
        addresses: Vec::new(),
        mac: None,
        acceleration: None,
        warnings: Vec::new(),
    }
}
