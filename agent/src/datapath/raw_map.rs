//! Maps by their bytes: of a layout that no type here stands for, or read many entries at once.

use super::sys::{self, MapInfo};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

const MAP_CREATE: libc::c_int = 0;
const MAP_LOOKUP_ELEM: libc::c_int = 1;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_LOOKUP_BATCH: libc::c_int = 24;

/// `enum bpf_map_type`.
const HASH: u32 = 1;
const PERCPU_HASH: u32 = 5;
const PERCPU_ARRAY: u32 = 6;
const LRU_HASH: u32 = 9;
const LRU_PERCPU_HASH: u32 = 10;

/// Entries read at once: more than any hash bucket holds, else the kernel refuses.
const BATCH: usize = 4096;

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

    /// Makes an empty map; `info.id` says nothing.
    pub fn create(info: &MapInfo) -> io::Result<Self> {
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

    fn element(
        &self,
        command: libc::c_int,
        key: &[u8],
        value: &mut [u8],
        flags: u64,
    ) -> io::Result<()> {
        #[repr(C)]
        struct Attr {
            map: u32,
            pad: u32,
            key: u64,
            value: u64,
            flags: u64,
        }
        if (key.len(), value.len()) != (self.key_len, self.value_len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut attr = Attr {
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
        #[repr(C)]
        struct Attr {
            in_batch: u64,
            out_batch: u64,
            keys: u64,
            values: u64,
            count: u32,
            map: u32,
            elem_flags: u64,
            flags: u64,
        }
        if !self.is_table() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut keys = vec![0u8; BATCH * self.key_len];
        let mut values = vec![0u8; BATCH * self.value_len];
        // Where the walk goes on: the number of a bucket.
        let mut next = 0u32;
        let mut first = true;
        loop {
            let from = next;
            let mut attr = Attr {
                in_batch: if first {
                    0
                } else {
                    std::ptr::from_ref(&from) as u64
                },
                out_batch: std::ptr::from_mut(&mut next) as u64,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count: BATCH as u32,
                map: self.fd.as_raw_fd() as u32,
                elem_flags: 0,
                flags: 0,
            };
            // SAFETY: both buffers have room for `count` entries of the map's own lengths; `from` and
            // `next` are as long as a hash table's position and outlive the call.
            let result = unsafe { sys::bpf(MAP_LOOKUP_BATCH, &mut attr) };
            let end = match result {
                Ok(_) => false,
                // The end; `count` entries came with it.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                Err(error) => return Err(error),
            };
            let count = (attr.count as usize).min(BATCH);
            let read = keys
                .chunks_exact(self.key_len)
                .zip(values.chunks_exact(self.value_len));
            read.take(count).for_each(|(key, value)| each(key, value));
            if end {
                return Ok(());
            }
            first = false;
        }
    }

    /// The same, typed.
    pub fn for_each_of<K: aya::Pod, V: aya::Pod>(
        &self,
        mut each: impl FnMut(K, V),
    ) -> io::Result<()> {
        if (size_of::<K>(), size_of::<V>()) != (self.key_len, self.value_len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.for_each(|key, value| {
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
