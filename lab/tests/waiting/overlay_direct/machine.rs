//! A virtual machine in a pod: what comes past the stack for it, and what it sends, are super-packets that a hypervisor hands on.

use super::{
    native::{NATIVE, say},
    *,
};
use sinabro_lab::{
    Machine,
    lab::UNDERLAY_MTU,
    traffic::{
        packet,
        tally::{Kind, Tally},
    },
    wire::Wire,
};

const BYTES: usize = 16 << 20;
const ETH: usize = 14;

/// Of the second node's pod, with a pod of the other node and one of its own.
fn talks(prepare: impl Fn(&Lab), flags: &[&str]) {
    let world = World::on(prepare, [flags; 2]);
    let _wire = Wire::to(&world.lab, 2).unwrap();
    let (n2, [one, two]) = (world.lab.node(2), &world.pods);
    let near = n2.add_pod("near").unwrap();
    let machine = Machine::new(n2, two).unwrap();
    let eth0 = packet::interface(two.place(), "eth0").unwrap();
    for other in [one, &near] {
        let damaged = || -> u64 {
            let places = [machine.place(), other.place()];
            let damaged = places.map(|place| snmp::damaged(place).unwrap());
            damaged.iter().sum()
        };
        for address in two.addresses() {
            let name = format!("{} to {address}", other.id());
            let path = Path::new(&name, other.place(), machine.place(), address);
            let (before, large) = (damaged(), Kind::LargerThan(UNDERLAY_MTU as usize));
            let large = Tally::of_incoming(two.place(), eth0, large).unwrap();
            machine.wire().largest();
            let stream = Stream::open(&path).unwrap();
            stream.carry(BYTES, 128 << 10).unwrap();
            let (large, largest) = (large.count().unwrap(), machine.wire().largest());
            println!(
                "{name}: {large} super-packets, {largest}, {:?}",
                stream.said().unwrap()
            );
            stream.must_have_lost_nothing().unwrap();
            assert!(large > 100, "{name}: {large} super-packets");
            assert!(largest <= machine.mtu() as usize + ETH, "{name}: {largest}");
            assert_eq!(damaged(), before, "{name}");
        }
    }
}

#[test]
fn a_machine_in_a_pod_has_what_comes_in_tunnels() {
    talks(|_| {}, &[]);
}

#[test]
fn a_machine_in_a_pod_has_what_comes_in_tunnels_over_ipv6() {
    talks(|lab| over_ipv6::nodes(lab, [true; 2]), &[]);
}

#[test]
fn a_machine_in_a_pod_has_what_comes_without_a_tunnel() {
    talks(|lab| say(lab, [true; 2]), &[NATIVE]);
}
