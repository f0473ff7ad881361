//! Global functions: the kernel verifies each by itself, once, and not again for each call and for each state of
//! registers and stack that a caller comes with.
//!
//! It does so with functions whose linkage is global in BTF (Linux 5.6, commit 51c39bb1d5d1). The linker leaves no
//! symbol global but the programs', so the linkage is written here, of all functions whose names end in `_global`. Such
//! a function may take the context and numbers, and gives a number: nothing else is known of either on Linux 5.10.

use anyhow::{Context as _, bail, ensure};

const SUFFIX: &[u8] = b"_global";

/// The one structure that a pointer may lead to.
const CONTEXT: &[u8] = b"__sk_buff";

const GLOBAL: u32 = 1;

/// Kinds of types (include/uapi/linux/btf.h).
mod kind {
    pub const INT: u32 = 1;
    pub const PTR: u32 = 2;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const FUNC: u32 = 12;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const ENUM64: u32 = 19;
}

/// Makes the linkage global of each function that is meant to have it.
///
/// # Errors
/// If the bytes are no BTF of this machine's byte order, or such a function takes or gives what it may not.
pub fn make(btf: &mut [u8]) -> anyhow::Result<()> {
    let types = Types::read(btf)?;
    let mut globals = Vec::new();
    for ty in &types.list {
        let name = types.name(ty.name);
        if ty.kind == kind::FUNC && name.ends_with(SUFFIX) {
            types
                .check(ty)
                .with_context(|| format!("function {}", String::from_utf8_lossy(name)))?;
            globals.push(ty.at);
        }
    }
    for at in globals {
        let info = word(btf, at + 4)? & !0xffff | GLOBAL;
        btf[at + 4..at + 8].copy_from_slice(&info.to_ne_bytes());
    }
    Ok(())
}

struct Type {
    /// Where it is in the section.
    at: usize,
    name: u32,
    kind: u32,
    len: usize,
    /// By what it is.
    refers_to: u32,
}

struct Types<'a> {
    bytes: &'a [u8],
    /// Where the names are.
    strings: usize,
    /// From the first, whose number is 1.
    list: Vec<Type>,
}

impl<'a> Types<'a> {
    fn read(bytes: &'a [u8]) -> anyhow::Result<Self> {
        let magic = bytes.first_chunk().context("BTF is cut off")?;
        ensure!(
            u16::from_ne_bytes(*magic) == 0xeb9f,
            "not BTF of this byte order"
        );
        let header = word(bytes, 4)? as usize;
        let offset = |at| Ok::<_, anyhow::Error>(header + word(bytes, at)? as usize);
        let (mut at, strings) = (offset(8)?, offset(16)?);
        let end = at + word(bytes, 12)? as usize;
        let mut list = Vec::new();
        while at < end {
            let info = word(bytes, at + 4)?;
            let (kind, len) = (info >> 24 & 31, (info & 0xffff) as usize);
            list.push(Type {
                at,
                name: word(bytes, at)?,
                kind,
                len,
                refers_to: word(bytes, at + 8)?,
            });
            at += 12
                + match kind {
                    kind::INT | kind::VAR | kind::DECL_TAG => 4,
                    kind::ARRAY => 12,
                    kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * len,
                    kind::ENUM | kind::FUNC_PROTO => 8 * len,
                    _ => 0,
                };
        }
        Ok(Self {
            bytes,
            strings,
            list,
        })
    }

    fn name(&self, offset: u32) -> &'a [u8] {
        let rest = self.bytes.get(self.strings + offset as usize..);
        let rest = rest.unwrap_or_default();
        rest.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    fn by_id(&self, id: u32) -> anyhow::Result<&Type> {
        let place = (id as usize).checked_sub(1);
        let found = place.and_then(|place| self.list.get(place));
        found.context("refers to a type that is not there")
    }

    fn check(&self, function: &Type) -> anyhow::Result<()> {
        let prototype = self.by_id(function.refers_to)?;
        ensure!(self.is_number(prototype.refers_to)?, "gives no number");
        for parameter in 0..prototype.len {
            let id = word(self.bytes, prototype.at + 12 + 8 * parameter + 4)?;
            if !self.is_number(id)? && !self.is_context(id)? {
                bail!("parameter {parameter} is neither the context nor a number");
            }
        }
        Ok(())
    }

    fn is_number(&self, id: u32) -> anyhow::Result<bool> {
        Ok(id != 0 && self.by_id(id)?.kind == kind::INT)
    }

    fn is_context(&self, id: u32) -> anyhow::Result<bool> {
        let pointer = self.by_id(id)?;
        if pointer.kind != kind::PTR || pointer.refers_to == 0 {
            return Ok(false);
        }
        let target = self.by_id(pointer.refers_to)?;
        Ok(target.kind == kind::STRUCT && self.name(target.name) == CONTEXT)
    }
}

pub fn word(bytes: &[u8], at: usize) -> anyhow::Result<u32> {
    let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
    Ok(u32::from_ne_bytes(*word.context("BTF is cut off")?))
}
