//! What is compared, and on which nodes.
//!
//! | nodes | | same node | across |
//! |---|---|---|---|
//! | n1, n2 | Sinabro | `sinabro` | `sinabro` |
//! | n1 | Sinabro, [by the link's MTU](local_mtu) | `sinabro`, `local-mtu off`, `loopback` | |
//! | n3 | Sinabro, packets between its pods through the stack | `without redirect_peer` | |
//! | n4 | bridge and ptp with host-local | `bridge`, `ptp` | |
//! | n5, n6 | bridge with host-local, and what flannel makes between nodes | | `flannel's way` |
//! | n1 and n2, n5 and n6 | the same, by a Service of kube-proxy's rules | | `sinabro, Service`, `flannel's way, Service` |
//! | n15, n16 | Sinabro with `dataPath: kernel` | | `sinabro, kernel` |
//! | n9, n10 | Sinabro, which translates Services, too | | `sinabro, direct` |
//! | n13, n14 | the same with `routing: native`, and so without a tunnel | | `sinabro, native` |
//! | n7, n8 | nothing | `bare veth (limit)`, two networks and a veth pair | `bare nodes (limit)` |
//! | n11, n12 | nothing but netfilter's connection tracking, as a cluster's nodes have it | | `bare nodes, tracked` |
//!
//! Against an earlier commit n3 to n8, n11 and n12 have that commit's programs, and nothing else is compared: n3 and n4 are
//! as n1 and n2, n5 and n6 as n9 and n10, n7 and n8 as n13 and n14, n11 and n12 as n15 and n16. By the link's MTU n1's pods are compared
//! with n3's.

use super::{
    Options, local_mtu,
    others::{self, Attached},
    pair::{self, Pair, SERVICE},
    rules,
};
use crate::bench::{cgroup::Cgroups, figures::OURS, http::Nginx};
use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod, datapath,
    node::NodeEntry,
    traffic::{
        own_packets,
        round_trips::round_trips,
        seat::{Ends, Seat},
        snmp,
    },
    underlay,
};
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
    time::Duration,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    SameNode,
    Across,
    /// On one node, by the MTU of the pods' links.
    LocalMtu,
}

pub const WAYS: [Way; 3] = [Way::SameNode, Way::Across, Way::LocalMtu];

impl Way {
    /// As options call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::SameNode => "same-node",
            Self::Across => "across",
            Self::LocalMtu => "local-mtu",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameNode => "same node",
            Self::Across => "across nodes",
            Self::LocalMtu => "by link MTU",
        })
    }
}

const FLANNEL: &str = "flannel's way";
/// On no machine.
const SERVICE_ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 96, 255, 10)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0xff, 0x10)),
];

pub struct Subject {
    pub name: String,
    way: Way,
    client: Place,
    server: Place,
    /// Of the server, IPv4 first.
    addresses: [IpAddr; 2],
    /// What its client asks instead, if it asks a Service.
    frontends: Option<[IpAddr; 2]>,
    /// Whether the packets go through the stack of the client's node, by its number.
    pub through_stack: Option<(usize, bool)>,
    /// A node by its number, and what its agent is to say of the way to the other.
    overlay: Option<(usize, &'static str)>,
    /// Whether segments and datagrams are as large as the link; None: whatever they are.
    pub large: Option<bool>,
}

impl Subject {
    pub fn new(name: &str, way: Way, [client, server]: [End<'_>; 2]) -> Self {
        Self {
            name: name.into(),
            way,
            client: client.0.clone(),
            server: server.0.clone(),
            addresses: server.1,
            frontends: None,
            through_stack: None,
            overlay: None,
            large: None,
        }
    }

    /// By each of the server's addresses.
    fn serve_http(&self, lab: &Lab, cpu: usize) -> Result<[Nginx; 2]> {
        let place = &self.server;
        let start = |address| Nginx::start(files(lab), Seat { place, cpu }, address);
        let [v4, v6] = self.addresses.map(start);
        let both = v4.and_then(|v4| Ok([v4, v6?]));
        both.with_context(|| self.name.clone())
    }
}

/// Whose files all see that serve HTTP or ask for it, wherever they are.
fn files(lab: &Lab) -> &Node {
    lab.node(1)
}

pub struct Scene {
    /// What gives nodes packets of their own ([`own_packets`]).
    _cards: Vec<OwnedFd>,
    // Dropped before the lab that they are in.
    _nginx: Vec<Nginx>,
    subjects: [Vec<Subject>; 3],
    lab: Lab,
    cgroups: Cgroups,
    cpus: [usize; 2],
}

impl Scene {
    pub fn make(cpus: [usize; 2], options: &Options, cgroups: Cgroups) -> Result<Self> {
        let wanted = |way| options.is_wanted(way) && options.cases(way).next().is_some();
        let present = Binaries::at(options.common.programs.present())?;
        let earlier = options.common.programs.earlier();
        let pairs = match wanted(Way::Across) {
            true => Pair::all(earlier.map(|(commit, _)| commit)),
            false => Vec::new(),
        };
        let few = earlier.is_some() && pairs.is_empty();
        let lab = Lab::new(present, if few { 4 } else { 16 }, Lifetime::Process)?;
        if let Some((_, dir)) = earlier {
            let theirs = pairs.iter().filter(|pair| !pair.ours);
            for number in [3, 4].into_iter().chain(theirs.flat_map(Pair::numbers)) {
                lab.node(number).set_binaries(Binaries::at(dir)?);
            }
        }
        let of_pairs = || pairs.iter().flat_map(|pair| pair.nodes(&lab));
        for node in pairs
            .iter()
            .filter(|pair| pair.kind == pair::Kind::Native)
            .flat_map(|pair| pair.nodes(&lab))
        {
            let entry = node.entry();
            node.set_entry(NodeEntry {
                native: true,
                ..entry
            });
        }
        // Those with no settings of their own.
        let agents = if earlier.is_some() { 4 } else { 3 };
        let nodes = || lab.nodes()[..agents].iter().chain(of_pairs());
        for node in nodes().filter(|_| options.ipv6_nodes) {
            node.lead_with_ipv6();
            let entry = node.entry();
            node.set_entry(NodeEntry {
                zero_checksum: true,
                ..entry
            });
        }
        lab.publish_entries(&nodes().map(Node::entry).collect::<Vec<_>>())?;
        for node in nodes() {
            cgroups.give(node)?;
        }
        for node in &lab.nodes()[..agents] {
            node.start_agent()?;
        }
        for pair in &pairs {
            pair.start(&lab)?;
        }
        for node in nodes() {
            node.wait_ready()?;
        }
        let mut subjects = sinabro(OURS, &lab, 1)?;
        match earlier {
            Some((commit, _)) => subjects.extend(sinabro(commit, &lab, 3)?),
            None => subjects.extend(theirs(&lab)?),
        }
        for pair in &pairs {
            subjects.push(pair.subject(&lab)?);
        }
        if wanted(Way::LocalMtu) {
            let earlier = earlier.map(|(commit, _)| (commit, 3));
            subjects.extend(local_mtu::subjects(&lab, earlier)?);
        }
        let mut cards = Vec::new();
        if options.as_cards {
            let router = lab.router().place();
            for node in lab.nodes() {
                let port = underlay::port(node.namespace().name(), 0);
                cards.push(own_packets::from(router, &port)?);
            }
        }
        let by_stack = if earlier.is_some() { 4 } else { 6 };
        for node in lab.nodes()[..by_stack].iter().chain(of_pairs()) {
            rules::kube_proxy(node, options.rules)?;
        }
        let clients = subjects
            .iter()
            .filter(|subject| subject.frontends.is_some() && options.rules > 0);
        for (subject, number) in clients.zip([1, if earlier.is_some() { 3 } else { 5 }]) {
            rules::service(lab.node(number), SERVICE_ADDRESSES, subject.addresses)?;
        }
        for node in &lab.nodes()[..2] {
            node.wait_for_direct_overlay()?;
        }
        let mut of_ways = [const { Vec::new() }; 3];
        let mut nginx = Vec::new();
        // Without rules nothing leads from a Service to its server.
        let is_led = |subject: &Subject| subject.frontends.is_none() || options.rules > 0;
        let subjects = subjects.into_iter().filter(is_led);
        for subject in subjects.filter(|subject| wanted(subject.way)) {
            if options.cases(subject.way).any(|case| case.kind.is_http()) {
                nginx.extend(subject.serve_http(&lab, cpus[1])?);
            }
            of_ways[subject.way as usize].push(subject);
        }
        Ok(Self {
            _cards: cards,
            subjects: of_ways,
            _nginx: nginx,
            lab,
            cgroups,
            cpus,
        })
    }

    pub fn cpus(&self) -> [usize; 2] {
        self.cpus
    }

    /// Those that are measured.
    pub fn ways(&self) -> impl Iterator<Item = Way> {
        WAYS.into_iter()
            .filter(|way| !self.subjects(*way).is_empty())
    }

    pub fn subjects(&self, way: Way) -> &[Subject] {
        &self.subjects[way as usize]
    }

    /// See [`files`].
    pub fn files(&self) -> &Node {
        files(&self.lab)
    }

    pub fn ends<'a>(&self, subject: &'a Subject, ipv6: bool) -> Ends<'a> {
        let places = [&subject.client, &subject.server];
        let family = usize::from(ipv6);
        Ends {
            frontend: subject.frontends.map(|of| of[family]),
            ..Ends::on(self.cpus, places, subject.addresses[family])
        }
    }

    /// Sees to it that packets go the way that a subject stands for: an error if they do not.
    pub fn verify(&self) -> Result<()> {
        for subject in self.subjects.iter().flatten() {
            for place in [&subject.client, &subject.server] {
                let verified = self.cgroups.verify(&self.lab, place);
                verified.with_context(|| subject.name.clone())?;
            }
            if let Some(large) = subject.large {
                for ipv6 in [false, true] {
                    let verified = local_mtu::verify(self.ends(subject, ipv6), large);
                    verified.with_context(|| subject.name.clone())?;
                }
            }
            if let Some((number, expected)) = subject.overlay {
                let said = self.lab.node(number).status()?.modes.remove("overlay");
                ensure!(
                    said.as_deref() == Some(expected),
                    "{}: the overlay of n{number} is {said:?}",
                    subject.name
                );
            }
            let Some((number, through_stack)) = subject.through_stack else {
                continue;
            };
            let node = self.lab.node(number);
            for ipv6 in [false, true] {
                let before = snmp::forwarded(node.place())?;
                let ends = self.ends(subject, ipv6);
                let time = Duration::from_millis(50);
                let asked = round_trips(ends, &ends.listen(0)?, 64, 1, time)?;
                let packets = snmp::forwarded(node.place())?.saturating_sub(before);
                // A request and its answer, if they do; else what else the node does meanwhile.
                let expected = 2 * asked.count;
                let went = packets >= expected;
                ensure!(
                    went == through_stack && (went || packets < asked.count / 2 + 100),
                    "{}: of {expected} packets {packets} went through the node's stack",
                    subject.name
                );
            }
        }
        Ok(())
    }
}

/// Where it is, and its addresses, IPv4 first.
pub type End<'a> = (&'a Place, [IpAddr; 2]);

pub fn end(pod: &Pod) -> End<'_> {
    (pod.place(), pod.addresses())
}

/// Two pods of n`number`, which has an agent.
fn same_node(name: &str, lab: &Lab, number: usize) -> Result<Subject> {
    let pod = |id| lab.node(number).add_pod(id);
    let (client, server) = (pod("near-client")?, pod("near-server")?);
    Ok(Subject::new(
        name,
        Way::SameNode,
        [end(&client), end(&server)],
    ))
}

/// Pods of n`number` and of the node after it, which have agents.
pub fn across(name: &str, lab: &Lab, number: usize) -> Result<Subject> {
    let client = lab.node(number).add_pod("far-client")?;
    let server = lab.node(number + 1).add_pod("far-server")?;
    Ok(Subject::new(
        name,
        Way::Across,
        [end(&client), end(&server)],
    ))
}

/// As installed, on n`number` and the node after it.
fn sinabro(name: &str, lab: &Lab, number: usize) -> Result<Vec<Subject>> {
    let (mut same, mut across) = (same_node(name, lab, number)?, across(name, lab, number)?);
    same.through_stack = Some((number, false));
    // Earlier commits send by the stack.
    if name == OURS {
        across.through_stack = Some((number, false));
        across.overlay = Some((number, "direct, beside kube-proxy"));
    }
    let client = lab.node(number).add_pod("service-client")?;
    let server = lab.node(number + 1).add_pod("service-server")?;
    let mut service = by_service(name, [end(&client), end(&server)]);
    service.through_stack = Some((number, true));
    Ok(vec![same, across, service])
}

fn theirs(lab: &Lab) -> Result<Vec<Subject>> {
    fn end(pod: &Attached) -> End<'_> {
        (&pod.place, pod.addresses)
    }
    datapath::deliver_by_stack(lab.node(3))?;
    let mut by_stack = same_node("without redirect_peer", lab, 3)?;
    by_stack.through_stack = Some((3, true));

    let node = lab.node(4);
    let pair = |plugin: &str, ranges: [&str; 2]| -> Result<Subject> {
        let ranges: [IpNet; 2] = [ranges[0].parse()?, ranges[1].parse()?];
        let config = others::config(plugin, &ranges);
        let attach = |number| others::attach(node, plugin, &config, &format!("{plugin}-{number}"));
        let pods = [0, 1].map(attach);
        let [client, server] = pods;
        Ok(Subject::new(
            plugin,
            Way::SameNode,
            [end(&client?), end(&server?)],
        ))
    };

    let pair_of_nodes = [lab.node(5), lab.node(6)];
    others::flannel(pair_of_nodes)?;
    let pods = |id| {
        pair_of_nodes.map(|node| {
            let config = others::config("bridge", &node.entry().pod_cidrs);
            others::attach(node, "bridge", &config, id)
        })
    };
    let [client, server] = pods("pod");
    let flannel = Subject::new(FLANNEL, Way::Across, [end(&client?), end(&server?)]);
    let [client, server] = pods("service-pod");
    let service = by_service(FLANNEL, [end(&client?), end(&server?)]);

    let nodes = bare("bare nodes (limit)", lab, [7, 8])?;
    for number in [11, 12] {
        rules::tracking(lab.node(number))?;
    }
    let tracked = bare("bare nodes, tracked", lab, [11, 12])?;
    let veth = others::cable()?;
    let veth = Subject::new(
        "bare veth (limit)",
        Way::SameNode,
        [end(&veth[0]), end(&veth[1])],
    );
    let bridge = pair("bridge", ["10.99.1.0/24", "fd00:99:1::/64"])?;
    let ptp = pair("ptp", ["10.99.2.0/24", "fd00:99:2::/64"])?;
    Ok(vec![
        by_stack, bridge, ptp, veth, flannel, service, nodes, tracked,
    ])
}

/// Pods of two nodes, of which the client asks a Service that kube-proxy's rules lead to the server.
fn by_service(name: &str, ends: [End<'_>; 2]) -> Subject {
    let mut subject = Subject::new(&format!("{name}{SERVICE}"), Way::Across, ends);
    subject.frontends = Some(SERVICE_ADDRESSES);
    subject
}

/// Two nodes themselves.
fn bare(name: &str, lab: &Lab, numbers: [usize; 2]) -> Result<Subject> {
    let ends = numbers.map(|number| {
        let node = lab.node(number);
        let addresses: [IpAddr; 2] = node.addresses().try_into().ok()?;
        Some((node.place(), addresses))
    });
    let [Some(client), Some(server)] = ends else {
        anyhow::bail!("a node has not one address of each family");
    };
    Ok(Subject::new(name, Way::Across, [client, server]))
}
