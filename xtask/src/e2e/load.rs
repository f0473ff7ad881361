//! Requests and streams between pods while something happens to the cluster.

use super::{
    pods::KubePod,
    world::{NAMESPACE, World},
};
use crate::cluster::Proxy;
use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use sinabro_lab::{
    Place,
    traffic::{
        path::Path,
        tcp,
        unbroken::{Pace, Traffic},
    },
};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    time::Duration,
};

/// The machine runs a cluster besides.
const PACE: Pace = Pace {
    pause: Duration::from_millis(10),
    clients: 1,
};
/// Of the servers behind the Service: requests, and the meter's right after it.
const PORT: u16 = 8080;
/// Of the Service, in the same order.
const SERVICE_PORT: u16 = 80;

/// Traffic within a node, across nodes, between nodes and pods, each family, and through a
/// Service, from pods a and b of one node and c, of another one but where that is to be left alone. It has run undisturbed for a while
/// when this returns: what a scenario does is compared with that.
pub fn traffic(world: &World, pods: [&KubePod; 3]) -> Result<Traffic> {
    traffic_and(world, pods, Vec::new())
}

/// The same, and further paths.
pub fn traffic_and(
    world: &World,
    [a, b, c]: [&KubePod; 3],
    mut paths: Vec<Path>,
) -> Result<Traffic> {
    let node = world.cluster.place(&world.nodes()[0])?;
    for family in world.families() {
        let mut path = |way: &str, from: &Place, to: &KubePod| -> Result<()> {
            let name = format!("{way}, {family}");
            paths.push(Path::new(&name, from, &to.place, to.address(*family)?));
            Ok(())
        };
        path("same node", &a.place, b)?;
        path("across nodes", &a.place, c)?;
        path("across nodes, back", &c.place, a)?;
        path("node to pod", &node, b)?;
        path("node to far pod", &node, c)?;
    }
    for (way, to) in [("Service, across nodes", c), ("Service, same node", b)] {
        paths.push(service_path(world, way, a, to)?);
    }
    let traffic = Traffic::start(&paths, PACE)?;
    let before = Sent::by(world)?;
    traffic.watch(world.before);
    if a.node != c.node {
        Sent::by(world)?.went_as_meant(&before, world)?;
    }
    Ok(traffic)
}

/// Packets that the nodes sent to pods of each other.
#[derive(Debug, Default)]
struct Sent {
    past_the_stack: u64,
    through_it: u64,
}

impl Sent {
    fn by(world: &World) -> Result<Self> {
        let mut sent = Self::default();
        for node in world.nodes() {
            for peer in world.peers(&node)? {
                let Some(packets) = peer.packets else {
                    continue;
                };
                sent.past_the_stack += packets.direct.sent + packets.native.sent;
                sent.through_it += packets.kernel.sent;
            }
        }
        Ok(sent)
    }

    /// What pods send goes past the stack. What the nodes send themselves, which is a quarter of this traffic, goes through it, and
    /// so does what pods send to kube-proxy's Services.
    fn went_as_meant(&self, before: &Self, world: &World) -> Result<()> {
        let past_the_stack = self.past_the_stack - before.past_the_stack;
        let through_it = self.through_it - before.through_it;
        let as_meant = match world.cluster.variant().proxy {
            Proxy::None => past_the_stack > through_it,
            Proxy::Nftables | Proxy::Iptables => past_the_stack != 0 && through_it != 0,
        };
        ensure!(
            as_meant,
            "between nodes {past_the_stack} packets went past the stack and {through_it} through it"
        );
        Ok(())
    }
}

/// The way to a Service whose one endpoint is `to`.
fn service_path(world: &World, way: &str, from: &KubePod, to: &KubePod) -> Result<Path> {
    let target = SocketAddr::new(service(world, to)?, SERVICE_PORT);
    let path = Path::new(way, &from.place, &to.place, to.primary()?).through(target, PORT);
    // kube-proxy takes a moment to know the Service.
    for path in [path.clone(), path.next_port()] {
        leads(world, &path)?;
    }
    Ok(path)
}

/// Waits until what translates a path leads to its server.
pub fn leads(world: &World, path: &Path) -> Result<()> {
    let (target, listen) = (path.target(path.listen()), path.listen());
    let what = format!("{}: {target} to lead to {}", path.name, path.to.name());
    world.wait(&what, || {
        let listener = path.to.run(|| Ok(TcpListener::bind(listen)?))?;
        let connected = tcp::connects(&path.from, target).is_ok();
        drop(listener);
        Ok(connected.then_some(()))
    })
}

/// Makes a Service for one pod; its first address.
pub fn service(world: &World, to: &KubePod) -> Result<IpAddr> {
    world.apply_all(vec![json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": to.name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"app": to.name},
            "ports": [
                {"name": "http", "port": SERVICE_PORT, "targetPort": PORT},
                {"name": "meter", "port": SERVICE_PORT + 1, "targetPort": PORT + 1},
                {
                    "name": "datagrams",
                    "protocol": "UDP",
                    "port": SERVICE_PORT + 1,
                    "targetPort": PORT + 1,
                },
            ],
            "ipFamilyPolicy": "PreferDualStack",
            // Who is ready is not this traffic's question. When the API server comes back after a
            // while, the controllers call every node not ready until they hear of it, and its pods
            // leave their Services for as long.
            "publishNotReadyAddresses": true,
        },
    })])?;
    let address = world.kubectl(&[
        "-n",
        NAMESPACE,
        "get",
        "service",
        &to.name,
        "-o",
        "jsonpath={.spec.clusterIP}",
    ])?;
    address
        .parse()
        .with_context(|| format!("`{address}` is not the address of a Service"))
}

/// Bytes go from one place to an address of another and arrive whole.
pub fn reaches(from: &Place, to: &KubePod) -> Result<()> {
    for address in &to.addresses {
        tcp::transfer(from, &to.place, *address, 100_000)
            .with_context(|| format!("{} does not reach {} at {address}", from.name(), to.name))?;
    }
    Ok(())
}
