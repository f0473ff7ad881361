//! How large packets are on the wire, and that none is lost for it, through whoever translates Services and host ports.

use crate::{
    cluster::{Family, Proxy, control, layout},
    e2e::{
        asking::addresses,
        load::leads,
        pods::{IMAGE, KubePod, manifest},
        world::{NAMESPACE, World},
    },
};
use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use sinabro_lab::{
    Place,
    traffic::{offload, path::Path, sizes::Sizes, snmp, stream::Stream},
};
use std::net::{IpAddr, SocketAddr};

/// Of the cables between the machines.
const MTU: usize = 1500;
const BYTES: usize = 1 << 20;
/// Of the servers, and of the Services.
const PORT: u16 = 8080;
const SERVICE_PORT: u16 = 80;
const HOST_PORT: u16 = 18_081;

/// A pod's server, and where else it is asked for.
struct Server<'a> {
    is_far: bool,
    pod: &'a KubePod,
    services: Vec<IpAddr>,
    node_port: u16,
}

/// A way, and whether a tunnel is on it, without which a pod's packets are smaller than the wire takes.
struct Way {
    path: Path,
    has_tunnel: bool,
}

pub fn on_the_wire(world: &mut World) -> Result<String> {
    let world = &*world;
    let nodes = world.nodes();
    let mut near = manifest("sizes-near", &nodes[0], IMAGE);
    near["spec"]["containers"][0]["ports"] =
        json!([{"containerPort": PORT, "hostPort": HOST_PORT}]);
    world.apply_all(vec![near])?;
    let near = world.running("sizes-near")?;
    let [client, far] = world
        .run_pods(&[("sizes-client", &nodes[0]), ("sizes-far", &nodes[1])])?
        .try_into()
        .ok()
        .context("two pods")?;
    let servers = [
        published(world, &near, false)?,
        published(world, &far, true)?,
    ];
    let mut all = Vec::new();
    for family in world.families() {
        all.extend(ways(world, *family, &client, &servers)?);
    }
    for way in all.iter().filter(|way| way.path.is_translated()) {
        leads(world, &way.path)?;
    }
    // What the control plane sends goes by its bridge.
    let control = world.cluster.place(layout::CONTROL)?;
    let places = nodes.iter().map(|node| world.cluster.place(node));
    let mut links: Vec<(Place, &str)> = places
        .map(|place| Ok((place?, "eth0")))
        .collect::<Result<_>>()?;
    links.push((control, control::BRIDGE));
    let carried = carried(&all, &links);
    for (place, link) in &links {
        offload::cut_behind(place, link)?;
    }
    Ok(format!(
        "{} streams, {} packets of {MTU} bytes, none above, none in parts, none lost",
        all.len(),
        carried?
    ))
}

/// A Service for one pod, with a port on each node.
fn published<'a>(world: &World, pod: &'a KubePod, is_far: bool) -> Result<Server<'a>> {
    world.apply_all(vec![json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": pod.name, "namespace": NAMESPACE},
        "spec": {
            "type": "NodePort",
            "selector": {"app": pod.name},
            "ports": [{"port": SERVICE_PORT, "targetPort": PORT}],
            "ipFamilyPolicy": "PreferDualStack",
        },
    })])?;
    let service = world.get(&["-n", NAMESPACE, "service", &pod.name])?;
    let node_port = service["spec"]["ports"][0]["nodePort"].as_u64();
    Ok(Server {
        is_far,
        pod,
        services: addresses(world, &pod.name)?,
        node_port: u16::try_from(node_port.context("no node port")?)?,
    })
}

/// Every way to the servers in a family, and to the outside.
fn ways(world: &World, family: Family, client: &KubePod, servers: &[Server]) -> Result<Vec<Way>> {
    let of = |all: &[IpAddr]| {
        let found = all.iter().copied().find(|address| family.has(*address));
        found.with_context(|| format!("{all:?} has none of {family}"))
    };
    let families = world.cluster.variant().families;
    let node_name = &world.nodes()[0];
    let number = layout::node_number(node_name).context("not a node")?;
    let node = (world.cluster.place(node_name)?, of(&families.node(number))?);
    let control = (
        world.cluster.place(layout::CONTROL)?,
        of(&families.control())?,
    );
    let name = format!("to the outside, {family}");
    let mut ways = vec![Way {
        path: Path::new(&name, &client.place, &control.0, control.1),
        has_tunnel: false,
    }];
    for server in servers {
        let address = server.pod.address(family)?;
        let mut way = |from: &str, place: &Place, target: Option<SocketAddr>| {
            let name = format!("{from} → {}, {family}", server.pod.name);
            let mut path = Path::new(&name, place, &server.pod.place, address);
            if let Some(target) = target {
                path = path.through(target, PORT);
            }
            let has_tunnel = server.is_far;
            ways.push(Way { path, has_tunnel });
        };
        let service = Some(SocketAddr::new(of(&server.services)?, SERVICE_PORT));
        let node_port = Some(SocketAddr::new(node.1, server.node_port));
        way("pod", &client.place, None);
        way("pod by Service", &client.place, service);
        way("pod by node port", &client.place, node_port);
        // Without a proxy that is for the sockets of a node's processes, of which this is none.
        if world.cluster.variant().proxy != Proxy::None {
            way("node by Service", &node.0, service);
        }
        way("outside by node port", &control.0, node_port);
        if !server.is_far {
            let host_port = Some(SocketAddr::new(node.1, HOST_PORT));
            way("outside by host port", &control.0, host_port);
        }
    }
    Ok(ways)
}

/// A stream both ways by each path; full packets that were seen.
fn carried(ways: &[Way], links: &[(Place, &str)]) -> Result<u32> {
    let wires = links
        .iter()
        .map(|(place, link)| Sizes::cut(place, link, MTU))
        .collect::<Result<Vec<_>>>()?;
    let misfits = || -> Result<u64> {
        let mut sum = 0;
        for (place, _) in links {
            sum += snmp::misfits(place)?;
        }
        Ok(sum)
    };
    let mut all = 0;
    for Way { path, has_tunnel } in ways {
        let name = &path.name;
        let before = misfits()?;
        let stream = Stream::open(path)?;
        for write in [700, 64 << 10] {
            stream.carry(BYTES, write)?;
        }
        let mut full = 0;
        for wire in &wires {
            full += wire.full().with_context(|| name.clone())?;
        }
        ensure!(misfits()? == before, "{name}: a packet did not fit");
        stream.must_have_lost_nothing()?;
        ensure!(
            !has_tunnel || full as usize > BYTES / MTU,
            "{name}: {full} full packets"
        );
        all += full;
    }
    Ok(all)
}
