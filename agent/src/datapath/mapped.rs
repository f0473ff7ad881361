//! Arrays of maps in this process's memory (`BPF_F_MMAPABLE`, Linux 5.5): read and written without a system call, and
//! each eight bytes of them at once.
//!
//! An array is there in windows, each from when something in it is looked at until [`Mapped::release`]: the kernel counts
//! all pages of a mapping as this process's memory at once (`remap_vmalloc_range`), and most of an array is room
//! for more or what nothing is done with for hours.

use super::raw_map::RawMap;
use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    ptr::{self, NonNull},
    sync::{
        PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
};

/// Bytes that are read and written at once.
const WORD: usize = size_of::<u64>();
/// Entries of a window: of the shortest as many bytes as the largest page has, where mappings begin.
const ENTRIES: u32 = (64 << 10) / WORD as u32;

/// An array. Words are in host order, as the programs on this machine read them.
pub struct Mapped {
    map: RawMap,
    windows: Box<[RwLock<Option<Window>>]>,
    entries: u32,
    /// Words of each entry: the kernel begins each at a multiple of eight bytes (`array_map_alloc`,
    /// kernel/bpf/arraymap.c).
    stride: usize,
}

/// Some of its entries.
struct Window {
    words: NonNull<AtomicU64>,
    /// How many words.
    count: usize,
}

// SAFETY: shared memory that is touched by atomic operations alone, and unmapped by its only owner.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Mapped {
    /// # Errors
    /// If it is no array that can be mapped.
    pub fn new(map: RawMap) -> io::Result<Self> {
        let entries = map.info().max_entries;
        let windows = entries.div_ceil(ENTRIES) as usize;
        let mapped = Self {
            windows: (0..windows).map(|_| RwLock::default()).collect(),
            entries,
            stride: (map.info().value_size as usize).div_ceil(WORD),
            map,
        };
        // What can be mapped at all can be later.
        if windows > 0 {
            mapped.window(0)?;
        }
        Ok(mapped)
    }

    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// A word of an entry; none beyond the end.
    pub fn load(&self, index: u32, word: usize) -> Option<u64> {
        self.with(index, word, |word| word.load(Ordering::Acquire))
    }

    /// Stores a word after everything that was stored before; false beyond the end.
    pub fn store(&self, index: u32, word: usize, value: u64) -> bool {
        let stored = self.with(index, word, |word| word.store(value, Ordering::Release));
        stored.is_some()
    }

    /// Has nothing of it in this process's memory, until something is looked at again.
    pub fn release(&self) {
        for window in &self.windows {
            let mut window = window.write().unwrap_or_else(PoisonError::into_inner);
            *window = None;
        }
    }

    /// Calls `each` with the words of every entry that has any but zero. What was not looked at before is in memory no
    /// longer than that.
    ///
    /// # Errors
    /// If a window cannot be mapped.
    pub fn for_each(&self, mut each: impl FnMut(u32, &[u64])) -> io::Result<()> {
        let mut words = vec![0; self.stride];
        for (number, known) in (0..).zip(&self.windows) {
            let (known, passing) = (read(known), &mut None);
            let window = match &*known {
                Some(window) => window,
                None => passing.insert(self.window(number)?),
            };
            let first = number * ENTRIES;
            for index in first..self.entries.min(first.saturating_add(ENTRIES)) {
                let at = (index - first) as usize * self.stride;
                for (word, copy) in words.iter_mut().enumerate() {
                    *copy = window.word(at + word).load(Ordering::Acquire);
                }
                if words.iter().any(|word| *word != 0) {
                    each(index, &words);
                }
            }
        }
        Ok(())
    }

    /// Stores what another one has; false if not all of that has a place here.
    ///
    /// # Errors
    /// If the other one cannot be read.
    pub fn copy(&self, other: &Self) -> io::Result<bool> {
        let mut fits = other.stride == self.stride;
        other.for_each(|index, words| {
            for (word, value) in words.iter().enumerate() {
                fits &= self.store(index, word, *value);
            }
        })?;
        Ok(fits)
    }

    /// # Panics
    /// If the window is not there and the kernel has no memory for its page tables: going on without what was to be stored
    /// would leave half a change.
    fn with<T>(&self, index: u32, word: usize, f: impl FnOnce(&AtomicU64) -> T) -> Option<T> {
        if index >= self.entries || word >= self.stride {
            return None;
        }
        let (number, first) = (index / ENTRIES, index % ENTRIES);
        let at = first as usize * self.stride + word;
        let known = self.windows.get(number as usize)?;
        if let Some(window) = &*read(known) {
            return Some(f(window.word(at)));
        }
        let mut known = known.write().unwrap_or_else(PoisonError::into_inner);
        let window = known.get_or_insert_with(|| match self.window(number) {
            Ok(window) => window,
            Err(error) => panic!("cannot map a part of an array into memory: {error}"),
        });
        Some(f(window.word(at)))
    }

    /// Maps one that has at least an entry.
    fn window(&self, number: u32) -> io::Result<Window> {
        let first = number * ENTRIES;
        let entries = ENTRIES.min(self.entries - first);
        let offset = first as usize * self.stride * WORD;
        Window::new(self.map.fd(), offset, entries as usize * self.stride)
    }
}

/// What is inside is whole whatever panics.
fn read(window: &RwLock<Option<Window>>) -> RwLockReadGuard<'_, Option<Window>> {
    window.read().unwrap_or_else(PoisonError::into_inner)
}

impl Window {
    fn new(map: BorrowedFd<'_>, offset: usize, count: usize) -> io::Result<Self> {
        let offset = offset.try_into().map_err(io::Error::other)?;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                count * WORD,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                offset,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let words = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { words, count })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.count, "a word beyond its window");
        // SAFETY: inside of the mapping, as just checked, which begins at a page and lives as long as this.
        unsafe { self.words.add(at).as_ref() }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nobody has a reference into any more.
        unsafe { libc::munmap(self.words.as_ptr().cast(), self.count * WORD) };
    }
}

#[cfg(test)]
mod tests {
    use super::{super::sys::MapInfo, *};

    /// Bytes of maps in this process's memory; what there is of the program is none (smaps, proc_pid_smaps(5)).
    fn in_memory() -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut of_map, mut kib) = (false, 0);
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("Rss:") if of_map => {
                    kib += words.next().unwrap().parse::<usize>().unwrap();
                }
                Some(word) if !word.ends_with(':') => of_map = line.ends_with("bpf-map"),
                _ => {}
            }
        }
        kib << 10
    }

    fn array(entries: u32, value_size: u32) -> Mapped {
        const ARRAY: u32 = 2;
        const MMAPABLE: u32 = 1 << 10;
        let map = RawMap::create(&MapInfo {
            map_type: ARRAY,
            id: 0,
            key_size: 4,
            value_size,
            max_entries: entries,
            map_flags: MMAPABLE,
        });
        Mapped::new(map.unwrap()).unwrap()
    }

    #[test]
    fn entries_are_what_the_kernel_has_on_both_sides_of_windows() {
        for entries in [1, ENTRIES - 1, ENTRIES, ENTRIES + 1, 3 * ENTRIES + 5] {
            let array = array(entries, 24);
            let some = [0, 1, ENTRIES - 1, ENTRIES, 2 * ENTRIES, entries - 1];
            let some: std::collections::BTreeSet<u32> =
                some.into_iter().filter(|at| *at < entries).collect();
            for index in &some {
                for word in 0..3 {
                    assert!(array.store(*index, word, u64::from(*index) * 3 + word as u64 + 1));
                }
            }
            let words = |index: u32| [1, 2, 3].map(|word| u64::from(index) * 3 + word);
            for index in &some {
                let kernels = array.map.get(&index.to_ne_bytes()).unwrap().unwrap();
                let own = words(*index).map(u64::to_ne_bytes).concat();
                assert_eq!(kernels, own, "{index} of {entries}");
                assert_eq!(array.load(*index, 2), Some(words(*index)[2]));
            }
            let mut found = Vec::new();
            let each = |index, seen: &[u64]| {
                assert_eq!(seen, words(index));
                found.push(index);
            };
            array.for_each(each).unwrap();
            assert!(found.iter().eq(&some), "{found:?}");
            assert!(array.load(entries, 0).is_none() && !array.store(entries, 0, 1));
            assert!(array.load(0, 3).is_none());
        }
    }

    /// In a process of its own: what others look at at the same time is in the same figure.
    #[test]
    fn what_is_not_looked_at_takes_no_memory() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let test = "datapath::mapped::tests::child_looks_at_little";
        let run = child.args(["--exact", test, "--ignored", "--nocapture"]);
        let run = run.output().unwrap();
        let said = [run.stdout, run.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(run.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "run by what_is_not_looked_at_takes_no_memory in a process of its own"]
    fn child_looks_at_little() {
        // 24 MiB.
        let array = array(1 << 20, 24);
        array.for_each(|_, _| {}).unwrap();
        assert!(array.store(1 << 19, 0, 1));
        // One window.
        let window = ENTRIES as usize * 24;
        assert_eq!(in_memory(), window);

        for index in 0..1 << 20 {
            assert!(array.store(index, 1, 7));
        }
        assert_eq!(in_memory(), 24 << 20);
        array.release();
        assert_eq!(in_memory(), 0);
        assert_eq!(array.load(1 << 19, 0), Some(1));
        assert_eq!(array.load((1 << 20) - 1, 1), Some(7));
    }
}
