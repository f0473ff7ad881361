//! A node for the real agent, with an uplink; and the plugin's side of the socket.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sinabro_common::{
    api::{
        ApiError, Attachment, ErrorCode, IpamReport, Owner, PodRef, Reply, ReplyEnvelope, Request,
        RequestEnvelope, Response, StatusReport, VERSION, frame,
    },
    atomic_file::AtomicFile,
    names,
};
pub use sinabro_lab::wait::eventually;
use sinabro_lab::{Lifetime, Namespace, Place, residue::run};
use sinabro_netlink::{Conn, link};
use std::{
    fs,
    io::Read,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Of one exchange with the agent.
pub const DEADLINE: Duration = Duration::from_secs(30);

const AGENT: &str = env!("CARGO_BIN_EXE_sinabro-agent");

/// The nodes file, inside.
const NODES: &str = "/run/nodes.yaml";

pub struct Node {
    agent: Option<Child>,
    // After the agent, which lives in it.
    namespace: Namespace,
    /// Network of all pods here: the agent never looks inside.
    pods: Place,
}

impl Node {
    /// A node without an agent.
    pub fn new() -> Self {
        let namespace = Namespace::new("n1", Lifetime::Process)
            .expect("namespaces need root: run `cargo xtask test`");
        let node = Self {
            agent: None,
            namespace,
            pods: Place::fresh("pods").unwrap(),
        };
        let place = node.place();
        place.set_up("lo", &[]).unwrap();
        let ends = [("up0", [2, 0, 0, 0, 1, 1]), ("up1", [2, 0, 0, 0, 1, 2])];
        place.cable(ends[0], 1500, place, ends[1]).unwrap();
        place.set_up("up1", &[]).unwrap();
        let address = "192.0.2.1/24".parse().unwrap();
        place.set_up("up0", &[address]).unwrap();
        node.write_nodes(
            "[{name: n1, addresses: [192.0.2.1], podCIDRs: [10.9.0.0/24, 'fd09::/64']}]",
        );
        node
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    pub fn place(&self) -> &Place {
        self.namespace.place()
    }

    /// The network of all pods.
    pub fn pods(&self) -> &Place {
        &self.pods
    }

    pub fn conn(&self) -> Conn {
        self.place().conn().unwrap()
    }

    pub fn write_nodes(&self, text: &str) {
        // Whole at once, as an editor or a ConfigMap does.
        let file = self.namespace.path(NODES);
        AtomicFile::new(&file).replace(text.as_bytes()).unwrap();
    }

    /// A path below the state directory.
    pub fn state(&self, name: &str) -> PathBuf {
        self.namespace.path(names::STATE_DIR).join(name)
    }

    /// A path below the pins.
    pub fn bpf(&self, name: &str) -> PathBuf {
        self.namespace.path(names::BPF_DIR).join(name)
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(AGENT);
        command
            .env_clear()
            .envs(run::inherited())
            .env("RUST_BACKTRACE", "1")
            // The machine's /var is nobody's to write to.
            .env("SINABRO_PROGRAMS_DIR", "/run/programs")
            // As large on every machine.
            .env("SINABRO_CONNECTIONS", "131072")
            .args(["--node-name=n1", "--metrics-address=", "--nodes", NODES])
            .stdin(Stdio::null());
        self.namespace.put(&mut command);
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
        let mut command = self.command();
        command.args(args);
        self.start_command(command);
    }

    /// The same of an agent that something else was done to before.
    pub fn start_command(&mut self, mut command: Command) {
        assert!(self.agent.is_none());
        let mut child = command.spawn().unwrap();
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
        let near = (attachment.link.as_str(), attachment.host_mac.0);
        // All pods share a namespace here.
        let peer = attachment.link.replace("snb", "pod");
        let far = (peer.as_str(), attachment.mac.0);
        let cable = self.place().cable(near, attachment.mtu, &self.pods, far);
        cable.unwrap()
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
        if let Some(child) = &mut self.agent {
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
            local_mtu: true,
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
        local_mtu: None,
        service_translation: None,
        host_ports: None,
        warnings: Vec::new(),
    }
}
