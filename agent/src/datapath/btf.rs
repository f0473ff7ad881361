//! Where the running kernel keeps a structure's field, by its own type information.
//!
//! Reads the BTF format (Documentation/bpf/btf.rst) as far as that takes: structures, unions,
//! enumerations, and what leads to their sizes. Input that contradicts itself gives an error.

use sinabro_common::abi::acceleration::KernelOffsets;
use std::{fs, io, path::Path};

/// The kernel's own.
const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const VOID: u32 = 0;

/// Structures within structures, or type names for type names.
const MAX_DEPTH: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum BtfError {
    #[error("the kernel does not describe its types: it was built without CONFIG_DEBUG_INFO_BTF")]
    Absent,
    #[error("the kernel's type information cannot be read")]
    Read(#[source] io::Error),
    #[error("the kernel's type information is damaged: {0}")]
    Damaged(&'static str),
    #[error("this kernel has no {0}")]
    Missing(String),
    #[error("{what} has {found} bits, not {wanted}")]
    Size {
        what: String,
        found: u32,
        wanted: u32,
    },
    #[error("{0} is not where it was expected")]
    Place(&'static str),
}

/// Where the running kernel keeps what `kernel.rs` of the acceleration programs reads.
pub fn kernel_offsets() -> Result<KernelOffsets, BtfError> {
    let bytes = fs::read(Path::new(VMLINUX)).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => BtfError::Absent,
        _ => BtfError::Read(error),
    })?;
    offsets(&Btf::parse(&bytes)?)
}

fn offsets(btf: &Btf<'_>) -> Result<KernelOffsets, BtfError> {
    let sock = &btf.structure("sock")?;
    let tcp_sock = &btf.structure("tcp_sock")?;
    let wait_queue_entry = &btf.structure("wait_queue_entry")?;
    // A socket's address is that of each structure that begins with it.
    let inner = btf.field(tcp_sock, &["inet_conn", "icsk_inet", "sk"])?;
    if inner.bit != 0 {
        return Err(BtfError::Place("the socket in struct tcp_sock"));
    }
    let whole = |of, path: &[&str], bits| btf.field(of, path).and_then(|f| f.whole(bits));
    let part = |of, path: &[&str]| btf.field(of, path);
    let userlocks = part(sock, &["sk_userlocks"])?;
    let shutdown = part(sock, &["sk_shutdown"])?;
    let repair = part(tcp_sock, &["repair"])?;
    Ok(KernelOffsets {
        flags: whole(sock, &["__sk_common", "skc_flags"], 64)?,
        zerocopy_bit: btf.value("sock_flags", "SOCK_ZEROCOPY")?,
        rmem_alloc: whole(sock, &["sk_backlog", "rmem_alloc"], 32)?,
        rcvbuf: whole(sock, &["sk_rcvbuf"], 32)?,
        userlocks: userlocks.bit / 8,
        userlocks_shift: userlocks.bit % 8,
        shutdown: shutdown.bit / 8,
        shutdown_shift: shutdown.bit % 8,
        ulp_ops: whole(tcp_sock, &["inet_conn", "icsk_ulp_ops"], 64)?,
        repair: repair.bit / 8,
        repair_bit: repair.bit % 8,
        copied_seq: whole(tcp_sock, &["copied_seq"], 32)?,
        write_seq: whole(tcp_sock, &["write_seq"], 32)?,
        user_data: whole(sock, &["sk_user_data"], 64)?,
        wq: whole(sock, &["sk_wq"], 64)?,
        wq_head: part(&btf.structure("socket_wq")?, &["wait", "head"])?.whole_bytes()?,
        wait_entry: part(wait_queue_entry, &["entry"])?.whole_bytes()?,
        wait_private: whole(wait_queue_entry, &["private"], 64)?,
    })
}

/// A field, within the structure that was asked.
#[derive(Debug, PartialEq, Eq)]
struct Field {
    name: String,
    /// From the structure's beginning.
    bit: u32,
    bits: u32,
}

impl Field {
    /// The offset of a field that has exactly this size and is aligned to it.
    fn whole(self, bits: u32) -> Result<u32, BtfError> {
        if self.bits != bits || !self.bit.is_multiple_of(bits) {
            return Err(BtfError::Size {
                what: self.name,
                found: self.bits,
                wanted: bits,
            });
        }
        Ok(self.bit / 8)
    }

    /// The offset of a structure within the other.
    fn whole_bytes(self) -> Result<u32, BtfError> {
        let bits = self.bits;
        match self.bit.is_multiple_of(64) {
            true => Ok(self.bit / 8),
            false => Err(BtfError::Size {
                what: self.name,
                found: bits,
                wanted: 64,
            }),
        }
    }
}

/// `enum` of kinds, those that matter.
mod kind {
    pub const INT: u32 = 1;
    pub const PTR: u32 = 2;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const TYPE_TAG: u32 = 18;
    pub const ENUM64: u32 = 19;
    pub const LAST: u32 = ENUM64;
}

struct Btf<'a> {
    strings: &'a [u8],
    types: &'a [u8],
    /// Where each type begins in `types`; the first is number one.
    starts: Vec<u32>,
}

/// `struct btf_type` without what follows it.
#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    /// Number of members and the like.
    len: u32,
    /// Members' offsets have a size in their upper byte.
    sized: bool,
    size_or_type: u32,
    /// Where what follows begins in `types`.
    rest: usize,
}

/// A structure that has a name.
struct Structure {
    name: &'static str,
    ty: Type,
}

/// `struct btf_member`.
struct Member {
    name: u32,
    ty: u32,
    bit: u32,
    /// Zero if it is not a bit field.
    bits: u32,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*word))
}

impl<'a> Btf<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, BtfError> {
        const HEADER: &str = "its header does not fit its length";
        let damaged = || BtfError::Damaged(HEADER);
        let magic = bytes.get(..2).and_then(|b| b.try_into().ok());
        if magic.map(u16::from_ne_bytes) != Some(MAGIC) {
            return Err(BtfError::Damaged("it does not begin with the magic number"));
        }
        let header = |at| word(bytes, at).map(|w| w as usize).ok_or_else(damaged);
        let (length, types, types_len) = (header(4)?, header(8)?, header(12)?);
        let (strings, strings_len) = (header(16)?, header(20)?);
        let section = |start: usize, len: usize| {
            let start = length.checked_add(start).ok_or_else(damaged)?;
            let end = start.checked_add(len).ok_or_else(damaged)?;
            bytes.get(start..end).ok_or_else(damaged)
        };
        let mut btf = Self {
            types: section(types, types_len)?,
            strings: section(strings, strings_len)?,
            starts: Vec::new(),
        };
        let mut at = 0;
        while at < btf.types.len() {
            btf.starts.push(at as u32);
            at = btf.end(&btf.read(at)?)?;
        }
        Ok(btf)
    }

    fn read(&self, at: usize) -> Result<Type, BtfError> {
        const TYPE: BtfError = BtfError::Damaged("a type is cut off");
        let info = word(self.types, at + 4).ok_or(TYPE)?;
        Ok(Type {
            name: word(self.types, at).ok_or(TYPE)?,
            kind: info >> 24 & 0x1f,
            len: info & 0xffff,
            sized: info >> 31 != 0,
            size_or_type: word(self.types, at + 8).ok_or(TYPE)?,
            rest: at + 12,
        })
    }

    /// Where the next type begins.
    fn end(&self, ty: &Type) -> Result<usize, BtfError> {
        let each = match ty.kind {
            kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12,
            kind::ENUM | kind::FUNC_PROTO => 8,
            _ => 0,
        };
        let once = match ty.kind {
            kind::INT | kind::VAR | kind::DECL_TAG => 4,
            kind::ARRAY => 12,
            // What a later kind carries is not known, so neither is where it ends.
            kind if kind == 0 || kind > kind::LAST => {
                return Err(BtfError::Damaged("it has a type of an unknown kind"));
            }
            _ => 0,
        };
        Ok(ty.rest + once + each * ty.len as usize)
    }

    fn name(&self, offset: u32) -> &'a [u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        let end = rest.iter().position(|&byte| byte == 0);
        &rest[..end.unwrap_or(rest.len())]
    }

    fn by_id(&self, id: u32) -> Result<Type, BtfError> {
        let start = id.checked_sub(1).and_then(|n| self.starts.get(n as usize));
        let start = start.ok_or(BtfError::Damaged("a type refers to one that is not there"))?;
        self.read(*start as usize)
    }

    fn structure(&self, name: &'static str) -> Result<Structure, BtfError> {
        let ty = self.by_name(kind::STRUCT, name)?;
        Ok(Structure { name, ty })
    }

    /// Looks through all types, of which a kernel has a hundred thousand and more.
    fn by_name(&self, kind: u32, name: &str) -> Result<Type, BtfError> {
        for &start in &self.starts {
            let ty = self.read(start as usize)?;
            // Empty ones only announce.
            if ty.kind == kind && ty.len > 0 && self.name(ty.name) == name.as_bytes() {
                return Ok(ty);
            }
        }
        Err(BtfError::Missing(format!("type {name}")))
    }

    fn members(&self, ty: Type) -> impl Iterator<Item = Result<Member, BtfError>> {
        (0..ty.len as usize).map(move |n| {
            let at = ty.rest + 12 * n;
            let read = |offset| {
                word(self.types, at + offset).ok_or(BtfError::Damaged("a member is cut off"))
            };
            let place = read(8)?;
            Ok(Member {
                name: read(0)?,
                ty: read(4)?,
                bit: if ty.sized { place & 0xff_ffff } else { place },
                bits: if ty.sized { place >> 24 } else { 0 },
            })
        })
    }

    /// What a type stands for once its names and qualifiers are taken off.
    fn plain(&self, mut id: u32) -> Result<Option<Type>, BtfError> {
        for _ in 0..MAX_DEPTH {
            if id == VOID {
                return Ok(None);
            }
            let ty = self.by_id(id)?;
            match ty.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = ty.size_or_type
                }
                _ => return Ok(Some(ty)),
            }
        }
        Err(BtfError::Damaged("a type is a name for itself"))
    }

    fn bits(&self, id: u32) -> Result<u32, BtfError> {
        Ok(match self.plain(id)? {
            Some(ty) => match ty.kind {
                kind::PTR => 64,
                kind::INT | kind::STRUCT | kind::UNION | kind::ENUM | kind::ENUM64 => {
                    ty.size_or_type.saturating_mul(8)
                }
                _ => 0,
            },
            None => 0,
        })
    }

    /// Finds a field by the names that lead to it, through members without a name.
    fn field(&self, of: &Structure, path: &[&str]) -> Result<Field, BtfError> {
        let name = || format!("{}.{}", of.name, path.join("."));
        let mut ty = of.ty;
        let mut field = Field {
            name: name(),
            bit: 0,
            bits: 0,
        };
        for (n, step) in path.iter().enumerate() {
            let member = self
                .member(ty, step, MAX_DEPTH)?
                .ok_or_else(|| BtfError::Missing(format!("field {}", name())))?;
            field.bit = field.bit.saturating_add(member.bit);
            field.bits = match member.bits {
                0 => self.bits(member.ty)?,
                bits => bits,
            };
            if n + 1 < path.len() {
                let next = self.plain(member.ty)?;
                ty = next.ok_or_else(|| BtfError::Missing(format!("field {}", name())))?;
            }
        }
        Ok(field)
    }

    fn member(&self, ty: Type, name: &str, depth: usize) -> Result<Option<Member>, BtfError> {
        if !matches!(ty.kind, kind::STRUCT | kind::UNION) || depth == 0 {
            return Ok(None);
        }
        for member in self.members(ty) {
            let member = member?;
            let own = self.name(member.name);
            if own == name.as_bytes() {
                return Ok(Some(member));
            }
            if !own.is_empty() {
                continue;
            }
            let Some(inner) = self.plain(member.ty)? else {
                continue;
            };
            if let Some(found) = self.member(inner, name, depth - 1)? {
                return Ok(Some(Member {
                    bit: found.bit.saturating_add(member.bit),
                    ..found
                }));
            }
        }
        Ok(None)
    }

    /// The number behind an enumeration's name.
    fn value(&self, enumeration: &str, name: &str) -> Result<u32, BtfError> {
        let ty = self.by_name(kind::ENUM, enumeration)?;
        for n in 0..ty.len as usize {
            let at = ty.rest + 8 * n;
            let read = |offset| {
                word(self.types, at + offset).ok_or(BtfError::Damaged("an enumeration is cut off"))
            };
            if self.name(read(0)?) == name.as_bytes() {
                return read(4);
            }
        }
        Err(BtfError::Missing(format!("value {enumeration}.{name}")))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::files, *};
    use proptest::prelude::*;

    #[test]
    fn finds_every_field_in_this_kernel() {
        let found = kernel_offsets().unwrap();
        let all = [
            found.flags,
            found.rmem_alloc,
            found.rcvbuf,
            found.userlocks,
            found.shutdown,
            found.ulp_ops,
            found.repair,
            found.copied_seq,
            found.write_seq,
            found.user_data,
        ];
        // They are in this order on no kernel by accident: all differ, none is the beginning.
        let mut distinct = all.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), all.len(), "{found:?}");
        assert!(!all.contains(&0), "{found:?}");
        // SOL_SOCKET flags have been added at the end only.
        assert_eq!(found.zerocopy_bit, 18);
    }

    /// Of what the kernel makes of that, `agent/tests/datapath/verify.rs` has the figures.
    #[test]
    fn functions_that_are_to_be_verified_by_themselves_are_global() {
        const FUNC: u32 = 12;
        /// `BTF_FUNC_GLOBAL`, where other types have a length.
        const GLOBAL: u32 = 1;
        let [follow, port, one, times] = [
            "changed_global",
            "try_port_global",
            "try_one_global",
            "times_global",
        ];
        for (object, functions) in [
            ("pod", &[follow, one, times][..]),
            ("uplink", &[follow, port, one, times]),
            ("overlay", &[follow, port, times]),
        ] {
            let bytes = files::object(object).unwrap();
            let types = aya_obj::Object::parse(bytes).unwrap().btf.unwrap();
            let types = types.to_bytes();
            let btf = Btf::parse(&types).unwrap();
            for function in functions {
                let found = btf.by_name(FUNC, function);
                assert_eq!(
                    found.map(|ty| ty.len).ok(),
                    Some(GLOBAL),
                    "{object}: {function}"
                );
            }
        }
    }

    /// A kernel whose structures are `sock { int a; struct { u8 b:2; u8 c:6; }; }`.
    fn small() -> Vec<u8> {
        let strings = b"\0sock\0a\0b\0c\0int\0u8\0";
        let mut types = Vec::new();
        let mut put = |words: &[u32]| {
            for word in words {
                types.extend_from_slice(&word.to_ne_bytes());
            }
        };
        // 1: int, 2: u8
        put(&[12, kind::INT << 24, 4, 32]);
        put(&[16, kind::INT << 24, 1, 8]);
        // 3: struct with bit fields
        put(&[0, 1 << 31 | kind::STRUCT << 24 | 2, 1]);
        put(&[8, 2, 2 << 24, 10, 2, 6 << 24 | 2]);
        // 4: sock
        put(&[1, kind::STRUCT << 24 | 2, 8]);
        put(&[6, 1, 0, 0, 3, 32]);
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&[1, 0]);
        for word in [
            24,
            0,
            types.len() as u32,
            types.len() as u32,
            strings.len() as u32,
        ] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(&types);
        bytes.extend_from_slice(strings);
        bytes
    }

    #[test]
    fn finds_whole_fields_and_bit_fields_in_members_without_name() {
        let bytes = small();
        let btf = Btf::parse(&bytes).unwrap();
        let sock = btf.structure("sock").unwrap();
        let place = |name| {
            let field = btf.field(&sock, &[name]).unwrap();
            (field.bit, field.bits)
        };
        assert_eq!(place("a"), (0, 32));
        assert_eq!(place("b"), (32, 2));
        assert_eq!(place("c"), (34, 6));
        assert!(matches!(
            btf.field(&sock, &["d"]),
            Err(BtfError::Missing(what)) if what == "field sock.d"
        ));
        assert!(matches!(
            btf.field(&sock, &["c"]).unwrap().whole(32),
            Err(BtfError::Size { found: 6, .. })
        ));
    }

    #[test]
    fn what_is_cut_off_is_an_error() {
        let bytes = small();
        for len in 0..bytes.len() {
            let result = Btf::parse(&bytes[..len]).and_then(|btf| offsets(&btf));
            assert!(result.is_err(), "{len}");
        }
    }

    proptest! {
        #[test]
        fn garbage_neither_panics_nor_hangs(
            at in any::<prop::sample::Index>(),
            with in prop::collection::vec(any::<u8>(), 1..16),
        ) {
            let mut bytes = small();
            let at = at.index(bytes.len());
            for (old, new) in bytes[at..].iter_mut().zip(with) {
                *old = new;
            }
            if let Ok(btf) = Btf::parse(&bytes) {
                for path in [&["a"][..], &["b"], &["c", "a"]] {
                    let _ = btf.structure("sock").and_then(|sock| btf.field(&sock, path));
                }
                let _ = offsets(&btf);
            }
        }
    }
}
