//! A virtual machine in a pod, which has its addresses and its MAC address: a bridge has the pod's link and the machine's, a tap. What comes
//! past the stack for it, and what it sends, are super-packets that a hypervisor hands on.

use super::{
    native::{NATIVE, say},
    *,
};
use sinabro_lab::{
    traffic::{
        packet,
        tally::{Kind, Tally},
    },
    wire::{Tap, Wire},
};

const BYTES: usize = 16 << 20;
const ETH: usize = 14;
/// All gateways' (ADR 3).
const GATEWAYS: [&str; 2] = ["169.254.1.1", "fe80::5342:1"];
const OF_GATEWAYS: &str = "02:53:4e:42:00:01";

struct Machine {
    world: World,
    near: Pod,
    place: Place,
    mtu: u32,
    /// To the second node, and into the machine.
    wires: [Wire; 2],
}

impl Machine {
    /// In the second node's pod.
    fn new(prepare: impl Fn(&Lab), flags: &[&str]) -> Self {
        let world = World::on(prepare, [flags; 2]);
        let wire = Wire::to(&world.lab, 2).unwrap();
        let near = world.lab.node(2).add_pod("near").unwrap();
        let place = Place::fresh("machine").unwrap();
        let pod = &world.pods[1];
        let endpoint = world.lab.node(2).endpoint(pod).unwrap();
        let mtu = endpoint.unwrap().mtu.unwrap();
        let ends = [
            Tap::of_machine(pod.place(), "tap0").unwrap(),
            Tap::of_machine(&place, "eth0").unwrap(),
        ];
        let mac = pod.result()["interfaces"][1]["mac"].as_str().unwrap();
        // The bridge takes what has its ports' own for itself.
        ip(
            pod.place(),
            &[
                "addr flush dev eth0".into(),
                "link set eth0 address 02:1a:b0:00:09:20".into(),
                "link add br0 type bridge".into(),
                "link set eth0 master br0".into(),
                "link set tap0 master br0 up".into(),
                "link set br0 up".into(),
            ],
        );
        let mut commands = vec![format!("link set eth0 address {mac} mtu {mtu} up")];
        for (address, gateway) in pod.addresses().into_iter().zip(GATEWAYS) {
            let nodad = if address.is_ipv6() { "nodad" } else { "" };
            commands.extend([
                format!("addr add {} dev eth0 {nodad}", IpNet::from(address)),
                format!("neigh add {gateway} lladdr {OF_GATEWAYS} dev eth0 nud permanent"),
                format!("route add default via {gateway} dev eth0 onlink"),
            ]);
        }
        ip(&place, &commands);
        Self {
            near,
            place,
            mtu,
            wires: [wire, Wire::between(ends).unwrap()],
            world,
        }
    }

    /// With a pod of another node, and with one of its own.
    fn talks(&self) {
        let pod = self.world.pods[1].place();
        let eth0 = packet::interface(pod, "eth0").unwrap();
        for other in [&self.world.pods[0], &self.near] {
            let damaged = || -> u64 {
                let places = [&self.place, other.place()];
                places
                    .map(|place| snmp::damaged(place).unwrap())
                    .iter()
                    .sum()
            };
            for address in self.world.pods[1].addresses() {
                let name = format!("{} to {address}", other.id());
                let path = Path::new(&name, other.place(), &self.place, address);
                let before = damaged();
                self.wires[1].largest();
                let large = Tally::of_incoming(pod, eth0, Kind::LargerThan(1500)).unwrap();
                let stream = Stream::open(&path).unwrap();
                stream.carry(BYTES, 128 << 10).unwrap();
                let (large, largest) = (large.count().unwrap(), self.wires[1].largest());
                println!(
                    "{name}: {large} super-packets, {:?}",
                    stream.said().unwrap()
                );
                stream.must_have_lost_nothing().unwrap();
                assert!(large > 100, "{name}: {large} super-packets");
                assert!(largest <= self.mtu as usize + ETH, "{name}: {largest}");
                assert_eq!(damaged(), before, "{name}");
            }
        }
    }
}

fn ip(place: &Place, commands: &[String]) {
    for command in commands {
        let command: Vec<_> = ["ip"]
            .into_iter()
            .chain(command.split_whitespace())
            .collect();
        place.command(&command).unwrap();
    }
}

#[test]
fn a_machine_in_a_pod_has_what_comes_in_tunnels() {
    Machine::new(|_| {}, &[]).talks();
}

#[test]
fn a_machine_in_a_pod_has_what_comes_in_tunnels_over_ipv6() {
    Machine::new(|lab| over_ipv6::nodes(lab, [true; 2]), &[]).talks();
}

#[test]
fn a_machine_in_a_pod_has_what_comes_without_a_tunnel() {
    Machine::new(|lab| say(lab, [true; 2]), &[NATIVE]).talks();
}
