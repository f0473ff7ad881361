//! In which order packets arrive whose way changes.

use super::{
    native::{NATIVE, goes_native, say},
    *,
};
use sinabro_lab::{raise::Raise, traffic::order::Numbered};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// So long everything goes one way.
const WHILE: Duration = Duration::from_millis(500);
/// Packets of a flow, in four changes of its way. Measured: no datagram. A processor handles up to 64 packets at a time, and what came in for the
/// device waits until it has (`dev_weight`).
const MOST: u64 = 64;
/// A super-packet of TCP's is one of them. Its receiver counts each of its segments (`tcp_data_queue_ofo`, net/ipv4/tcp_input.c), measured: none or 5, and
/// 410 where others kept the machine busy.
const SUPER_PACKET: u64 = 65_536;

/// The way of what one node sends, and of what the other takes, becomes the kernel's and is direct again.
#[test]
fn few_packets_are_overtaken_where_their_way_changes() {
    few_are_overtaken(&World::new([&[], &[]]), ways_become_the_kernels);
}

#[test]
fn few_packets_are_overtaken_where_their_way_over_ipv6_changes() {
    let by_ipv6 = |lab: &Lab| over_ipv6::nodes(lab, [true; 2]);
    few_are_overtaken(&World::on(by_ipv6, [&[], &[]]), ways_become_the_kernels);
}

/// Nodes begin and end to say that they take what is in no tunnel.
#[test]
fn few_packets_are_overtaken_where_their_tunnel_goes_and_comes() {
    few_are_overtaken(&World::new([&[NATIVE], &[NATIVE]]), tunnels_go_and_come);
}

fn few_are_overtaken(world: &World, ways_change: impl Fn(&World)) {
    let [one, two] = &world.pods;
    let paths = two.addresses().map(|address| {
        let name = format!("to {address}");
        Path::new(&name, one.place(), two.place(), address)
    });
    let streams = paths.each_ref().map(|path| Stream::open(path).unwrap());
    let datagrams = paths.each_ref().map(|path| Numbered::start(path).unwrap());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for stream in &streams {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    stream.carry(1 << 20, 64 << 10).unwrap();
                }
            });
        }
        let _raise = Raise(&stop);
        thread::sleep(WHILE);
        ways_change(world);
    });
    for (datagrams, stream) in datagrams.into_iter().zip(&streams) {
        let (sent, order) = datagrams.finish().unwrap();
        println!("{sent} sent, {order:?}, {:?}", stream.said().unwrap());
        assert!(order.arrived > sent / 2, "{order:?} of {sent}");
        assert!(order.overtaken <= MOST && order.twice == 0, "{order:?}");
        for said in stream.said().unwrap() {
            let segments = SUPER_PACKET / said.mss as u64;
            assert!(u64::from(said.out_of_order) <= MOST * segments, "{said:?}");
        }
    }
}

fn ways_become_the_kernels(world: &World) {
    for node in world.lab.nodes() {
        for (flags, is_direct) in [(&[KERNEL][..], false), (&[], true)] {
            node.kill_agent().unwrap();
            start(node, flags);
            node.wait_ready().unwrap();
            eventually("another way", || goes_direct(node) == is_direct);
            let at = usize::from(node.name() == world.lab.node(2).name());
            let counts = counted_for_a_while(world)[at];
            let (way, other) = match is_direct {
                true => (counts.direct, counts.kernel),
                false => (counts.kernel, counts.direct),
            };
            assert!(is_both_ways(way) && other == NOTHING, "{counts:?}");
        }
    }
}

fn tunnels_go_and_come(world: &World) {
    for is_native in [true, false, true, false] {
        say(&world.lab, [is_native; 2]);
        for node in world.lab.nodes() {
            eventually("another way", || goes_native(node) == is_native);
        }
        for counts in counted_for_a_while(world) {
            let (way, other) = match is_native {
                true => (counts.native, counts.direct),
                false => (counts.direct, counts.native),
            };
            assert!(is_both_ways(way) && other == NOTHING, "{counts:?}");
        }
    }
}

/// Once what was on its way is there.
fn counted_for_a_while(world: &World) -> [PathCounts; 2] {
    thread::sleep(WHILE / 5);
    world.counts_of(|| thread::sleep(WHILE))
}
