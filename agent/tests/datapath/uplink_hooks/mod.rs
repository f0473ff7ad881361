//! `uplink_out` and `uplink_in` on single packets.

mod flows;
mod translation;

use crate::{
    kit::{self, NODE, OUTSIDE, PORT_MAX, PORT_MIN, Pod},
    logs,
    packet::{self, ACK, FIN, ICMP, Ip, SYN, Seen, TCP, UDP, see},
    run::{DROP, PASS, Programs},
};
use aya::maps::{HashMap, Map, MapData};
use sinabro_agent::datapath::{Datapath, DatapathConfig, monotonic_ns};
use sinabro_common::{
    abi::{
        Addr,
        config::FLAG_CARRYING,
        drop::DropReason,
        nat::{KIND_FORWARD, KIND_INBOUND, KIND_REVERSE, NatEntry, NatKey},
    },
    names,
};
use std::{collections::HashSet, net::IpAddr, time::Instant};

pub const NODE_IP: IpAddr = IpAddr::V4(NODE);
pub const FAR: IpAddr = IpAddr::V4(OUTSIDE);
const SECOND: u64 = 1_000_000_000;

pub struct World {
    pub datapath: Datapath,
    pub programs: Programs,
    pub a: Pod,
    pub b: Pod,
}

pub fn world<T: Send>(test: impl FnOnce(World) -> T + Send) -> T {
    world_with(&kit::config(), test)
}

pub fn world_with<T: Send>(config: &DatapathConfig, test: impl FnOnce(World) -> T + Send) -> T {
    let config = config.clone();
    kit::fresh(move || {
        let datapath = kit::load_with(&config);
        let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
        test(World {
            programs: Programs::of(&datapath),
            datapath,
            a,
            b,
        })
    })
}

/// The masquerade table, as it is pinned.
pub fn table() -> std::collections::HashMap<NatKey, NatEntry> {
    let data = MapData::from_pin(format!("{}/NAT", names::BPF_DIR)).unwrap();
    let map: HashMap<_, NatKey, NatEntry> = Map::HashMap(data).try_into().unwrap();
    map.iter().collect::<Result<_, _>>().unwrap()
}

pub fn insert(key: NatKey, entry: NatEntry) {
    let data = MapData::from_pin(format!("{}/NAT", names::BPF_DIR)).unwrap();
    let mut map: HashMap<_, NatKey, NatEntry> = Map::HashMap(data).try_into().unwrap();
    map.insert(key, entry, 0).unwrap();
}

impl World {
    fn frame(ip: &Ip) -> Vec<u8> {
        packet::eth(
            [2, 0, 0, 0, 0, 9],
            [2, 0, 0, 0, 0, 1],
            ip.kind(),
            &ip.bytes(),
        )
    }

    /// What the uplink sends for a packet of the node's side.
    pub fn out(&self, ip: &Ip) -> (i32, Vec<u8>) {
        self.programs
            .run("uplink_out", self.a.ifindex, &Self::frame(ip))
    }

    /// What the node takes a packet from outside for.
    fn come(&self, ip: &Ip) -> (i32, Vec<u8>) {
        self.programs
            .run("uplink_in", self.a.ifindex, &Self::frame(ip))
    }

    pub fn sent(&self, ip: &Ip) -> Seen {
        let (verdict, out) = self.out(ip);
        assert_eq!(verdict, PASS, "{:?}", self.datapath.drops());
        see(&out)
    }

    fn received(&self, ip: &Ip) -> Seen {
        let (verdict, out) = self.come(ip);
        assert_eq!(verdict, PASS, "{:?}", self.datapath.drops());
        see(&out)
    }

    fn leaves_alone(&self, ip: &Ip, what: &str) {
        let frame = Self::frame(ip);
        for program in ["uplink_out", "uplink_in"] {
            let (verdict, out) = self.programs.run(program, self.a.ifindex, &frame);
            assert_eq!((verdict, &out), (PASS, &frame), "{program}: {what}");
        }
    }

    fn dropped(&self, program: &str, ip: &Ip, reason: DropReason) {
        let before = kit::dropped(&self.datapath, reason);
        let (verdict, _) = self.programs.run(program, self.a.ifindex, &Self::frame(ip));
        assert_eq!(verdict, DROP, "{:?}", self.datapath.drops());
        assert_eq!(kit::dropped(&self.datapath, reason) - before, 1);
    }

    fn sweep_at(&self, seconds: u64) -> u64 {
        self.datapath
            .sweep(monotonic_ns() + seconds * SECOND)
            .unwrap()
    }
}

/// A packet of a protocol from one end to another.
pub fn make(proto: u8, src: (IpAddr, u16), dst: (IpAddr, u16)) -> Ip {
    match proto {
        TCP => packet::tcp(src, dst, SYN, b"hello"),
        UDP => packet::udp(src, dst, b"hello"),
        _ => packet::icmp(src.0, dst.0, 8, src.1),
    }
}

/// The reply to a packet as it was seen.
fn reply_to(seen: &Seen) -> Ip {
    let (src, dst) = ((seen.dst, seen.ports.1), (seen.src, seen.ports.0));
    match seen.proto {
        TCP => packet::tcp(src, dst, SYN | ACK, b"hi"),
        UDP => packet::udp(src, dst, b"hi"),
        _ => packet::icmp(src.0, dst.0, 0, seen.ports.0),
    }
}
