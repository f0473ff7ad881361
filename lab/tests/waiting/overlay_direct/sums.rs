//! Between nodes whose packets come with the sum of all their bytes (CHECKSUM_COMPLETE), as some cards leave it. So does a tunnel
//! whose outer checksum the node has added up itself; it is their uplink here.

use super::{native, *};
use sinabro_lab::traffic::whole_sum::{self, WholeSums};

const UPLINK: &str = "sum0";

/// Nodes with such an uplink, by which they know each other.
fn nodes(lab: &Lab) {
    let own: Vec<_> = lab.nodes().iter().map(|n| n.addresses()[0]).collect();
    for (at, node) in lab.nodes().iter().enumerate() {
        let ends = [own[at], own[1 - at]];
        whole_sum::tunnel(node.place(), "eth0", UPLINK, ends).unwrap();
        let number = at + 1;
        let nets: [IpNet; 2] = [
            format!("198.18.9.{number}/24").parse().unwrap(),
            format!("2001:db8:18:9::{number}/64").parse().unwrap(),
        ];
        node.place().set_up(UPLINK, &nets).unwrap();
        let mut entry = node.entry();
        entry.addresses = nets.map(|net| net.addr()).into();
        node.set_entry(entry);
    }
}

#[test]
fn the_sum_of_a_whole_packet_stays_its_own_between_nodes() {
    for (by_ipv6, routing) in [
        (false, "tunnel"),
        (true, "tunnel"),
        (false, "native"),
        (true, "native"),
    ] {
        let what = format!("known by IPv6: {by_ipv6}, {routing}");
        let prepare = |lab: &Lab| {
            nodes(lab);
            if by_ipv6 {
                over_ipv6::nodes(lab, [true; 2]);
            }
            native::say(lab, [routing == "native"; 2]);
        };
        let (uplinks, routing) = (
            format!("--uplinks={UPLINK}"),
            format!("--routing={routing}"),
        );
        let world = World::on(prepare, [&[&uplinks, &routing], &[&uplinks, &routing]]);
        let sums = [0, 1].map(|pod| WholeSums::watch(world.pods[pod].place(), "eth0").unwrap());
        assert_eq!(world.carried(|| exchange(&world)), [[0, 0]; 2], "{what}");
        for sums in sums {
            let seen = sums.seen().unwrap();
            assert!(seen.complete > 0 && seen.wrong == 0, "{what}: {seen:?}");
        }
    }
}
