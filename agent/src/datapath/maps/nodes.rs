//! `NODES`, `POD_RANGES` and `OVERLAY`.
//!
//! Nobody else writes them, so what they hold is read once and remembered: a cluster has
//! thousands of nodes, and a change concerns one.

use super::{FlowEpoch, error, lock, net_of_prefix, prefix, removed};
use crate::datapath::DatapathError;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, lpm_trie::Key};
use ipnet::IpNet;
use sinabro_common::abi::{
    Addr,
    node::{Node, Overlay, vxlan_header},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap as Records},
    hash::Hash,
    net::IpAddr,
    sync::Mutex,
};

const NODES: &str = "NODES";
const POD_RANGES: &str = "POD_RANGES";
const OVERLAY: &str = "OVERLAY";

/// Whose tunnels are taken, and for whom. A node's tunnel address stands for the node.
#[derive(Clone, Copy, Debug)]
pub struct Tunnels<'a> {
    /// This node's tunnel address.
    pub local: IpAddr,
    pub port: u16,
    pub vni: u32,
    /// The VXLAN device's own addresses, no more than two.
    pub gateways: &'a [IpAddr],
    /// Every address of every node, this one included → its tunnel address.
    pub nodes: &'a BTreeMap<IpAddr, IpAddr>,
    /// Pod ranges, this node's included → the tunnel address of their node.
    pub ranges: &'a BTreeMap<IpNet, IpAddr>,
}

impl Tunnels<'_> {
    /// The other nodes, by their tunnel addresses.
    pub fn peers(&self) -> BTreeSet<Addr> {
        let tunnels = self.nodes.values().filter(|&&node| node != self.local);
        tunnels.map(|&node| node.into()).collect()
    }
}

pub struct Nodes(Mutex<Inner>);

struct Inner {
    nodes: HashMap<MapData, Addr, Node>,
    ranges: LpmTrie<MapData, Addr, Node>,
    overlay: Array<MapData, Overlay>,
    /// What the two hold, once it was read.
    known: Option<Known>,
    flows: FlowEpoch,
}

struct Known {
    nodes: Records<Addr, Node>,
    ranges: Records<(u32, [u8; 16]), Node>,
}

impl Nodes {
    pub fn new(
        nodes: Map,
        ranges: Map,
        overlay: Map,
        flows: FlowEpoch,
    ) -> Result<Self, DatapathError> {
        Ok(Self(Mutex::new(Inner {
            nodes: nodes.try_into().map_err(error(NODES, "opening"))?,
            ranges: ranges.try_into().map_err(error(POD_RANGES, "opening"))?,
            overlay: overlay.try_into().map_err(error(OVERLAY, "opening"))?,
            known: None,
            flows,
        })))
    }

    /// What [`crate::datapath::Datapath::mark_of_requests`] says.
    pub fn mark_of_requests(&self) -> Result<Option<u32>, DatapathError> {
        mark_of_requests(&lock(&self.0).overlay)
    }

    /// Of all nodes.
    pub fn pod_ranges(&self) -> Result<Vec<IpNet>, DatapathError> {
        let mut inner = lock(&self.0);
        let Inner {
            nodes,
            ranges,
            known,
            ..
        } = &mut *inner;
        let now = match known {
            Some(known) => known,
            None => known.insert(read(nodes, ranges)?),
        };
        Ok(now.ranges.keys().filter_map(net_of_prefix).collect())
    }

    /// Makes the maps hold exactly this. What is in both is found all the time.
    pub fn set(&self, tunnels: &Tunnels<'_>) -> Result<(), DatapathError> {
        let mut inner = lock(&self.0);
        let set = inner.set(tunnels);
        set.and(inner.flows.raise())
    }
}

impl Inner {
    fn set(&mut self, tunnels: &Tunnels<'_>) -> Result<(), DatapathError> {
        let Inner {
            nodes,
            ranges,
            overlay,
            known,
            ..
        } = self;
        // Forgotten unless all of it succeeds.
        let mut before = match known.take() {
            Some(known) => known,
            None => read(nodes, ranges)?,
        };
        let node = |tunnel: &IpAddr| Node {
            tunnel: (*tunnel).into(),
            flags: 0,
        };
        let wanted = tunnels.nodes.iter();
        change(
            &mut before.nodes,
            wanted.map(|(address, tunnel)| (Addr::from(*address), node(tunnel))),
            nodes,
            |map, addr, node| {
                map.insert(addr, node, 0)
                    .map_err(error(NODES, "writing to"))
            },
            |map, addr| removed(map.remove(addr)).map_err(error(NODES, "removing from")),
        )?;
        let wanted = tunnels.ranges.iter();
        change(
            &mut before.ranges,
            wanted.map(|(range, tunnel)| (prefix(range), node(tunnel))),
            ranges,
            |map, (len, addr), node| {
                map.insert(&Key::new(*len, Addr(*addr)), node, 0)
                    .map_err(error(POD_RANGES, "writing to"))
            },
            |map, (len, addr)| {
                removed(map.remove(&Key::new(*len, Addr(*addr))))
                    .map_err(error(POD_RANGES, "removing from"))
            },
        )?;
        *known = Some(before);
        set_overlay(overlay, tunnels)
    }
}

fn read(
    nodes: &HashMap<MapData, Addr, Node>,
    ranges: &LpmTrie<MapData, Addr, Node>,
) -> Result<Known, DatapathError> {
    let in_ranges = ranges
        .iter()
        .map(|entry| entry.map(|(key, node)| ((key.prefix_len(), key.data().0), node)));
    Ok(Known {
        nodes: nodes
            .iter()
            .collect::<Result<_, _>>()
            .map_err(error(NODES, "reading from"))?,
        ranges: in_ranges
            .collect::<Result<_, _>>()
            .map_err(error(POD_RANGES, "reading from"))?,
    })
}

/// Writes what is new or different, then removes what is not wanted; `records` follows.
fn change<K: Hash + Eq + Copy, M>(
    records: &mut Records<K, Node>,
    wanted: impl Iterator<Item = (K, Node)>,
    map: &mut M,
    write: impl Fn(&mut M, &K, &Node) -> Result<(), DatapathError>,
    remove: impl Fn(&mut M, &K) -> Result<(), DatapathError>,
) -> Result<(), DatapathError> {
    let wanted: Records<K, Node> = wanted.collect();
    for (key, node) in &wanted {
        if records.get(key) != Some(node) {
            write(map, key, node)?;
        }
    }
    for key in records.keys() {
        if !wanted.contains_key(key) {
            remove(map, key)?;
        }
    }
    *records = wanted;
    Ok(())
}

/// That of a node whose overlay is known.
fn mark_of_requests(map: &Array<MapData, Overlay>) -> Result<Option<u32>, DatapathError> {
    let overlay = map.get(&0, 0).map_err(error(OVERLAY, "reading from"))?;
    let is_known = overlay.local != Addr::UNSPECIFIED;
    Ok(is_known.then(|| overlay.mark_of_requests()))
}

fn set_overlay(
    map: &mut Array<MapData, Overlay>,
    tunnels: &Tunnels<'_>,
) -> Result<(), DatapathError> {
    let before = map.get(&0, 0).map_err(error(OVERLAY, "reading from"))?;
    let stamp = match before.stamp {
        // Kept: packets that have the old one are on their way.
        stamp if stamp != [0; 6] => stamp,
        _ => random_stamp()?,
    };
    let gateway = |at: usize| tunnels.gateways.get(at).copied();
    let overlay = Overlay {
        local: tunnels.local.into(),
        gateways: [0, 1].map(|at| gateway(at).map_or(Addr::UNSPECIFIED, Addr::from)),
        stamp,
        port: tunnels.port.to_be_bytes(),
        vxlan: vxlan_header(tunnels.vni),
    };
    if overlay == before {
        return Ok(());
    }
    map.set(0, overlay, 0).map_err(error(OVERLAY, "writing to"))
}

/// Six bytes that nobody can foresee.
fn random_stamp() -> Result<[u8; 6], DatapathError> {
    let mut stamp = [0; 6];
    while stamp == [0; 6] {
        // SAFETY: writes no more than the array's length; so few bytes come all at once.
        let got = unsafe { libc::getrandom(stamp.as_mut_ptr().cast(), stamp.len(), 0) };
        if got != 6 {
            return Err(DatapathError::Probe(std::io::Error::last_os_error()));
        }
    }
    Ok(stamp)
}
