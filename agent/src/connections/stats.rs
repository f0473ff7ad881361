//! How many connections of which kind.
//!
//! Where most lead to is found in memory of a bounded size, however many remote ends there are: the first pass
//! keeps candidates (Misra and Gries, "Finding repeated elements", 1982), among which whatever has more than one
//! in [`CANDIDATES`] of all is for certain; the second counts those exactly.

use super::row::Row;
use crate::endpoint::PodNames;
use sinabro_common::{
    abi::{
        Addr,
        connection::{ALL_SHARES, HOST_SHARE, Limits, OUTSIDE_DATAGRAMS, OUTSIDE_SHARE, Share},
    },
    api::{
        ConnectionStats, Mapped, PacketEnd, PodConnections, RemoteConnections, StateClass,
        protocol_name,
    },
};
use std::collections::{BTreeMap, HashMap};

const CANDIDATES: usize = 1024;
/// Of the room that is left one pod's unanswered connections may take one in so many.
const EMBRYONIC_PART: u64 = 8;
/// Remote ends that are shown.
const REMOTES: usize = 20;

/// Protocol, address and port.
type Remote = (u8, Addr, Option<u16>);

#[derive(Default)]
pub struct Count {
    connections: u64,
    masqueraded: u64,
    apart: u64,
    by_class: BTreeMap<&'static str, u64>,
    by_state: BTreeMap<&'static str, u64>,
    by_protocol: BTreeMap<u8, u64>,
    /// Connections and those that nobody has answered, by payer.
    by_payer: HashMap<u32, (u64, u64)>,
    candidates: HashMap<Remote, u64>,
}

impl Count {
    pub fn add(&mut self, row: &Row, pods: &PodNames) {
        self.connections += 1;
        let is_mapping = row.is_mapping();
        self.masqueraded += u64::from(row.masqueraded_as().is_some() && !is_mapping);
        self.apart += u64::from(row.mapping() == Some(Mapped::Apart));
        *self.by_class.entry(class(row.class())).or_default() += 1;
        *self.by_state.entry(row.state()).or_default() += 1;
        *self.by_protocol.entry(row.sent.proto).or_default() += 1;
        let payer = self.by_payer.entry(row.record.payer).or_default();
        payer.0 += 1;
        payer.1 += u64::from(row.is_embryonic());
        if is_mapping {
            // It leads to nobody.
            return;
        }
        let remote = remote(row, pods);
        if self.candidates.len() < CANDIDATES || self.candidates.contains_key(&remote) {
            *self.candidates.entry(remote).or_default() += 1;
        } else {
            self.candidates.retain(|_, count| {
                *count -= 1;
                *count > 0
            });
        }
    }

    /// To count exactly.
    pub fn candidates(&mut self) -> Remotes {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.values_mut().for_each(|count| *count = 0);
        Remotes(candidates)
    }

    pub fn report(
        self,
        capacity: u32,
        limits: &Limits,
        shares: &[(u32, Share)],
        remotes: Remotes,
        pods: &PodNames,
    ) -> ConnectionStats {
        let words = |counts: BTreeMap<&str, u64>| {
            let counts = counts.into_iter();
            counts
                .map(|(word, count)| (word.to_owned(), count))
                .collect()
        };
        let protocols = self.by_protocol.into_iter();
        ConnectionStats {
            connections: self.connections,
            capacity: capacity.into(),
            room: None,
            masqueraded: self.masqueraded,
            apart: self.apart,
            by_class: words(self.by_class),
            by_state: words(self.by_state),
            by_protocol: protocols
                .map(|(proto, count)| (protocol_name(proto).into_owned(), count))
                .collect(),
            pods: of_pods(&self.by_payer, limits, shares, pods),
            remotes: remotes.report(pods),
        }
    }
}

/// Every pod of the node, those with most connections first; and the host's own, those of clients outside and those that
/// nobody is charged for, if there are any.
fn of_pods(
    counts: &HashMap<u32, (u64, u64)>,
    limits: &Limits,
    shares: &[(u32, Share)],
    pods: &PodNames,
) -> Vec<PodConnections> {
    let shares: HashMap<u32, Share> = shares.iter().copied().collect();
    // As the programs decide (agent-ebpf/src/connection/share.rs).
    let taken = shares.get(&ALL_SHARES).copied().unwrap_or_default();
    let room = u64::from(limits.capacity).saturating_sub(taken.connections);
    let limit = room.min(limits.per_pod.into());
    let unanswered_limit = room
        .div_ceil(EMBRYONIC_PART)
        .min(limits.embryonic_per_pod.into());
    let of = |payer: u32, pod: &str| {
        let (connections, unanswered) = counts.get(&payer).copied().unwrap_or_default();
        PodConnections {
            pod: pod.to_owned(),
            connections,
            limit,
            unanswered,
            unanswered_limit,
            refused: shares.get(&payer).map_or(0, |share| share.refused),
        }
    };
    let mut rows: Vec<_> = pods.links().map(|(payer, pod)| of(payer, pod)).collect();
    rows.sort_by(|a, b| (b.connections, &a.pod).cmp(&(a.connections, &b.pod)));
    if counts.contains_key(&HOST_SHARE) {
        rows.push(PodConnections {
            limit: 0,
            unanswered_limit: 0,
            ..of(HOST_SHARE, "(host)")
        });
    }
    if counts.contains_key(&OUTSIDE_SHARE) {
        rows.push(of(OUTSIDE_SHARE, "(outside)"));
    }
    if counts.contains_key(&OUTSIDE_DATAGRAMS) {
        rows.push(of(OUTSIDE_DATAGRAMS, "(outside, datagrams)"));
    }
    rows
}

/// Remote ends and how many connections lead to each.
pub struct Remotes(HashMap<Remote, u64>);

impl Remotes {
    pub fn add(&mut self, row: &Row, pods: &PodNames) {
        if let Some(count) = self.0.get_mut(&remote(row, pods)) {
            *count += 1;
        }
    }

    fn report(self, pods: &PodNames) -> Vec<RemoteConnections> {
        let mut all: Vec<_> = self.0.into_iter().collect();
        all.sort_by(|(a, most), (b, more)| more.cmp(most).then(a.cmp(b)));
        let shown = all
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .take(REMOTES);
        shown
            .map(|((proto, addr, port), connections)| RemoteConnections {
                protocol: protocol_name(proto).into_owned(),
                remote: PacketEnd {
                    address: addr.into(),
                    port,
                    pod: pods.at(addr).map(Into::into),
                },
                connections,
            })
            .collect()
    }
}

/// The server, unless that is a pod of this node and the client is not: then the client, whatever port it has.
fn remote(row: &Row, pods: &PodNames) -> Remote {
    let inbound = pods.at(row.sent.dst).is_some() && pods.at(row.sent.src).is_none();
    match inbound {
        true => (row.sent.proto, row.sent.src, None),
        false => (row.sent.proto, row.sent.dst, row.server_port()),
    }
}

fn class(class: StateClass) -> &'static str {
    match class {
        StateClass::Established => "established",
        StateClass::Unanswered => "unanswered",
        StateClass::Closing => "closing",
    }
}
