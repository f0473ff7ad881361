//! In which order packets arrive whose way changes.

use super::*;
use sinabro_lab::{raise::Raise, traffic::order::Numbered};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// So long everything goes one way.
const WHILE: Duration = Duration::from_millis(500);
/// Packets of a flow, in four changes of its way. Measured: no datagram, and 5 segments where others kept the machine busy. A processor handles up
/// to 64 packets at a time, and what came in for the device waits until it has (`dev_weight`).
const MOST: u64 = 64;

/// The way of what one node sends, and of what the other takes, becomes the kernel's and is direct again.
#[test]
fn few_packets_are_overtaken_where_their_way_changes() {
    let world = World::new([&[], &[]]);
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
        for node in world.lab.nodes() {
            ways_change(&world, node);
        }
    });
    for (datagrams, stream) in datagrams.into_iter().zip(&streams) {
        let (sent, order) = datagrams.finish().unwrap();
        println!("{sent} sent, {order:?}, {:?}", stream.said().unwrap());
        assert!(order.arrived > sent / 2, "{order:?} of {sent}");
        assert!(order.overtaken <= MOST && order.twice == 0, "{order:?}");
        for said in stream.said().unwrap() {
            assert!(u64::from(said.out_of_order) <= MOST, "{said:?}");
        }
    }
}

fn ways_change(world: &World, node: &Node) {
    for (flags, is_direct) in [(&["--overlay=kernel"][..], false), (&[], true)] {
        node.kill_agent().unwrap();
        start(node, flags);
        node.wait_ready().unwrap();
        eventually("another way", || goes_direct(node) == is_direct);
        // What was on its way.
        thread::sleep(WHILE / 5);
        let at = usize::from(node.name() == world.lab.node(2).name());
        let counts = world.counts_of(|| thread::sleep(WHILE))[at];
        let (way, other) = match is_direct {
            true => (counts.direct, counts.kernel),
            false => (counts.kernel, counts.direct),
        };
        assert!(is_both_ways(way) && other == NOTHING, "{counts:?}");
    }
}
