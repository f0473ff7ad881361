//! What leaves as the node, as the ConfigMap of ip-masq-agent says.

use crate::{
    cluster::layout::CONTROL,
    e2e::{
        pods::KubePod,
        world::{NAMESPACE, SYSTEM, World},
    },
};
use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use sinabro_lab::{
    Place,
    traffic::{any, readable},
};
use std::{
    cell::Cell,
    net::{IpAddr, UdpSocket},
    time::{Duration, Instant},
};

const NAME: &str = "ip-masq-agent";
const TROUBLE: &str = "MasqueradeFileInvalid";
/// A datagram may be lost.
const TRY: Duration = Duration::from_secs(2);

/// The cluster's ConfigMap, which is gone with this.
struct ConfigMap<'a> {
    world: &'a World,
    node: &'a str,
    version: Cell<u32>,
}

impl ConfigMap<'_> {
    fn set(&self, config: &str) -> Result<()> {
        let object = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": NAME, "namespace": SYSTEM},
            "data": {"config": config},
        });
        self.world.cluster.apply(&object.to_string())?;
        self.hasten()
    }

    fn remove(&self) -> Result<()> {
        self.world
            .kubectl(&["-n", SYSTEM, "delete", "configmap", NAME])?;
        self.hasten()
    }

    /// The kubelet looks at a pod's volumes once a minute, or when the pod's object changes.
    fn hasten(&self) -> Result<()> {
        self.version.set(self.version.get() + 1);
        let looked_at = format!("e2e/config={}", self.version.get());
        for pod in self.agents()? {
            self.world
                .kubectl(&["-n", SYSTEM, "annotate", "--overwrite", &pod, &looked_at])?;
        }
        Ok(())
    }

    fn agents(&self) -> Result<Vec<String>> {
        let of_node = format!("--field-selector=spec.nodeName={}", self.node);
        let selector = "--selector=app.kubernetes.io/name=sinabro";
        let names = [
            "-n", SYSTEM, "get", "pods", "-o", "name", selector, &of_node,
        ];
        let names = self.world.kubectl(&names)?;
        Ok(names.split_whitespace().map(Into::into).collect())
    }
}

impl Drop for ConfigMap<'_> {
    fn drop(&mut self) {
        let delete = [
            "-n",
            SYSTEM,
            "delete",
            "--ignore-not-found",
            "configmap",
            NAME,
        ];
        let _ = self.world.kubectl(&delete);
    }
}

/// As whom a pod's datagram is seen; none if it did not come.
fn seen(pod: &KubePod, outside: &Place, address: IpAddr) -> Result<Option<IpAddr>> {
    let server = outside.run(|| Ok(UdpSocket::bind((address, 0))?))?;
    let target = server.local_addr()?;
    let client = pod.place.run(|| Ok(UdpSocket::bind((any(address), 0))?))?;
    client.send_to(b"who am I?", target)?;
    match readable(&server, Instant::now() + TRY)? {
        true => Ok(Some(server.recv_from(&mut [0; 16])?.1.ip())),
        false => Ok(None),
    }
}

/// A list is followed, a wrong one leaves the one before in place and is named, and without one all is as it was.
pub fn config_map(world: &mut World) -> Result<String> {
    let world = &*world;
    let nodes = world.nodes();
    let node = &nodes[0];
    let outside = world.cluster.place(CONTROL)?;
    let pods = world.run_pods(&[("masqueraded", node)])?;
    let pod = &pods[0];
    let status = world.status(node)?;
    let addresses = world.cluster.variant().families.control();
    let of_family = |of: &[IpAddr], like: &IpAddr| {
        let mut of = of.iter().copied();
        let found = of.find(|address| address.is_ipv4() == like.is_ipv4());
        found.with_context(|| format!("none is of the family of {like}"))
    };
    let as_whom = |who: &str, of: &[IpAddr]| {
        addresses.iter().try_for_each(|address| {
            let expected = of_family(of, address)?;
            let what = format!("{address} to see the {who}, {expected}");
            world.wait(&what, || {
                let seen = seen(pod, &outside, *address)?;
                ensure!(seen == Some(expected), "it sees {seen:?}");
                Ok(Some(()))
            })
        })
    };
    as_whom("node", &status.node_addresses)?;

    let config = ConfigMap {
        world,
        node,
        version: Cell::new(0),
    };
    let list: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let list: Vec<_> = (list.iter())
        .map(|address| format!("{address}/{}", if address.contains(':') { 128 } else { 32 }))
        .collect();
    config.set(&format!("nonMasqueradeCIDRs: [{}]\n", list.join(", ")))?;
    as_whom("pod", &pod.addresses)?;

    config.set("nonMasqueradedCIDRs: []\n")?;
    let troubled = |is: bool| {
        let what = format!("the trouble {TROUBLE} to be there: {is}");
        world.wait(&what, || {
            let troubles = world.status(node)?.troubles;
            let found = troubles.iter().any(|trouble| trouble.reason == TROUBLE);
            Ok((found == is).then_some(()))
        })
    };
    troubled(true)?;
    world.wait("an Event on the node", || {
        let events = world.get(&["--all-namespaces", "events.v1.events.k8s.io"])?;
        let events = events["items"].as_array().context("no events")?;
        let told = events
            .iter()
            .any(|event| event["reason"] == TROUBLE && event["regarding"]["name"] == node.as_str());
        Ok(told.then_some(()))
    })?;
    as_whom("pod", &pod.addresses)?;

    config.remove()?;
    as_whom("node", &status.node_addresses)?;
    troubled(false)?;
    world.kubectl(&["-n", NAMESPACE, "delete", "pod", &pod.name])?;
    Ok(format!(
        "{} saw the node, the pod, the node",
        list.join(" and ")
    ))
}
