//! What is compared, and on which nodes.
//!
//! | nodes | |
//! |---|---|
//! | n1, n2 | Sinabro, Services translated by it, so that packets go past the stack |
//! | n9, n10 | Sinabro, packets by the stack |
//! | n3, n4 | `ptp`, masquerade by iptables |
//! | n5, n6 | `ptp`, masquerade by nftables |
//! | n7, n8 | `ptp`, no translation |
//!
//! The host outside is at the other end of each node's cable, so that what a packet costs is what the node
//! does with it, and no switch of this machine.
//!
//! Nodes of an even number have the rules that kube-proxy makes. Against an earlier commit n3 and n4 have
//! that commit's programs, and nothing else is compared.

use super::{
    Options,
    case::Part,
    flows::{Filled, Table},
    translators::{self, IPTABLES, NFTABLES, ROUTED},
};
use crate::bench::{
    agent_help,
    cgroup::Cgroups,
    figures::OURS,
    http::Nginx,
    pod::{others, rules},
};
use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place,
    datapath::Planted,
    lab::UNDERLAY_MTU,
    node::SERVICES_FLAGS,
    traffic::{
        self,
        seat::{Ends, Seat},
    },
};
use sinabro_netlink::{Family, link, route::Route};
use std::{net::IpAddr, time::Instant};

/// As OURS, but that packets pass the node's stack, as they do where others translate Services.
const BY_STACK: &str = "sinabro, by the stack";

pub struct Subject {
    pub name: String,
    /// The number of its node, from 1.
    node: usize,
    client: Place,
    address: IpAddr,
    /// What the host outside is to see.
    seen: IpAddr,
    /// Where its connections are, if others can be put there.
    table: Option<Table>,
}

pub struct Scene {
    // Dropped before the lab that they are in.
    _nginx: Nginx,
    plain: Vec<Subject>,
    kube_proxy: Vec<Subject>,
    outside: Place,
    lab: Lab,
    cgroups: Cgroups,
    cpus: [usize; 2],
    ipv6: bool,
}

impl Scene {
    pub fn make(cpus: [usize; 2], options: &Options, cgroups: Cgroups) -> Result<Self> {
        let present = Binaries::at(options.common.programs.present())?;
        let earlier = options.common.programs.earlier();
        let pairs = if earlier.is_some() { 2 } else { 5 };
        let lab = Lab::new(present, 2 * pairs, Lifetime::Process)?;
        let outside = Place::fresh("outside")?;
        for node in lab.nodes() {
            connect(node, &outside)
                .with_context(|| format!("cannot connect {} to the outside", node.name()))?;
        }
        let others = match earlier {
            Some((_, dir)) => {
                for number in [3, 4] {
                    lab.node(number).set_binaries(Binaries::at(dir)?);
                }
                [3, 4]
            }
            None => [9, 10],
        };
        let agents = [1, 2].into_iter().chain(others);
        let with_room = options.cases(Part::Flows).next().is_some();
        for number in agents.clone() {
            let node = lab.node(number);
            // Each is a cluster of its own: there is no way between them.
            node.write_nodes(&[node.entry()])?;
            cgroups.give(node)?;
            start(node, number < 9, with_room)?;
        }
        for number in agents {
            lab.node(number).wait_ready()?;
        }
        let seat = Seat {
            place: &outside,
            cpu: cpus[1],
        };
        let address = family(&addresses_outside()?, options.ipv6)?;
        let mut scene = Self {
            _nginx: Nginx::start(lab.node(1), seat, address)?,
            plain: Vec::new(),
            kube_proxy: Vec::new(),
            outside,
            lab,
            cgroups,
            cpus,
            ipv6: options.ipv6,
        };
        for number in [1, 2] {
            let rules = (number == 2).then_some(options.rules);
            let mut subjects = vec![scene.sinabro(OURS, number)?];
            match earlier {
                Some((commit, _)) => subjects.push(scene.sinabro(commit, number + 2)?),
                None => {
                    subjects.push(scene.sinabro(BY_STACK, number + 8)?);
                    subjects.extend(scene.others(number)?);
                }
            }
            for subject in &subjects {
                rules::kube_proxy(scene.lab.node(subject.node), rules.unwrap_or(0))?;
            }
            match number {
                1 => scene.plain = subjects,
                _ => scene.kube_proxy = subjects,
            }
        }
        // Those that nothing is asked of are neither shown nor verified.
        let is_wanted = |part| options.cases(part).next().is_some();
        if !is_wanted(Part::KubeProxy) {
            scene.kube_proxy.clear();
        }
        if !is_wanted(Part::Plain) {
            scene.plain.retain(|subject| subject.table.is_some());
        }
        if !is_wanted(Part::Plain) && !is_wanted(Part::Flows) {
            scene.plain.clear();
        }
        Ok(scene)
    }

    fn sinabro(&self, name: &str, number: usize) -> Result<Subject> {
        let node = self.lab.node(number);
        let pod = node.add_pod("client")?;
        Ok(Subject {
            name: name.into(),
            node: number,
            client: pod.place().clone(),
            address: family(&pod.addresses(), self.ipv6)?,
            seen: family(&node.addresses(), self.ipv6)?,
            // Earlier commits may have others.
            table: (name == OURS || Planted::is_possible(node)).then_some(Table::Ours),
        })
    }

    /// Of the plain nodes (1), or of those with kube-proxy's rules (2).
    fn others(&self, which: usize) -> Result<Vec<Subject>> {
        let names = [IPTABLES, NFTABLES, ROUTED];
        let other = |(place, name): (usize, &&str)| -> Result<Subject> {
            let number = 2 * (place + 1) + which;
            let node = self.lab.node(number);
            let ranges = node.entry().pod_cidrs;
            let pod = others::attach(node, "ptp", &others::config("ptp", &ranges), "client")?;
            let range = ranges[usize::from(self.ipv6)];
            let own = family(&node.addresses(), self.ipv6)?;
            let address = pod.addresses[usize::from(self.ipv6)];
            match *name {
                IPTABLES => translators::iptables(node, range)?,
                NFTABLES => translators::nftables(node, range)?,
                _ => {
                    let port = self.outside.index(node.name())?;
                    let back = Route::to(range).via(own).dev(port).onlink();
                    self.outside.conn()?.execute(back.add())?;
                }
            }
            let translated = *name != ROUTED;
            Ok(Subject {
                name: (*name).into(),
                node: number,
                client: pod.place,
                address,
                seen: if translated { own } else { address },
                table: translated.then_some(Table::Netfilter),
            })
        };
        names.iter().enumerate().map(other).collect()
    }

    pub fn cpus(&self) -> [usize; 2] {
        self.cpus
    }

    pub fn subjects(&self, part: Part) -> Vec<&Subject> {
        match part {
            Part::Plain => self.plain.iter().collect(),
            Part::KubeProxy => self.kube_proxy.iter().collect(),
            Part::Flows => {
                let plain = self.plain.iter();
                plain.filter(|subject| subject.table.is_some()).collect()
            }
        }
    }

    pub fn node(&self, subject: &Subject) -> &Node {
        self.lab.node(subject.node)
    }

    pub fn ends<'a>(&'a self, subject: &'a Subject) -> Result<Ends<'a>> {
        let places = [&subject.client, &self.outside];
        let address = family(&addresses_outside()?, self.ipv6)?;
        Ok(Ends::on(self.cpus, places, address))
    }

    /// Puts other connections into a subject's table.
    pub fn fill<'a>(&'a self, subject: &Subject, flows: u32) -> Result<Filled<'a>> {
        let table = subject.table.context("no others can be put there")?;
        Filled::new(
            table,
            self.node(subject),
            subject.address,
            subject.seen,
            flows,
        )
    }

    /// An error unless the host outside sees of each subject what it stands for.
    pub fn verify(&self) -> Result<()> {
        self.cgroups.verify(&self.lab, &self.outside)?;
        for subject in self.plain.iter().chain(&self.kube_proxy) {
            self.cgroups.verify(&self.lab, &subject.client)?;
            if subject.name == OURS {
                self.node(subject).wait_for_way("direct")?;
            }
            let seen = || -> Result<IpAddr> {
                let ends = self.ends(subject)?;
                let listener = ends.listen(0)?;
                let target = listener.local_addr()?;
                let _client = subject.client.run(|| Ok(traffic::connect(target)?))?;
                let (_, peer) = traffic::accept(&listener, Instant::now() + traffic::PATIENCE)?;
                Ok(peer.ip())
            };
            let node = self.node(subject).name();
            let seen = seen().with_context(|| format!("{} on {node}", subject.name))?;
            ensure!(
                seen == subject.seen,
                "{} on {node}: the host outside saw {seen} instead of {}",
                subject.name,
                subject.seen
            );
        }
        Ok(())
    }
}

fn family(addresses: &[IpAddr], ipv6: bool) -> Result<IpAddr> {
    let found = addresses.iter().find(|address| address.is_ipv6() == ipv6);
    found.copied().context("an address family is missing")
}

/// The addresses of the host outside, the same on each of its links, IPv4 first.
const OUTSIDE: [&str; 2] = ["172.30.0.200", "fd00:172:30::200"];

fn addresses_outside() -> Result<[IpAddr; 2]> {
    Ok([OUTSIDE[0].parse()?, OUTSIDE[1].parse()?])
}

/// Takes a node off the lab's network and lays a cable between it and the host outside instead.
fn connect(node: &Node, outside: &Place) -> Result<()> {
    let place = node.place();
    let (eth0, mut conn) = (place.index("eth0")?, place.conn()?);
    conn.execute(link::delete(eth0))?;
    let addresses = node.addresses();
    let last = match addresses[0] {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(address) => address.octets()[15],
    };
    let ends = [0, 1].map(|end| [0x02, 0x1a, 0xb0, 1, end, last]);
    let far = ("eth0", ends[1]);
    outside.cable((node.name(), ends[0]), UNDERLAY_MTU, place, far)?;
    let theirs = addresses_outside()?;
    let nets = |addresses: &[IpAddr], length: [u8; 2]| -> Result<Vec<IpNet>> {
        let net = |address: &IpAddr| {
            let length = length[usize::from(address.is_ipv6())];
            Ok(IpNet::new(*address, length)?)
        };
        addresses.iter().map(net).collect()
    };
    let eth0 = place.set_up("eth0", &nets(&addresses, [24, 64])?)?;
    let port = outside.set_up(node.name(), &nets(&theirs, [32, 128])?)?;
    for (own, theirs) in addresses.iter().zip(theirs) {
        let only = IpNet::from(*own);
        let back = Route::to(only).dev(port).src(theirs).scope_link();
        outside.conn()?.execute(back.add())?;
        let default = Route::default_of(Family::of(theirs)).via(theirs).dev(eth0);
        place.conn()?.execute(default.add())?;
    }
    Ok(())
}

/// Starts an agent, with room for other connections if there are to be any: a table of another size than nodes have costs more, as
/// less of it stays in the processor's caches. Commits before the table of connections know no such setting, and give out few ports
/// if they are not told others. They go past the stack if they can and are to.
fn start(node: &Node, is_direct: bool, with_room: bool) -> Result<()> {
    let help = agent_help(node)?;
    let mut flags = Vec::new();
    if !help.contains("--connections ") {
        flags.push("--masquerade-ports=16384-65535");
    } else if with_room {
        flags.push("--connections=1200000");
    }
    let knows = |flag: &str| help.contains(flag);
    // The second is its name in earlier commits.
    if is_direct && (knows("--data-path ") || knows("--forwarding ")) {
        node.write_services("{kind: List, items: []}\n")?;
        flags.extend(SERVICES_FLAGS);
    }
    node.start_agent_with(&flags)
}
