//! Datagrams that pods send many of by one call (UDP_SEGMENT), and get many of by one (UDP_GRO), as QUIC's libraries do.

use super::{
    across::{self, CLUSTER_AT},
    again::{PORT, hand_on},
    native::{NATIVE, settled, shared},
    proxy::{VPN, make_vpn},
    *,
};
use sinabro_lab::{
    lab::UNDERLAY_MTU,
    traffic::{
        bursts::{self, ALL, Burst, End, Take},
        offload::Datagrams,
    },
    wire::Wire,
};
use std::net::IpAddr;

const ETH: usize = 14;

fn damaged(world: &World) -> u64 {
    let pods = world.pods.iter();
    pods.map(|pod| snmp::damaged(pod.place()).unwrap()).sum()
}

/// All exchanges between both pods, both ways: each datagram arrives once and whole, and none is damaged. The most that one end got
/// at once.
fn exchanges(world: &World, take: Take) -> usize {
    let [one, two] = &world.pods;
    let before = damaged(world);
    let exchange = |address| {
        let path = Path::new("between nodes", one.place(), two.place(), address);
        let seen = bursts::exchange(&path, &ALL, take).unwrap();
        seen.at_once.into_iter().max().unwrap()
    };
    let most = two.addresses().map(exchange);
    assert_eq!(damaged(world), before);
    most.into_iter().max().unwrap()
}

/// How many of the packets that a node has counted it has sent past the stack, in a tunnel or not, and by the device; and received.
fn of(counts: PathCounts) -> [[u64; 3]; 2] {
    let by = [counts.direct, counts.native, counts.kernel];
    [by.map(|by| by.sent), by.map(|by| by.received)]
}

/// Of two addresses, as packets and as datagrams.
const PACKETS: u64 = 2 * ALL.len() as u64;
/// What is one datagram, of which a kernel makes no super-packet.
const SINGLE: u64 = 2;

/// By which way packets are sent and received, by the flags of both nodes, where no link cuts them.
fn whole(flags: [&[&str]; 2]) -> [[[u64; 3]; 2]; 2] {
    let is = |flags: &[&str], flag| flags.contains(&flag);
    let native = flags.iter().all(|flags| is(flags, NATIVE));
    flags.map(|own| {
        let sent = match () {
            () if native => [0, PACKETS, 0],
            () if is(own, KERNEL) => [0, 0, PACKETS],
            () => [PACKETS, 0, 0],
        };
        // In a tunnel they are left to the device, since the receiver's socket is to cut them.
        let received = match () {
            () if native => [0, PACKETS, 0],
            () if is(own, KERNEL) => [0, 0, PACKETS],
            () => [SINGLE, 0, PACKETS - SINGLE],
        };
        [sent, received]
    })
}

const WAYS: [[&[&str]; 2]; 5] = [
    [&[], &[]],
    [&[KERNEL], &[KERNEL]],
    [&[], &[KERNEL]],
    [&[KERNEL], &[]],
    [&[NATIVE], &[NATIVE]],
];

#[test]
fn bursts_arrive_by_every_way() {
    for flags in WAYS {
        let world = shared(flags);
        for take in Take::BOTH {
            let mut most = 0;
            let counts = world.counts_of(|| most = exchanges(&world, take));
            assert_eq!(counts.map(of), whole(flags), "{flags:?}, {take:?}");
            let whole = if take == Take::Gathered { 64 } else { 1 };
            assert_eq!(most, whole, "{flags:?}, {take:?}");
        }
    }
}

/// Over a wire that carries bytes: they are cut before it, with checksums of their own, and put together behind it or not.
#[test]
fn bursts_arrive_over_a_wire() {
    for flags in WAYS {
        let world = settled(flags);
        let wire = Wire::to(&world.lab, 2).unwrap();
        let ways = Datagrams::ALL.map(|how| Take::BOTH.map(|take| (how, take)));
        for (how, take) in ways.into_iter().flatten() {
            let n2 = world.lab.node(2).place();
            offload::gather_datagrams(n2, "eth0", how).unwrap();
            let mut most = 0;
            let counts = world.counts_of(|| most = exchanges(&world, take));
            let joined = (how, take) == (Datagrams::Joined, Take::Gathered);
            assert_eq!(most > 1, joined, "{flags:?}, {how:?}: {most}");
            assert_eq!(wire.largest(), UNDERLAY_MTU as usize + ETH, "{flags:?}");
            for ([sent, received], [by, _]) in counts.map(of).into_iter().zip(whole(flags)) {
                assert_eq!(sent, by, "{flags:?}, {how:?}, {take:?}");
                assert!(received.iter().sum::<u64>() >= PACKETS, "{received:?}");
            }
        }
    }
}

/// As QUIC's libraries find out how large packets may be: each is sent as large as the link, whatever the kernel has heard of the way
/// (IP_PMTUDISC_PROBE). What single ones have shown many of one call may rely on.
#[test]
fn bursts_are_as_large_without_a_tunnel_as_what_was_probed() {
    let world = shared([&[NATIVE], &[NATIVE]]);
    let [one, two] = &world.pods;
    for address in two.addresses() {
        let ends = [one, two].map(|pod| {
            let of_pod = pod.addresses()[usize::from(address.is_ipv6())];
            let end = End::open(pod.place(), SocketAddr::new(of_pod, 0), Take::Single).unwrap();
            udp::probes(end.socket(), address).unwrap();
            end
        });
        let addresses = [0, 1].map(|at| ends[at].socket().local_addr().unwrap());
        for (at, end) in ends.iter().enumerate() {
            end.socket().connect(addresses[1 - at]).unwrap();
        }
        let [client, server] = &ends;
        let size = client.full().unwrap();
        for (first, datagrams) in [(0, 1), (100, 20), (200, 40)] {
            let burst = Burst {
                size: Some(size),
                datagrams,
                last: 0,
            };
            for [from, to] in [[client, server], [server, client]] {
                let sent = from.send(first, burst).unwrap();
                to.take(first, &sent).unwrap();
            }
        }
    }
}

/// How long the segments are that are cut from a pod's own tunnel depends on what is in it: of what is UDP the stack hands on that, and
/// nothing else.
#[test]
fn of_super_packets_the_stack_sees_those_in_a_pods_own_tunnel_alone() {
    let world = settled([&[NATIVE], &[NATIVE]]);
    let [one, two] = &world.pods;
    let forwarded = || snmp::forwarded(world.lab.node(1).place()).unwrap();
    let before = forwarded();
    exchanges(&world, Take::Gathered);
    assert_eq!(forwarded(), before);
    make_vpn([one, two]);
    for [_, far] in VPN {
        let before = forwarded();
        let path = Path::new(
            "in a tunnel",
            one.place(),
            two.place(),
            far.parse().unwrap(),
        );
        let stream = Stream::open(&path).unwrap();
        stream.carry(16 << 20, 128 << 10).unwrap();
        assert!(forwarded() > before + 100, "{far}");
    }
}

/// What a tunnel between two nodes has room for, of either family; between pods of one node there is more.
fn that_fit() -> [Burst; ALL.len()] {
    const FITS: usize = UNDERLAY_MTU as usize - OUTSIDE - 48;
    ALL.map(|burst| Burst {
        size: burst.size.or(Some(FITS)),
        ..burst
    })
}

/// To a Service whose endpoint is another node's pod: from a pod, and from a client outside that comes by the first node.
#[test]
fn bursts_to_a_service_arrive() {
    for flags in [&[][..], &[KERNEL], &[NATIVE]] {
        let world = settled([flags; 2]);
        across::publish(&world);
        let [one, two] = &world.pods;
        let from_pod = CLUSTER_AT.into_iter().zip(two.addresses());
        let from_pod = from_pod.map(|(at, address)| {
            let path = Path::new(&format!("by {at}"), one.place(), two.place(), address);
            path.through(SocketAddr::new(at.parse().unwrap(), PORT), PORT)
        });
        let before = damaged(&world);
        for path in from_pod.chain(across::paths(&world)) {
            for take in Take::BOTH {
                let seen = bursts::exchange(&path, &that_fit(), take);
                seen.unwrap_or_else(|error| panic!("{flags:?}: {error:#}"));
            }
        }
        assert_eq!(damaged(&world), before);
    }
}

/// A pod that sends on what it gets, as it got it: to a pod of its node, to one of another node, and to the outside.
#[test]
fn bursts_are_handed_on() {
    for (wired, flags) in [
        (false, &[][..]),
        (true, &[]),
        (false, &[NATIVE]),
        (true, &[NATIVE]),
    ] {
        let world = World::<3>::on(
            |lab| {
                if flags == [NATIVE] {
                    native::say(lab, [true; 3]);
                }
            },
            [flags; 3],
        );
        let _wire = wired.then(|| Wire::to(&world.lab, 2).unwrap());
        let near = world.lab.node(2).add_pod("near").unwrap();
        let [one, proxy, far] = &world.pods;
        let outside = world.lab.outside();
        let outside_addresses = world.lab.outside_addresses().unwrap();
        let targets: [(&str, &Place, [IpAddr; 2]); 3] = [
            ("a pod of its node", near.place(), near.addresses()),
            ("a pod of another node", far.place(), far.addresses()),
            ("the outside", outside.place(), outside_addresses),
        ];
        let ports = targets.iter().zip(PORT..);
        let ports = ports.flat_map(|((_, _, addresses), port)| addresses.map(|to| (port, to)));
        hand_on(proxy.place(), ports, "masquerade");
        for is_cut in [false, true] {
            if is_cut {
                offload::cut_before(proxy.place(), "eth0").unwrap();
            }
            for ((what, place, addresses), port) in targets.iter().zip(PORT..) {
                for (to, of_proxy) in addresses.iter().zip(proxy.addresses()) {
                    let what = format!("{what}, {to}, {flags:?}, wired: {wired}, cut: {is_cut}");
                    let path = Path::new(&what, one.place(), place, *to);
                    let path = path.through(SocketAddr::new(of_proxy, port), port);
                    for take in Take::BOTH {
                        bursts::exchange(&path, &that_fit(), take).unwrap();
                        let damaged = [one.place(), proxy.place(), place];
                        let damaged = damaged.map(|place| snmp::damaged(place).unwrap());
                        assert_eq!(damaged, [0; 3], "{what}");
                    }
                }
            }
        }
    }
}
