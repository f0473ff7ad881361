//! The compiled programs: five objects, of this version or of another that ran on this node before.

use super::{DatapathError, maps::shape};
use aya::include_bytes_aligned;
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
