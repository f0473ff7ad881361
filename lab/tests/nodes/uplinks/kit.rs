//! A node with further cables to the outside host, and traffic out of its pods.

use ipnet::IpNet;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    lab::UNDERLAY_MTU,
    traffic::{errors, icmp, path::Path, stream::Stream, udp},
    wait::eventually,
};
use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
};

pub const BYTES: usize = 8 << 20;
const WRITE: usize = 64 << 10;

pub fn lab() -> Lab {
    Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap()
}

/// The addresses of both ends of a further way out, IPv4 first.
pub struct Way {
    pub link: String,
    pub near: [IpAddr; 2],
    pub far: [IpAddr; 2],
}

impl Way {
    pub fn new(link: &str, number: u8) -> Self {
        let ends = |end: u8| {
            [
                format!("198.18.{number}.{end}").parse().unwrap(),
                format!("2001:db8:18:{number}::{end}").parse().unwrap(),
            ]
        };
        Self {
            link: link.into(),
            near: ends(2),
            far: ends(1),
        }
    }

    fn nets(ends: [IpAddr; 2]) -> Vec<IpNet> {
        let net =
            |address: IpAddr| IpNet::new(address, if address.is_ipv4() { 24 } else { 64 }).unwrap();
        ends.map(net).into()
    }

    /// Addresses on the links of both ends, which are raised.
    pub fn set_up(&self, node: &Node, outside: &Place) {
        node.place()
            .set_up(&self.link, &Self::nets(self.near))
            .unwrap();
        outside.set_up(&self.link, &Self::nets(self.far)).unwrap();
    }

    /// A cable to the outside host, its ends called the same.
    pub fn cable(link: &str, number: u8, lab: &Lab) -> Self {
        let way = Self::new(link, number);
        let (node, outside) = (lab.node(1), lab.outside().place());
        let mac = |end| [2, 0x18, 0, 0, number, end];
        let (near, far) = ((link, mac(2)), (link, mac(1)));
        node.place()
            .cable(near, UNDERLAY_MTU, outside, far)
            .unwrap();
        way.set_up(node, outside);
        way
    }
}

pub fn ip(place: &Place, commands: &[String]) {
    for command in commands {
        let output = place.run(|| {
            let mut ip = Command::new("ip");
            Ok(ip.args(command.split_whitespace()).output()?)
        });
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "ip {command}: {said}");
    }
}

/// Has both default routes leave by these, each a next hop.
pub fn leave_by(node: &Node, ways: &[&Way]) {
    let routes = [0, 1].map(|family| {
        let hop = |way: &&Way| format!("nexthop via {} dev {}", way.far[family], way.link);
        let hops: Vec<String> = ways.iter().map(hop).collect();
        let ip = if family == 0 { "-4" } else { "-6" };
        [
            format!("{ip} route del default"),
            format!("{ip} route add default {}", hops.join(" ")),
        ]
    });
    ip(node.place(), routes.as_flattened());
}

/// Starts the agent, waits until it knows these uplinks, and adds a pod.
pub fn start(node: &Node, uplinks: &[&str], flags: &[&str]) -> Pod {
    node.start_agent_with(flags).unwrap();
    node.wait_ready().unwrap();
    wait_for(node, uplinks);
    node.add_pod("pod").unwrap()
}

/// Waits until these are the node's uplinks.
pub fn wait_for(node: &Node, uplinks: &[&str]) {
    eventually("the uplinks to be known", || {
        node.status().unwrap().uplink == uplinks.join(",")
    });
}

pub fn seen(stream: &Stream) -> IpAddr {
    stream
        .server()
        .peer_addr()
        .map(|peer: SocketAddr| peer.ip())
        .unwrap()
}

/// The client's address as a server outside sees it.
pub fn seen_at(pod: &Pod, outside: &Place, address: IpAddr) -> IpAddr {
    let path = Path::new("out", pod.place(), outside, address);
    seen(&Stream::open(&path).unwrap())
}

/// Everything works and comes from there: TCP of 8 MB each way, small and fragmented UDP, ping, and an ICMP
/// error.
pub fn works(pod: &Pod, outside: &Place, address: IpAddr, source: IpAddr) {
    works_from_any(pod, outside, address, &[source]);
}

/// The same where several may be the source, each protocol's its own.
pub fn works_from_any(pod: &Pod, outside: &Place, address: IpAddr, sources: &[IpAddr]) {
    let path = Path::new(&format!("out to {address}"), pod.place(), outside, address);
    let comes = |what: &str, source: IpAddr| {
        let is = sources.contains(&source);
        assert!(
            is,
            "{what} to {address} comes from {source}, not {sources:?}"
        );
    };
    let stream = Stream::open(&path).unwrap();
    comes("TCP", seen(&stream));
    stream.carry(BYTES, WRITE).unwrap();
    for size in [100, 5000] {
        let seen = udp::echo(pod.place(), outside, address, size, false).unwrap();
        comes(&format!("UDP of {size} bytes"), seen);
    }
    let seen = icmp::ping_seen(pod.place(), outside, address).unwrap();
    comes("ping", seen);
    // What is said about a packet finds who sent it.
    let closed = SocketAddr::new(address, 33_434);
    let heard = errors::of_closed_port(pod.place(), closed, b"anybody?").unwrap();
    assert!(heard.is_closed_port() && heard.from == address, "{heard:?}");
    assert_eq!(heard.quoted, b"anybody?");
}
