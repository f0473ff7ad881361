//! Packets of every size, and those that are cut.

use super::*;

/// Of the underlay: a provider's, everybody's, and a data centre's.
pub const MTUS: [u32; 3] = [1400, 1500, 9000];
/// What stands before a packet between two nodes (RFC 7348 §5).
pub const OUTSIDE: usize = 50;
pub const OUTSIDE_IPV6: usize = 70;

/// Whatever each of two nodes sends by, all arrives, at every size of packets up to the largest.
#[test]
fn every_pair_of_ways_carries_all_of_every_size() {
    every_pair(&MTUS, OUTSIDE, |_| {});
}

pub fn every_pair(mtus: &[u32], outside: usize, prepare: impl Fn(&Lab)) {
    let ways: [&[&str]; 2] = [&[], &[KERNEL]];
    for &mtu in mtus {
        for flags in ways.iter().flat_map(|one| ways.map(|two| [*one, two])) {
            let prepare = |lab: &Lab| {
                set_mtu(lab, mtu);
                prepare(lab);
            };
            let world = World::on(prepare, flags);
            let devices = world.carried(|| large(&world, mtu as usize - outside));
            let by_device = flags.map(|flags| !flags.is_empty());
            // Whatever way it was sent by, the receiver's own says whether its device sees it.
            let seen = devices.map(|both| both.map(|count| count > 0));
            let expected = by_device.map(|is_kernels| [is_kernels; 2]);
            assert_eq!(seen, expected, "{mtu}, {flags:?}: {devices:?}");
        }
    }
}

/// No link of this lab cuts what the kernel is to cut datagrams from: the receiver's socket does. It could not if that came past
/// the stack.
#[test]
fn datagrams_that_are_cut_last_of_all_arrive() {
    let world = native::shared([&[], &[]]);
    let [one, two] = &world.pods;
    for address in two.addresses() {
        let [sender, receiver] = world.counts_of(|| {
            udp::cut(one.place(), two.place(), address, 1000, 10).unwrap();
        });
        assert_eq!((sender.direct.sent, sender.kernel.sent), (1, 0));
        let received = (receiver.direct.received, receiver.kernel.received);
        assert_eq!(received, (0, 1), "{address}");
    }
}

pub fn set_mtu(lab: &Lab, mtu: u32) {
    for node in lab.nodes() {
        let port = format!("to-{}", node.name());
        lab.router().place().set_mtu(&port, mtu).unwrap();
        node.place().set_mtu("eth0", mtu).unwrap();
    }
}

/// Bytes of a stream: some, or with SINABRO_THOROUGH as many as are promised.
pub fn stream_len() -> u64 {
    amount(8 << 20, 64 << 20).into()
}

/// Streams, and datagrams that fill a packet of a size, both ways.
pub fn large(world: &World, size: usize) {
    let [one, two] = &world.pods;
    for (from, to) in [(one, two), (two, one)] {
        for address in to.addresses() {
            let headers = if address.is_ipv4() { 28 } else { 48 };
            let full = size - headers;
            for size in [1, full - 1, full] {
                udp::echo(from.place(), to.place(), address, size, true).unwrap();
            }
            // Back comes no more than a digest.
            tcp::transfer(from.place(), to.place(), address, stream_len()).unwrap();
        }
    }
}

#[test]
fn what_only_a_router_can_do_is_left_to_the_stack() {
    let world = native::shared([&[], &[]]);
    let [one, two] = &world.pods;
    for address in two.addresses() {
        let counts = world.counts_of(|| {
            let large = world.carried(|| {
                udp::echo(one.place(), two.place(), address, 8000, false).unwrap();
            });
            // Six parts there and six back.
            assert_eq!(large, [[6, 6]; 2], "{address}");
        });
        let six = PathPackets {
            sent: 6,
            received: 6,
        };
        let by_the_stack = PathCounts {
            kernel: six,
            ..PathCounts::default()
        };
        assert_eq!(counts, [by_the_stack; 2]);
    }
}
