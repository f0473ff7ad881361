//! `FRONTENDS`, `SETS`, `SLOTS`, `BACKENDS`, `SOURCE_RANGES` and `SERVICE_RANGES`: entries, in whatever order the caller writes
//! them. The order that no packet falls into is in `sinabro_common::abi::service`. The arrays are in the agent's memory while it
//! changes them: what is written there costs no system call.

use super::{Prefix, error, lock, raw, removed};
use crate::datapath::{DatapathError, ServiceRoom, mapped::Mapped, raw_map::RawMap};
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, lpm_trie::Key};
use sinabro_common::abi::{
    Addr,
    service::{Backend, Frontend, FrontendKey, RangeOf, Set, Slot, SourceKey},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::{Mutex, MutexGuard},
};

const FRONTENDS: &str = "FRONTENDS";
const SETS: &str = "SETS";
const SLOTS: &str = "SLOTS";
const BACKENDS: &str = "BACKENDS";
const SOURCE_RANGES: &str = "SOURCE_RANGES";
const SERVICE_RANGES: &str = "SERVICE_RANGES";

/// What Services lead to.
pub struct Services {
    frontends: Mutex<HashMap<MapData, FrontendKey, Frontend>>,
    all_frontends: RawMap,
    sets: Mapped,
    slots: Mapped,
    backends: Mapped,
    sources: Mutex<LpmTrie<MapData, SourceKey, u8>>,
    source_room: u32,
    ranges: Mutex<LpmTrie<MapData, Addr, RangeOf>>,
}

impl Services {
    pub(super) fn new(
        mut take: impl FnMut(&'static str) -> Result<Map, DatapathError>,
    ) -> Result<Self, DatapathError> {
        let frontends = match take(FRONTENDS)? {
            Map::HashMap(data) => data,
            _ => return Err(wrong(FRONTENDS)),
        };
        let sources = match take(SOURCE_RANGES)? {
            Map::LpmTrie(data) => data,
            _ => return Err(wrong(SOURCE_RANGES)),
        };
        Ok(Self {
            source_room: raw(&sources, SOURCE_RANGES)?.info().max_entries,
            sources: Mutex::new(
                Map::LpmTrie(sources)
                    .try_into()
                    .map_err(error(SOURCE_RANGES, "opening"))?,
            ),
            all_frontends: raw(&frontends, FRONTENDS)?,
            frontends: Mutex::new(
                Map::HashMap(frontends)
                    .try_into()
                    .map_err(error(FRONTENDS, "opening"))?,
            ),
            sets: mapped::<Set>(take(SETS)?, SETS)?,
            slots: mapped::<Slot>(take(SLOTS)?, SLOTS)?,
            backends: mapped::<Backend>(take(BACKENDS)?, BACKENDS)?,
            ranges: Mutex::new(
                take(SERVICE_RANGES)?
                    .try_into()
                    .map_err(error(SERVICE_RANGES, "opening"))?,
            ),
        })
    }

    /// Empty ones that no program knows.
    #[cfg(test)]
    pub fn apart(room: &ServiceRoom) -> Result<Self, DatapathError> {
        use crate::datapath::maps::shape;
        let config = crate::datapath::DatapathConfig {
            services: room.clone(),
            ..Default::default()
        };
        let expected = shape::expected(&config);
        Self::new(|name| {
            let of = |source: std::io::Error| error(name, "making")(source.into());
            let found = expected.iter().find(|map| map.shape.name == name);
            let info = found.ok_or(DatapathError::Missing { what: "map", name })?;
            let map = RawMap::create(&info.shape.info()).map_err(of)?;
            let fd = map.fd().try_clone_to_owned().map_err(of)?;
            let data = MapData::from_fd(fd).map_err(error(name, "opening"))?;
            Map::from_map_data(data).map_err(error(name, "opening"))
        })
    }

    /// How many entries the maps have room for.
    pub fn room(&self) -> ServiceRoom {
        ServiceRoom {
            frontends: self.all_frontends.info().max_entries,
            sets: self.sets.entries(),
            slots: self.slots.entries(),
            backends: self.backends.entries(),
        }
    }

    /// Has no more of the arrays in this process's memory than is looked at from now on.
    pub fn release_memory(&self) {
        for array in [&self.sets, &self.slots, &self.backends] {
            array.release();
        }
    }

    /// # Errors
    /// If there is no room for another, or the kernel refuses.
    pub fn put_frontend(&self, key: FrontendKey, frontend: Frontend) -> Result<(), DatapathError> {
        let put = self.locked().insert(key, frontend, 0);
        put.map_err(error(FRONTENDS, "writing to"))
    }

    /// Puts many; how many of them, the first ones, and why no more.
    pub fn put_frontends(
        &self,
        keys: &[FrontendKey],
        frontends: &[Frontend],
    ) -> (usize, Result<(), DatapathError>) {
        let _locked = self.locked();
        let (written, result) = self.all_frontends.put_all(keys, frontends);
        let result = result.map_err(|source| error(FRONTENDS, "writing to")(source.into()));
        (written, result)
    }

    pub fn remove_frontend(&self, key: &FrontendKey) -> Result<(), DatapathError> {
        removed(self.locked().remove(key)).map_err(error(FRONTENDS, "removing from"))
    }

    pub fn frontends(&self) -> Result<Vec<(FrontendKey, Frontend)>, DatapathError> {
        let _locked = self.locked();
        let mut all = Vec::new();
        self.all_frontends
            .for_each_of(|key, frontend| all.push((key, frontend)))
            .map_err(|source| error(FRONTENDS, "reading from")(source.into()))?;
        Ok(all)
    }

    /// How many ranges of clients there is room for.
    pub fn source_room(&self) -> u32 {
        self.source_room
    }

    /// All, by the number of the Service's port.
    pub fn sources(&self) -> Result<Vec<(u32, Prefix)>, DatapathError> {
        let sources = lock(&self.sources);
        let all = sources.keys().map(|key| {
            let key = key?;
            let SourceKey { service, client } = key.data();
            Ok((
                service,
                (
                    key.prefix_len().saturating_sub(SourceKey::bits_of(0)),
                    client.0,
                ),
            ))
        });
        let all: Result<_, aya::maps::MapError> = all.collect();
        all.map_err(error(SOURCE_RANGES, "reading from"))
    }

    /// Lets these clients use the guarded frontends of a Service's port.
    pub fn put_source(&self, service: u32, clients: &Prefix) -> Result<(), DatapathError> {
        let put = lock(&self.sources).insert(&source(service, clients), 1, 0);
        put.map_err(error(SOURCE_RANGES, "writing to"))
    }

    pub fn remove_source(&self, service: u32, clients: &Prefix) -> Result<(), DatapathError> {
        let removal = lock(&self.sources).remove(&source(service, clients));
        removed(removal).map_err(error(SOURCE_RANGES, "removing from"))
    }

    /// Has nobody be at these addresses unless a Service is, but for those that somebody else translates.
    ///
    /// # Errors
    /// If the kernel refuses, or there is no room; then nothing more is taken for nobody's than was before or is wanted.
    pub fn set_ranges(
        &self,
        ranges: &BTreeSet<Prefix>,
        of_others: &BTreeSet<Prefix>,
    ) -> Result<(), DatapathError> {
        let mut map = lock(&self.ranges);
        let all: Result<Vec<_>, _> = map.iter().collect();
        let before: BTreeMap<Prefix, RangeOf> = all
            .map_err(error(SERVICE_RANGES, "reading from"))?
            .into_iter()
            .map(|(key, kind)| ((key.prefix_len(), key.data().0), kind))
            .collect();
        let key = |(len, addr): &Prefix| Key::new(*len, Addr(*addr));
        let wanted = |prefix: &Prefix| match of_others.contains(prefix) {
            true => Some(RangeOf::OTHERS),
            false => ranges.contains(prefix).then_some(RangeOf::SERVICES),
        };
        // First what says that nobody is there, last what says it anew: in between that is said of less.
        let gone = |kind: RangeOf| {
            let old = before.iter().filter(move |(_, found)| **found == kind);
            old.filter(|(prefix, _)| wanted(prefix).is_none())
        };
        let mut remove = |prefix: &Prefix| {
            removed(map.remove(&key(prefix))).map_err(error(SERVICE_RANGES, "removing from"))
        };
        gone(RangeOf::SERVICES).try_for_each(|(prefix, _)| remove(prefix))?;
        for prefix in of_others.iter().chain(ranges) {
            if let Some(kind) = wanted(prefix)
                && before.get(prefix) != Some(&kind)
            {
                map.insert(&key(prefix), kind, 0)
                    .map_err(error(SERVICE_RANGES, "writing to"))?;
            }
        }
        let mut remove = |prefix: &Prefix| {
            removed(map.remove(&key(prefix))).map_err(error(SERVICE_RANGES, "removing from"))
        };
        gone(RangeOf::OTHERS).try_for_each(|(prefix, _)| remove(prefix))
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<MapData, FrontendKey, Frontend>> {
        lock(&self.frontends)
    }

    /// Changes it at once. All that was written before is seen by whoever sees it.
    pub fn put_set(&self, index: u32, set: Set) -> Result<(), DatapathError> {
        let put = self.sets.store(index, 0, set.0);
        inside(put.then_some(()), SETS, index, "writing to")
    }

    pub fn set(&self, index: u32) -> Result<Set, DatapathError> {
        inside(
            self.sets.load(index, 0).map(Set),
            SETS,
            index,
            "reading from",
        )
    }

    pub fn put_slots(&self, base: u32, slots: &[Slot]) -> Result<(), DatapathError> {
        (base..).zip(slots).try_for_each(|(index, slot)| {
            // SAFETY: as many bytes, without padding, and any make a word.
            let word = unsafe { mem::transmute::<Slot, u64>(*slot) };
            let put = self.slots.store(index, 0, word);
            inside(put.then_some(()), SLOTS, index, "writing to")
        })
    }

    pub fn slot(&self, index: u32) -> Result<Slot, DatapathError> {
        let word = self.slots.load(index, 0);
        // SAFETY: as many bytes, any of which are a slot.
        let slot = word.map(|word| unsafe { mem::transmute::<u64, Slot>(word) });
        inside(slot, SLOTS, index, "reading from")
    }

    /// Where the address differs from the one that was there, the generation has to differ, too: nobody sees one of them
    /// with the other's.
    pub fn put_backend(&self, id: u32, backend: Backend) -> Result<(), DatapathError> {
        // SAFETY: as many bytes, without padding, and any make words.
        let words = unsafe { mem::transmute::<Backend, [u64; 3]>(backend) };
        let of_addr = |word| self.backends.load(id, word) == Some(words[word]);
        let put = (of_addr(0) && of_addr(1)) || {
            let nobody = Backend {
                port: [0; 2],
                flags: 0,
                ..backend
            };
            // SAFETY: as above.
            let nobody = unsafe { mem::transmute::<Backend, [u64; 3]>(nobody) };
            // The last word has the generation.
            self.backends.store(id, 2, nobody[2])
                && self.backends.store(id, 0, words[0])
                && self.backends.store(id, 1, words[1])
        };
        let put = put && self.backends.store(id, 2, words[2]);
        inside(put.then_some(()), BACKENDS, id, "writing to")
    }

    pub fn backend(&self, id: u32) -> Result<Backend, DatapathError> {
        let word = |word| self.backends.load(id, word);
        let words = || Some([word(0)?, word(1)?, word(2)?]);
        // SAFETY: as many bytes, any of which are an endpoint.
        let backend = words().map(|words| unsafe { mem::transmute::<[u64; 3], Backend>(words) });
        inside(backend, BACKENDS, id, "reading from")
    }

    /// Calls `each` with all that were ever written, by their ids in order.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn for_each_backend(
        &self,
        mut each: impl FnMut(u32, Backend),
    ) -> Result<(), DatapathError> {
        let each = |id, words: &[u64]| {
            if let [one, two, three] = *words {
                // SAFETY: as many bytes, any of which are an endpoint.
                each(id, unsafe {
                    mem::transmute::<[u64; 3], Backend>([one, two, three])
                });
            }
        };
        let read = self.backends.for_each(each);
        read.map_err(|source| error(BACKENDS, "reading from")(source.into()))
    }
}

fn source(service: u32, (len, addr): &Prefix) -> Key<SourceKey> {
    let client = Addr(*addr);
    Key::new(SourceKey::bits_of(*len), SourceKey { service, client })
}

fn wrong(name: &'static str) -> DatapathError {
    let what = "map of the right type";
    DatapathError::Missing { what, name }
}

/// An array with values of that type.
fn mapped<T: aya::Pod>(map: Map, name: &'static str) -> Result<Mapped, DatapathError> {
    // It checks the lengths of keys and values.
    Array::<_, T>::try_from(&map).map_err(error(name, "opening"))?;
    let Map::Array(data) = map else {
        return Err(wrong(name));
    };
    Mapped::new(raw(&data, name)?)
        .map_err(|source| error(name, "mapping into memory")(source.into()))
}

fn inside<T>(
    value: Option<T>,
    name: &'static str,
    index: u32,
    what: &'static str,
) -> Result<T, DatapathError> {
    let beyond = || {
        // The kernel's own word for it.
        let source = std::io::Error::from_raw_os_error(libc::E2BIG);
        tracing::debug!(map = name, index, "beyond the end");
        error(name, what)(source.into())
    };
    value.ok_or_else(beyond)
}
