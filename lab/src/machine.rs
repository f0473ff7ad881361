//! A virtual machine in a pod, with the pod's addresses and MAC address: a bridge has the pod's link and the machine's, a tap, behind
//! which is what a hypervisor does. So is KubeVirt's binding of that name.

use crate::{
    Node, Place, Pod,
    wire::{Tap, Wire},
};
use anyhow::{Context as _, Result};
use sinabro_common::{api::Mac, names};
use sinabro_netlink::{Family, addr::Addr, bridge, link, neigh::Neigh, route::Route};
use std::net::IpAddr;

/// Of the pod's link, as the machine has the one that it had.
const OF_LINK: [u8; 6] = [2, 0x1a, 0xb0, 0, 9, 0x20];

pub struct Machine {
    place: Place,
    mtu: u32,
    wire: Wire,
}

impl Machine {
    pub fn new(node: &Node, pod: &Pod) -> Result<Self> {
        let place = Place::fresh("machine")?;
        let endpoint = node.endpoint(pod)?.context("the agent knows no such pod")?;
        let mtu = endpoint.mtu.context("the pod has no MTU")?;
        let mac = pod.result()["interfaces"][1]["mac"].as_str();
        let mac: Mac = mac.context("the pod has no MAC address")?.parse()?;
        let wire = Wire::between([
            Tap::of_machine(pod.place(), "tap0")?,
            Tap::of_machine(&place, "eth0")?,
        ])?;
        give(pod.place())?;
        have(&place, pod, mac, mtu)?;
        Ok(Self { place, mtu, wire })
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    /// What its packets may have.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// What its hypervisor carries.
    pub fn wire(&self) -> &Wire {
        &self.wire
    }
}

/// The pod's link is the machine's.
fn give(pod: &Place) -> Result<()> {
    let eth0 = pod.index("eth0")?;
    let mut conn = pod.conn()?;
    conn.execute(link::set_mac(eth0, OF_LINK))?;
    conn.execute(bridge::create("br0"))?;
    for port in ["eth0", "tap0"] {
        pod.plug(port, "br0")?;
        pod.set_up(port, &[])?;
    }
    pod.set_up("br0", &[])?;
    Ok(())
}

fn have(machine: &Place, pod: &Pod, mac: Mac, mtu: u32) -> Result<()> {
    let eth0 = machine.index("eth0")?;
    let mut conn = machine.conn()?;
    conn.execute(link::set_mac(eth0, mac.0))?;
    conn.execute(link::set_mtu(eth0, mtu))?;
    conn.execute(link::set_up(eth0))?;
    let gateways: [IpAddr; 2] = [names::GATEWAY_V4.into(), names::GATEWAY_V6.into()];
    for (address, gateway) in pod.addresses().into_iter().zip(gateways) {
        let route = Route::default_of(Family::of(gateway)).via(gateway);
        conn.execute(Addr::new(eth0, address.into()).nodad().add())?;
        conn.execute(Neigh::new(eth0, gateway, names::HOST_MAC).add())?;
        conn.execute(route.dev(eth0).onlink().add())?;
    }
    Ok(())
}
