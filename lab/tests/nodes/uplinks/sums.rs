//! An uplink whose packets come with the sum of all their bytes (CHECKSUM_COMPLETE), as some cards leave it. So does a tunnel whose
//! outer checksum the node has added up itself.

use super::kit::{BYTES, Way, lab, leave_by, start, works};
use sinabro_lab::{
    node::SERVICES_FLAGS,
    traffic::whole_sum::{self, WholeSums},
};

/// A quarter of the super-packets of a stream: what comes before the way past the stack is known has no such sum any more.
const LEAST: u64 = BYTES as u64 / (64 << 10) / 4;

#[test]
fn the_sum_of_a_whole_packet_stays_its_own_on_the_way_into_a_pod() {
    let lab = lab();
    let (node, outside) = (lab.node(1), lab.outside().place());
    node.write_services("{kind: List, items: []}\n").unwrap();
    let cable = Way::cable("wan0", 3, &lab);
    let (near, far) = (cable.near[0], cable.far[0]);
    whole_sum::tunnel(node.place(), "wan0", "sum0", [near, far]).unwrap();
    whole_sum::tunnel(outside, "wan0", "sum0", [far, near]).unwrap();
    let way = Way::new("sum0", 4);
    way.set_up(node, outside);
    leave_by(node, &[&way]);
    // Past the stack, which forgets such sums of what it forwards.
    let flags = [&SERVICES_FLAGS[..], &["--uplinks=sum0"]].concat();
    let pod = start(node, &["sum0"], &flags);
    let sums = WholeSums::watch(pod.place(), "eth0").unwrap();
    for (near, far) in way.near.into_iter().zip(way.far) {
        let before = sums.seen().unwrap();
        works(&pod, outside, far, near);
        let after = sums.seen().unwrap();
        assert!(after.complete > before.complete + LEAST, "{far}: {after:?}");
        assert_eq!(after.wrong, 0, "{far}: {after:?}");
    }
}
