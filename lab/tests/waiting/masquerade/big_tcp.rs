//! Super-packets of IPv4 whose length field says nothing, for it has two bytes (kernel commit 9eefedd58ae1): a pod lets its own link have
//! them, and the links on the way may have them, too.

use super::kit::{Way, World, far};
use sinabro_lab::{
    Place,
    traffic::{
        packet,
        path::Path,
        stream::Stream,
        tally::{Kind, Tally},
    },
};
use sinabro_netlink::link;

const BYTES: usize = 64 << 20;
const WRITE: usize = 1 << 20;
/// The most that the length field says.
const SAYS: usize = 65_535;
/// Three of the ordinary ones.
const LARGE: u32 = 3 * SAYS as u32;

/// False if this kernel has no such packets.
fn let_have(place: &Place, link: &str) -> bool {
    let index = place.index(link).unwrap();
    let set = link::set_gso_ipv4_max_size(index, LARGE);
    place.conn().unwrap().execute(set).is_ok()
}

/// A stream from the pod; how many packets without a length left the pod, and how many came to the far host.
fn stream(world: &World) -> [u32; 2] {
    let pod = world.pod(1).place();
    let tallies = [pod, &world.beyond].map(|place| {
        let eth0 = packet::interface(place, "eth0").unwrap();
        Tally::start(place, eth0, Kind::LargerThan(SAYS)).unwrap()
    });
    let path = Path::new("BIG TCP", pod, &world.beyond, far()[0]);
    let stream = Stream::open(&path).unwrap();
    stream.carry(BYTES, WRITE).unwrap();
    tallies.map(|tally| tally.count().unwrap())
}

#[test]
fn packets_without_a_length_leave_as_the_node() {
    for way in Way::BOTH {
        let world = World::guarded(way, 1, &[]);
        if !let_have(world.pod(1).place(), "eth0") {
            println!("skipped: this kernel has no super-packets of IPv4 without a length");
            return;
        }
        let [left, came] = stream(&world);
        println!("{way:?}: {left} left the pod, {came} came");
        assert!(left > 0, "{way:?}");
        assert_eq!(came, 0, "{way:?}: the uplink cuts them");

        let on_the_way = [
            (world.node().place(), "eth0"),
            (world.lab.router().place(), "out0"),
            (world.lab.outside().place(), "far0"),
        ];
        for (place, link) in on_the_way {
            assert!(let_have(place, link));
        }
        let [left, came] = stream(&world);
        println!("{way:?}: {left} left the pod, {came} came whole");
        assert!(left > 0 && came > 0, "{way:?}");
    }
}
