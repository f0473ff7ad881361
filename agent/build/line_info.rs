//! Takes line information out of `.BTF.ext` (Documentation/bpf/btf.rst): a quarter of an object, which the kernel keeps for each program, for
//! the source lines in a verifier's log.

use super::globals::word;
use anyhow::{Context as _, ensure};

/// `struct btf_ext_header`: magic, version, flags, length of the header; then offset and length of each part, counted from the header's end.
const PARTS: usize = 8;
const LENGTH_AT: usize = 4;
const LINE_INFO: usize = 1;

/// The section without it. Other parts stay as they are.
///
/// # Errors
/// If it is malformed.
pub fn without(section: &[u8]) -> anyhow::Result<Vec<u8>> {
    let number = |at| word(section, at).map(|number| number as usize);
    let header = number(LENGTH_AT)?;
    ensure!(
        header >= PARTS && header <= section.len(),
        "a header of {header} bytes"
    );
    let (mut head, mut body) = (section[..header].to_vec(), Vec::new());
    for part in 0..(header - PARTS) / 8 {
        let at = PARTS + 8 * part;
        let (from, length) = (header + number(at)?, number(at + 4)?);
        let bytes = section
            .get(from..from + length)
            .with_context(|| format!("part {part} is outside of the section"))?;
        let kept = if part == LINE_INFO { &[][..] } else { bytes };
        head[at..at + 4].copy_from_slice(&(body.len() as u32).to_ne_bytes());
        head[at + 4..at + 8].copy_from_slice(&(kept.len() as u32).to_ne_bytes());
        body.extend(kept);
    }
    Ok([head, body].concat())
}
