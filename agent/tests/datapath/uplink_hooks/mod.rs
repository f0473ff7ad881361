//! `uplink_out` and `uplink_in` on single packets.

mod at_once;
mod closed;
mod early;
pub mod finished;
mod flows;
mod full;
mod mapping;
mod model;
mod named;
mod options;
mod ports;
mod protocols;
mod quoted;
mod room;
mod successor;
mod translation;
mod udplite;

use crate::{
    kit::{self, NODE, OUTSIDE, PORT_MAX, PORT_MIN, Pod},
    packet::{self, ACK, FIN, ICMP, Ip, RST, SCTP, SYN, Seen, TCP, UDP, see},
    run::{DROP, PASS, Programs},
};
use aya::maps::{Array, HashMap, Map, MapData};
use sinabro_agent::datapath::{Datapath, DatapathConfig, monotonic_ns};
use sinabro_common::{
    abi::{
        Addr,
        config::FLAG_CARRYING,
        connection::{Alias, Connection, ConnectionKey, FLAG_INBOUND, FLAG_SERVICE, Tuple},
        drop::DropReason,
        endpoint::Endpoint,
        uplink::{NOT_OF_POD, Uplink, checked_place},
    },
    names,
};
use std::{collections::HashSet, net::IpAddr};

pub const NODE_IP: IpAddr = IpAddr::V4(NODE);
pub const FAR: IpAddr = IpAddr::V4(OUTSIDE);
const NODE_IP6: &str = "2001:db8::1";
const SECOND: u64 = 1_000_000_000;

pub struct World {
    pub datapath: Datapath,
    pub programs: Programs,
    pub a: Pod,
    pub b: Pod,
}

pub fn world(test: impl FnOnce(World) + Send) {
    world_with(&kit::config(), test);
}

pub fn world_with(config: &DatapathConfig, test: impl FnOnce(World) + Send) {
    let config = config.clone();
    kit::fresh(move || {
        let datapath = kit::load_with(&config);
        let programs = Programs::of(&datapath);
        if programs.skipped() {
            return;
        }
        let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
        // Any interface will do: the programs are run on packets, not attached.
        set_source(a.ifindex, NODE_IP, NODE_IP6.parse().unwrap());
        test(World {
            programs,
            datapath,
            a,
            b,
        });
    });
}

pub fn open<K: aya::Pod, V: aya::Pod>(name: &str) -> HashMap<MapData, K, V> {
    let generation = if name == "CONNECTIONS" { 3 } else { 2 };
    let data = MapData::from_pin(format!("{}/v{generation}/{name}", names::BPF_DIR)).unwrap();
    Map::HashMap(data).try_into().unwrap()
}

/// The table of connections, as it is pinned.
pub fn table() -> std::collections::HashMap<ConnectionKey, Connection> {
    let map = open::<ConnectionKey, Connection>("CONNECTIONS");
    map.iter().collect::<Result<_, _>>().unwrap()
}

pub fn aliases() -> std::collections::HashMap<Tuple, Alias> {
    let map = open::<Tuple, Alias>("ALIASES");
    map.iter().collect::<Result<_, _>>().unwrap()
}

/// Sets every time in the table back.
pub fn age(seconds: u64) {
    let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
    for (key, mut record) in table() {
        // As the programs do: this machine may have been up for less.
        record.last_seen_ns = record.last_seen_ns.wrapping_sub(seconds * SECOND);
        record.began_ns = record.began_ns.wrapping_sub(seconds * SECOND);
        record.seen_ticks = record.seen_ticks.wrapping_sub(1000);
        records.insert(key, record, 0).unwrap();
    }
    let mut all = open::<Tuple, Alias>("ALIASES");
    for (key, mut alias) in aliases() {
        alias.noted_ticks = alias.noted_ticks.wrapping_sub(1000);
        if alias.reusable_ns != 0 {
            // Zero says something else.
            alias.reusable_ns = alias.reusable_ns.saturating_sub(seconds * SECOND).max(1);
        }
        all.insert(key, alias, 0).unwrap();
    }
}

/// Every alias leads to a record that has it, and every record that has one is led to.
pub fn check_table() {
    let (table, aliases) = (table(), aliases());
    let mut owned = HashSet::new();
    for (key, connection) in &table {
        let both = [connection.alias(key), connection.service_alias(key)];
        for alias in both.into_iter().flatten() {
            assert!(owned.insert(alias), "two connections share {alias:?}");
            let found = aliases[&alias];
            assert_eq!(alias.to(found.addr, found.port).key().0, *key);
            let is_of_answers =
                connection.has(FLAG_SERVICE) && connection.alias(key) == Some(alias);
            assert!(!is_of_answers || found.pad[0] == 0, "{alias:?}");
        }
    }
    // No claim was left behind.
    assert_eq!(aliases.len(), owned.len());
}

/// Addresses that what leaves by an interface gets.
pub fn set_source(ifindex: u32, v4: IpAddr, v6: IpAddr) {
    let uplink = Uplink {
        v4: v4.into(),
        v6: v6.into(),
        header_len: 14,
        pad: 0,
    };
    open("UPLINKS").insert(ifindex, uplink, 0).unwrap();
    // As the agent does: a pod's link that a test takes for an uplink is one from now on.
    let data = MapData::from_pin(format!("{}/CHECKED_LINKS", names::BPF_DIR)).unwrap();
    let mut checked: Array<MapData, u32> = Map::Array(data).try_into().unwrap();
    checked
        .set(checked_place(ifindex), ifindex | NOT_OF_POD, 0)
        .unwrap();
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
        self.forward(&Self::frame(ip))
    }

    /// What the uplink sends for a frame that came in by its pod's link, or as any other does.
    fn forward(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        let source = match frame.get(12..14) {
            Some([0x08, 0x00]) => frame.get(26..30).map(|v4| Addr::v4(v4.try_into().unwrap())),
            _ => frame.get(22..38).map(|v6| Addr::v6(v6.try_into().unwrap())),
        };
        let pin = format!("{}/ENDPOINTS", names::BPF_DIR);
        let pinned = Map::HashMap(MapData::from_pin(pin).unwrap());
        let endpoints: HashMap<MapData, Addr, Endpoint> = pinned.try_into().unwrap();
        let of_pod = source.and_then(|source| endpoints.get(&source, 0).ok());
        let from = of_pod.map_or(self.b.ifindex, |endpoint| endpoint.ifindex);
        self.programs
            .run_from("uplink_out", self.a.ifindex, from, frame)
            .unwrap()
    }

    /// What the uplink sends for a packet of a socket of the node.
    fn host_out(&self, ip: &Ip) -> (i32, Vec<u8>) {
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
        for (hook, (verdict, out)) in [
            ("forwarded", self.forward(&frame)),
            ("sent", self.host_out(ip)),
            ("received", self.come(ip)),
        ] {
            assert_eq!((verdict, &out), (PASS, &frame), "{hook}: {what}");
        }
    }

    fn dropped(&self, program: &str, ip: &Ip, reason: DropReason) {
        let before = kit::dropped(&self.datapath, reason);
        let (verdict, _) = match program {
            "uplink_out" => self.out(ip),
            _ => self.come(ip),
        };
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
        SCTP => packet::sctp(src, dst, b"hello"),
        _ => packet::icmp(src.0, dst.0, if src.0.is_ipv4() { 8 } else { 128 }, src.1),
    }
}

/// The reply to a packet as it was seen.
fn reply_to(seen: &Seen) -> Ip {
    let (src, dst) = ((seen.dst, seen.ports.1), (seen.src, seen.ports.0));
    match seen.proto {
        TCP => packet::tcp(src, dst, SYN | ACK, b"hi"),
        UDP => packet::udp(src, dst, b"hi"),
        SCTP => packet::sctp(src, dst, b"hi"),
        _ => {
            let kind = if src.0.is_ipv4() { 0 } else { 129 };
            packet::icmp(src.0, dst.0, kind, seen.ports.0)
        }
    }
}
