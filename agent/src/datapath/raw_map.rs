//! Maps by their bytes: of a layout that no type here stands for, or read many entries at once.

use super::sys::{self, MapInfo};
use std::{
    io,
    ops::AddAssign,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

const MAP_LOOKUP_ELEM: libc::c_int = 1;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_DELETE_ELEM: libc::c_int = 3;
const MAP_LOOKUP_BATCH: libc::c_int = 24;
const MAP_UPDATE_BATCH: libc::c_int = 26;

/// `enum bpf_map_type`.
const HASH: u32 = 1;
const ARRAY: u32 = 2;
const PERCPU_HASH: u32 = 5;
const PERCPU_ARRAY: u32 = 6;
const LRU_HASH: u32 = 9;
const LRU_PERCPU_HASH: u32 = 10;

/// `BPF_F_MMAPABLE`.
const MMAPABLE: u32 = 1 << 10;

/// Entries read at once: more than any hash bucket holds, else the kernel refuses.
const BATCH: usize = 4096;
/// The same where each has a value for each CPU. If a bucket holds more, it is tried with more.
const BATCH_PER_CPU: usize = 256;

/// A map, and the lengths of its keys and values.
pub struct RawMap {
    fd: OwnedFd,
    info: MapInfo,
    key_len: usize,
    value_len: usize,
}

/// Which entries may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    Any = 0,
    /// `BPF_NOEXIST`.
    New = 1,
}

/// Of the commands on one entry.
#[repr(C)]
struct Element {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Of the commands on many entries.
#[repr(C)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    elem_flags: u64,
    flags: u64,
}

impl RawMap {
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let info = sys::map_info(fd.as_fd())?;
        let value = info.value_size as usize;
        // A value for each CPU, each at a multiple of eight (`bpf_map_value_size`, kernel/bpf/syscall.c).
        let value_len = match info.map_type {
            PERCPU_HASH | PERCPU_ARRAY | LRU_PERCPU_HASH => {
                let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
                value.next_multiple_of(8) * cpus
            }
            _ => value,
        };
        Ok(Self {
            key_len: info.key_size as usize,
            value_len,
            fd,
            info,
        })
    }

    /// Opens what is pinned there, if it is a map.
    pub fn open(path: &Path) -> io::Result<Self> {
        let fd = sys::obj_get(path)?;
        match sys::kind(fd.as_fd())? {
            sys::Kind::Map => Self::new(fd),
            other => Err(io::Error::other(format!("it is not a map but {other:?}"))),
        }
    }

    pub fn info(&self) -> &MapInfo {
        &self.info
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether it is a hash table of plain values: what has another type cannot be read in whole, or
    /// its values stand for the kernel's own objects.
    pub fn is_table(&self) -> bool {
        matches!(self.info.map_type, HASH | PERCPU_HASH | LRU_HASH)
    }

    /// Whether it is an array that can be mapped into memory.
    pub fn is_mapped_array(&self) -> bool {
        self.info.map_type == ARRAY && self.info.map_flags & MMAPABLE != 0
    }

    /// A key's value.
    pub fn get(&self, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let mut value = vec![0; self.value_len];
        match self.element(MAP_LOOKUP_ELEM, key, &mut value, 0) {
            Ok(()) => Ok(Some(value)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes an entry; false if it is there and only new ones may be written.
    pub fn put(&self, key: &[u8], value: &[u8], which: Put) -> io::Result<bool> {
        let mut value = value.to_vec();
        match self.element(MAP_UPDATE_ELEM, key, &mut value, which as u64) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes an entry, if it is there.
    pub fn remove(&self, key: &[u8]) -> io::Result<()> {
        if key.len() != self.key_len {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut attr = Element {
            map: self.fd.as_raw_fd() as u32,
            pad: 0,
            key: key.as_ptr() as u64,
            // The command takes none.
            value: 0,
            flags: 0,
        };
        // SAFETY: the key has the length of the map's, as just checked, and outlives the call.
        match unsafe { sys::bpf(MAP_DELETE_ELEM, &mut attr) }.map(drop) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    /// A value of zeros, on all CPUs.
    pub fn zeros(&self) -> Vec<u8> {
        vec![0; self.value_len]
    }

    /// A key's values of all CPUs, added up.
    pub fn sum_of<V: aya::Pod + Default + AddAssign>(&self, key: &[u8]) -> io::Result<Option<V>> {
        self.must_hold(self.key_len, size_of::<V>())?;
        Ok(self.get(key)?.map(|values| sum(&values)))
    }

    /// Writes a key's value: this to the first CPU, zeros to all others.
    pub fn put_sum<V: aya::Pod>(&self, key: &[u8], sum: V) -> io::Result<()> {
        self.must_hold(self.key_len, size_of::<V>())?;
        let mut values = self.zeros();
        // SAFETY: the values of all CPUs are as long as one at least, as just checked, and take any bytes (`aya::Pod`).
        unsafe { values.as_mut_ptr().cast::<V>().write_unaligned(sum) };
        self.put(key, &values, Put::Any).map(drop)
    }

    /// Writes a key's value, the same to all CPUs.
    pub fn put_on_all<V: aya::Pod>(&self, key: &[u8], value: &V) -> io::Result<()> {
        self.must_hold(self.key_len, size_of::<V>())?;
        let mut values = self.zeros();
        for place in values.chunks_exact_mut(size_of::<V>().next_multiple_of(8)) {
            // SAFETY: as long as the type at least, of which all bytes are its fields' (`aya::Pod`).
            unsafe { place.as_mut_ptr().cast::<V>().write_unaligned(*value) };
        }
        self.put(key, &values, Put::Any).map(drop)
    }

    /// Calls `each` with every entry of a hash table that has a value for each CPU, those added up.
    pub fn for_each_sum<K: aya::Pod, V: aya::Pod + Default + AddAssign>(
        &self,
        mut each: impl FnMut(K, V),
    ) -> io::Result<()> {
        self.must_hold(size_of::<K>(), size_of::<V>())?;
        let mut from = None;
        loop {
            let read = |key: &[u8], values: &[u8]| {
                // SAFETY: a key is as long as the type, as just checked, which takes any bytes (`aya::Pod`).
                let key = unsafe { key.as_ptr().cast::<K>().read_unaligned() };
                each(key, sum(values));
            };
            from = self.some(from, BATCH_PER_CPU, read)?;
            if from.is_none() {
                return Ok(());
            }
        }
    }

    /// An error unless keys and the values of one CPU are so long.
    fn must_hold(&self, key: usize, value: usize) -> io::Result<()> {
        match (key, value) == (self.key_len, self.info.value_size as usize) {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn element(
        &self,
        command: libc::c_int,
        key: &[u8],
        value: &mut [u8],
        flags: u64,
    ) -> io::Result<()> {
        if (key.len(), value.len()) != (self.key_len, self.value_len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut attr = Element {
            map: self.fd.as_raw_fd() as u32,
            pad: 0,
            key: key.as_ptr() as u64,
            value: value.as_mut_ptr() as u64,
            flags,
        };
        // SAFETY: both have the lengths of the map's, as just checked, and outlive the call.
        unsafe { sys::bpf(command, &mut attr) }.map(drop)
    }

    /// Calls `each` with every entry of a hash table, which are read many at a time. Entries that come
    /// or go meanwhile may be missed; none is seen twice.
    pub fn for_each(&self, mut each: impl FnMut(&[u8], &[u8])) -> io::Result<()> {
        let mut from = None;
        loop {
            from = self.some(from, BATCH, &mut each)?;
            if from.is_none() {
                return Ok(());
            }
        }
    }

    /// Calls `each` with up to `count` entries of a hash table, those from a place on; returns the place after
    /// them, if there are more. A place stays what it is while the map changes, and needs nothing to be kept.
    /// Where more entries than that have one place, they come together.
    pub fn some(
        &self,
        from: Option<u32>,
        mut count: usize,
        mut each: impl FnMut(&[u8], &[u8]),
    ) -> io::Result<Option<u32>> {
        if !self.is_table() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        loop {
            let mut keys = vec![0u8; count * self.key_len];
            let mut values = vec![0u8; count * self.value_len];
            // The number of a bucket.
            let mut next = 0u32;
            let mut attr = Batch {
                in_batch: from
                    .as_ref()
                    .map_or(0, |from| std::ptr::from_ref(from) as u64),
                out_batch: std::ptr::from_mut(&mut next) as u64,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count: count as u32,
                map: self.fd.as_raw_fd() as u32,
                elem_flags: 0,
                flags: 0,
            };
            // SAFETY: both buffers have room for `count` entries of the map's own lengths; `from` and
            // `next` are as long as a hash table's position and outlive the call.
            let result = unsafe { sys::bpf(MAP_LOOKUP_BATCH, &mut attr) };
            let end = match result.map_err(|error| (error.raw_os_error(), error)) {
                Ok(_) => false,
                // The end; `count` entries came with it.
                Err((Some(libc::ENOENT), _)) => true,
                // A bucket has more.
                Err((Some(libc::ENOSPC), _)) if count < self.info.max_entries as usize => {
                    count *= 2;
                    continue;
                }
                Err((_, error)) => return Err(error),
            };
            let read = keys
                .chunks_exact(self.key_len)
                .zip(values.chunks_exact(self.value_len));
            let read = read.take(count.min(attr.count as usize));
            read.for_each(|(key, value)| each(key, value));
            return Ok((!end).then_some(next));
        }
    }

    /// Writes many entries of a table; how many of them it wrote, the first ones, and why no more.
    pub fn put_all<K: aya::Pod, V: aya::Pod>(
        &self,
        keys: &[K],
        values: &[V],
    ) -> (usize, io::Result<()>) {
        let fits = (size_of::<K>(), size_of::<V>()) == (self.key_len, self.value_len);
        if !fits || keys.len() != values.len() || !self.is_table() {
            return (0, Err(io::ErrorKind::InvalidInput.into()));
        }
        if keys.is_empty() {
            return (0, Ok(()));
        }
        let mut attr = Batch {
            in_batch: 0,
            out_batch: 0,
            keys: keys.as_ptr() as u64,
            values: values.as_ptr() as u64,
            count: keys.len() as u32,
            map: self.fd.as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        };
        // SAFETY: both have `count` entries of the map's own lengths, as just checked, and outlive the call.
        let result = unsafe { sys::bpf(MAP_UPDATE_BATCH, &mut attr) }.map(drop);
        // What the kernel could not begin says nothing of how many (`generic_map_update_batch`,
        // kernel/bpf/syscall.c), and writing an entry again does no harm.
        let written = match result {
            Ok(()) => keys.len(),
            Err(_) if (attr.count as usize) < keys.len() => attr.count as usize,
            Err(_) => 0,
        };
        (written, result)
    }

    /// [`Self::for_each`], typed.
    pub fn for_each_of<K: aya::Pod, V: aya::Pod>(
        &self,
        mut each: impl FnMut(K, V),
    ) -> io::Result<()> {
        self.for_each(self.typed(&mut each)?)
    }

    /// [`Self::some`], typed.
    pub fn some_of<K: aya::Pod, V: aya::Pod>(
        &self,
        from: Option<u32>,
        count: usize,
        mut each: impl FnMut(K, V),
    ) -> io::Result<Option<u32>> {
        self.some(from, count, self.typed(&mut each)?)
    }

    fn typed<K: aya::Pod, V: aya::Pod>(
        &self,
        each: &mut impl FnMut(K, V),
    ) -> io::Result<impl FnMut(&[u8], &[u8])> {
        if (size_of::<K>(), size_of::<V>()) != (self.key_len, self.value_len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(|key: &[u8], value: &[u8]| {
            // SAFETY: as long as the types, as just checked, which take any bytes (`aya::Pod`).
            let (key, value) = unsafe {
                (
                    key.as_ptr().cast::<K>().read_unaligned(),
                    value.as_ptr().cast::<V>().read_unaligned(),
                )
            };
            each(key, value);
        })
    }
}

/// Of the values of all CPUs, each at a multiple of eight.
fn sum<V: aya::Pod + Default + AddAssign>(values: &[u8]) -> V {
    let mut sum = V::default();
    for value in values.chunks_exact(size_of::<V>().next_multiple_of(8)) {
        // SAFETY: as long as the type at least, which takes any bytes (`aya::Pod`).
        sum += unsafe { value.as_ptr().cast::<V>().read_unaligned() };
    }
    sum
}

#[cfg(test)]
impl RawMap {
    /// Makes an empty map; `info.id` says nothing.
    pub fn create(info: &MapInfo) -> io::Result<Self> {
        const MAP_CREATE: libc::c_int = 0;
        let mut attr = [
            info.map_type,
            info.key_size,
            info.value_size,
            info.max_entries,
            info.map_flags,
        ];
        // SAFETY: the beginning of the command's structure, without pointers; the descriptor is new.
        let fd = unsafe { sys::bpf(MAP_CREATE, &mut attr).map(|fd| sys::own(fd)) };
        Self::new(fd?)
    }

    /// The same map by a descriptor of its own.
    pub fn again(&self) -> io::Result<Self> {
        Self::new(self.fd.try_clone()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn table(entries: u32) -> RawMap {
        let map = RawMap::create(&MapInfo {
            map_type: HASH,
            id: 0,
            key_size: 4,
            value_size: 4,
            max_entries: entries,
            map_flags: 0,
        })
        .unwrap();
        for n in 0..entries {
            let bytes = n.to_ne_bytes();
            map.put(&bytes, &bytes, Put::New).unwrap();
        }
        map
    }

    #[test]
    fn parts_are_the_whole_however_large_they_are() {
        let map = table(3000);
        // Smaller than what some bucket has, larger than the table.
        for count in [1, 2, 100, 5000] {
            let (mut seen, mut from) = (BTreeSet::new(), None);
            loop {
                from = map
                    .some_of(from, count, |key: u32, value: u32| {
                        assert_eq!(key, value);
                        assert!(seen.insert(key), "{key} comes twice");
                    })
                    .unwrap();
                if from.is_none() {
                    break;
                }
            }
            assert_eq!(seen, (0..3000).collect());
        }
    }

    /// A place comes from outside.
    #[test]
    fn a_place_beyond_the_end_is_an_error_or_the_end() {
        let map = table(10);
        for from in [4000, u32::MAX] {
            let mut seen = 0;
            let next = map.some_of(Some(from), 100, |_: u32, _: u32| seen += 1);
            assert!(matches!(next, Ok(None) | Err(_)), "{next:?}");
            assert_eq!(seen, 0);
        }
        let wrong = map.some_of(None, 100, |_: u64, _: u32| {});
        assert!(wrong.is_err());
    }
}
