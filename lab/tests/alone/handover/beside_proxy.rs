//! Packets between nodes go past netfilter beside kube-proxy, and back: no connection notices, and netfilter takes none for invalid.

use super::{BEFORE, Exchanges, IDLE, OFF, PACE, World, must_flow, start_agent, vip};
use sinabro_common::api::{PathPackets, Request, Response};
use sinabro_lab::{
    Node,
    traffic::{PATIENCE, accept, path::Path, unbroken::Traffic},
};
use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    time::Instant,
};

const BESIDE: &str = "--service-proxy=off --beside-proxy=true";

/// By pods' own addresses, from one node to the other.
fn straight(world: &World) -> Vec<Path> {
    let server = &world.servers[1];
    let path = |address| {
        let name = format!("pod, its own address, {address}");
        Path::new(&name, world.client.place(), server.place(), address)
    };
    server.addresses().map(path).into()
}

/// Packets of both nodes that went past the stack.
fn direct(world: &World) -> u64 {
    let of = |node: &Node| match node.ask(Request::Metrics).unwrap() {
        Response::Metrics(metrics) => {
            let PathPackets { sent, received } = metrics.overlay_packets.unwrap().direct;
            sent + received
        }
        answer => panic!("{answer:?}"),
    };
    world.lab.nodes().iter().map(of).sum()
}

/// A connection by a Service on which nothing is said.
struct Idle {
    client: TcpStream,
    server: TcpStream,
}

impl Idle {
    fn all(world: &World) -> Vec<Self> {
        let server = &world.servers[1];
        let idle = |(family, address)| {
            let bind = || Ok(TcpListener::bind((address, IDLE.1))?);
            let listener = server.place().run(bind).unwrap();
            let to = SocketAddr::new(vip(family), IDLE.0);
            let connect = || Ok(TcpStream::connect_timeout(&to, PATIENCE)?);
            let client = world.client.place().run(connect).unwrap();
            let (server, _) = accept(&listener, Instant::now() + PATIENCE).unwrap();
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            Self { client, server }
        };
        server
            .addresses()
            .into_iter()
            .enumerate()
            .map(idle)
            .collect()
    }

    /// The server speaks first: its packet is the first after what has changed.
    fn speaks(&mut self, what: &str) {
        let mut heard = [0; 5];
        self.server.write_all(b"hello").unwrap();
        let read = self.client.read_exact(&mut heard);
        read.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(&heard, b"hello", "{what}");
    }
}

/// As kube-proxy does: what netfilter takes for invalid is dropped.
fn drop_invalid(world: &World) {
    for node in world.lab.nodes() {
        for family in ["ip", "ip6"] {
            let rule = format!(
                "table {family} kube-proxy {{ chain filter-forward {{
                    type filter hook forward priority -110
                    ct state invalid counter drop
                }}; }}"
            );
            node.command(&["nft", &rule]).unwrap();
        }
    }
}

/// What netfilter took for invalid, by the rule that kube-proxy has for it.
fn invalid(world: &World) -> Vec<String> {
    let mut found = Vec::new();
    for node in world.lab.nodes() {
        for family in ["ip", "ip6"] {
            let mut nft = Command::new("nft");
            node.place()
                .put(nft.args(["list", "chain", family, "kube-proxy", "filter-forward"]));
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
    world.restart(OFF);
    let exchanges = Exchanges::start(&world);
    let paths: Vec<_> = world.paths().into_iter().chain(straight(&world)).collect();
    let traffic = Traffic::start(&paths, PACE).unwrap();
    traffic.watch(BEFORE);
    assert_eq!(direct(&world), 0);
    let [mut idle, mut idler, mut idlest] = [(); 3].map(|()| Idle::all(&world));
    traffic.event("past netfilter").unwrap();
    world.restart(BESIDE);
    for node in world.lab.nodes() {
        node.wait_for_direct_overlay().unwrap();
    }
    must_flow(&traffic, "past netfilter");
    assert!(direct(&world) > 0);
    for idle in &mut idle {
        idle.speaks("past netfilter");
    }
    for family in 0..2 {
        assert!(world.is_by_rules(world.client.place(), family), "new");
    }
    traffic.event("the agents were killed").unwrap();
    for node in world.lab.nodes() {
        node.kill_agent().unwrap();
        start_agent(node, BESIDE);
        node.wait_ready().unwrap();
    }
    must_flow(&traffic, "with another agent");
    for idle in &mut idler {
        idle.speaks("with another agent");
    }
    traffic.event("by the stack").unwrap();
    world.restart(OFF);
    must_flow(&traffic, "by the stack");
    for idle in idle.iter_mut().chain(&mut idler).chain(&mut idlest) {
        idle.speaks("by the stack");
    }
    println!("{}", world.told(exchanges.finish()));
    println!("{}", traffic.finish().unwrap());
    let invalid = invalid(&world);
    assert_eq!(invalid.len(), 4);
    for line in invalid {
        assert!(line.contains("counter packets 0 "), "{line}");
    }
}
