//! The compiled programs: five objects, of this version or of another that ran on this node before.

use super::{DatapathError, maps::shape};
use aya::include_bytes_aligned;
use nix::unistd::{SysconfVar, sysconf};
use std::borrow::Cow;

static OBJECTS: [(&str, &[u8]); 5] = [
    (
        "pod",
        include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pod")),
    ),
    (
        "uplink",
        include_bytes_aligned!(concat!(env!("OUT_DIR"), "/uplink")),
    ),
    (
        "overlay",
        include_bytes_aligned!(concat!(env!("OUT_DIR"), "/overlay")),
    ),
    (
        "sock",
        include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sock")),
    ),
    (
        "service_sock",
        include_bytes_aligned!(concat!(env!("OUT_DIR"), "/service_sock")),
    ),
];

/// An object of this version.
pub fn object(name: &str) -> Result<&'static [u8], DatapathError> {
    let found = OBJECTS.iter().find(|(of, _)| *of == name);
    let built = found.filter(|(_, bytes)| !bytes.is_empty());
    built
        .map(|(_, bytes)| *bytes)
        .ok_or(DatapathError::NotBuilt)
}

/// Has nothing of them in this process's memory until somebody asks again, for whom they are in the file that this program
/// is. They are read when it starts, and by nobody who is in a hurry after that.
pub fn release() {
    let Ok(Some(page)) = sysconf(SysconfVar::PAGE_SIZE) else {
        return;
    };
    for (_, bytes) in &OBJECTS {
        let Some(pages) = whole_pages(bytes, page as usize) else {
            continue;
        };
        let (at, len) = (pages.as_ptr().cast_mut().cast(), pages.len());
        // SAFETY: whole pages of constants without addresses in them, so that neither the program nor its loader has written
        // to them: a private mapping of the program's file, of which the kernel gives what it gave before.
        let result = unsafe { libc::madvise(at, len, libc::MADV_DONTNEED) };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            tracing::debug!(%error, "the programs' objects stay in memory");
        }
    }
}

/// The part that has each of its pages for itself.
fn whole_pages(bytes: &[u8], page: usize) -> Option<&[u8]> {
    let before = bytes.as_ptr().addr().wrapping_neg() % page;
    let len = bytes.len().checked_sub(before)? / page * page;
    bytes.get(before..before + len)
}

/// Five ELF files, as the compiler made them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectFiles {
    /// Of the agent that they are part of.
    pub version: Cow<'static, str>,
    pub pod: Cow<'static, [u8]>,
    pub uplink: Cow<'static, [u8]>,
    pub overlay: Cow<'static, [u8]>,
    /// The TCP acceleration.
    pub sock: Cow<'static, [u8]>,
    /// Services at sockets.
    pub service_sock: Cow<'static, [u8]>,
    /// What they mean by the bytes of the maps ([`shape::layout`]).
    pub layout: u64,
}

impl ObjectFiles {
    /// Those of this version.
    pub fn current() -> Result<Self, DatapathError> {
        Ok(Self {
            version: env!("CARGO_PKG_VERSION").into(),
            pod: object("pod")?.into(),
            uplink: object("uplink")?.into(),
            overlay: object("overlay")?.into(),
            sock: object("sock")?.into(),
            service_sock: object("service_sock")?.into(),
            layout: shape::layout(),
        })
    }
}

/// For tests of refusals (`sinabro_common::fail_point::refused`): the first instruction of each
/// program of an object reads through a register that holds nothing, which no verifier accepts.
///
/// The places in the ELF64 header and in its section headers are those of elf(5).
pub fn spoil(object: &mut Cow<'static, [u8]>) {
    let elf = object.to_mut();
    /// `r0 = *(u32 *)(r0 + 0)`, RFC 9669 section 5.3.
    const UNREADABLE: [u8; 8] = [0x61, 0, 0, 0, 0, 0, 0, 0];
    /// The opcode of the one instruction that takes the place of two (section 5.4).
    const WIDE: u8 = 0x18;
    const SHF_EXECINSTR: u64 = 4;
    let u16_at = |elf: &[u8], at: usize| Some(u16::from_le_bytes(*elf.get(at..)?.first_chunk()?));
    let u64_at = |elf: &[u8], at: usize| Some(u64::from_le_bytes(*elf.get(at..)?.first_chunk()?));
    let sections = u16_at(elf, 60).unwrap_or(0);
    let mut section = |number: usize| -> Option<()> {
        let size = usize::from(u16_at(elf, 58)?);
        let header = usize::try_from(u64_at(elf, 40)?).ok()? + number * size;
        let (flags, length) = (u64_at(elf, header + 8)?, u64_at(elf, header + 32)?);
        if flags & SHF_EXECINSTR != 0 && length > 0 {
            let code = usize::try_from(u64_at(elf, header + 24)?).ok()?;
            let places = if *elf.get(code)? == WIDE { 2 } else { 1 };
            let first = elf.get_mut(code..code + places * UNREADABLE.len())?;
            for place in first.chunks_exact_mut(UNREADABLE.len()) {
                place.copy_from_slice(&UNREADABLE);
            }
        }
        Some(())
    };
    for number in 0..usize::from(sections) {
        section(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, os::unix::fs::FileExt as _};

    #[test]
    fn whole_pages_are_within() {
        let bytes = vec![0; 5 * 64];
        let first = bytes.as_ptr().addr().next_multiple_of(64) - bytes.as_ptr().addr();
        let of = |from: usize, to: usize| {
            let pages = whole_pages(&bytes[first + from..first + to], 64)?;
            let at = pages.as_ptr().addr() - bytes.as_ptr().addr() - first;
            Some((at, at + pages.len()))
        };
        assert_eq!(of(0, 128), Some((0, 128)));
        assert_eq!(of(0, 127), Some((0, 64)));
        assert_eq!(of(1, 192), Some((64, 192)));
        assert_eq!(of(1, 127), Some((64, 64)));
        assert_eq!(of(1, 63), None);
    }

    /// How many pages of all objects are in this process's memory, and how many there are (`pagemap`, bit 63 of each).
    fn in_memory() -> (usize, usize) {
        let page = sysconf(SysconfVar::PAGE_SIZE).unwrap().unwrap() as usize;
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let (mut present, mut all) = (0, 0);
        for (_, bytes) in &OBJECTS {
            let pages = whole_pages(bytes, page).unwrap_or_default();
            let first = pages.as_ptr().addr() / page;
            for number in first..first + pages.len() / page {
                let mut entry = [0; 8];
                pagemap
                    .read_exact_at(&mut entry, number as u64 * 8)
                    .unwrap();
                present += (u64::from_ne_bytes(entry) >> 63) as usize;
                all += 1;
            }
        }
        (present, all)
    }

    #[test]
    fn objects_that_were_released_are_in_the_file_alone_and_the_same_when_they_are_read() {
        // Other tests may read them meanwhile, and the kernel maps what is around a page with it.
        const TURNS: usize = 100;
        let copies = OBJECTS.map(|(_, bytes)| bytes.to_vec());
        let mut last = None;
        for _ in 0..TURNS {
            // All are read by that.
            assert!(OBJECTS.iter().map(|(_, bytes)| *bytes).eq(&copies));
            let (before, all) = in_memory();
            release();
            let (after, _) = in_memory();
            if before == all && after <= all / 10 {
                assert!(OBJECTS.iter().map(|(_, bytes)| *bytes).eq(&copies));
                return;
            }
            last = Some((before, after, all));
        }
        panic!("before, after, of: {last:?}");
    }
}
