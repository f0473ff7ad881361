//! Two nodes that need no tunnels between them, and a third that takes nothing else.

use super::{
    native::{NATIVE, say},
    native_mtu::{OF_TUNNELS, OF_UPLINK, carries, mtu},
    three::{FAMILIES, PAIRS, Pair, counted, path, said},
    *,
};

/// The third node's number.
const THIRD: usize = 3;

fn world() -> World<3> {
    let prepare = |lab: &Lab| say(lab, [true, true, false]);
    let world = World::on(prepare, [&[NATIVE], &[NATIVE], &[]]);
    eventually("ways of both kinds", || {
        PAIRS
            .iter()
            .all(|pair| goes(&world, *pair, is_tunnelled(*pair)))
    });
    world
}

fn is_tunnelled(pair: Pair) -> bool {
    pair.contains(&THIRD)
}

/// Whether the way from a node to another is past the stack, in tunnels or not.
fn goes(world: &World<3>, pair: Pair, in_tunnels: bool) -> bool {
    let way = match in_tunnels {
        true => PeerPath::Direct { why: None },
        false => PeerPath::Native,
    };
    said(world, pair).path == Some(way)
}

/// All is sent and taken by its way alone.
fn each_goes_its_way(world: &World<3>, in_tunnels: &dyn Fn(Pair) -> bool, what: impl FnOnce()) {
    let before = counted(world);
    what();
    for ((pair, before), after) in PAIRS.into_iter().zip(before).zip(counted(world)) {
        let [own, other] = pair;
        // Sent, and received.
        let tunnels = [in_tunnels(pair), in_tunnels([other, own])];
        for (way, expected) in [
            (|counts: PathCounts| counts.direct) as fn(PathCounts) -> PathPackets,
            |counts| counts.native,
            |counts| counts.kernel,
        ]
        .into_iter()
        .zip([tunnels, tunnels.map(|is| !is), [false; 2]])
        {
            let (before, after) = (way(before), way(after));
            let rises = [after.sent > before.sent, after.received > before.received];
            assert_eq!(rises, expected, "{pair:?}: {before:?} {after:?}");
        }
    }
}

fn full_packets(world: &World<3>, pair: Pair, size: usize) {
    for (family, headers) in [28, 48].into_iter().enumerate() {
        let path = path(world, pair, family);
        carries(world, &path, [size; 2]);
        udp::echo(&path.from, &path.to, path.address, size - headers, true).unwrap();
    }
}

#[test]
fn each_pair_of_nodes_has_its_own_way_and_size_of_packets() {
    let world = world();
    let sizes = [1, 2, 3].map(|number| mtu(world.lab.node(number), &world.pods[number - 1]));
    assert_eq!(sizes, [OF_UPLINK, OF_UPLINK, OF_TUNNELS]);
    each_goes_its_way(&world, &is_tunnelled, || {
        for [from, to] in [[1, 2], [1, 3], [2, 3]] {
            exchange_between(&world.pods[from - 1], &world.pods[to - 1]);
        }
    });
    each_goes_its_way(&world, &is_tunnelled, || {
        for pair in PAIRS {
            let size = match is_tunnelled(pair) {
                true => OF_TUNNELS,
                false => OF_UPLINK,
            };
            full_packets(&world, pair, size);
        }
    });
    // Who does not agree on a size beforehand is told.
    for family in 0..FAMILIES.len() {
        let path = path(&world, [1, THIRD], family);
        let full = OF_UPLINK - if family == 0 { 28 } else { 48 };
        eventually("the sender is told", || {
            udp::is_too_long(&path.from, path.address, full).is_ok()
        });
    }
}

#[test]
fn the_third_node_begins_to_do_without_tunnels_under_load() {
    let world = world();
    let paths: Vec<_> = [[1, 2], [THIRD, 1], [2, THIRD]]
        .into_iter()
        .flat_map(|pair| [0, 1].map(|family| path(&world, pair, family)))
        .collect();
    let traffic = watched(&paths);
    let phase = |what: &str, act: &dyn Fn(), in_tunnels: &dyn Fn(Pair) -> bool| {
        traffic.event(what).unwrap();
        act();
        eventually(what, || {
            let mut pairs = PAIRS.iter();
            pairs.all(|pair| goes(&world, *pair, in_tunnels(*pair)))
        });
        // What was on its way.
        traffic.watch(PHASE / 10);
        each_goes_its_way(&world, in_tunnels, || traffic.watch(PHASE));
        traffic.must_flow(what).unwrap();
    };
    let third = world.lab.node(THIRD);
    let restart = || {
        third.kill_agent().unwrap();
        start(third, &[NATIVE]);
        third.wait_ready().unwrap();
    };
    // It sends so what the others take so.
    let is_to_third = |[_, to]: Pair| to == THIRD;
    phase("it may", &restart, &is_to_third);
    phase("it says so", &|| say(&world.lab, [true; 3]), &|_| false);
    println!("{}", traffic.finish().unwrap());
    // What it makes now has packets as large as the others'.
    let new = third.add_pod("new").unwrap();
    for (family, address) in new.addresses().into_iter().enumerate() {
        let one = world.pods[0].place();
        let path = Path::new(FAMILIES[family], one, new.place(), address);
        carries(&world, &path, [OF_UPLINK; 2]);
    }
    for pair in [[1, THIRD], [THIRD, 2]] {
        full_packets(&world, pair, OF_TUNNELS);
    }
}
