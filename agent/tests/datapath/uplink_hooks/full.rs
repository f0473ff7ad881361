//! A table that is really full, as it may be for a moment where the shares' counts have drifted.

use super::{protocols::families, *};
use crate::logs;
use aya::maps::MapError;
use sinabro_common::abi::{
    Addr,
    config::FLAG_ENDPOINT_INDEPENDENT,
    connection::{ALL_SHARES, Share},
};
use std::time::Instant;

const ROOM: u32 = 64;
/// What has ports, or an id, and what has neither.
const PROTOCOLS: [u8; 5] = [TCP, UDP, SCTP, ICMP, GRE];
const GRE: u8 = 47;

fn config() -> DatapathConfig {
    DatapathConfig {
        connections: Some(ROOM),
        ..kit::config()
    }
}

/// Puts entries into a map until the kernel has no room for another. Which ones.
fn fill<K: aya::Pod, V: aya::Pod>(name: &str, value: V, keys: impl Iterator<Item = K>) -> Vec<K> {
    let mut map = open::<K, V>(name);
    let mut put = Vec::new();
    for key in keys {
        match map.insert(key, value, 0) {
            Ok(()) => put.push(key),
            Err(MapError::SyscallError(error)) => {
                let full = Some(libc::E2BIG);
                assert_eq!(error.io_error.raw_os_error(), full, "{error}");
                return put;
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("{name} has room for all");
}

/// Of ends that are in no packet here.
fn strangers() -> impl Iterator<Item = Tuple> {
    (0..=4 * ROOM).map(|number| Tuple {
        src: IpAddr::from([198, 18, 0, 1]).into(),
        dst: IpAddr::from([198, 18, 1, 1]).into(),
        src_port: (number as u16).to_be_bytes(),
        dst_port: 80_u16.to_be_bytes(),
        proto: TCP,
        pad: [0; 3],
    })
}

fn fill_table() -> Vec<ConnectionKey> {
    let keys = strangers().map(|tuple| tuple.key().0);
    fill("CONNECTIONS", Connection::NONE, keys)
}

fn fill_aliases() -> Vec<Tuple> {
    let alias = Alias::to(Addr::UNSPECIFIED, [0; 2]);
    fill("ALIASES", alias, strangers())
}

/// Connections, those that nobody answered, and those that were refused.
fn counted(payer: u32) -> (u64, u64, u64) {
    let share = open::<u32, Share>("SHARES").get(&payer, 0).unwrap();
    (share.connections, share.embryonic, share.refused)
}

fn packet(proto: u8, src: (IpAddr, u16), dst: (IpAddr, u16)) -> Ip {
    match proto {
        GRE => packet::other(src.0, dst.0, GRE),
        _ => make(proto, src, dst),
    }
}

/// One connection of each protocol and family is there; then a map is filled: what is there goes on in both directions,
/// a new one is dropped for this reason, and takes nothing. With one place free again it gets in.
fn what_is_new_is_dropped<K: aya::Pod, V: aya::Pod>(map: &str, fill: fn() -> Vec<K>) {
    world_with(&config(), |w| {
        let began = Instant::now();
        let mut there = Vec::new();
        for proto in PROTOCOLS {
            for (pod, node, far) in families(&w) {
                let first = packet(proto, (pod, 1000), (far, 80));
                let out = w.out(&first);
                assert_eq!(out.0, PASS, "{proto}: {:?}", w.datapath.drops());
                let answer = match proto {
                    GRE => packet::other(far, node, GRE),
                    _ => reply_to(&see(&out.1)),
                };
                let came = w.come(&answer);
                assert_ne!(came.1, World::frame(&answer), "{proto}");
                there.push((first, out, answer, came));
            }
        }
        check_table();
        let filled = fill();
        let before = (table().len(), aliases().len());
        let shares = [w.a.ifindex, ALL_SHARES].map(counted);
        for proto in PROTOCOLS {
            for (pod, _, far) in families(&w) {
                let other = if far.is_ipv4() {
                    "203.0.113.7"
                } else {
                    "2600::7"
                };
                let new = packet(proto, (pod, 2000), (other.parse().unwrap(), 80));
                w.dropped("uplink_out", &new, DropReason::NatTableFull);
                assert_eq!((table().len(), aliases().len()), before, "{proto}: {pod}");
                assert_eq!([w.a.ifindex, ALL_SHARES].map(counted), shares, "{proto}");
            }
        }
        for (first, out, answer, came) in &there {
            assert_eq!(w.out(first), *out);
            assert_eq!(w.come(answer), *came);
        }
        logs::assert_said_rarely(
            &w.datapath,
            began,
            "WARN the table of connections is full, new ones are dropped until others end \
             object=\"uplink\"",
        );
        let mut entries = open::<K, V>(map);
        entries.remove(&filled[0]).unwrap();
        w.sent(&make(TCP, (w.a.v4, 2000), (FAR, 80)));
        let next = make(TCP, (w.a.v4, 2001), (FAR, 80));
        w.dropped("uplink_out", &next, DropReason::NatTableFull);
        for key in &filled[1..] {
            entries.remove(key).unwrap();
        }
        check_table();
    });
}

#[test]
fn a_new_connection_is_dropped_where_the_table_is_full() {
    what_is_new_is_dropped::<_, Connection>("CONNECTIONS", fill_table);
}

#[test]
fn a_new_connection_is_dropped_where_no_alias_can_be_added() {
    what_is_new_is_dropped::<_, Alias>("ALIASES", fill_aliases);
}

/// A mapping and its first connection take two places each: with one of either nothing is left behind.
#[test]
fn a_mapping_is_dropped_where_one_place_is_left() {
    world_with(&config(), |w| {
        let mut config = kit::node_config();
        config.flags |= FLAG_ENDPOINT_INDEPENDENT;
        w.datapath.set_node_config(config).unwrap();
        let question = make(UDP, (w.a.v4, 1000), (FAR, 3478));
        let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
        let mut all = open::<Tuple, Alias>("ALIASES");
        let refuses = |what: &str| {
            let before = (table().len(), aliases().len());
            w.dropped("uplink_out", &question, DropReason::NatTableFull);
            assert_eq!((table().len(), aliases().len()), before, "{what}");
            let (connections, embryonic, _) = counted(w.a.ifindex);
            assert_eq!((connections, embryonic), (0, 0), "{what}");
        };
        let filled = fill_table();
        refuses("no record");
        for key in &filled {
            records.remove(key).unwrap();
        }
        let filled = fill_aliases();
        refuses("no alias");
        all.remove(&filled[0]).unwrap();
        refuses("one alias");
        for key in &filled[1..] {
            all.remove(key).unwrap();
        }
        w.sent(&question);
        assert_eq!(table().len(), 2);
        assert_eq!(aliases().len(), 2);
    });
}

/// Without a record its answers keep the pod's address as long as nothing translates them, so it is not for the node to drop.
#[test]
fn who_comes_to_a_pods_own_address_comes_in_without_a_record() {
    world_with(&config(), |w| {
        let filled = fill_table();
        let shares = counted(w.a.ifindex);
        for (pod, _, far) in families(&w) {
            let syn = make(TCP, (far, 5000), (pod, 80));
            assert_eq!(w.received(&syn).dst, pod);
        }
        assert_eq!(table().len(), filled.len());
        assert_eq!(counted(w.a.ifindex), shares);
    });
}
