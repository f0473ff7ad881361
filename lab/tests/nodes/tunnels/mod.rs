//! Nobody but nodes speaks in tunnels, by whatever way a packet reaches the tunnel port.

mod scene;

use scene::{
    Attack::{Bare, Tunnel},
    Way::{self, Device, Native, Tunnels, TunnelsOverIpv6},
    World,
};
use sinabro_common::{abi::drop::DropReason, names};
use sinabro_lab::{
    Lifetime, Namespace, Node,
    checks::{
        spoof::{await_drops, drops},
        tunnel::{Ear, FORGED, send},
    },
    traffic::packet,
};
use sinabro_netlink::{Conn, addr::Addr, link, veth::Veth};
use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
};

fn nft(node: &Node, rules: &str) {
    let mut nft = Command::new("nft");
    nft.arg(format!("table ip lab {{\n{rules}\n}}"));
    let status = node.namespace().spawn(nft).unwrap().wait().unwrap();
    assert!(status.success());
}

fn tunnel_port(node: &Node) -> SocketAddr {
    SocketAddr::new(node.addresses()[0], names::VXLAN_PORT)
}

fn every_way(way: Way) {
    use DropReason::TunnelSource;
    use DropReason::{EncapProhibited, PodSource, SourceAddr, TunnelFragment, TunnelInner};
    let world = World::new(way);
    let (n1, n2) = (world.node(1), world.node(2));
    let (to_n1, to_n2) = (tunnel_port(n1), tunnel_port(n2));
    assert_eq!(to_n2.is_ipv6(), way == TunnelsOverIpv6);
    let outside = world.lab().outside().place();
    world.lab().route_pods_from_outside().unwrap();
    let router = packet::interface(world.lab().router().place(), "out0").unwrap();
    let (whole, in_parts) = (&[][..], &[0; 3000][..]);
    for victim in world.victims() {
        let stopped = |attack, more, counted| world.stopped(victim, &attack, more, counted);
        // A pod: to the other node, to its own, in fragments.
        let (remote, local) = (world.pod(1, 1).place(), world.pod(2, 2).place());
        let prohibited = |node| (node, EncapProhibited);
        stopped(Tunnel(remote, to_n2), whole, prohibited(n1));
        stopped(Tunnel(remote, to_n1), whole, prohibited(n1));
        stopped(Tunnel(local, to_n2), whole, prohibited(n2));
        stopped(Tunnel(remote, to_n2), in_parts, prohibited(n1));
        // The same with another's address and without a tunnel.
        stopped(Bare(remote, names::HOST_MAC), whole, (n1, SourceAddr));
        stopped(Bare(local, names::HOST_MAC), whole, (n2, SourceAddr));
        // A host outside: from an address that is no node's, in fragments too.
        stopped(Tunnel(outside, to_n2), whole, (n2, TunnelSource));
        stopped(Tunnel(outside, to_n2), in_parts, (n2, TunnelSource));
        // With a pod's address: what is no other node's to send without a tunnel.
        let bare = Bare(outside, router.mac);
        match way == Native && !victim.is_local {
            false => stopped(bare, whole, (n2, PodSource)),
            // SECURITY.md says so, and what to do about it.
            true => world.taken(victim, &bare),
        }
        // A process of the node, that speaks for no pod of its node, or in fragments.
        match victim.is_local {
            true => stopped(Tunnel(n1.place(), to_n2), whole, (n2, TunnelInner)),
            false => stopped(Tunnel(n1.place(), to_n2), in_parts, (n2, TunnelFragment)),
        }
    }
}

#[test]
fn every_way_over_ipv4() {
    every_way(Tunnels);
}

#[test]
fn every_way_over_ipv6() {
    every_way(TunnelsOverIpv6);
}

#[test]
fn every_way_where_the_sender_has_a_device() {
    every_way(Device);
}

#[test]
fn every_way_without_tunnels() {
    every_way(Native);
}

#[test]
fn a_translated_port_is_no_way_in() {
    // Translated by the first node's netfilter.
    let world = World::new(Device);
    let (n1, n2) = (world.node(1), world.node(2));
    let nat =
        |rules: &str| format!("chain pre {{ type nat hook prerouting priority dstnat\n{rules}\n}}");
    // As a Service does whose endpoint is a node's tunnel port: another's, its own.
    let (a, b) = (n1.addresses()[0], n2.addresses()[0]);
    let port = names::VXLAN_PORT;
    nft(
        n1,
        &nat(&format!(
            "ip daddr 10.96.0.77 udp dport 4000 dnat to {b}:{port}
             ip daddr 10.96.0.77 udp dport 4001 dnat to {a}:{port}
             ip daddr 10.96.0.77 udp dport 4002 meta mark set 0x4000 dnat to {b}:{port}"
        )),
    );
    nft(
        n1,
        "chain post { type nat hook postrouting priority srcnat\nmeta mark 0x4000 masquerade\n}",
    );
    // As a host port does.
    nft(n2, &nat(&format!("udp dport 4003 redirect to :{port}")));

    let (pod, outside) = (world.pod(1, 1).place(), world.lab().outside().place());
    let service: IpAddr = "10.96.0.77".parse().unwrap();
    for victim in world.victims_over_ipv4() {
        use DropReason::{EncapProhibited, TunnelUnchecked};
        let stopped = |from, to, more: &[u8], counted| {
            world.stopped(victim, &Tunnel(from, to), more, counted);
        };
        for (to, more) in [(4000, &[][..]), (4002, &[]), (4000, &[0; 3000])] {
            let to = SocketAddr::new(service, to);
            stopped(pod, to, more, (n1, EncapProhibited));
        }
        let host_port = SocketAddr::new(b, 4003);
        stopped(pod, host_port, &[], (n2, TunnelUnchecked));
        stopped(outside, host_port, &[], (n2, TunnelUnchecked));
        // The node itself is where this one ends: nothing of it is for a pod of n2.
        let before = drops(n1, TunnelUnchecked).unwrap();
        let ear = Ear::new(n1, world.pod(1, 2), true).unwrap();
        let payload = ear.forgery(victim.source, FORGED).unwrap();
        send(pod, SocketAddr::new(service, 4001), &payload).unwrap();
        ear.hears_only(world.pod(2, 1).place()).unwrap();
        await_drops(n1, TunnelUnchecked, before, 1).unwrap();
    }
}

#[test]
fn another_link_is_no_way_in() {
    let world = World::new(Tunnels);
    let node = world.node(2);
    let stranger = Namespace::new("stranger", Lifetime::Process).unwrap();
    let mut conn = node.netlink().unwrap();
    conn.create_veth(&Veth {
        name: "side",
        mac: [2, 0, 0, 0, 7, 1],
        mtu: 1500,
        peer_name: "eth0",
        peer_mac: [2, 0, 0, 0, 7, 2],
        peer_netns: Some(stranger.place().net()),
    })
    .unwrap();
    // It even has the address of the other node, over there.
    let theirs = world.node(1).addresses()[0];
    let add = |conn: &mut Conn, name: &str, net: &str| {
        let index = conn.link_by_name(name).unwrap().index;
        let address = Addr::new(index, net.parse().unwrap());
        conn.execute_all([link::set_up(index), address.add()])
            .unwrap();
    };
    add(&mut conn, "side", "198.18.0.1/24");
    let mut beyond = Conn::in_netns(stranger.place().net()).unwrap();
    add(&mut beyond, "eth0", "198.18.0.2/24");
    let are_stopped = || {
        for victim in world.victims_over_ipv4() {
            let to = SocketAddr::new("198.18.0.1".parse().unwrap(), names::VXLAN_PORT);
            let counted = (node, DropReason::TunnelUnchecked);
            world.stopped(victim, &Tunnel(stranger.place(), to), &[], counted);
        }
    };
    are_stopped();
    add(&mut beyond, "eth0", &format!("{theirs}/32"));
    are_stopped();
}
