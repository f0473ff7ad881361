//! What goes to another node without a tunnel is as large as the uplink carries, and nobody sends more than his way does.

use super::{
    across::{OUTSIDE_AT, publish},
    native::{NATIVE, both, goes_native, in_tunnels, know_each_other, world},
    *,
};
use sinabro_lab::{
    lab::UNDERLAY_MTU,
    traffic::{
        any, packet, readable,
        tally::{Kind, Tally},
    },
};
use std::{net::UdpSocket, time::Instant};

pub const OF_UPLINK: usize = UNDERLAY_MTU as usize;
pub const OF_TUNNELS: usize = OF_UPLINK - OUTSIDE;
/// TCP's timestamps (RFC 7323), which every segment has.
const OPTIONS: usize = 12;
const BYTES: usize = 4 << 20;

/// The size of packets of a pod that leave its node.
pub fn mtu(node: &Node, pod: &Pod) -> usize {
    node.endpoint(pod).unwrap().unwrap().mtu.unwrap() as usize
}

/// Both ends send packets of these sizes, none of which is lost or has to be cut.
pub fn carries<const NODES: usize>(world: &World<NODES>, path: &Path, sizes: [usize; 2]) {
    let misfits = || {
        let nodes = world.lab.nodes().iter();
        let misfits = nodes.map(|node| snmp::misfits(node.place()).unwrap());
        misfits.collect::<Vec<_>>()
    };
    let (name, before) = (&path.name, misfits());
    let stream = Stream::open(path).unwrap();
    stream.carry(BYTES, 128 << 10).unwrap();
    let is_v4 = path.address.is_ipv4();
    let headers = if is_v4 { 40 } else { 60 } + OPTIONS;
    assert_eq!(
        stream.said().unwrap().map(|said| said.mss + headers),
        sizes,
        "{name}"
    );
    stream.must_have_lost_nothing().unwrap();
    assert_eq!(misfits(), before, "{name}: a packet did not fit");
}

#[test]
fn what_needs_no_tunnel_is_as_large_as_the_uplinks_packets() {
    let world = both(|_| {});
    let [one, two] = &world.pods;
    let (n1, n2) = (world.lab.node(1), world.lab.node(2));
    assert_eq!([mtu(n1, one), mtu(n2, two)], [OF_UPLINK; 2]);
    let status = shown(n1, "status");
    assert!(status.contains("1500, local 65535"), "{status}");
    for (family, address) in two.addresses().into_iter().enumerate() {
        let far = Path::new("pod to pod", one.place(), two.place(), address);
        let sent = in_tunnels(&world, || carries(&world, &far, [OF_UPLINK; 2]));
        assert_eq!(sent, 0, "{address}");
        // By the node's stack, and back past the pod's.
        let of_node = Path::new("node to pod", n1.place(), two.place(), address);
        carries(&world, &of_node, [OF_TUNNELS; 2]);
        let own = n1.addresses()[family];
        let to_node = Path::new("pod to node", two.place(), n1.place(), own);
        carries(&world, &to_node, [OF_UPLINK; 2]);
    }
}

/// One way is in no tunnel and the other is in one.
#[test]
fn connections_are_as_large_as_both_of_their_ways_carry() {
    let world = both(|_| {});
    let [one, two] = &world.pods;
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    let to = format!("{}/32", n2.addresses()[0]);
    n1.command(&["ip", "route", "add", &to, "via", ROUTER])
        .unwrap();
    eventually("the router is noticed", || goes_direct(n1));
    assert!(goes_native(n2));
    for (from, to) in [(one, two), (two, one)] {
        for address in to.addresses() {
            let path = Path::new("one way in a tunnel", from.place(), to.place(), address);
            carries(&world, &path, [OF_TUNNELS; 2]);
        }
    }
    // Who does not agree on it beforehand is told.
    for address in two.addresses() {
        let full = OF_UPLINK - if address.is_ipv4() { 28 } else { 48 };
        eventually("the sender is told", || {
            udp::is_too_long(one.place(), address, full).is_ok()
        });
        udp::echo(one.place(), two.place(), address, full - OUTSIDE, true).unwrap();
    }
}

/// What the client is led to by the stack is no larger than what the stack may put into tunnels.
#[test]
fn a_client_outside_is_told_what_the_stack_of_its_node_carries() {
    let world = both(|_| {});
    let [_, two] = &world.pods;
    let (client, n1) = (world.lab.outside().place(), world.lab.node(1));
    publish(&world);
    know_each_other(&world);
    for (to, address) in OUTSIDE_AT.into_iter().zip(two.addresses()) {
        let to = to.parse().unwrap();
        world.lab.lead_from_outside(to, n1).unwrap();
        let path = Path::new("from outside", client, two.place(), address);
        let path = path.through(SocketAddr::new(to, PORT), PORT);
        let sent = in_tunnels(&world, || carries(&world, &path, [OF_TUNNELS, OF_UPLINK]));
        assert_eq!(sent, 0, "{to}");
    }
}

/// Before Linux 5.12 no program puts what is larger than its MTU into an interface, so the stack has it by the uplink.
/// Which kernel is one of these is tried: here the agent is told.
#[test]
fn what_an_old_kernel_refuses_the_device_comes_by_the_uplink() {
    let world = world(|_| {}, [&[NATIVE], &[NATIVE]]);
    let [one, two] = &world.pods;
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    n2.kill_agent().unwrap();
    let flags = [&FLAGS[..], &[NATIVE, KERNEL]].concat();
    n2.start_agent_refused("tunnels", &flags).unwrap();
    n2.wait_ready().unwrap();
    eventually("it is known", || goes_native(n1));
    n2.command(&[
        "sysctl",
        "-q",
        "-w",
        "net.ipv4.conf.eth0.rp_filter=0",
        "net.ipv4.conf.all.rp_filter=0",
    ])
    .unwrap();
    for address in two.addresses() {
        let server = two
            .place()
            .run(|| Ok(UdpSocket::bind((address, 0))?))
            .unwrap();
        let client = one
            .place()
            .run(|| Ok(UdpSocket::bind((any(address), 0))?))
            .unwrap();
        udp::never_cut(&client, address).unwrap();
        let full = OF_UPLINK - if address.is_ipv4() { 28 } else { 48 };
        let at = server.local_addr().unwrap();
        let device = packet::interface(n2.place(), names::VXLAN_LINK).unwrap();
        for (size, by_device) in [(full - OUTSIDE, 1), (full - OUTSIDE + 1, 0), (full, 0)] {
            let tally = Tally::start(n2.place(), device, Kind::ToUdpPort(at.port())).unwrap();
            client.send_to(&vec![7; size], at).unwrap();
            let deadline = Instant::now() + PATIENCE;
            assert!(readable(&server, deadline).unwrap(), "{at}: {size}");
            assert_eq!(server.recv(&mut [0; OF_UPLINK]).unwrap(), size);
            assert_eq!(tally.count().unwrap(), by_device, "{at}: {size}");
        }
    }
}
