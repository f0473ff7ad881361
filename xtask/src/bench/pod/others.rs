//! What others put between pods: the reference plugins, and flannel's links between nodes.

use super::rules;
use crate::{bench::cni::quick_sandbox, setup};
use anyhow::{Context as _, Result};
use ipnet::IpNet;
use serde_json::{Value, json};
use sinabro_lab::{Node, Place, cni::Call, node::netns_path};
use sinabro_netlink::{
    Mac,
    fdb::Fdb,
    neigh::Neigh,
    route::Route,
    sysctl,
    vxlan::{Vxlan, VxlanSettings},
};
use std::net::IpAddr;

const SPEC: &str = "1.0.0";
/// What VXLAN leaves of an underlay's 1500 bytes, as ours leaves it to pods.
const MTU: u32 = 1450;
/// With an underlay of IPv6, whose header is 20 bytes longer.
const MTU_V6: u32 = 1430;

/// A pod of somebody else.
pub struct Attached {
    pub place: Place,
    /// IPv4 first.
    pub addresses: [IpAddr; 2],
}

/// A reference plugin with host-local, as clusters configure it that have nothing else.
pub fn config(plugin: &str, ranges: &[IpNet]) -> Value {
    let ranges: Vec<Value> = ranges.iter().map(|net| json!([{"subnet": net}])).collect();
    let mut config = json!({
        "cniVersion": SPEC,
        "name": format!("bench-{plugin}"),
        "type": plugin,
        "mtu": MTU,
        // Of no consequence between pods; with flannel its own rules do it.
        "ipMasq": false,
        "ipam": {
            "type": "host-local",
            // On the node's tmpfs.
            "dataDir": "/run/lab/host-local",
            "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        },
    });
    if plugin == "bridge" {
        config["bridge"] = "cni0".into();
        config["isGateway"] = true.into();
        config["hairpinMode"] = true.into();
    }
    config
}

/// Makes a sandbox and adds it by a reference plugin.
pub fn attach(node: &Node, plugin: &str, config: &Value, id: &str) -> Result<Attached> {
    let plugins = setup::reference_plugins().context("the reference plugins are missing")?;
    let place = quick_sandbox(node, id)?;
    let call = Call {
        plugin: &plugins.join(plugin),
        command: "ADD",
        container_id: id,
        netns: Some(&netns_path(id)),
        args: None,
        config,
    };
    let add = || {
        let result = call.run(node)?.success()?;
        let addresses = addresses(&result);
        addresses.with_context(|| format!("not one address of each family: {result}"))
    };
    let addresses = add().with_context(|| format!("cannot add a pod by {plugin}"))?;
    Ok(Attached { place, addresses })
}

/// The addresses of an ADD's result, IPv4 first.
fn addresses(result: &Value) -> Option<[IpAddr; 2]> {
    let ips = result["ips"].as_array()?.iter();
    let nets = ips.map(|ip| ip["address"].as_str()?.parse::<IpNet>().ok());
    let mut addresses = nets
        .map(|net| Some(net?.addr()))
        .collect::<Option<Vec<_>>>()?;
    addresses.sort();
    let [v4, v6] = addresses[..] else {
        return None;
    };
    (v4.is_ipv4() && v6.is_ipv6()).then_some([v4, v6])
}

/// Two networks with a veth pair between them, and nothing else.
pub fn cable() -> Result<[Attached; 2]> {
    let [a, b] = ["bare-client", "bare-server"].map(Place::fresh);
    let (a, b) = (a?, b?);
    a.cable(
        ("eth0", [2, 0, 0, 0, 0, 1]),
        MTU,
        &b,
        ("eth0", [2, 0, 0, 0, 0, 2]),
    )?;
    let set_up = |place: Place, last: u8| -> Result<Attached> {
        let nets = [format!("10.98.0.{last}/24"), format!("fd00:98::{last}/64")];
        let nets = nets
            .iter()
            .map(|text| text.parse())
            .collect::<Result<Vec<IpNet>, _>>()?;
        place.set_up("eth0", &nets)?;
        let addresses = [nets[0].addr(), nets[1].addr()];
        Ok(Attached { place, addresses })
    };
    Ok([set_up(a, 1)?, set_up(b, 2)?])
}

/// What flannel's VXLAN backend makes on two nodes: a device for each family, and for each peer a
/// forwarding entry, a neighbour and a route; and its masquerade.
pub fn flannel(nodes: [&Node; 2]) -> Result<()> {
    for (node, peer) in [(nodes[0], nodes[1]), (nodes[1], nodes[0])] {
        let (own, theirs) = (node.entry(), peer.entry());
        for (number, (name, mtu)) in [("flannel.1", MTU), ("flannel-v6.1", MTU_V6)]
            .into_iter()
            .enumerate()
        {
            let (address, range) = (own.addresses[number], own.pod_cidrs[number]);
            let vxlan = Vxlan {
                name,
                mac: mac(address),
                mtu,
                settings: VxlanSettings::new(1, 8472, address),
            };
            let mut conn = node.netlink()?;
            conn.execute(vxlan.create())?;
            let single = |net: IpNet| IpNet::from(net.network());
            let link = node.place().set_up(name, &[single(range)])?;
            let far = theirs.pod_cidrs[number];
            let fdb = Fdb {
                link,
                mac: mac(theirs.addresses[number]),
                dst: theirs.addresses[number],
            };
            conn.execute_all([
                fdb.add(),
                Neigh::new(link, far.network(), fdb.mac).add(),
                Route::to(far).via(far.network()).dev(link).onlink().add(),
            ])?;
            rules::flannel(node, range)?;
        }
        node.place().run(|| {
            sysctl::write(&["net", "ipv4", "ip_forward"], "1")?;
            Ok(sysctl::write(
                &["net", "ipv6", "conf", "all", "forwarding"],
                "1",
            )?)
        })?;
    }
    Ok(())
}

/// A device's, of its node's address.
fn mac(address: IpAddr) -> Mac {
    let [family, last] = match address {
        IpAddr::V4(address) => [4, address.octets()[3]],
        IpAddr::V6(address) => [6, address.octets()[15]],
    };
    [0x02, 0xf1, 0xa7, 0, family, last]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_has_one_address_of_each_family() {
        let ips = |ips: &[&str]| {
            let ips: Vec<Value> = ips.iter().map(|ip| json!({"address": ip})).collect();
            addresses(&json!({ "ips": ips }))
        };
        let found = ips(&["fd00::2/64", "10.0.0.2/24"]).unwrap();
        assert_eq!(found[0], "10.0.0.2".parse::<IpAddr>().unwrap());
        assert!(ips(&["10.0.0.2/24"]).is_none());
        assert!(ips(&["10.0.0.2/24", "10.0.0.3/24"]).is_none());
        assert!(ips(&["10.0.0.2", "fd00::2/64"]).is_none());
        assert!(addresses(&json!({})).is_none());
    }
}
