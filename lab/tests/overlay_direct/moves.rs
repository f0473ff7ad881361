//! A node comes to be reached by something else while pods of three nodes talk past the stack: who talks to it sees that for as long as is
//! said here, and nobody else does.

use super::{
    three::{PAIRS, counted, gaps, paths, said},
    *,
};
use sinabro_lab::{NodeEntry, traffic::gaps::Meter};
use sinabro_netlink::{Family, addr::Addr, link};
use std::{net::IpAddr, thread, time::Instant};

/// Between nodes that nothing has happened to; measured: 2 ms.
const OF_OTHERS: Duration = Duration::from_millis(50);
/// Long enough for all ways to have packets.
const LOOK: Duration = Duration::from_millis(300);

/// The agent looks by itself every 30 s, so by then it has heard of what has happened.
const SOON: Duration = Duration::from_secs(15);

/// Something happens to a node while all pods talk: datagrams to it and from it stand still for no longer than that, TCP until it next sends
/// again, and all go past the stack soon.
fn happens(what: &str, to: usize, longest: Duration, act: impl FnOnce(&World<3>)) {
    let world = World::new([&[], &[], &[]]);
    eventually("all ways to be direct", || are_direct(&world));
    let paths = paths(&world);
    let meter = Meter::start(&paths).unwrap();
    meter.watch(PHASE);
    assert!(go_directly(&world), "before");
    meter.event(what).unwrap();
    act(&world);
    let done = Instant::now();
    eventually("all packets to go directly", || {
        are_direct(&world) && go_directly(&world)
    });
    let later = done.elapsed();
    assert!(later < SOON, "{later:?}");
    meter.watch(PHASE);
    let watched = meter.finish().unwrap();
    println!("{}", watched.table().join("\n"));
    for (pair, of_pair) in PAIRS.iter().zip(paths.chunks(2)) {
        // TCP waits for twice as long each time.
        let most = match pair.contains(&to) {
            true => [longest, 2 * longest],
            false => [OF_OTHERS; 2],
        };
        for path in of_pair {
            let gaps = gaps(&watched, path);
            let hold = gaps.iter().zip(most).all(|(gap, most)| *gap < most);
            assert!(hold, "{}: {gaps:?}", path.name);
        }
    }
}

fn are_direct(world: &World<3>) -> bool {
    let direct = Some(PeerPath::Direct { why: None });
    PAIRS.iter().all(|pair| said(world, *pair).path == direct)
}

/// Whether packets are sent and taken past the stack by all nodes, and none by it.
fn go_directly(world: &World<3>) -> bool {
    let before = counted(world);
    thread::sleep(LOOK);
    let mut both = before.into_iter().zip(counted(world));
    both.all(|(before, after)| {
        after.direct.sent > before.direct.sent
            && after.direct.received > before.direct.received
            && after.kernel == before.kernel
    })
}

/// Measured: 1 ms, as it asks for the others' addresses and so tells them its own, and 210 ms of TCP, which waits for 200 ms before it sends again.
#[test]
fn a_node_gets_another_mac_address_under_load() {
    let longest = Duration::from_millis(250);
    happens("n2 has another MAC address", 2, longest, |world| {
        let place = world.lab.node(2).place();
        let eth0 = place.index("eth0").unwrap();
        let other = link::set_mac(eth0, [2, 0x1a, 0xb0, 0, 9, 12]);
        place.conn().unwrap().execute(other).unwrap();
    });
}

/// Measured: 60 to 100 ms, until agents have read the list of nodes and acted on it; 230 ms where they wait for a processor, and then 1.9 s of TCP.
#[test]
fn a_node_gets_another_address_under_load() {
    let longest = Duration::from_secs(4);
    happens("n3 has another address", 3, longest, |world| {
        let n3 = world.lab.node(3);
        let from = n3.addresses();
        let to: IpAddr = "172.30.0.63".parse().unwrap();
        let eth0 = n3.place().index("eth0").unwrap();
        let [old, new] =
            [from[0], to].map(|address| Addr::new(eth0, IpNet::new(address, 24).unwrap()));
        // The kernel takes the default route with the address that it was made for.
        let router = Route::default_of(Family::V4).via(ROUTER.parse().unwrap());
        let requests = [old.delete(), new.add(), router.dev(eth0).replace()];
        n3.netlink().unwrap().execute_all(requests).unwrap();
        n3.set_entry(NodeEntry {
            addresses: vec![to, from[1]],
            ..n3.entry()
        });
        world.lab.publish().unwrap();
    });
}

/// Measured: 45 to 165 ms, until the agent has its programs on it.
#[test]
fn a_nodes_uplink_is_made_again_under_load() {
    let longest = Duration::from_secs(4);
    happens("n1 has another uplink", 1, longest, |world| {
        world.lab.renew_uplink(1).unwrap();
    });
}
