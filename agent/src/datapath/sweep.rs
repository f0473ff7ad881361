//! Ends connections that are over, and counts what the others take.
//!
//! Order keeps the table sound while packets pass: a record goes before its alias, so a translated port is free
//! only once nothing is translated to it any more. An alias that leads to no record is a claim that is being
//! made at this moment, or one that a killed agent or a lost race left behind: it goes when it is so at two looks
//! in a row.

mod scarcity;

use super::{
    DatapathError,
    beside_proxy::Timeouts,
    maps::{Connections, Endpoints, Owner, PortBitmaps},
};
use scarcity::Scarcity;
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            ALL_SHARES, Connection, ConnectionKey, FLAG_APART, FLAG_INBOUND, FLAG_MAPPING,
            FLAG_MASQUERADED, FLAG_SERVICE, FLAG_STACK, HOST_SHARE, Limits, MAX_PORT_BITMAPS,
            PORT_TABLES, Share, Tuple, is_of_pod, is_outside, is_portless, port_table,
        },
    },
    algo::lifetime::{self, Stage},
    names,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    hash::{BuildHasher as _, RandomState},
    time::{Duration, Instant},
};

/// What a sweep needs beside the table.
pub struct Rules<'a> {
    pub now_ns: u64,
    /// Remote ends towards which few ports are left.
    pub port_bitmaps: &'a PortBitmaps,
    pub limits: Limits,
    /// The uplinks' addresses; connections translated to another are over. None: not known.
    pub sources: Option<&'a HashSet<Addr>>,
    /// Connections of addresses that are not in here are over. None: not known.
    pub endpoints: Option<&'a Endpoints>,
    /// Whether those of protocols without ports go on.
    pub portless: bool,
    /// Those that the stack may translate live as long as there.
    pub netfilter: Timeouts,
}

/// Kept by the caller from sweep to sweep.
#[derive(Default)]
pub struct Memory {
    pub sweeps: u64,
    /// Time spent in them.
    pub spent: Duration,
    /// What was removed last: a packet that met the removal half-way may have left a record without its alias.
    removed: Vec<ConnectionKey>,
    /// Aliases that led to no record when last looked at.
    suspects: HashSet<Tuple>,
    /// All that were there then.
    pub aliases: u64,
    /// What was left to each payer, and of all.
    left: HashMap<u32, Count>,
}

/// How often aliases are looked at, for that asks for each one's record; every time while ports are scarce.
const ALIASES_EVERY: u64 = 8;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    pub removed: u64,
    /// Connections left.
    pub connections: u64,
    /// Of those, the ones that nobody has answered,
    pub unanswered: u64,
    /// that an end has closed or reset,
    pub closing: u64,
    /// and that leave the node under its own address;
    pub masqueraded: u64,
    /// mappings, which are none,
    pub mappings: u64,
    /// and connections by another port than their client's mapping.
    pub apart: u64,
}

/// Whether a sweep is due before its time ([`scarcity::is_due`]).
pub fn is_due(connections: &Connections, memory: &Memory) -> Result<bool, DatapathError> {
    scarcity::is_due(connections, &memory.left)
}

/// Removes what is over, and sets the shares right.
pub fn sweep(
    connections: &Connections,
    rules: &Rules<'_>,
    memory: &mut Memory,
) -> Result<Swept, DatapathError> {
    let began = Instant::now();
    // Whoever was killed between two steps did not come to mend what is between them, nor did one whose maps were carried
    // over while programs wrote to them.
    if memory.sweeps == 0 {
        connections.mend_all()?;
    }
    for key in std::mem::take(&mut memory.removed) {
        connections.mend(&key)?;
    }
    let mut over = Vec::new();
    let mut counts = Counts::default();
    let mut known = Known::new(rules.endpoints);
    // Of the time before, which is what is known before all are read.
    let before: BTreeMap<u32, Share> = connections.shares()?.into_iter().collect();
    let scarcity = Scarcity::of(&before, connections.capacity(), &rules.limits);
    let mut failed = None;
    connections.for_each(|key, connection| {
        if failed.is_some() {
            return;
        }
        match is_over(rules, &mut known, &scarcity, &key, &connection) {
            Ok(true) => over.push(key),
            Ok(false) => counts.add(&key, &connection),
            Err(error) => failed = Some(error),
        }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let mut removed = 0;
    for key in over {
        // Once more, now: a packet may have passed since.
        let Some(connection) = connections.get(&key)? else {
            continue;
        };
        if is_over(rules, &mut known, &scarcity, &key, &connection)? {
            connections.remove(&key, &connection)?;
            memory.removed.push(key);
            removed += 1;
        } else {
            counts.add(&key, &connection);
        }
    }
    let ends = rules.port_bitmaps.ends()?;
    if memory.sweeps.is_multiple_of(ALIASES_EVERY) || !ends.is_empty() {
        removed += sweep_aliases(connections, rules, ends, memory)?;
    }
    connections.forget_finished(rules.now_ns)?;
    memory.sweeps += 1;
    let all = counts.all();
    memory.left = counts.by_payer;
    memory.left.insert(ALL_SHARES, all);
    for (payer, before) in before {
        let left = memory.left.get(&payer).copied().unwrap_or_default();
        connections.correct(payer, &before, (left.connections, left.embryonic))?;
    }
    memory.spent += began.elapsed();
    Ok(Swept {
        removed,
        connections: all.connections,
        unanswered: counts.unanswered,
        closing: counts.closing,
        masqueraded: counts.masqueraded,
        mappings: counts.mappings,
        apart: counts.apart,
    })
}

/// A payer's connections.
#[derive(Clone, Copy, Default)]
struct Count {
    connections: u64,
    /// Of those, the ones that it began and nobody has answered,
    embryonic: u64,
    /// and that make room sooner where it is scarce.
    done: u64,
}

/// Removes aliases that lead to no record, if they did not when last looked at, and notes which ports are taken
/// where few are left.
fn sweep_aliases(
    connections: &Connections,
    rules: &Rules<'_>,
    ends: Vec<Tuple>,
    memory: &mut Memory,
) -> Result<u64, DatapathError> {
    let mut crowds = Crowds::new();
    let mut orphans = HashSet::new();
    let mut count = 0;
    let mut failed = None;
    connections.for_each_alias(|key, alias| {
        match connections.owner(&key, &alias) {
            // Takes no port.
            Ok(Some(Owner::Service)) => return,
            Ok(Some(Owner::Nat)) => {}
            Ok(None) => {
                orphans.insert(key);
            }
            Err(error) => failed = Some(error),
        }
        count += 1;
        crowds.count(&key);
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let mut removed = 0;
    for key in orphans.intersection(&memory.suspects) {
        let still = match connections.alias(key)? {
            Some(alias) => connections.owner(key, &alias)?.is_none(),
            None => false,
        };
        if still {
            connections.remove_alias(key)?;
            removed += 1;
        }
    }
    memory.suspects = orphans;
    memory.aliases = count - removed;
    crowds.note(connections, rules, ends)?;
    Ok(removed)
}

/// How many aliases there are towards each remote end, or towards a few of them together: a table of all ends
/// would be as large as that of the connections.
struct Crowds {
    hash: RandomState,
    counts: Vec<u32>,
}

impl Crowds {
    const COUNTS: usize = 1 << 16;

    fn new() -> Self {
        Self {
            hash: RandomState::new(),
            counts: vec![0; Self::COUNTS],
        }
    }

    fn place(&self, end: &Tuple) -> usize {
        self.hash.hash_one(end) as usize % Self::COUNTS
    }

    fn count(&mut self, key: &Tuple) {
        let place = self.place(&key.crowd());
        self.counts[place] += 1;
    }

    /// Notes which ports are taken towards the most crowded of the ends with less than half of their ports left.
    fn note(
        self,
        connections: &Connections,
        rules: &Rules<'_>,
        before: Vec<Tuple>,
    ) -> Result<(), DatapathError> {
        let bitmaps = rules.port_bitmaps;
        let tables: Result<Vec<_>, _> = (0..PORT_TABLES)
            .map(|table| bitmaps.reserved(table))
            .collect();
        let tables = tables?;
        let reserved = |end: &Tuple| &tables[port_table(end.proto) as usize];
        let half = |end: &Tuple| ((1 << 16) - reserved(end).count()) / 2;
        let mut ends = HashMap::<Tuple, Vec<u16>>::new();
        connections.for_each_alias(|key, alias| {
            let end = key.crowd();
            // One whose connection is over is free, as the programs see it.
            let is_free = alias.reusable_ns != 0 && alias.reusable_ns <= rules.now_ns;
            if !is_free && self.counts[self.place(&end)] > half(&end) {
                let ports = ends.entry(end).or_default();
                ports.push(u16::from_be_bytes(key.dst_port));
            }
        })?;
        let mut ends: Vec<_> = ends.into_iter().collect();
        ends.retain(|(end, ports)| ports.len() > half(end) as usize);
        ends.sort_unstable_by_key(|(_, ports)| Reverse(ports.len()));
        ends.truncate(MAX_PORT_BITMAPS as usize / 2);
        for end in before {
            if !ends.iter().any(|(crowded, _)| *crowded == end) {
                bitmaps.remove(&end)?;
            }
        }
        for (end, taken) in ends {
            let mut ports = *reserved(&end);
            taken.into_iter().for_each(|port| ports.take(port));
            bitmaps.set(&end, &ports)?;
        }
        Ok(())
    }
}

/// Connections and those that nobody answered, by who pays.
#[derive(Default)]
struct Counts {
    by_payer: HashMap<u32, Count>,
    unanswered: u64,
    closing: u64,
    masqueraded: u64,
    mappings: u64,
    apart: u64,
}

impl Counts {
    fn add(&mut self, key: &ConnectionKey, connection: &Connection) {
        let stage = stage(key, connection);
        let count = self.by_payer.entry(connection.payer).or_default();
        count.connections += 1;
        // As the programs count: what somebody outside begins is not the pod's to answer for.
        let is_own = !connection.has(FLAG_INBOUND);
        count.embryonic += u64::from(stage.is_embryonic() && is_own);
        self.unanswered += u64::from(stage.is_embryonic());
        count.done += u64::from(scarcity::is_done(connection, stage));
        self.closing += u64::from(stage.is_closed() || stage == Stage::HalfClosed);
        let is_mapping = connection.has(FLAG_MAPPING);
        self.masqueraded += u64::from(leaves(connection) && !is_mapping);
        self.mappings += u64::from(is_mapping);
        self.apart += u64::from(connection.has(FLAG_APART));
    }

    fn all(&self) -> Count {
        let mut all = Count::default();
        for count in self.by_payer.values() {
            all.connections += count.connections;
            all.embryonic += count.embryonic;
            all.done += count.done;
        }
        all
    }
}

/// Which addresses are of pods, asked once for each.
struct Known<'a> {
    endpoints: Option<&'a Endpoints>,
    asked: HashMap<Addr, bool>,
}

impl<'a> Known<'a> {
    fn new(endpoints: Option<&'a Endpoints>) -> Self {
        Self {
            endpoints,
            asked: HashMap::new(),
        }
    }

    /// Also if it is not known.
    fn is_pod(&mut self, addr: Addr) -> Result<bool, DatapathError> {
        let Some(endpoints) = self.endpoints else {
            return Ok(true);
        };
        if let Some(is) = self.asked.get(&addr) {
            return Ok(*is);
        }
        let is = endpoints.contains(addr)?;
        self.asked.insert(addr, is);
        Ok(is)
    }
}

/// Whether its packets leave the node under the node's address; a pod that is its own Service's endpoint has another,
/// within its link.
fn leaves(connection: &Connection) -> bool {
    let itself = [Addr::v4(names::ITSELF_V4), Addr::v6(names::ITSELF_V6)];
    connection.has(FLAG_MASQUERADED) && !itself.contains(&connection.nat)
}

/// Removes every connection of these addresses.
pub fn end_of(connections: &Connections, addresses: &HashSet<Addr>) -> Result<(), DatapathError> {
    let mut ended = Vec::new();
    connections.for_each(|key, connection| {
        if addresses.contains(&key.low) || addresses.contains(&key.high) {
            ended.push((key, connection));
        }
    })?;
    ended
        .iter()
        .try_for_each(|(key, connection)| connections.remove(key, connection))
}

pub fn stage(key: &ConnectionKey, connection: &Connection) -> Stage {
    let (client, server) = connection.client_and_server();
    let lived = connection.last_seen_ns.saturating_sub(connection.began_ns);
    lifetime::stage(key.proto, client, server, lived)
}

fn is_over(
    rules: &Rules<'_>,
    known: &mut Known<'_>,
    scarcity: &Scarcity,
    key: &ConnectionKey,
    connection: &Connection,
) -> Result<bool, DatapathError> {
    let sent = connection.from_client(key);
    let pods: &[Addr] = match connection.flags & (FLAG_MASQUERADED | FLAG_INBOUND | FLAG_STACK) {
        // Their clients are no pods.
        _ if is_outside(connection.payer) => &[],
        FLAG_MASQUERADED if connection.payer == HOST_SHARE => &[],
        FLAG_MASQUERADED => &[sent.src],
        FLAG_INBOUND => &[sent.dst],
        // The other end may be a pod of another node.
        FLAG_STACK if known.is_pod(sent.src)? => &[sent.src],
        FLAG_STACK => &[sent.dst],
        0 if connection.has(FLAG_SERVICE) => &[sent.src],
        // No program writes such a record.
        _ => return Ok(true),
    };
    for pod in pods {
        if !known.is_pod(*pod)? {
            return Ok(true);
        }
    }
    if !rules.portless && is_portless(key.proto) && leaves(connection) {
        return Ok(true);
    }
    // To pods of other nodes a client outside has this node's address inside the overlay.
    let is_masqueraded = leaves(connection) && is_of_pod(connection.payer);
    if is_masqueraded
        && rules
            .sources
            .is_some_and(|sources| !sources.contains(&connection.nat))
    {
        return Ok(true);
    }
    let stage = stage(key, connection);
    let seconds = match connection.has(FLAG_MAPPING) {
        true => lifetime::of_mapping(&rules.limits.lifetimes),
        false => rules.limits.lifetimes[stage as usize],
    };
    let seconds = match connection.has(FLAG_STACK) {
        true => seconds.max(rules.netfilter.of(stage)),
        false => seconds,
    };
    let lifetime = u64::from(seconds) * 1_000_000_000;
    let sooner = scarcity.lifetime(connection, stage).unwrap_or(u64::MAX);
    let lifetime = lifetime.min(sooner);
    Ok(rules.now_ns.saturating_sub(connection.last_seen_ns) > lifetime)
}
