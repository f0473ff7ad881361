//! Tunnels: `pod_out`, `uplink_out`, `uplink_in` and both programs of the VXLAN device on single packets.

mod arriving;
mod beside_proxy;
mod counted;
mod direct;
mod flows;
mod leaving;
mod native;
mod origin;
mod own;

use crate::{
    kit::{self, Pod},
    packet::{self, ARP, Ip, SYN},
    run::{DROP, PASS, Programs, REDIRECT},
};
use sinabro_agent::datapath::{Datapath, DatapathConfig, Tunnels};
use sinabro_common::{
    abi::{
        config::{FLAG_STAMPED, FLAG_TUNNELS},
        drop::DropReason::{self, *},
    },
    names::{HOST_MAC, VXLAN_PORT, VXLAN_VNI, vxlan_mac},
};
use sinabro_lab::kernel;
use std::{collections::BTreeMap, net::IpAddr};

const FIRST: u16 = 0x2000;
const LATER: u16 = 0x00b9;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Three nodes, known by IPv4 or by IPv6, with pods of both families; this is the first.
struct World {
    datapath: Datapath,
    programs: Programs,
    a: Pod,
    b: Pod,
    underlay: [IpAddr; 3],
}

const UPLINK: &str = "uplink";
/// The other address of the second node.
const SECOND_OF_SECOND: &str = "198.51.100.2";

fn both(test: impl Fn(&World) + Sync) {
    with(&kit::config(), test);
}

fn with(config: &DatapathConfig, test: impl Fn(&World) + Sync) {
    for underlay in [
        ["192.0.2.1", "192.0.2.2", "192.0.2.3"],
        ["2001:db8:1::1", "2001:db8:1::2", "2001:db8:1::3"],
    ] {
        kit::fresh(|| {
            let datapath = kit::load_with(config);
            let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
            let world = World {
                programs: Programs::of(&datapath),
                datapath,
                a,
                b,
                underlay: underlay.map(ip),
            };
            world.know(3);
            make_uplink();
            kit::on_one_processor(|| test(&world));
        });
    }
}

/// Makes the uplink, on which the second node's addresses are.
fn make_uplink() {
    let here = kit::this_place();
    let (near, far) = ([2, 0, 0, 0, 9, 1], [2, 0, 0, 0, 9, 2]);
    here.cable((UPLINK, near), 1500, &here, ("far", far))
        .unwrap();
    here.set_up("far", &[]).unwrap();
    let nets = ["192.0.2.1/24", "2001:db8:1::1/64"].map(|net| net.parse().unwrap());
    here.set_up(UPLINK, &nets).unwrap();
}

impl World {
    /// The first `count` of the nodes are known.
    fn know(&self, count: usize) {
        self.tell(&self.datapath, count);
    }

    fn tell(&self, datapath: &Datapath, count: usize) {
        let mut nodes: BTreeMap<IpAddr, IpAddr> = BTreeMap::new();
        let mut ranges = BTreeMap::new();
        for (number, &tunnel) in (1..).zip(&self.underlay[..count]) {
            nodes.insert(tunnel, tunnel);
            for range in [format!("10.{number}.0.0/24"), format!("fd00:{number}::/64")] {
                ranges.insert(range.parse().unwrap(), tunnel);
            }
        }
        if count > 1 {
            nodes.insert(ip(SECOND_OF_SECOND), self.underlay[1]);
        }
        datapath
            .set_tunnels(&Tunnels {
                local: self.underlay[0],
                port: VXLAN_PORT,
                vni: VXLAN_VNI,
                gateways: &[ip("10.1.0.1"), ip("fd00:1::1")],
                nodes: &nodes,
                ranges: &ranges,
            })
            .unwrap();
    }

    fn run(&self, program: &str, from: u32, frame: &[u8]) -> (i32, Vec<u8>) {
        self.programs
            .run_from(program, self.a.ifindex, from, frame)
            .unwrap()
    }

    fn passes(&self, program: &str, frame: &[u8], what: &str) {
        let (action, out) = self.run(program, 0, frame);
        assert_eq!((action, &out[..]), (PASS, frame), "{program}: {what}");
    }

    fn dropped(&self, program: &str, frame: &[u8], reason: DropReason, what: &str) {
        self.dropped_from(program, 0, frame, reason, what);
    }

    fn dropped_from(&self, program: &str, from: u32, frame: &[u8], reason: DropReason, what: &str) {
        let before = kit::dropped(&self.datapath, reason);
        let (action, _) = self.run(program, from, frame);
        let drops = self.datapath.drops();
        assert_eq!(action, DROP, "{program}: {what}");
        let counted = kit::dropped(&self.datapath, reason) - before;
        assert_eq!(counted, 1, "{program}: {what}: {drops:?}");
    }

    /// A tunnel packet from the second node to this one, if not changed.
    fn outer(&self, inner: &[u8]) -> Ip {
        let payload = [&[8, 0, 0, 0, 0, 0, 1, 0], inner].concat();
        let (from, to) = (self.underlay[1], self.underlay[0]);
        packet::udp((from, 40_000), (to, VXLAN_PORT), &payload)
    }

    /// What comes out of a tunnel, as the second node's device sends it.
    fn inner(&self, ip: &Ip) -> Vec<u8> {
        let macs = [0, 1].map(|node| vxlan_mac(self.underlay[node]));
        packet::eth(macs[0], macs[1], ip.kind(), &ip.bytes())
    }

    /// The inner frame behind the header as the uplink lets it in.
    fn admitted(&self, outer: &Ip, inner: &[u8], what: &str) -> Vec<u8> {
        let (action, out) = self.run("uplink_in", 0, &frame(outer));
        assert_eq!(action, PASS, "{what}: {:?}", self.datapath.drops());
        let at = out.len() - inner.len();
        // The inner source MAC address and the outer checksum are all that differs.
        assert_eq!(out[at..at + 6], inner[..6], "{what}");
        assert_eq!(out[at + 12..], inner[12..], "{what}");
        let seen = packet::see(&out);
        assert_eq!((seen.src, seen.dst), (outer.src, outer.dst), "{what}");
        out[at..].to_vec()
    }

    /// An inner frame with the stamp on it.
    fn stamped(&self, inner: &Ip) -> Vec<u8> {
        let honest = packet::udp((ip("10.2.0.7"), 1), (self.a.v4, 2), b"");
        let honest = self.inner(&honest);
        let stamp = &self.admitted(&self.outer(&honest), &honest, "an honest packet")[6..12];
        let mut frame = self.inner(inner);
        frame[6..12].copy_from_slice(stamp);
        frame
    }
}

fn frame(ip: &Ip) -> Vec<u8> {
    packet::eth(
        [2, 0, 0, 0, 0, 1],
        [2, 0, 0, 0, 0, 2],
        ip.kind(),
        &ip.bytes(),
    )
}

/// A packet from one address to another of the same family.
fn from_to(src: IpAddr, dst: IpAddr) -> Ip {
    packet::tcp((src, 4000), (dst, 80), SYN, b"hello")
}
