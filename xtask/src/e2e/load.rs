//! Requests and streams between pods while something happens to the cluster.

use super::{
    pods::KubePod,
    world::{NAMESPACE, World},
};
use anyhow::{Context as _, Result};
use serde_json::json;
use sinabro_lab::{
    Place,
    traffic::{http::Load, load::Stream, tcp, unbroken::Traffic},
};
use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

/// Between blocks of a stream: the machine runs a cluster besides.
const PAUSE: Duration = Duration::from_millis(10);
/// Port of the servers behind the Service.
const PORT: u16 = 8080;

/// Traffic within a node, across nodes, both families, and through a Service, from pods a and b of
/// one node and c of another.
pub fn traffic(world: &World, [a, b, c]: [&KubePod; 3]) -> Result<Traffic> {
    let pairs = [
        (a, b, b.v4()?),
        (a, b, b.v6()?),
        (a, c, c.v4()?),
        (c, a, a.v6()?),
    ];
    let stream = |(from, to, address): &(&KubePod, &KubePod, IpAddr)| {
        Stream::start(&from.place, &to.place, *address, PAUSE)
    };
    let load = |(from, to, address): &(&KubePod, &KubePod, IpAddr)| {
        Load::start(&from.place, &to.place, *address, 1)
    };
    let streams = pairs.iter().map(stream).collect::<Result<Vec<_>>>()?;
    let mut loads = pairs.iter().map(load).collect::<Result<Vec<_>>>()?;
    for (from, to) in [(a, c), (a, b)] {
        loads.push(service_load(world, from, to)?);
    }
    let traffic = Traffic { streams, loads };
    traffic.must_flow("at the beginning")?;
    Ok(traffic)
}

/// Requests to a Service whose one endpoint is `to`.
fn service_load(world: &World, from: &KubePod, to: &KubePod) -> Result<Load> {
    let address = service(world, to)?;
    let target = SocketAddr::new(address, 80);
    let listen = SocketAddr::new(to.v4()?, PORT);
    // kube-proxy takes a moment to know the Service.
    world.wait(&format!("Service {address} to lead to {}", to.name), || {
        let listener = to.place.run(|| Ok(std::net::TcpListener::bind(listen)?))?;
        let connected = tcp::connects(&from.place, target).is_ok();
        drop(listener);
        Ok(connected.then_some(()))
    })?;
    Load::through(&from.place, &to.place, listen, Some(target), 1)
}

/// Makes a Service for one pod; its first address.
pub fn service(world: &World, to: &KubePod) -> Result<IpAddr> {
    world.apply_all(vec![json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": to.name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"app": to.name},
            "ports": [{"port": 80, "targetPort": PORT}],
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
