//! Arrays of maps in this process's memory (`BPF_F_MMAPABLE`, Linux 5.5): read and written without a system call, and
//! each eight bytes of them at once.

use super::raw_map::RawMap;
use std::{
    io,
    os::fd::AsRawFd as _,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
};

/// Bytes that are read and written at once.
const WORD: usize = size_of::<u64>();

/// An array. Words are in host order, as the programs on this machine read them.
pub struct Mapped {
    words: NonNull<AtomicU64>,
    entries: u32,
    /// Words of each entry: the kernel begins each at a multiple of eight bytes (`array_map_alloc`,
    /// kernel/bpf/arraymap.c).
    stride: usize,
    len: usize,
}

// SAFETY: shared memory that is touched by atomic operations alone, and unmapped by its only owner.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// # Errors
    /// If it is no array that can be mapped.
    pub fn new(map: &RawMap) -> io::Result<Self> {
        let info = map.info();
        let stride = (info.value_size as usize).div_ceil(WORD);
        let len = stride * WORD * info.max_entries as usize;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.fd().as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let words = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            words,
            entries: info.max_entries,
            stride,
            len,
        })
    }

    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// A word of an entry; none beyond the end.
    pub fn load(&self, index: u32, word: usize) -> Option<u64> {
        self.word(index, word)
            .map(|word| word.load(Ordering::Acquire))
    }

    /// Stores a word after everything that was stored before; false beyond the end.
    pub fn store(&self, index: u32, word: usize, value: u64) -> bool {
        let word = self.word(index, word);
        word.is_some_and(|word| {
            word.store(value, Ordering::Release);
            true
        })
    }

    fn word(&self, index: u32, word: usize) -> Option<&AtomicU64> {
        let inside = index < self.entries && word < self.stride;
        // SAFETY: inside of the mapping, as just checked, which begins at a page and lives as long as this.
        inside.then(|| unsafe { self.words.add(index as usize * self.stride + word).as_ref() })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nobody has a reference into any more.
        unsafe { libc::munmap(self.words.as_ptr().cast(), self.len) };
    }
}
