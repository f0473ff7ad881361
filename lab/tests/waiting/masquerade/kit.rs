//! A node with pods, and a host two routers away that knows the nodes' addresses and no pod's.
//!
//! ```text
//!   pod ── n1 ── router ────────── outside ────────── beyond
//!               172.30.0.1        192.0.2.10         198.51.100.10
//!               fd00:172:30::1    2001:db8:2::10     2001:db8:3::10
//! ```

use sinabro_common::api::{ConnectionStats, MetricsReport, Request, Response};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod, amount::amount, node::SERVICES_FLAGS,
    traffic::packet::Interface,
};
use sinabro_netlink::{Family, route::Route, sysctl};
use std::net::IpAddr;

pub const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];
const BEYOND: [&str; 2] = ["198.51.100.10/24", "2001:db8:3::10/64"];
const BEYOND_ROUTER: [&str; 2] = ["198.51.100.1/24", "2001:db8:3::1/64"];
const ROUTER: [&str; 2] = ["172.30.0.1", "fd00:172:30::1"];
const OUTSIDE_ROUTER: [&str; 2] = ["192.0.2.1", "2001:db8:2::1"];

/// What kube-proxy has in the way of every packet that a node forwards: those that do not belong to a
/// connection that the kernel knows are dropped (its issue 74839).
const FORWARD_RULES: &str = "table inet proxy {
    chain forward { type filter hook forward priority filter; ct state invalid drop; }
}";

/// How packets leave the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By its stack.
    Stack,
    /// Past it, as where Services are the agent's.
    Direct,
}

impl Way {
    pub const BOTH: [Self; 2] = [Self::Stack, Self::Direct];

    /// What an agent is told for it.
    pub fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Stack => &[],
            Self::Direct => &SERVICES_FLAGS,
        }
    }

    /// The ways of a test's part, where each of its parts by both takes too long: one by turns, or with SINABRO_THOROUGH
    /// both.
    pub fn in_turn(part: usize) -> impl Iterator<Item = Self> {
        let ways = Self::BOTH.into_iter();
        ways.cycle().skip(part % 2).take(amount(1, 2) as usize)
    }
}

pub struct World {
    pub beyond: Place,
    pods: Vec<Pod>,
    pub lab: Lab,
}

impl World {
    /// One node with so many pods.
    pub fn new(pods: usize) -> Self {
        Self::guarded(Way::Stack, pods, &[])
    }

    /// The same, but that packets go past the node's stack, where Services are the agent's.
    pub fn direct(pods: usize) -> Self {
        Self::direct_with(pods, &[])
    }

    /// The same with flags of the agent.
    pub fn direct_with(pods: usize, flags: &[&str]) -> Self {
        Self::by(Way::Direct, pods, &[], flags)
    }

    /// By a way, with flags of the agent. The stack has kube-proxy's rules; past it there are none.
    pub fn guarded(way: Way, pods: usize, flags: &[&str]) -> Self {
        let world = Self::by(way, pods, &[], flags);
        if way == Way::Stack {
            world.guard();
        }
        world
    }

    /// By the stack, and past it.
    pub fn by_both_ways(pods: usize) -> impl Iterator<Item = Self> {
        Way::BOTH
            .into_iter()
            .map(move |way| Self::guarded(way, pods, &[]))
    }

    /// The same, but that nothing tracks connections.
    pub fn unguarded_by_both_ways(pods: usize) -> impl Iterator<Item = Self> {
        Way::BOTH
            .into_iter()
            .map(move |way| Self::by(way, pods, &[], &[]))
    }

    /// Waits until packets go by a way, as the agent says.
    pub fn wait_for_way(&self, beginning: &str) {
        self.node().wait_for_way(beginning).unwrap();
    }

    /// The same without rules that have the kernel track connections, and so put packets in parts together;
    /// with sysctls of the node as they are before its agent starts, and flags of the agent.
    pub fn with(pods: usize, sysctls: &[(&str, &str)], flags: &[&str]) -> Self {
        Self::by(Way::Stack, pods, sysctls, flags)
    }

    /// The same by a way.
    pub fn by(way: Way, pods: usize, sysctls: &[(&str, &str)], flags: &[&str]) -> Self {
        let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
        let node = lab.node(1);
        for (name, value) in sysctls {
            let path: Vec<_> = name.split('.').collect();
            let set = || Ok(sysctl::write(&path, value)?);
            node.namespace().run(set).unwrap();
        }
        if way == Way::Stack {
            return Self::in_lab(lab, pods, flags);
        }
        node.write_services("{kind: List, items: []}\n").unwrap();
        let world = Self::in_lab(lab, pods, &[way.flags(), flags].concat());
        world.wait_for_way("direct");
        world
    }

    /// The same on the node of a lab.
    pub fn in_lab(lab: Lab, pods: usize, flags: &[&str]) -> Self {
        let beyond = beyond(&lab);
        let node = lab.node(1);
        node.start_agent_with(flags).unwrap();
        node.wait_ready().unwrap();
        let pods = (1..=pods).map(|number| node.add_pod(&format!("pod{number}")).unwrap());
        Self {
            pods: pods.collect(),
            beyond,
            lab,
        }
    }

    /// Puts [`FORWARD_RULES`] in place.
    pub fn guard(&self) {
        self.node()
            .place()
            .command(&["nft", FORWARD_RULES])
            .unwrap();
    }

    /// The way that packets go, as the agent says.
    pub fn way(&self) -> String {
        self.node().status().unwrap().modes["forwarding"].clone()
    }

    /// As `sinabroctl connections stats` has it.
    pub fn stats(&self) -> ConnectionStats {
        match self.node().ask(Request::ConnectionStats).unwrap() {
            Response::ConnectionStats(stats) => stats,
            other => panic!("{other:?}"),
        }
    }

    pub fn metrics(&self) -> MetricsReport {
        match self.node().ask(Request::Metrics).unwrap() {
            Response::Metrics(metrics) => *metrics,
            other => panic!("{other:?}"),
        }
    }

    /// Packets that were dropped for a reason, by its label.
    pub fn dropped(&self, reason: &str) -> u64 {
        let drops = self.metrics().drops.into_iter();
        let of_reason = drops.filter(|drop| drop.reason == reason);
        of_reason.map(|drop| drop.packets).sum()
    }

    /// How often the table was swept.
    pub fn sweeps(&self) -> u64 {
        self.metrics().connections.unwrap().sweeps
    }

    pub fn node(&self) -> &Node {
        self.lab.node(1)
    }

    /// By number, from 1.
    pub fn pod(&self, number: usize) -> &Pod {
        &self.pods[number - 1]
    }

    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    /// The node's addresses, by family.
    pub fn own(&self) -> [IpAddr; 2] {
        let addresses = self.node().addresses();
        [addresses[0], addresses[1]]
    }
}

/// The far host's addresses, by family.
pub fn far() -> [IpAddr; 2] {
    BEYOND.map(|net| net.parse::<ipnet::IpNet>().unwrap().addr())
}

/// The addresses by which the two routers speak to the node, by family.
pub fn routers() -> [[IpAddr; 2]; 2] {
    [0, 1].map(|family| {
        let outside = ["192.0.2.10", "2001:db8:2::10"][family];
        [ROUTER[family], outside].map(|text| text.parse().unwrap())
    })
}

fn beyond(lab: &Lab) -> Place {
    let beyond = Place::fresh("beyond").unwrap();
    let (router, outside) = (lab.router().place(), lab.outside());
    let nets = |texts: [&str; 2]| texts.map(|text| text.parse::<ipnet::IpNet>().unwrap());
    let ends = [("far0", [2, 0x1a, 0xb0, 0, 3, 1]), ("eth0", FAR_MAC)];
    outside.place().forward().unwrap();
    outside
        .place()
        .cable(ends[0], 1500, &beyond, ends[1])
        .unwrap();
    outside
        .place()
        .set_up("far0", &nets(BEYOND_ROUTER))
        .unwrap();
    let eth0 = beyond.set_up("eth0", &nets(BEYOND)).unwrap();
    let default = |place: &Place, via: IpAddr, link| {
        let route = Route::default_of(Family::of(via)).via(via).dev(link);
        place.conn().unwrap().execute(route.add()).unwrap();
    };
    for (family, back) in OUTSIDE_ROUTER.iter().enumerate() {
        default(&beyond, nets(BEYOND_ROUTER)[family].addr(), eth0);
        let there = Route::to(nets(BEYOND)[family].trunc())
            .via(routers()[family][1])
            .dev(router.index("out0").unwrap());
        router.conn().unwrap().execute(there.add()).unwrap();
        default(
            outside.place(),
            back.parse().unwrap(),
            outside.place().index("eth0").unwrap(),
        );
    }
    beyond
}

const FAR_MAC: [u8; 6] = [2, 0x1a, 0xb0, 0, 3, 2];

/// All routers know the way to the node's pods.
pub fn route_pods(world: &World) {
    for (family, range) in world.node().entry().pod_cidrs.into_iter().enumerate() {
        let (router, outside) = (world.lab.router().place(), world.lab.outside().place());
        let there = Route::to(range)
            .via(world.own()[family])
            .dev(router.index("br0").unwrap());
        router.conn().unwrap().execute(there.add()).unwrap();
        let there = Route::to(range)
            .via(OUTSIDE_ROUTER[family].parse().unwrap())
            .dev(outside.index("eth0").unwrap());
        outside.conn().unwrap().execute(there.add()).unwrap();
    }
}

/// The link between the two routers carries no more than this.
pub fn narrow(world: &World, mtu: u32) {
    for (machine, link) in [(world.lab.router(), "out0"), (world.lab.outside(), "eth0")] {
        machine.place().set_mtu(link, mtu).unwrap();
    }
}

pub fn eth0(place: &Place) -> Interface {
    sinabro_lab::traffic::packet::interface(place, "eth0").unwrap()
}

/// Where the far host's frames go.
pub fn far_router(world: &World) -> [u8; 6] {
    let outside = world.lab.outside().place();
    sinabro_lab::traffic::packet::interface(outside, "far0")
        .unwrap()
        .mac
}
