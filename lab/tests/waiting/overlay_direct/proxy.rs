//! A pod that sends on, by the link that they came by, the super-packets that it gets past the stack: to pods of its own node and of
//! another one, out of the cluster, and through a tunnel of its own. The wire to its node carries bytes, so these are made there (GRO).

use super::{
    again::hand_on,
    native::{NATIVE, say},
    *,
};
use sinabro_lab::{
    lab::UNDERLAY_MTU,
    traffic::{
        packet,
        tally::{Kind, Tally},
    },
    wire::Wire,
};
use std::net::IpAddr;

/// The ends of a tunnel between the proxy and the third node's pod, IPv4 and IPv6.
pub const VPN: [[&str; 2]; 2] = [["10.98.0.2", "10.98.0.3"], ["fd00:98::2", "fd00:98::3"]];
const BYTES: usize = 16 << 20;
const ETH: usize = 14;

struct Proxied {
    world: World<3>,
    /// To the proxy's node.
    wire: Wire,
    near: Pod,
}

/// To whom the proxy hands on what it gets at one of its ports.
struct Target<'a> {
    what: &'static str,
    place: &'a Place,
    addresses: [IpAddr; 2],
}

impl Proxied {
    fn new(prepare: impl Fn(&Lab), flags: &[&str]) -> Self {
        let world = World::on(prepare, [flags; 3]);
        let wire = Wire::to(&world.lab, 2).unwrap();
        let n2 = world.lab.node(2);
        let near = n2.add_pod("near").unwrap();
        // Knows no connection whose beginning it has not seen. The table counts as one of Services, whose rules have nothing go by the stack.
        let firewall = "table inet cni_hostport { chain forward {
            type filter hook forward priority 0; ct state invalid drop; }; }";
        n2.command(&["nft", firewall]).unwrap();
        let strictly = || {
            Ok(sysctl::write(
                &["net", "netfilter", "nf_conntrack_tcp_loose"],
                "0",
            )?)
        };
        n2.place().run(strictly).unwrap();
        let proxied = Self { world, wire, near };
        make_vpn([proxied.proxy(), proxied.far()]);
        let targets = proxied.targets();
        let targets = targets.iter().zip(PORT..);
        let targets = targets.flat_map(|(target, port)| target.addresses.map(|to| (port, to)));
        hand_on(proxied.proxy().place(), targets, "masquerade");
        proxied
    }

    fn proxy(&self) -> &Pod {
        &self.world.pods[1]
    }

    fn far(&self) -> &Pod {
        &self.world.pods[2]
    }

    fn targets(&self) -> [Target<'_>; 4] {
        let outside = self.world.lab.outside_addresses().unwrap();
        let vpn = VPN.map(|[_, far]| far.parse().unwrap());
        [
            (
                "a pod of its node",
                self.near.place(),
                self.near.addresses(),
            ),
            (
                "a pod of another node",
                self.far().place(),
                self.far().addresses(),
            ),
            ("the outside", self.world.lab.outside().place(), outside),
            ("through its tunnel", self.far().place(), vpn),
        ]
        .map(|(what, place, addresses)| Target {
            what,
            place,
            addresses,
        })
    }

    /// All that it hands on arrives as it was sent, and nothing has to be sent twice.
    fn hands_on(&self) {
        let one = &self.world.pods[0];
        let proxy = self.proxy().place();
        let eth0 = packet::interface(proxy, "eth0").unwrap();
        let damaged = || -> u64 {
            let places = self.targets().map(|target| target.place.clone());
            let places = places.iter().chain([one.place(), proxy]);
            places.map(|place| snmp::damaged(place).unwrap()).sum()
        };
        for (target, port) in self.targets().iter().zip(PORT..) {
            for (to, of_proxy) in target.addresses.into_iter().zip(self.proxy().addresses()) {
                let name = format!("{}, {to}", target.what);
                let path = Path::new(&name, one.place(), target.place, to);
                let path = path.through(SocketAddr::new(of_proxy, port), port);
                let (before, large) = (damaged(), Kind::LargerThan(UNDERLAY_MTU as usize));
                let large = Tally::of_incoming(proxy, eth0, large).unwrap();
                self.wire.largest();
                let stream = Stream::open(&path).unwrap();
                stream.carry(BYTES, 128 << 10).unwrap();
                let (large, largest) = (large.count().unwrap(), self.wire.largest());
                println!(
                    "{name}: {large} super-packets, {largest}, {:?}",
                    stream.said().unwrap()
                );
                stream.must_have_lost_nothing().unwrap();
                assert!(large > 100, "{name}: {large} super-packets");
                assert!(largest <= UNDERLAY_MTU as usize + ETH, "{name}: {largest}");
                assert_eq!(damaged(), before, "{name}");
            }
        }
    }
}

/// A tunnel of two pods' own.
pub fn make_vpn(ends: [&Pod; 2]) {
    for (at, pod) in ends.into_iter().enumerate() {
        let (local, remote) = (pod.v4(), ends[1 - at].v4());
        let link = format!(
            "ip link add vpn mtu 1300 type vxlan id 5 local {local} remote {remote} dstport 4789"
        );
        let place = pod.place();
        place.command(&link.split(' ').collect::<Vec<_>>()).unwrap();
        let nets = VPN.map(|ends| {
            let length = if ends[at].contains(':') { 64 } else { 24 };
            format!("{}/{length}", ends[at]).parse().unwrap()
        });
        place.set_up("vpn", &nets).unwrap();
    }
}

#[test]
fn a_pod_hands_on_what_comes_in_tunnels() {
    Proxied::new(|_| {}, &[]).hands_on();
}

#[test]
fn a_pod_hands_on_what_comes_in_tunnels_over_ipv6() {
    Proxied::new(|lab| over_ipv6::nodes(lab, [true; 3]), &[]).hands_on();
}

#[test]
fn a_pod_hands_on_what_comes_without_a_tunnel() {
    Proxied::new(|lab| say(lab, [true; 3]), &[NATIVE]).hands_on();
}
