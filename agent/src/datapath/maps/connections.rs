//! `CONNECTIONS` and `ALIASES`, `SHARES` and `LIMITS`, `FINISHED`.

use super::{error, found, lock, raw, removed};
use crate::datapath::{DatapathError, raw_map::RawMap};
use aya::maps::{Array, HashMap, Map, MapData, MapError, Queue};
use sinabro_common::abi::connection::{
    ALL_SHARES, Alias, Connection, ConnectionKey, Finished, HOST_SHARE, Limits, MAX_FINISHED,
    OUTSIDE_DATAGRAMS, OUTSIDE_SHARE, Share, Tuple,
};
use std::sync::Mutex;

const CONNECTIONS: &str = "CONNECTIONS";
const ALIASES: &str = "ALIASES";
const SHARES: &str = "SHARES";
const LIMITS: &str = "LIMITS";
const FINISHED: &str = "FINISHED";

/// In the place of the first, if the queue is full.
const BPF_EXIST: u64 = 2;

pub struct Connections {
    records: Table<ConnectionKey, Connection>,
    aliases: Table<Tuple, Alias>,
    shares: Mutex<HashMap<MapData, u32, Share>>,
    limits: Mutex<Array<MapData, Limits>>,
    finished: Mutex<Queue<MapData, Finished>>,
}

impl Connections {
    /// # Errors
    /// If a map is none of the kind, or cannot be read.
    pub fn new(
        records: Map,
        aliases: Map,
        shares: Map,
        limits: Map,
        finished: Map,
    ) -> Result<Self, DatapathError> {
        let connections = Self {
            records: Table::new(records, CONNECTIONS)?,
            aliases: Table::new(aliases, ALIASES)?,
            shares: Mutex::new(shares.try_into().map_err(error(SHARES, "opening"))?),
            limits: Mutex::new(limits.try_into().map_err(error(LIMITS, "opening"))?),
            finished: Mutex::new(finished.try_into().map_err(error(FINISHED, "opening"))?),
        };
        for payer in [HOST_SHARE, OUTSIDE_SHARE, OUTSIDE_DATAGRAMS, ALL_SHARES] {
            connections.start(payer)?;
        }
        Ok(connections)
    }

    /// Connections that there is room for.
    pub fn capacity(&self) -> u32 {
        self.records.raw.info().max_entries
    }

    pub fn set_limits(&self, limits: Limits) -> Result<(), DatapathError> {
        lock(&self.limits)
            .set(0, limits, 0)
            .map_err(error(LIMITS, "writing to"))
    }

    /// Takes out what was to make way by then, as a sweep has ended it: what is at the head is of use to the programs.
    ///
    /// # Errors
    /// If the queue cannot be read.
    pub fn forget_finished(&self, now_ns: u64) -> Result<(), DatapathError> {
        let mut finished = lock(&self.finished);
        for _ in 0..MAX_FINISHED {
            match finished.pop(0) {
                Ok(first) if first.from_ns > now_ns => {
                    return finished
                        .push(first, BPF_EXIST)
                        .map_err(error(FINISHED, "writing to"));
                }
                Ok(_) => {}
                Err(MapError::ElementNotFound) => break,
                Err(other) => return Err(error(FINISHED, "reading from")(other)),
            }
        }
        Ok(())
    }

    pub fn limits(&self) -> Result<Limits, DatapathError> {
        lock(&self.limits)
            .get(&0, 0)
            .map_err(error(LIMITS, "reading from"))
    }

    /// Begins to count what a pod's connections take; goes on where that is counted already.
    pub fn start(&self, payer: u32) -> Result<(), DatapathError> {
        const NEW: u64 = 1;
        match lock(&self.shares).insert(payer, Share::default(), NEW) {
            Err(MapError::SyscallError(error))
                if error.io_error.raw_os_error() == Some(libc::EEXIST) =>
            {
                Ok(())
            }
            other => other.map_err(error(SHARES, "writing to")),
        }
    }

    pub fn end(&self, payer: u32) -> Result<(), DatapathError> {
        removed(lock(&self.shares).remove(&payer)).map_err(error(SHARES, "removing from"))
    }

    pub fn share(&self, payer: u32) -> Result<Option<Share>, DatapathError> {
        found(lock(&self.shares).get(&payer, 0)).map_err(error(SHARES, "reading from"))
    }

    /// All shares, by the index of the pod's link; [`HOST_SHARE`], [`OUTSIDE_SHARE`] and [`ALL_SHARES`] among them.
    pub fn shares(&self) -> Result<Vec<(u32, Share)>, DatapathError> {
        let shares = lock(&self.shares);
        let all: Result<Vec<_>, MapError> = shares.iter().collect();
        all.map_err(error(SHARES, "reading from"))
    }

    /// Sets a count right that is there.
    ///
    /// `counted`: connections and embryonic ones, counted since it was `before`. What programs added meanwhile is
    /// added here, too, whether or not it was counted already: the next time tells.
    pub fn correct(
        &self,
        payer: u32,
        before: &Share,
        counted: (u64, u64),
    ) -> Result<(), DatapathError> {
        let mut shares = lock(&self.shares);
        let Some(now) = found(shares.get(&payer, 0)).map_err(error(SHARES, "reading from"))? else {
            return Ok(());
        };
        let moved = |counted: u64, now: u64, before: u64| {
            let since = now.wrapping_sub(before) as i64;
            counted.saturating_add_signed(since)
        };
        let share = Share {
            connections: moved(counted.0, now.connections, before.connections),
            embryonic: moved(counted.1, now.embryonic, before.embryonic),
            refused: now.refused,
        };
        if share == now {
            return Ok(());
        }
        shares
            .insert(payer, share, 0)
            .map_err(error(SHARES, "writing to"))
    }

    pub fn get(&self, key: &ConnectionKey) -> Result<Option<Connection>, DatapathError> {
        self.records.get(key)
    }

    pub fn alias(&self, key: &Tuple) -> Result<Option<Alias>, DatapathError> {
        self.aliases.get(key)
    }

    /// Removes a connection: the record, and then the aliases that lead to it.
    pub fn remove(
        &self,
        key: &ConnectionKey,
        connection: &Connection,
    ) -> Result<(), DatapathError> {
        self.records.remove(key)?;
        let aliases = [connection.alias(key), connection.service_alias(key)];
        for alias in aliases.into_iter().flatten() {
            if let Some(found) = self.aliases.get(&alias)?
                && leads_to(&alias, &found, key)
            {
                self.aliases.remove(&alias)?;
            }
        }
        self.mend(key)
    }

    /// Gives a record an alias back that was removed as the one of the record before: between the two steps of
    /// [`Self::remove`] a packet may begin the same connection again, by the alias that is still there. Where somebody else
    /// has the alias by now the record goes, and the next packet begins it once more.
    pub fn mend(&self, key: &ConnectionKey) -> Result<(), DatapathError> {
        let Some(connection) = self.records.get(key)? else {
            return Ok(());
        };
        let sent = connection.from_client(key);
        for (alias, addr, port) in [
            (connection.alias(key), sent.src, sent.src_port),
            (connection.service_alias(key), sent.dst, sent.dst_port),
        ] {
            let Some(alias) = alias else { continue };
            let own = Alias::to(addr, port);
            let is_there = match self.aliases.get(&alias)? {
                Some(found) => leads_to(&alias, &found, key),
                None => self.aliases.add(&alias, &own)?,
            };
            if !is_there {
                return self.records.remove(key);
            }
        }
        Ok(())
    }

    /// [`Self::mend`]s what lacks an alias, which no program leaves behind.
    pub fn mend_all(&self) -> Result<(), DatapathError> {
        let mut broken = Vec::new();
        let mut failed = None;
        self.for_each(|key, connection| match self.is_whole(&key, &connection) {
            Ok(true) => {}
            Ok(false) => broken.push(key),
            Err(error) => failed = Some(error),
        })?;
        failed.map_or(Ok(()), Err)?;
        broken.iter().try_for_each(|key| self.mend(key))
    }

    /// Whether all of a record's aliases lead to it.
    fn is_whole(
        &self,
        key: &ConnectionKey,
        connection: &Connection,
    ) -> Result<bool, DatapathError> {
        let aliases = [connection.alias(key), connection.service_alias(key)];
        for alias in aliases.into_iter().flatten() {
            let found = self.aliases.get(&alias)?;
            if !found.is_some_and(|found| leads_to(&alias, &found, key)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes a connection of a Service, unless either the alias or the record is somebody's or has no room; whether it was
    /// written.
    pub fn add_of_service(
        &self,
        key: &ConnectionKey,
        connection: &Connection,
    ) -> Result<bool, DatapathError> {
        let Some(alias) = connection.service_alias(key) else {
            return Ok(false);
        };
        let sent = connection.from_client(key);
        let to = Alias::to(sent.dst, sent.dst_port);
        if !self.aliases.add(&alias, &to)? {
            return Ok(false);
        }
        match self.records.add(key, connection) {
            Ok(true) => Ok(true),
            other => self.aliases.remove(&alias).and(other),
        }
    }

    /// Writes a connection that is not translated, unless there is one or no room; whether it was written.
    pub fn add_untranslated(
        &self,
        key: &ConnectionKey,
        connection: &Connection,
    ) -> Result<bool, DatapathError> {
        self.records.add(key, connection)
    }

    pub fn remove_alias(&self, key: &Tuple) -> Result<(), DatapathError> {
        self.aliases.remove(key)
    }

    /// What an alias is in the record that it leads to; nothing if there is none, or it has others.
    pub fn owner(&self, key: &Tuple, alias: &Alias) -> Result<Option<Owner>, DatapathError> {
        let record = key.to(alias.addr, alias.port).key().0;
        let Some(found) = self.records.get(&record)? else {
            return Ok(None);
        };
        Ok(if found.alias(&record) == Some(*key) {
            Some(Owner::Nat)
        } else if found.service_alias(&record) == Some(*key) {
            Some(Owner::Service)
        } else {
            None
        })
    }

    /// Calls `each` with every record; the map may be changed meanwhile, also by `each`.
    pub fn for_each(
        &self,
        each: impl FnMut(ConnectionKey, Connection),
    ) -> Result<(), DatapathError> {
        self.records.for_each(each)
    }

    /// Calls `each` with up to `count` records from a place on, and returns the place after them
    /// ([`RawMap::some`]).
    pub fn some(
        &self,
        from: Option<u32>,
        count: usize,
        each: impl FnMut(ConnectionKey, Connection),
    ) -> Result<Option<u32>, DatapathError> {
        let raw = &self.records.raw;
        raw.some_of(from, count, each)
            .map_err(|source| error(CONNECTIONS, "reading from")(MapError::from(source)))
    }

    /// [`Self::for_each`] of every alias.
    pub fn for_each_alias(&self, each: impl FnMut(Tuple, Alias)) -> Result<(), DatapathError> {
        self.aliases.for_each(each)
    }
}

/// What an alias is to its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Answers come by it to the address that the client has outside.
    Nat,
    /// The client's packets to a Service go by it.
    Service,
}

/// Whether a connection is the one that an alias is for.
fn leads_to(key: &Tuple, alias: &Alias, connection: &ConnectionKey) -> bool {
    key.to(alias.addr, alias.port).key().0 == *connection
}

/// A hash table, also read many entries at once.
struct Table<K, V> {
    name: &'static str,
    map: Mutex<HashMap<MapData, K, V>>,
    raw: RawMap,
}

impl<K: aya::Pod, V: aya::Pod> Table<K, V> {
    fn new(map: Map, name: &'static str) -> Result<Self, DatapathError> {
        let Map::HashMap(data) = &map else {
            return Err(DatapathError::Missing {
                what: "hash map",
                name,
            });
        };
        Ok(Self {
            name,
            raw: raw(data, name)?,
            map: Mutex::new(map.try_into().map_err(error(name, "opening"))?),
        })
    }

    fn get(&self, key: &K) -> Result<Option<V>, DatapathError> {
        found(lock(&self.map).get(key, 0)).map_err(error(self.name, "reading from"))
    }

    /// Writes an entry, unless there is one or no room; whether it was written.
    fn add(&self, key: &K, value: &V) -> Result<bool, DatapathError> {
        const NEW: u64 = 1;
        match lock(&self.map).insert(key, value, NEW) {
            Ok(()) => Ok(true),
            Err(MapError::SyscallError(refused))
                if matches!(
                    refused.io_error.raw_os_error(),
                    Some(libc::EEXIST | libc::E2BIG)
                ) =>
            {
                Ok(false)
            }
            Err(source) => Err(error(self.name, "writing to")(source)),
        }
    }

    fn remove(&self, key: &K) -> Result<(), DatapathError> {
        removed(lock(&self.map).remove(key)).map_err(error(self.name, "removing from"))
    }

    fn for_each(&self, each: impl FnMut(K, V)) -> Result<(), DatapathError> {
        self.raw
            .for_each_of(each)
            .map_err(|source| error(self.name, "reading from")(MapError::from(source)))
    }
}
