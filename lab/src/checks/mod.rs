//! What must hold between pods, nodes and the outside: one list, used by the demo and by the
//! tests.
//!
//! A check sends real traffic and says in one line what it saw. It leaves the scene as it found
//! it, so checks may run in any order and beside one another.

pub mod acceleration;
pub mod books;
mod lifecycle;
mod outside;
mod reach;
pub mod service;
pub mod spoof;
pub mod tunnel;

pub use reach::large;

use crate::{Lab, Node, Pod, traffic::path::Path};
use anyhow::{Context as _, Result};
use std::{net::IpAddr, thread};

/// Nodes with pods, ready for traffic.
pub struct Scene {
    lab: Lab,
    pods: Vec<Vec<Pod>>,
}

/// Pods that every check may count on, on each node.
pub const PODS_PER_NODE: usize = 3;

impl Scene {
    /// Adds pods to each node of a lab, all nodes at once, and has a Service lead to some of them, for agents that
    /// follow it ([`service::start`]).
    pub fn new(lab: Lab) -> Result<Self> {
        let pods = thread::scope(|scope| {
            let nodes: Vec<_> = lab
                .nodes()
                .iter()
                .map(|node| {
                    scope.spawn(move || -> Result<Vec<Pod>> {
                        (1..=PODS_PER_NODE)
                            .map(|number| node.add_pod(&format!("{}-pod{number}", node.name())))
                            .collect()
                    })
                })
                .collect();
            nodes
                .into_iter()
                .map(|node| {
                    node.join()
                        .map_err(|_| anyhow::anyhow!("a thread panicked"))?
                })
                .collect::<Result<Vec<_>>>()
        })?;
        service::publish(&lab, &service::endpoints(&pods))?;
        Ok(Self { lab, pods })
    }

    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    pub fn node(&self, number: usize) -> &Node {
        self.lab.node(number)
    }

    /// Pod by node and number, both from 1.
    pub fn pod(&self, node: usize, number: usize) -> &Pod {
        &self.pods[node - 1][number - 1]
    }

    pub fn into_lab(self) -> Lab {
        self.lab
    }

    /// The ways that traffic takes: within a node, across nodes, between nodes and pods, and out
    /// through the masquerade.
    pub fn paths(&self) -> Result<Vec<Path>> {
        let (a, near, far) = (self.pod(1, 1), self.pod(1, 2), self.pod(2, 1));
        let node = self.node(1);
        let outside = self.lab.outside().place();
        let address = Family::V4.pick(&self.lab.outside_addresses()?)?;
        let mut paths = vec![Path::new("outside, IPv4", near.place(), outside, address)];
        for (family, name) in [(Family::V4, "IPv4"), (Family::V6, "IPv6")] {
            let mut path = |way: &str, from, to, address| {
                paths.push(Path::new(&format!("{way}, {name}"), from, to, address));
            };
            path("same node", a.place(), near.place(), family.of(near));
            path("across nodes", a.place(), far.place(), family.of(far));
            path("across nodes, back", far.place(), a.place(), family.of(a));
            path("node to pod", node.place(), a.place(), family.of(a));
            path("node to far pod", node.place(), far.place(), family.of(far));
            let own = family.pick(&node.addresses())?;
            path("pod to node", a.place(), node.place(), own);
        }
        Ok(paths)
    }
}

/// An address of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl Family {
    const BOTH: [Self; 2] = [Self::V4, Self::V6];

    fn of(self, pod: &Pod) -> IpAddr {
        match self {
            Self::V4 => pod.v4(),
            Self::V6 => pod.v6(),
        }
    }

    fn pick(self, addresses: &[IpAddr]) -> Result<IpAddr> {
        addresses
            .iter()
            .find(|address| address.is_ipv4() == (self == Self::V4))
            .copied()
            .context("no address of this family")
    }
}

/// One thing that must hold.
#[derive(Clone, Copy)]
pub struct Check {
    /// As in the demo's JSON, and the test's name.
    pub name: &'static str,
    /// As in the demo's table.
    pub title: &'static str,
    run: fn(&Scene) -> Result<String>,
}

impl Check {
    /// Says what was seen, or why it does not hold.
    pub fn run(&self, scene: &Scene) -> Result<String> {
        (self.run)(scene)
    }

    pub fn by_name(name: &str) -> Option<&'static Self> {
        CHECKS.iter().find(|check| check.name == name)
    }
}

macro_rules! checks {
    ($($name:ident in $module:ident: $title:literal,)*) => {
        /// Every check, in the order of the demo's table.
        pub const CHECKS: &[Check] = &[$(Check {
            name: stringify!($name),
            title: $title,
            run: $module::$name,
        },)*];

        /// Calls a macro with the names of all checks, so that each can become a test.
        #[macro_export]
        macro_rules! for_each_check {
            ($callback:ident) => { $callback! { $($name)* } };
        }
    };
}

checks! {
    same_node_ipv4 in reach: "pod → pod, same node, IPv4",
    same_node_ipv6 in reach: "pod → pod, same node, IPv6",
    across_nodes_ipv4 in reach: "pod → pod, across nodes, IPv4",
    across_nodes_ipv6 in reach: "pod → pod, across nodes, IPv6",
    full_mtu in reach: "full-size packets, DF, across nodes",
    local_mtu in reach: "packets of 64 KB, same node",
    pod_to_node in reach: "pod → node",
    node_to_pod in reach: "node → pod",
    one_byte in reach: "1 byte by TCP, digests compared",
    large_transfer in reach: "64 MB by TCP, digests compared",
    acceleration in acceleration: "accelerated TCP, same node",
    masquerade in outside: "pod → outside, masqueraded",
    replies_only in outside: "outside cannot reach pods by itself",
    service_from_pod in service: "pod → Service, no kube-proxy",
    service_from_node in service: "node → Service, no kube-proxy",
    service_from_outside in service: "outside → Service, no kube-proxy",
    spoofed_address in spoof: "spoofed source address dropped",
    spoofed_mac in spoof: "spoofed source MAC dropped",
    spoofed_arp in spoof: "spoofed ARP dropped",
    forged_tunnel in tunnel: "forged tunnel packets dropped",
    counters in lifecycle: "packets counted per pod",
    verify in lifecycle: "CNI CHECK agrees with the kernel",
    deletion in lifecycle: "pod deletion frees everything",
}
