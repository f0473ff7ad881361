//! Nodes on two links, and routers between them: the one by which nodes reach each other gets another MAC address, or another router
//! takes its place, while pods talk.
//!
//! ```text
//!   n1 ── br0 ── near │ first, second or third router │ far ── br1 ── n2
//! ```

use super::{moves::TCP_WAITS, *};
use sinabro_lab::{lab::UNDERLAY_MTU, traffic::gaps::Meter};
use sinabro_netlink::{Family, bridge, link};
use three::FAMILIES;

/// Networks of both links.
const LINKS: [[&str; 2]; 2] = [
    ["172.30.0.", "fd00:172:30::"],
    ["172.31.0.", "fd00:172:31::"],
];
const LENGTHS: [u8; 2] = [24, 64];
const OF_SECOND_NODE: &str = "12";
/// Of the routers, on both.
const ROUTERS: [&str; 3] = ["101", "102", "103"];
const ENDS: [&str; 2] = ["near", "far"];

/// Measured: 0.2 to 1.3 ms, as routers and nodes say their MAC addresses themselves; a busy machine may keep everybody waiting for longer.
const AT_ONCE: Duration = Duration::from_millis(50);
/// Until agents have heard of it; measured: 60 to 125 ms.
const FOLLOWED: Duration = Duration::from_millis(500);
/// Until programs ask the kernel again, every 100 of its ticks: measured up to 396 ms, where it counts 250 a second.
const UNTIL_ASKED: Duration = Duration::from_millis(1_600);

struct Routers<'a> {
    world: &'a World,
    places: [Place; 3],
}

/// The second node is on the other link, and both reach each other by the first router.
fn two_links(lab: &Lab, is_known_by_ipv6: bool) -> [Place; 3] {
    let router = lab.router().place();
    router
        .conn()
        .unwrap()
        .execute(bridge::create("br1"))
        .unwrap();
    router.set_up("br1", &[]).unwrap();
    router.plug("to-n2", "br1").unwrap();
    let places = [0, 1, 2].map(|number| {
        let place = Place::fresh(["first", "second", "third"][number]).unwrap();
        place.forward().unwrap();
        // As routers do it that have a twin.
        for (family, setting) in [("ipv4", "arp_notify"), ("ipv6", "ndisc_notify")] {
            let write = || {
                Ok(sysctl::write(
                    &["net", family, "conf", "all", setting],
                    "1",
                )?)
            };
            place.run(write).unwrap();
        }
        for (at, end) in ENDS.into_iter().enumerate() {
            let port = format!("gw{number}-{end}");
            let macs = [0, 1].map(|side| [2, 0x1a, 0xb1, side, number as u8, at as u8]);
            place
                .cable((end, macs[0]), UNDERLAY_MTU, router, (&port, macs[1]))
                .unwrap();
            router.set_up(&port, &[]).unwrap();
            router.plug(&port, ["br0", "br1"][at]).unwrap();
            let nets = [0, 1].map(|family| net(at, family, ROUTERS[number]));
            place.set_up(end, &nets).unwrap();
        }
        place
    });
    let n2 = lab.node(2);
    n2.command(&["ip", "addr", "flush", "dev", "eth0", "scope", "global"])
        .unwrap();
    let nets = [0, 1].map(|family| net(1, family, OF_SECOND_NODE));
    n2.place().set_up("eth0", &nets).unwrap();
    let mut entry = n2.entry();
    entry.addresses = nets.map(|net| net.addr()).into();
    n2.set_entry(entry);
    if is_known_by_ipv6 {
        over_ipv6::nodes(lab, [true; 2]);
    }
    lab.publish().unwrap();
    lead_by(lab, 0);
    places
}

fn net(link: usize, family: usize, last: &str) -> IpNet {
    let (network, length) = (LINKS[link][family], LENGTHS[family]);
    format!("{network}{last}/{length}").parse().unwrap()
}

/// Both nodes reach the other link by one of the routers.
fn lead_by(lab: &Lab, router: usize) {
    for (own, node) in lab.nodes().iter().enumerate() {
        let eth0 = node.place().index("eth0").unwrap();
        for family in [0, 1] {
            let via = net(own, family, ROUTERS[router]).addr();
            let there = net(1 - own, family, "0").trunc();
            let default = Route::default_of(Family::of(via));
            // The second node has no other router.
            let routes = match own {
                0 => vec![Route::to(there)],
                _ => vec![Route::to(there), default],
            };
            for route in routes {
                let change = route.via(via).dev(eth0).replace();
                node.netlink().unwrap().execute(change).unwrap();
            }
        }
    }
}

impl Routers<'_> {
    fn get_another_mac_address(&self, router: usize) {
        let place = &self.places[router];
        for (at, end) in ENDS.into_iter().enumerate() {
            let index = place.index(end).unwrap();
            let other = link::set_mac(index, [2, 0x1a, 0xb1, 9, router as u8, at as u8]);
            place.conn().unwrap().execute(other).unwrap();
        }
    }

    /// The router that there is goes, and routes lead by the next one.
    fn is_replaced_by(&self, next: usize) {
        let place = &self.places[next - 1];
        for end in ENDS {
            let index = place.index(end).unwrap();
            place
                .conn()
                .unwrap()
                .execute(link::set_down(index))
                .unwrap();
        }
        lead_by(&self.world.lab, next);
    }
}

/// Something happens while pods talk: the longest gap of datagrams, and of TCP. And what devices carried when that was over.
fn longest(world: &World, what: &str, act: impl FnOnce()) -> ([Duration; 2], [[u64; 2]; 2]) {
    let [one, two] = &world.pods;
    let paths: Vec<_> = [(one, two), (two, one)]
        .into_iter()
        .flat_map(|(from, to)| {
            [0, 1].map(|family| {
                let name = format!("{} to {}, {}", from.id(), to.id(), FAMILIES[family]);
                Path::new(&name, from.place(), to.place(), to.addresses()[family])
            })
        })
        .collect();
    let meter = Meter::start(&paths).unwrap();
    meter.watch(PHASE);
    meter.event(what).unwrap();
    act();
    meter.watch(PHASE);
    let carried = world.carried(|| meter.watch(PHASE / 4));
    let watched = meter.finish().unwrap();
    let longest = ["UDP", "TCP"].map(|kind| {
        let gaps = paths
            .iter()
            .map(|path| watched.gap(&format!("{kind}, {}", path.name)));
        gaps.max().unwrap()
    });
    println!("{what}: {longest:?}\n{}", watched.table().join("\n"));
    (longest, carried)
}

fn routers_change(is_known_by_ipv6: bool) {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    let places = two_links(&lab, is_known_by_ipv6);
    let world = World::start(lab, [&[], &[]]);
    let routers = Routers {
        world: &world,
        places,
    };
    let all_go_direct = || {
        for node in world.lab.nodes() {
            eventually("the way to be past the stack", || goes_direct(node));
        }
        for counts in world.counts_of(|| exchange(&world)) {
            let is_past = is_both_ways(counts.direct) && counts.kernel == NOTHING;
            assert!(is_past, "{counts:?}");
        }
    };
    let during = |what: &str, most: Duration, act: &dyn Fn()| {
        let (gaps, carried) = longest(&world, what, act);
        let is_short = gaps[0] < most && gaps[1] < 2 * most + TCP_WAITS;
        assert!(is_short, "{what}: {gaps:?}");
        carried
    };
    all_go_direct();
    let act = || routers.get_another_mac_address(0);
    let carried = during("the router has another MAC address", AT_ONCE, &act);
    assert_eq!(carried, [[0, 0]; 2]);
    let act = || routers.is_replaced_by(1);
    let carried = during("another router takes over", FOLLOWED, &act);
    assert_eq!(carried, [[0, 0]; 2]);
    all_go_direct();

    let kill = |node: &Node| node.kill_agent().unwrap();
    world.lab.nodes().iter().for_each(kill);
    // Neighbours are the kernel's, also for what goes past its stack.
    let act = || routers.get_another_mac_address(1);
    let carried = during("its MAC address changes without agents", AT_ONCE, &act);
    assert_eq!(carried, [[0, 0]; 2]);
    // Programs see by themselves that the way is another, and leave it to the kernel.
    let act = || routers.is_replaced_by(2);
    let carried = during("a third one takes over without them", UNTIL_ASKED, &act);
    assert!(carried.iter().all(|[_, sent]| *sent > 0), "{carried:?}");
    for node in world.lab.nodes() {
        start(node, &[]);
    }
    for node in world.lab.nodes() {
        node.wait_ready().unwrap();
    }
    all_go_direct();
}

#[test]
fn routers_between_nodes_change_under_load() {
    routers_change(false);
}

#[test]
fn routers_between_nodes_that_are_known_by_ipv6_change_under_load() {
    routers_change(true);
}
