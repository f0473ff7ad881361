//! Packets between pods of two nodes go past the kernel's routes and VXLAN device where that is possible, and by them where not.
#![allow(clippy::unwrap_used)]

mod across;
mod auto;
mod congestion;
mod fabric;
mod mixed;
mod moves;
mod native;
mod native_mtu;
mod order;
mod over_ipv6;
mod sums;
mod three;

use ipnet::IpNet;
use sinabro_common::{
    api::{NodeReport, PathCounts, PathPackets, PeerPath, PeerProbe, Request as Ask, Response},
    names,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    amount::amount,
    confinement,
    traffic::{
        icmp, offload,
        path::Path,
        snmp,
        stream::Stream,
        tcp, udp,
        unbroken::{Pace, Traffic},
    },
    wait::eventually,
};
use sinabro_netlink::{Request, route::Route, sysctl};
use std::{array::from_fn, fs, net::SocketAddr, process::Command, time::Duration};

const PATIENCE: Duration = Duration::from_secs(2);
const FLAGS: [&str; 2] = [
    "--service-proxy=on",
    "--services-file=/run/lab/services.yaml",
];
const AUTO: &str = "--routing=auto";
const ASKS: &str = "--peer-probe=true";
const ASKS_NOBODY: &str = "--peer-probe=false";

/// Nodes with a pod each.
struct World<const NODES: usize = 2> {
    lab: Lab,
    pods: [Pod; NODES],
}

impl<const NODES: usize> World<NODES> {
    fn new(flags: [&[&str]; NODES]) -> Self {
        Self::on(|_| {}, flags)
    }

    /// On nodes that are made ready before their agents come.
    fn on(prepare: impl Fn(&Lab), flags: [&[&str]; NODES]) -> Self {
        let lab = Lab::new(Binaries::find().unwrap(), NODES, Lifetime::Process).unwrap();
        prepare(&lab);
        for (node, flags) in lab.nodes().iter().zip(flags) {
            let prepared = node.ctl(&["prepare"]).unwrap();
            assert!(prepared.status.success(), "{prepared:?}");
            node.write_services("{kind: List, items: []}\n").unwrap();
            start(node, flags);
        }
        for node in lab.nodes() {
            node.wait_ready().unwrap();
        }
        let pods = from_fn(|at| {
            let number = at + 1;
            lab.node(number).add_pod(&format!("pod{number}")).unwrap()
        });
        Self { lab, pods }
    }
}

impl World {
    /// What each node's VXLAN device has received and sent.
    fn by_device(&self) -> [[u64; 2]; 2] {
        [1, 2].map(|number| counts(self.lab.node(number)))
    }

    /// What each node has counted of the other. Its agent may ask the other something at any time, which counts.
    fn counted(&self) -> [PathCounts; 2] {
        [1, 2].map(|number| {
            let node = self.lab.node(number);
            let [before, packets, after] = [
                in_metrics(node),
                other(node).packets.unwrap(),
                in_metrics(node),
            ];
            for ((before, packets), after) in each(before).zip(each(packets)).zip(each(after)) {
                assert!(
                    (before..=after).contains(&packets),
                    "{before} {packets} {after}"
                );
            }
            packets
        })
    }

    /// What it counted of something.
    fn counts_of(&self, what: impl FnOnce()) -> [PathCounts; 2] {
        let before = self.counted();
        what();
        let after = self.counted();
        let less = |a: PathPackets, b: PathPackets| PathPackets {
            sent: a.sent - b.sent,
            received: a.received - b.received,
        };
        [0, 1].map(|node| PathCounts {
            direct: less(after[node].direct, before[node].direct),
            native: less(after[node].native, before[node].native),
            kernel: less(after[node].kernel, before[node].kernel),
        })
    }

    /// What its devices carried of something.
    fn carried(&self, what: impl FnOnce()) -> [[u64; 2]; 2] {
        let before = self.by_device();
        what();
        let after = self.by_device();
        [0, 1].map(|node| [0, 1].map(|way| after[node][way] - before[node][way]))
    }
}

fn start(node: &Node, flags: &[&str]) {
    // Probes go by the device, and say who answers by another way.
    let asks = flags.iter().any(|flag| [AUTO, ASKS].contains(flag));
    let probe: &[&str] = if asks { &[] } else { &[ASKS_NOBODY] };
    let flags = [&FLAGS, flags, probe].concat();
    node.start_confined_agent(&flags, &confinement::AGENT)
        .unwrap();
}

/// What a node's metrics say of all others.
fn in_metrics(node: &Node) -> PathCounts {
    match node.ask(Ask::Metrics).unwrap() {
        Response::Metrics(metrics) => metrics.overlay_packets.unwrap(),
        answer => panic!("{answer:?}"),
    }
}

fn each(counts: PathCounts) -> impl Iterator<Item = u64> {
    let PathCounts {
        direct,
        native,
        kernel,
    } = counts;
    [direct, native, kernel]
        .into_iter()
        .flat_map(|PathPackets { sent, received }| [sent, received])
}

/// What a node says of the other one.
fn other(node: &Node) -> NodeReport {
    said_of(node, |said| !said.local)
}

/// What a node says of one that is asked for.
fn said_of(node: &Node, is_it: impl Fn(&NodeReport) -> bool) -> NodeReport {
    let nodes = match node.ask(Ask::Nodes { after: None }).unwrap() {
        Response::Nodes(nodes) => nodes,
        answer => panic!("{answer:?}"),
    };
    nodes.into_iter().find(is_it).unwrap()
}

/// Why a node reaches the other one by the stack.
fn why(node: &Node) -> String {
    match other(node).path {
        Some(PeerPath::Kernel { why }) => why,
        path => panic!("{path:?}"),
    }
}

fn goes_direct(node: &Node) -> bool {
    other(node).path == Some(PeerPath::Direct { why: None })
}

const NOTHING: PathPackets = PathPackets {
    sent: 0,
    received: 0,
};

fn is_both_ways(packets: PathPackets) -> bool {
    packets.sent > 0 && packets.received > 0
}

fn shown(node: &Node, command: &str) -> String {
    String::from_utf8(node.ctl(&[command]).unwrap().stdout).unwrap()
}

fn counts(node: &Node) -> [u64; 2] {
    let read = || Ok(fs::read_to_string("/proc/thread-self/net/dev")?);
    let text = node.place().run(read).unwrap();
    let line = text.lines().find_map(|line| {
        let (name, counts) = line.split_once(':')?;
        (name.trim() == names::VXLAN_LINK).then_some(counts)
    });
    let counts: Vec<u64> = line
        .unwrap()
        .split_whitespace()
        .map(|count| count.parse().unwrap())
        .collect();
    // Behind eight columns of what was received, beginning with bytes, are those of what was sent.
    [counts[1], counts[9]]
}

fn exchange(world: &World) {
    let [one, two] = &world.pods;
    exchange_between(one, two);
}

fn exchange_between(one: &Pod, two: &Pod) {
    for (from, to) in [(one, two), (two, one)] {
        for address in to.addresses() {
            icmp::ping(from.place(), address, PATIENCE).unwrap();
            udp::echo(from.place(), to.place(), address, 1000, true).unwrap();
            let path = Path::new("stream", from.place(), to.place(), address);
            Stream::open(&path)
                .unwrap()
                .carry(16 << 20, 128 << 10)
                .unwrap();
        }
    }
}

#[test]
fn neither_device_sees_what_goes_past() {
    let world = World::new([&[], &[]]);
    let counts = world.counts_of(|| {
        assert_eq!(world.carried(|| exchange(&world)), [[0, 0]; 2]);
    });
    for (node, counts) in world.lab.nodes().iter().zip(counts) {
        assert!(goes_direct(node), "{:?}", other(node));
        assert!(is_both_ways(counts.direct), "{counts:?}");
        assert_eq!(counts.kernel, NOTHING);
        let status = shown(node, "status");
        let mode = status
            .lines()
            .find(|line| line.starts_with("Mode overlay:"));
        assert!(mode.unwrap().ends_with(" direct"), "{status}");
    }
}

#[test]
fn nodes_of_both_kinds_reach_each_other() {
    let world = World::new([&[], &["--overlay=kernel"]]);
    let [one, two] = world.counts_of(|| {
        let [[received, sent], [of_kernel, by_kernel]] = world.carried(|| exchange(&world));
        assert_eq!([received, sent], [0, 0]);
        assert!(of_kernel > 0 && by_kernel > 0, "{of_kernel} {by_kernel}");
    });
    assert!(goes_direct(world.lab.node(1)));
    assert!(is_both_ways(one.direct) && one.kernel == NOTHING, "{one:?}");
    assert_eq!(why(world.lab.node(2)), "the setting overlay is kernel");
    assert!(is_both_ways(two.kernel) && two.direct == NOTHING, "{two:?}");
}

/// What is to be encrypted passes IPsec's policies in the stack alone. This one lets all pass.
#[test]
fn a_node_with_policies_of_ipsec_sends_by_the_stack() {
    let world = World::on(
        |lab| {
            let policy = "xfrm policy add dst 198.51.100.0/24 dir out action allow";
            let policy: Vec<&str> = ["ip"].into_iter().chain(policy.split(' ')).collect();
            lab.node(1).command(&policy).unwrap();
        },
        [&[], &[]],
    );
    let [one, two] = world.counts_of(|| {
        let [[received, sent], [there, back]] = world.carried(|| exchange(&world));
        assert!(received > 0 && sent > 0, "{received} {sent}");
        assert_eq!([there, back], [0, 0]);
    });
    let n1 = world.lab.node(1);
    assert!(why(n1).starts_with("IPsec has policies"), "{}", why(n1));
    let status = shown(n1, "status");
    assert!(status.contains("kernel: IPsec has policies"), "{status}");
    assert!(is_both_ways(one.kernel) && one.direct == NOTHING, "{one:?}");
    assert!(goes_direct(world.lab.node(2)));
    assert!(is_both_ways(two.direct) && two.kernel == NOTHING, "{two:?}");
}

#[test]
fn services_of_others_keep_packets_in_the_stack() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.start_agent().unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
        eventually("the other node is known", || other(node).path.is_some());
        let why = why(node);
        assert!(why.starts_with("Services are not ours"), "{why}");
    }
}

/// Whether it is one is tried (`agent/tests/datapath/tunnel_hooks`): here the agent is told.
#[test]
fn a_kernel_without_tunnels_for_programs_is_named() {
    let world = World::new([&[], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    n1.kill_agent().unwrap();
    n1.start_agent_refused("tunnels", &FLAGS).unwrap();
    n1.wait_ready().unwrap();
    let old = "this node's Linux is older than 5.13";
    assert_eq!(why(n1), old);
    let status = shown(n1, "status");
    assert!(status.contains(&format!("kernel: {old}\n")), "{status}");
    assert!(goes_direct(n2), "{:?}", other(n2));
    // What the other one sends so is taken so.
    let [received, _] = world
        .counts_of(|| exchange(&world))
        .map(|counts| counts.direct.received);
    assert!(received > 0);
    n1.kill_agent().unwrap();
    start(n1, &[]);
    n1.wait_ready().unwrap();
    eventually("the way to be direct", || goes_direct(n1));
}

/// A route of one node to the other changes, and an agent goes and comes.
#[test]
fn what_is_said_of_a_way_follows_it() {
    let world = World::new([&[], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    let to = n2.addresses()[0];
    let change = |what: &str| {
        let route = format!("ip route {what}");
        n1.command(&route.split(' ').collect::<Vec<_>>()).unwrap();
    };
    let hops = format!("nexthop via {ROUTER} nexthop via 172.30.0.13");
    change(&format!("add {to}/32 {hops}"));
    eventually("a second next hop", || !goes_direct(n1));
    assert!(why(n1).contains("several next hops"), "{}", why(n1));
    let nodes = shown(n1, "nodes");
    assert!(nodes.contains("  kernel: the route to it"), "{nodes}");
    assert!(shown(n1, "status").contains("direct but to 1 node\n"));
    assert!(goes_direct(n2));
    change(&format!("del {to}/32"));
    eventually("one next hop", || goes_direct(n1));

    change(&format!("add unreachable {to}/32"));
    eventually("a route to nowhere", || !goes_direct(n1));
    assert!(why(n1).contains("EHOSTUNREACH"), "{}", why(n1));
    change(&format!("del unreachable {to}/32"));
    eventually("a way", || goes_direct(n1));

    // Tunnels begin at this node's address, which rules may send another way than others.
    change(&format!("add {to}/32 table 77 {hops}"));
    let from = n1.addresses()[0];
    let rule = |what: &str| {
        let rule = format!("ip rule {what} from {from} lookup 77");
        n1.command(&rule.split(' ').collect::<Vec<_>>()).unwrap();
    };
    rule("add");
    eventually("a rule", || !goes_direct(n1));
    assert!(why(n1).contains("several next hops"), "{}", why(n1));
    rule("del");
    eventually("no rule", || goes_direct(n1));

    exchange(&world);
    let before = other(n1).packets.unwrap();
    assert!(is_both_ways(before.direct), "{before:?}");
    n1.kill_agent().unwrap();
    start(n1, &["--overlay=kernel"]);
    n1.wait_ready().unwrap();
    let after = other(n1).packets.unwrap();
    assert_eq!(after.direct, before.direct);
    exchange(&world);
    let after = other(n1).packets.unwrap();
    assert_eq!(after.direct, before.direct);
    assert!(after.kernel.sent > before.kernel.sent, "{after:?}");
}

#[test]
fn what_only_a_router_can_do_is_left_to_the_stack() {
    let world = World::new([&[], &[]]);
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

/// Of the underlay: a provider's, everybody's, and a data centre's.
const MTUS: [u32; 3] = [1400, 1500, 9000];
/// What stands before a packet between two nodes (RFC 7348 §5).
const OUTSIDE: usize = 50;
const OUTSIDE_IPV6: usize = 70;

/// Whatever each of two nodes sends by, all arrives, at every size of packets up to the largest.
#[test]
fn every_pair_of_ways_carries_all_of_every_size() {
    every_pair(&MTUS, OUTSIDE, |_| {});
}

fn every_pair(mtus: &[u32], outside: usize, prepare: impl Fn(&Lab)) {
    let ways: [&[&str]; 2] = [&[], &["--overlay=kernel"]];
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
    let world = World::new([&[], &[]]);
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

fn set_mtu(lab: &Lab, mtu: u32) {
    for node in lab.nodes() {
        let port = format!("to-{}", node.name());
        lab.router().place().set_mtu(&port, mtu).unwrap();
        node.place().set_mtu("eth0", mtu).unwrap();
    }
}

/// Bytes of a stream: some, or with SINABRO_THOROUGH as many as are promised.
fn stream_len() -> u64 {
    amount(8 << 20, 64 << 20).into()
}

/// Streams, and datagrams that fill a packet of a size, both ways.
fn large(world: &World, size: usize) {
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

/// Behind a pod, which hands on what comes for one of its ports: `[IPv4, IPv6]`.
const BEHIND: [&str; 2] = ["10.99.0.2", "fd00:99::2"];
const BEFORE: [&str; 2] = ["10.99.0.1", "fd00:99::1"];
const PORT: u16 = 8080;

/// A place behind a pod, by a link named `lan`.
fn behind(pod: &Pod) -> Place {
    let place = Place::fresh("behind").unwrap();
    let (near, far) = (("lan", [2, 0, 0, 0, 9, 1]), ("eth0", [2, 0, 0, 0, 9, 2]));
    pod.place().cable(near, 1450, &place, far).unwrap();
    for (end, link, addresses) in [(pod.place(), "lan", BEFORE), (&place, "eth0", BEHIND)] {
        let nets = addresses.map(|address| {
            let length = if address.contains(':') { 64 } else { 24 };
            format!("{address}/{length}").parse().unwrap()
        });
        end.set_up(link, &nets).unwrap();
    }
    let rules: String = BEHIND
        .iter()
        .zip(["ip", "ip6"])
        .map(|(to, family)| {
            let number = if family == "ip" { "ipv4" } else { "ipv6" };
            format!("meta nfproto {number} tcp dport {PORT} dnat {family} to {to}\n")
        })
        .collect();
    let table = format!(
        "table inet lab {{
            chain pre {{ type nat hook prerouting priority dstnat; {rules} }}
            chain post {{ type nat hook postrouting priority srcnat; oifname lan masquerade; }}
        }}"
    );
    let mut nft = Command::new("nft");
    pod.place().put(nft.arg(table));
    assert!(nft.status().unwrap().success());
    let forward = || {
        sysctl::write(&["net", "ipv4", "ip_forward"], "1")?;
        Ok(sysctl::write(
            &["net", "ipv6", "conf", "all", "forwarding"],
            "1",
        )?)
    };
    pod.place().run(forward).unwrap();
    place
}

#[test]
fn super_packets_leave_a_pod_again_as_they_came() {
    leave_again(&World::new([&[], &[]]), [false; 2]);
}

/// From the first node's pod to what is behind the second's. `by_devices`: whether their nodes' devices see it.
fn leave_again(world: &World, by_devices: [bool; 2]) {
    let [one, two] = &world.pods;
    let behind = behind(two);
    for is_cut in [false, true] {
        if is_cut {
            offload::cut_before(two.place(), "lan").unwrap();
        }
        for (address, of_behind) in two.addresses().into_iter().zip(BEHIND) {
            let name = format!("to what is behind {address}, cut: {is_cut}");
            let target = SocketAddr::new(address, PORT);
            let path = Path::new(&name, one.place(), &behind, of_behind.parse().unwrap());
            let path = path.through(target, PORT);
            let carried = world.carried(|| {
                let stream = Stream::open(&path).unwrap();
                stream.carry(16 << 20, 128 << 10).unwrap();
                println!("{name}: {:?}", stream.said().unwrap());
            });
            assert_eq!(carried.map(|both| both != [0, 0]), by_devices, "{name}");
        }
    }
}

/// The underlay's router, which hands on what is sent to it.
const ROUTER: &str = "172.30.0.1";
const ROUTER_IPV6: &str = "fd00:172:30::1";
const BEFORE_EVENTS: Duration = Duration::from_secs(5);
const PHASE: Duration = Duration::from_secs(2);

/// Pods of both nodes talk to each other, and have for a while.
fn talk(world: &World) -> Traffic {
    let [one, two] = &world.pods;
    let paths: Vec<_> = [(one, two), (two, one)]
        .iter()
        .flat_map(|(from, to)| {
            to.addresses().map(|address| {
                let name = format!("{} to {address}", from.id());
                Path::new(&name, from.place(), to.place(), address)
            })
        })
        .collect();
    watched(&paths)
}

fn watched(paths: &[Path]) -> Traffic {
    let pace = Pace {
        pause: Duration::from_millis(10),
        clients: 1,
    };
    let traffic = Traffic::start(paths, pace).unwrap();
    traffic.watch(BEFORE_EVENTS);
    traffic
}

/// Ways change and agents go while pods of both nodes talk: nothing is lost, and nothing stands still.
#[test]
fn ways_are_followed_under_load() {
    let world = World::new([&[], &[]]);
    let traffic = talk(&world);
    let handed_on = || snmp::forwarded(world.lab.router().place()).unwrap();
    let during = |what: &str, act: &dyn Fn()| {
        traffic.event(what).unwrap();
        act();
        traffic.watch(PHASE);
        let (by_router, by_device) = (handed_on(), world.by_device());
        traffic.watch(PHASE);
        traffic.must_flow(what).unwrap();
        let after = world.by_device();
        let devices = [0, 1].map(|node| after[node][1] > by_device[node][1]);
        (handed_on() > by_router, devices)
    };
    let n1 = world.lab.node(1);
    let far: IpNet = IpNet::from(world.lab.node(2).addresses()[0]);
    let by_router = Route::to(far).via(ROUTER.parse().unwrap());
    let change = |request: Request| n1.netlink().unwrap().execute(request).unwrap();

    let direct = [false, false];
    assert_eq!(during("nothing happened", &|| {}), (false, direct));
    let act = || change(by_router.add());
    assert_eq!(during("a router came between", &act), (true, direct));
    let act = || change(by_router.delete());
    assert_eq!(during("it went again", &act), (false, direct));
    let act = || n1.stop_agent().unwrap();
    assert_eq!(during("an agent was stopped", &act).1, [true, false]);
    let act = || {
        start(n1, &[]);
        n1.wait_ready().unwrap();
    };
    assert_eq!(during("it was started", &act), (false, direct));
    let act = || n1.kill_agent().unwrap();
    assert_eq!(during("it was killed", &act), (false, direct));
    // The programs see by themselves that the way is another.
    let act = || change(by_router.add());
    let seen = during("a router came between meanwhile", &act);
    assert_eq!(seen, (true, [true, false]));
    let act = || change(by_router.delete());
    assert_eq!(during("and went", &act), (false, direct));
    let act = || {
        start(n1, &["--overlay=kernel"]);
        n1.wait_ready().unwrap();
    };
    assert_eq!(during("it was told to leave it", &act).1, [true, false]);
    println!("{}", traffic.finish().unwrap());
}
