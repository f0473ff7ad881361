//! Packets between nodes go past netfilter beside kube-proxy, and back: no connection notices, and netfilter takes none for invalid.

use super::{
    BEFORE, Exchanges, IDLE, OFF, PACE, World,
    firewall::{firewall, is_dropped},
    must_flow, vip,
};
use sinabro_common::api::{PathPackets, Request, Response};
use sinabro_lab::{
    Node, Pod,
    node::KERNEL_FLAG,
    traffic::{PATIENCE, accept, path::Path, unbroken::Traffic},
};
use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

/// The port that a firewall is about.
pub(super) const FENCED: u16 = 7000;
/// And one that it is not about.
pub(super) const FREE: u16 = 7100;
/// Segments that end connections still go past netfilter.
pub(super) const FEW: u64 = 200;
const KUBE_PROXY: &str = "kube-proxy";
/// By when a rule that comes is obeyed.
pub(super) const SOON: Duration = Duration::from_secs(1);

/// By pods' own addresses, from one node to the other.
pub(super) fn straight(world: &World) -> Vec<Path> {
    let server = &world.servers[1];
    let path = |address| {
        let name = format!("pod, its own address, {address}");
        Path::new(&name, world.client.place(), server.place(), address)
    };
    server.addresses().map(path).into()
}

/// Packets of both nodes that went past the stack.
pub(super) fn direct(world: &World) -> u64 {
    let of = |node: &Node| match node.ask(Request::Metrics).unwrap() {
        Response::Metrics(metrics) => {
            let PathPackets { sent, received } = metrics.overlay_packets.unwrap().direct;
            sent + received
        }
        answer => panic!("{answer:?}"),
    };
    world.lab.nodes().iter().map(of).sum()
}

/// A connection on which nothing is said.
pub(super) struct Idle {
    client: TcpStream,
    server: TcpStream,
}

impl Idle {
    /// By the Service: so many of each family.
    pub(super) fn all(world: &World, count: usize) -> Vec<Self> {
        let server = &world.servers[1];
        let idle = |(family, address)| {
            let listener = listen(server, (address, IDLE.1).into());
            let to = SocketAddr::new(vip(family), IDLE.0);
            (0..count)
                .map(|_| Self::connect(world, &listener, to, PATIENCE))
                .collect::<Vec<_>>()
        };
        server
            .addresses()
            .into_iter()
            .enumerate()
            .flat_map(idle)
            .collect()
    }

    /// By the pod's own addresses: no netfilter has seen them.
    pub(super) fn straight(world: &World, port: u16) -> Vec<Self> {
        let server = &world.servers[1];
        let straight = |address| {
            let to = SocketAddr::new(address, port);
            Self::connect(world, &listen(server, to), to, SOON)
        };
        server.addresses().map(straight).into()
    }

    fn connect(world: &World, listener: &TcpListener, to: SocketAddr, patience: Duration) -> Self {
        let connect = || Ok(TcpStream::connect_timeout(&to, patience)?);
        let client = world.client.place().run(connect).unwrap();
        let (server, _) = accept(listener, Instant::now() + PATIENCE).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { client, server }
    }

    /// Where the client has connected to.
    pub(super) fn to(&self) -> SocketAddr {
        self.client.peer_addr().unwrap()
    }

    /// The server speaks first: its packet is the first after what has changed.
    pub(super) fn speaks(&mut self, what: &str) {
        let mut heard = [0; 5];
        self.server.write_all(b"hello").unwrap();
        let read = self.client.read_exact(&mut heard);
        read.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(&heard, b"hello", "{what}");
    }

    /// Whether what the client says now is heard soon.
    pub(super) fn gets_through(&self) -> bool {
        (&self.client).write_all(b"hello").unwrap();
        self.server.set_read_timeout(Some(SOON)).unwrap();
        (&self.server).read(&mut [0; 5]).is_ok()
    }

    /// What was held up is heard in the end.
    pub(super) fn hears(&self) {
        let mut heard = [0; 5];
        self.server.set_read_timeout(Some(PATIENCE)).unwrap();
        (&self.server).read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"hello");
    }

    /// A FIN is the first segment after what has changed.
    pub(super) fn ends(self, what: &str) {
        drop(self.client);
        self.server.set_read_timeout(Some(PATIENCE)).unwrap();
        let read = (&self.server).read(&mut [0; 5]);
        assert_eq!(read.unwrap_or_else(|error| panic!("{what}: {error}")), 0);
    }
}

fn listen(server: &Pod, at: SocketAddr) -> TcpListener {
    server.place().run(|| Ok(TcpListener::bind(at)?)).unwrap()
}

/// As kube-proxy does: what netfilter takes for invalid is dropped.
pub(super) fn drop_invalid(world: &World) {
    drop_invalid_in(world, KUBE_PROXY);
}

/// The same by another table of this name.
pub(super) fn drop_invalid_in(world: &World, table: &str) {
    for node in world.lab.nodes() {
        for family in ["ip", "ip6"] {
            let rule = format!(
                "table {family} {table} {{ chain filter-forward {{
                    type filter hook forward priority -110
                    ct state invalid counter drop
                }}; }}"
            );
            node.command(&["nft", &rule]).unwrap();
        }
    }
}

/// Netfilter took nothing for invalid, by the rule that kube-proxy has for it.
pub(super) fn nothing_is_invalid(world: &World) {
    nothing_is_invalid_in(world, KUBE_PROXY);
}

pub(super) fn nothing_is_invalid_in(world: &World, table: &str) {
    let invalid = invalid(world, table);
    assert_eq!(invalid.len(), 4);
    for line in invalid {
        assert!(line.contains("counter packets 0 "), "{line}");
    }
}

fn invalid(world: &World, table: &str) -> Vec<String> {
    let mut found = Vec::new();
    for node in world.lab.nodes() {
        for family in ["ip", "ip6"] {
            let mut nft = Command::new("nft");
            node.place()
                .put(nft.args(["list", "chain", family, table, "filter-forward"]));
            let said = String::from_utf8(nft.output().unwrap().stdout).unwrap();
            let counters = said.lines().filter(|line| line.contains("invalid"));
            found.extend(counters.map(|line| line.trim().to_owned()));
        }
    }
    found
}

#[test]
fn connections_notice_nothing_of_the_fast_path_beside_kube_proxy() {
    let world = World::new();
    world.add_rules();
    drop_invalid(&world);
    world.restart(KERNEL_FLAG);
    let exchanges = Exchanges::start(&world);
    let paths: Vec<_> = world.paths().into_iter().chain(straight(&world)).collect();
    let traffic = Traffic::start(&paths, PACE).unwrap();
    traffic.watch(BEFORE);
    assert_eq!(direct(&world), 0);
    let [mut idle, mut idler, mut idlest] = [1, 250, 1].map(|count| Idle::all(&world, count));
    traffic.event("past netfilter").unwrap();
    world.restart(OFF);
    world.is_direct();
    must_flow(&traffic, "past netfilter");
    assert!(direct(&world) > 0);
    for idle in &mut idle {
        idle.speaks("past netfilter");
    }
    for family in 0..2 {
        assert!(world.is_by_rules(world.client.place(), family), "new");
    }
    let straight = |port| Idle::straight(&world, port);
    let (fenced, closing, closing_late) = (straight(FENCED), straight(FREE), straight(FREE + 1));
    traffic.event("the agents were killed").unwrap();
    world.kill(OFF);
    must_flow(&traffic, "with another agent");
    for idle in &mut idler {
        idle.speaks("with another agent");
    }
    traffic.event("a firewall came").unwrap();
    firewall(&world, &[FENCED]);
    sleep(SOON);
    for fenced in &fenced {
        assert!(!fenced.gets_through(), "the firewall");
        assert!(is_dropped(&world, fenced.to()), "the firewall");
    }
    let before = direct(&world);
    must_flow(&traffic, "behind a firewall");
    assert!(direct(&world) - before < FEW, "by the stack");
    for closing in closing {
        closing.ends("behind a firewall");
    }
    for idle in &mut idler {
        idle.speaks("behind a firewall");
    }
    traffic.event("the firewall went").unwrap();
    firewall(&world, &[]);
    must_flow(&traffic, "without the firewall");
    world.is_direct();
    for fenced in &fenced {
        fenced.hears();
    }
    traffic.event("by the stack").unwrap();
    world.restart(KERNEL_FLAG);
    must_flow(&traffic, "by the stack");
    for closing in closing_late {
        closing.ends("by the stack");
    }
    for idle in idle.iter_mut().chain(&mut idler).chain(&mut idlest) {
        idle.speaks("by the stack");
    }
    println!("{}", world.told(exchanges.finish()));
    println!("{}", traffic.finish().unwrap());
    nothing_is_invalid(&world);
}
