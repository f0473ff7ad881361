//! The whole laboratory: router, outside host, nodes.

use crate::{
    holder::Lifetime,
    namespace::Namespace,
    node::{Node, NodeEntry},
    place::Place,
    underlay::{self, BRIDGE, Member, Underlay},
};
use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use sinabro_netlink::{Family, bridge, link, route::Route, sysctl};
use std::{
    env,
    net::IpAddr,
    path::{Path, PathBuf},
};

/// The outside host's addresses (documentation prefixes, RFC 5737 and RFC 3849).
pub const OUTSIDE: [&str; 2] = ["192.0.2.10/24", "2001:db8:2::10/64"];
const OUTSIDE_ROUTER: [&str; 2] = ["192.0.2.1/24", "2001:db8:2::1/64"];
const UNDERLAY_ROUTER: [&str; 2] = ["172.30.0.1/24", "fd00:172:30::1/64"];

/// MTU of every link of the underlay, as on most networks.
pub const UNDERLAY_MTU: u32 = 1500;

/// Where the programs under test are.
#[derive(Clone, Debug)]
pub struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// Takes the programs of a directory; all three must be there.
    pub fn at(dir: impl Into<PathBuf>) -> Result<Self> {
        // Absolute: whoever enters a node's mount namespace loses the working directory.
        let dir = std::path::absolute(dir.into()).context("cannot find the programs")?;
        let binaries = Self { dir };
        for path in [binaries.plugin(), binaries.agent(), binaries.ctl()] {
            ensure!(
                path.is_file(),
                "{} is missing: run `cargo xtask test`, which builds it first",
                path.display()
            );
        }
        Ok(binaries)
    }

    /// For tests: SINABRO_BIN_DIR, else the directory above the test's own.
    pub fn find() -> Result<Self> {
        if let Some(dir) = env::var_os("SINABRO_BIN_DIR") {
            return Self::at(dir);
        }
        let exe = env::current_exe().context("cannot find the test's own path")?;
        let dir = exe.parent().and_then(Path::parent);
        Self::at(dir.context("the test is at the file system's root")?)
    }

    pub fn plugin(&self) -> PathBuf {
        self.dir.join("sinabro")
    }

    pub fn agent(&self) -> PathBuf {
        self.dir.join("sinabro-agent")
    }

    pub fn ctl(&self) -> PathBuf {
        self.dir.join("sinabroctl")
    }
}

/// Router, outside host and nodes; dropping it ends all of them, unless they are kept.
pub struct Lab {
    // Dropped in this order: nodes before what they hang on.
    nodes: Vec<Node>,
    outside: Namespace,
    router: Namespace,
    binaries: Binaries,
    lifetime: Lifetime,
    underlay: Underlay,
}

impl Lab {
    /// Makes the underlay and the nodes n1, n2, …; agents are not started yet.
    pub fn new(binaries: Binaries, nodes: usize, lifetime: Lifetime) -> Result<Self> {
        Self::over(Underlay::Cable, binaries, nodes, lifetime)
    }

    /// The same where nodes are connected by something else than a cable each.
    pub fn over(
        underlay: Underlay,
        binaries: Binaries,
        nodes: usize,
        lifetime: Lifetime,
    ) -> Result<Self> {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "the lab makes namespaces and needs root: run `cargo xtask test` or `cargo xtask demo`"
        );
        let made = networks(underlay, lifetime).context("cannot make the underlay")?;
        let (router, outside) = made;
        let mut lab = Self {
            nodes: Vec::new(),
            outside,
            router,
            binaries,
            lifetime,
            underlay,
        };
        for _ in 0..nodes {
            lab.add_node()?;
        }
        lab.publish()?;
        Ok(lab)
    }

    /// A lab with all its agents ready.
    pub fn start(binaries: Binaries, nodes: usize, lifetime: Lifetime) -> Result<Self> {
        let lab = Self::new(binaries, nodes, lifetime)?;
        for node in lab.nodes() {
            node.start_agent()?;
        }
        for node in lab.nodes() {
            node.wait_ready()?;
        }
        Ok(lab)
    }

    /// For tests: the programs that the build just made, as long as the test lives.
    pub fn for_test(nodes: usize) -> Result<Self> {
        Self::start(Binaries::find()?, nodes, Lifetime::Process)
    }

    /// Connects one more node. Others learn of it by [`Lab::publish`].
    pub fn add_node(&mut self) -> Result<&Node> {
        let number = self.nodes.len() as u8 + 1;
        let entry = NodeEntry::numbered(number);
        let name = entry.name.clone();
        let connect = || -> Result<Node> {
            let namespace = machine(&name, self.lifetime)?;
            self.plug_in(&namespace, number)?;
            Node::new(namespace, entry, self.binaries.clone())
        };
        let node = connect().with_context(|| format!("cannot make node {name}"))?;
        self.nodes.push(node);
        Ok(&self.nodes[self.nodes.len() - 1])
    }

    /// Deletes a node's uplink, a cable, and makes it again as it was born with it.
    pub fn renew_uplink(&self, number: u8) -> Result<()> {
        let namespace = self.node(number.into()).namespace();
        let delete = link::delete_by_name("eth0");
        namespace.place().conn()?.execute(delete)?;
        self.plug_in(namespace, number)
    }

    /// Gives a node its uplink, addresses and routers.
    fn plug_in(&self, node: &Namespace, number: u8) -> Result<()> {
        let (router, node_at) = (self.router.place(), node.place());
        let mut ports = Vec::new();
        for (leg, at) in self.underlay.legs().iter().zip(0..) {
            let port = underlay::port(node.name(), at);
            // Unique on the bridge.
            let [near, far] = [0, 1].map(|end| [0x02, 0x1a, 0xb0, at, end, 10 + number]);
            router.cable((&port, near), UNDERLAY_MTU, node_at, (leg, far))?;
            ports.push(port);
        }
        // Without addresses, so that nobody is asked for who cannot be reached yet: the kernel asks again after a second.
        self.underlay.lay(node_at, number)?;
        self.underlay.plug_in(router, node.name(), &ports)?;
        let link = self.underlay.link();
        node_at.set_up(link, &node_nets(number)?)?;
        if self.underlay == Underlay::Wireguard {
            self.introduce(node_at, number)?;
        }
        for router in nets(&UNDERLAY_ROUTER)? {
            default_route(node_at, link, router.addr())?;
        }
        Ok(())
    }

    /// Has a node and all that are there already know each other.
    fn introduce(&self, place: &Place, number: u8) -> Result<()> {
        let new = member(place, number);
        new.meet(&member(self.router.place(), underlay::ROUTER))?;
        for (node, other) in self.nodes.iter().zip(1..) {
            new.meet(&member(node.place(), other))?;
        }
        Ok(())
    }

    /// Writes every node's entry into every node's nodes file.
    pub fn publish(&self) -> Result<()> {
        let entries: Vec<_> = self.nodes.iter().map(Node::entry).collect();
        self.publish_entries(&entries)
    }

    /// Writes these entries, whatever the nodes are, into every node's nodes file.
    pub fn publish_entries(&self, entries: &[NodeEntry]) -> Result<()> {
        self.nodes
            .iter()
            .try_for_each(|node| node.write_nodes(entries))
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Node by number, from 1, as in its name.
    pub fn node(&self, number: usize) -> &Node {
        &self.nodes[number - 1]
    }

    pub fn outside(&self) -> &Namespace {
        &self.outside
    }

    pub fn router(&self) -> &Namespace {
        &self.router
    }

    pub fn underlay(&self) -> Underlay {
        self.underlay
    }

    /// The outside host's IPv4 and IPv6 address.
    pub fn outside_addresses(&self) -> Result<[IpAddr; 2]> {
        let nets = nets(&OUTSIDE)?;
        Ok([nets[0].addr(), nets[1].addr()])
    }

    /// Has the router and the outside host know the way to pods, which by default they do not.
    pub fn route_pods_from_outside(&self) -> Result<()> {
        let (router, outside) = (self.router.place(), self.outside.place());
        let add = |place: &Place, link: &str, range: IpNet, via: IpAddr| -> Result<()> {
            let route = Route::to(range).via(via).dev(place.index(link)?);
            Ok(place.conn()?.execute(route.add())?)
        };
        let routers = nets(&OUTSIDE_ROUTER)?;
        for (node, number) in self.nodes.iter().zip(1..) {
            // IPv4 first, as all others here, by whichever the node is known.
            let mut addresses = node.addresses();
            addresses.sort_by_key(IpAddr::is_ipv6);
            let ways = addresses.into_iter().zip(&routers);
            for (range, (address, via)) in crate::node::pod_cidrs(number).into_iter().zip(ways) {
                add(router, self.underlay.routers_link(), range, address)?;
                add(outside, "eth0", range, via.addr())?;
            }
        }
        Ok(())
    }

    /// Has the outside host and the router send what is for an address to a node.
    pub fn lead_from_outside(&self, to: IpAddr, node: &Node) -> Result<()> {
        let mut of_node = node.addresses().into_iter();
        let of_node = of_node.find(|address| address.is_ipv4() == to.is_ipv4());
        let of_node =
            of_node.with_context(|| format!("{} has no address for {to}", node.name()))?;
        let of_router = nets(&OUTSIDE_ROUTER)?[usize::from(to.is_ipv6())].addr();
        for (place, link, via) in [
            (self.outside.place(), "eth0", of_router),
            (self.router.place(), self.underlay.routers_link(), of_node),
        ] {
            let route = Route::to(to.into()).via(via).dev(place.index(link)?);
            place.conn()?.execute(route.add())?;
        }
        Ok(())
    }

    /// Every process that keeps the lab alive: to be ended by hand if it is kept.
    pub fn pids(&self) -> Vec<i32> {
        let mut pids: Vec<i32> = self.nodes.iter().filter_map(Node::agent_pid).collect();
        pids.extend(self.nodes.iter().map(|node| node.namespace().pid()));
        pids.extend([self.outside.pid(), self.router.pid()]);
        pids
    }
}

/// A namespace with loopback up and no delay before IPv6 addresses are usable.
fn machine(name: &str, lifetime: Lifetime) -> Result<Namespace> {
    let namespace = Namespace::new(name, lifetime)?;
    namespace.run(|| {
        // Nobody else can have these addresses: no duplicate address detection (RFC 4862 §5.4).
        for conf in ["all", "default"] {
            sysctl::write(&["net", "ipv6", "conf", conf, "accept_dad"], "0")?;
        }
        Ok(())
    })?;
    namespace.place().set_up("lo", &[])?;
    Ok(namespace)
}

fn networks(underlay: Underlay, lifetime: Lifetime) -> Result<(Namespace, Namespace)> {
    let router = machine("router", lifetime)?;
    let outside = machine("outside", lifetime)?;
    let (at, out) = (router.place(), outside.place());
    at.forward()?;
    at.conn()?.execute(bridge::create(BRIDGE))?;
    underlay.lay_on_bridge(at)?;
    at.set_up(underlay.routers_link(), &nets(&UNDERLAY_ROUTER)?)?;
    let [near, far] = [0, 1].map(|end| [0x02, 0x1a, 0xb0, 0, end, 10]);
    at.cable(("out0", near), UNDERLAY_MTU, out, ("eth0", far))?;
    let eth0 = out.set_up("eth0", &nets(&OUTSIDE)?)?;
    at.set_up("out0", &nets(&OUTSIDE_ROUTER)?)?;
    let mut conn = out.conn()?;
    for (underlay, via) in nets(&UNDERLAY_ROUTER)?.iter().zip(nets(&OUTSIDE_ROUTER)?) {
        conn.execute(Route::to(underlay.trunc()).via(via.addr()).dev(eth0).add())?;
    }
    Ok((router, outside))
}

fn default_route(machine: &Place, link: &str, via: IpAddr) -> Result<()> {
    let link = machine.index(link)?;
    let route = Route::default_of(Family::of(via)).via(via).dev(link);
    Ok(machine.conn()?.execute(route.add())?)
}

fn member(place: &Place, number: u8) -> Member<'_> {
    Member {
        place,
        number,
        addresses: crate::node::underlay_addresses(number).into(),
    }
}

fn node_nets(number: u8) -> Result<Vec<IpNet>> {
    let [v4, v6] = crate::node::underlay_addresses(number);
    Ok(vec![IpNet::new(v4, 24)?, IpNet::new(v6, 64)?])
}

fn nets(texts: &[&str]) -> Result<Vec<IpNet>> {
    texts.iter().map(|text| Ok(text.parse()?)).collect()
}
