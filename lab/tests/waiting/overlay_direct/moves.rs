//! A node comes to be reached by something else while pods of three nodes talk past the stack: who talks to it sees that for as long as is
//! said here, and nobody else does.

use super::{
    native::{NATIVE, say},
    three::{PAIRS, counted, gaps, paths, said},
    *,
};
use sinabro_lab::traffic::gaps::Meter;
use sinabro_netlink::{Family, addr::Addr, link};
use std::{net::IpAddr, thread, time::Instant};

/// Between nodes that nothing has happened to; measured: 2 ms.
const OF_OTHERS: Duration = Duration::from_millis(50);
/// What TCP stands still for beside: it waits for 200 ms before it sends again what was lost, and then for twice as long each time.
pub const TCP_WAITS: Duration = Duration::from_millis(800);
/// Long enough for all ways to have packets.
const LOOK: Duration = Duration::from_millis(300);

/// The agent looks by itself every 30 s, so by then it has heard of what has happened.
const SOON: Duration = Duration::from_secs(15);

/// How nodes reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tunnels,
    TunnelsOverIpv6,
    Native,
}

use Way::{Native, Tunnels, TunnelsOverIpv6};

impl Way {
    fn world(self) -> World<3> {
        let prepare = |lab: &Lab| match self {
            Tunnels => {}
            TunnelsOverIpv6 => over_ipv6::nodes(lab, [true; 3]),
            Native => say(lab, [true; 3]),
        };
        let flags: &[&str] = if self == Native { &[NATIVE] } else { &[] };
        World::on(prepare, [flags; 3])
    }

    fn path(self) -> PeerPath {
        match self {
            Native => PeerPath::Native,
            _ => PeerPath::Direct { why: None },
        }
    }

    fn packets(self, counts: PathCounts) -> PathPackets {
        match self {
            Native => counts.native,
            _ => counts.direct,
        }
    }
}

/// Something happens to a node while all pods talk: datagrams to it and from it stand still for no longer than that, TCP until it next sends
/// again, and all go past the stack soon.
fn happens(
    world: &World<3>,
    way: Way,
    what: &str,
    to: usize,
    longest: Duration,
    act: impl FnOnce(),
) {
    eventually("all ways to be past the stack", || are_past(way, world));
    let paths = paths(world);
    let meter = Meter::start(&paths).unwrap();
    meter.watch(PHASE);
    assert!(go_past(way, world), "before {what}");
    meter.event(what).unwrap();
    act();
    let done = Instant::now();
    eventually("all packets to go past the stack", || {
        are_past(way, world) && go_past(way, world)
    });
    let later = done.elapsed();
    assert!(later < SOON, "{what}: {later:?}");
    meter.watch(PHASE);
    let watched = meter.finish().unwrap();
    println!("{way:?}\n{}", watched.table().join("\n"));
    for (pair, of_pair) in PAIRS.iter().zip(paths.chunks(2)) {
        let most = match pair.contains(&to) {
            true => [longest, 2 * longest + TCP_WAITS],
            false => [OF_OTHERS; 2],
        };
        for path in of_pair {
            let gaps = gaps(&watched, path);
            let hold = gaps.iter().zip(most).all(|(gap, most)| *gap < most);
            assert!(hold, "{way:?}, {what}, {}: {gaps:?}", path.name);
        }
    }
}

fn are_past(way: Way, world: &World<3>) -> bool {
    let path = Some(way.path());
    PAIRS.iter().all(|pair| said(world, *pair).path == path)
}

/// Whether packets are sent and taken past the stack by all nodes, and none by it.
fn go_past(way: Way, world: &World<3>) -> bool {
    let before = counted(world);
    thread::sleep(LOOK);
    let mut both = before.into_iter().zip(counted(world));
    both.all(|(before, after)| {
        let [own, later] = [before, after].map(|counts| way.packets(counts));
        later.sent > own.sent && later.received > own.received && after.kernel == before.kernel
    })
}

/// Measured: 0.2 to 1.3 ms, as its kernel says so, and at times 190 to 210 ms of TCP.
fn gets_another_mac_address(world: &World<3>, way: Way) {
    let longest = Duration::from_millis(50);
    happens(world, way, "n2 has another MAC address", 2, longest, || {
        let place = world.lab.node(2).place();
        let eth0 = place.index("eth0").unwrap();
        let other = link::set_mac(eth0, [2, 0x1a, 0xb0, 0, 9, 12]);
        place.conn().unwrap().execute(other).unwrap();
    });
}

/// One that it is known by: natively of both families. Measured: 3 to 120 ms, until agents have read the list of
/// nodes and acted on it; 230 ms where they wait for a processor, and then 1.9 s of TCP.
fn gets_another_address(world: &World<3>, way: Way) {
    let longest = Duration::from_secs(1);
    happens(world, way, "n3 has another address", 3, longest, || {
        let n3 = world.lab.node(3);
        let mut entry = n3.entry();
        for address in &mut entry.addresses {
            let (to, length, router) = match (address.is_ipv4(), way) {
                (true, Tunnels | Native) => ("172.30.0.63", 24, ROUTER),
                (false, TunnelsOverIpv6 | Native) => ("fd00:172:30::3f", 64, ROUTER_IPV6),
                _ => continue,
            };
            let to: IpAddr = to.parse().unwrap();
            replace_address(n3, [*address, to], length, router.parse().unwrap());
            *address = to;
        }
        n3.set_entry(entry);
        world.lab.publish().unwrap();
    });
}

fn replace_address(node: &Node, ends: [IpAddr; 2], length: u8, router: IpAddr) {
    let eth0 = node.place().index("eth0").unwrap();
    let [old, new] = ends.map(|at| Addr::new(eth0, IpNet::new(at, length).unwrap()));
    // The kernel takes IPv4's default route with the address that it was made for.
    let default = Route::default_of(Family::of(router)).via(router).dev(eth0);
    let requests = [old.delete(), new.nodad().add(), default.replace()];
    node.netlink().unwrap().execute_all(requests).unwrap();
}

/// Measured: 45 to 180 ms, until the agent has its programs on it; by IPv6 one time in five 1.05 s of what it sends.
fn is_made_again(world: &World<3>, way: Way) {
    // A question for a neighbour that is lost is asked again after a second.
    let longest = Duration::from_secs(2);
    happens(world, way, "n1 has another uplink", 1, longest, || {
        world.lab.renew_uplink(1).unwrap();
    });
}

fn all_happen(way: Way) {
    let world = way.world();
    gets_another_mac_address(&world, way);
    gets_another_address(&world, way);
    is_made_again(&world, way);
}

#[test]
fn nodes_change_under_load() {
    all_happen(Tunnels);
}

#[test]
fn nodes_that_are_known_by_ipv6_change_under_load() {
    all_happen(TunnelsOverIpv6);
}

#[test]
fn nodes_without_tunnels_change_under_load() {
    all_happen(Native);
}
