//! The tables of iptables-legacy and ip6tables-legacy, read only: of filter the policy of its FORWARD
//! chain and the interfaces that its rules speak of, of any which chains it has, and whether it has anything.
//!
//! nf_tables knows nothing of these tables. They are read as iptables reads them, by getsockopt on a
//! socket of the family (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h), which
//! needs CAP_NET_ADMIN. A table that is asked for comes into being, so /proc says first whether it
//! is there.

use crate::{Error, Family, Result};
use nix::errno::Errno;
use std::{
    fs, io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

/// NF_INET_FORWARD.
const FORWARD: usize = 2;
/// IPT_SO_GET_INFO and IP6T_SO_GET_INFO, …_GET_ENTRIES.
const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
/// struct ipt_getinfo: name, valid hooks, five hook entries, five underflows, count, size.
const INFO: usize = 32 + 4 + 5 * 4 + 5 * 4 + 4 + 4;
const UNDERFLOWS: usize = 32 + 4 + 5 * 4;
const VALID_HOOKS: usize = 32;
const COUNT: usize = INFO - 8;
const SIZE: usize = INFO - 4;
/// struct ipt_get_entries: name, size, entries at the alignment of a counter.
const ENTRIES: usize = 40;
/// Verdict of a standard target (struct xt_standard_target): -NF_DROP - 1.
const DROP: i32 = -1;
const TARGET_HEADER: usize = 32;
const NAME: usize = 16;
/// More than anybody has: a size beyond is not a table's.
const LARGEST: usize = 64 << 20;

/// Where in an entry things are; a target's offset and the next entry's follow the address part.
struct Layout {
    interfaces: [usize; 2],
    /// struct ipt_ip or ip6t_ip6.
    address: usize,
}

const V4: Layout = Layout {
    interfaces: [16, 32],
    address: 84,
};
const V6: Layout = Layout {
    interfaces: [64, 80],
    address: 136,
};

/// A filter table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// What of the forwarded no rule decides is dropped.
    pub drops_forwarded: bool,
    /// Interfaces that rules compare, in or out, as they are written: `snb+`.
    pub interfaces: Vec<Vec<u8>>,
}

/// The filter table of a family; none if there is none.
///
/// # Errors
/// If the kernel refuses, or what it says makes no sense.
pub fn filter(family: Family) -> Result<Option<Filter>> {
    const TABLE: &str = "filter";
    let Some(Table { info, entries }) = table(family, TABLE)? else {
        return Ok(None);
    };
    let layout = match family {
        Family::V4 => V4,
        Family::V6 => V6,
    };
    let policy = number(&info, UNDERFLOWS + FORWARD * 4);
    let parsed = policy.and_then(|policy| parse(&entries, policy as usize, &layout));
    parsed.map(Some).ok_or_else(|| malformed(family, TABLE))
}

/// Whether a table has a chain of its user's with that name, if there is the table.
///
/// # Errors
/// As [`filter`].
pub fn has_chain(family: Family, name: &str, chain: &str) -> Result<bool> {
    // A chain begins with an entry whose target, ERROR, has its name, ended by a zero.
    let chain = [chain.as_bytes(), &[0]].concat();
    let found = table(family, name)?;
    Ok(found.is_some_and(|table| {
        let mut parts = table.entries.windows(chain.len());
        parts.any(|part| part == chain)
    }))
}

/// Whether somebody has rules or chains in a table, if there is the table.
///
/// # Errors
/// As [`filter`].
pub fn is_used(family: Family, name: &str) -> Result<bool> {
    let Some(Table { info, .. }) = table(family, name)? else {
        return Ok(false);
    };
    let hooks = number(&info, VALID_HOOKS).map(u32::count_ones);
    match (hooks, number(&info, COUNT)) {
        // It begins with a policy for each hook, and an end.
        (Some(hooks), Some(count)) => Ok(count > hooks + 1),
        _ => Err(malformed(family, name)),
    }
}

/// What the kernel says of a table: struct ipt_getinfo, and the entries.
struct Table {
    info: Vec<u8>,
    entries: Vec<u8>,
}

fn table(family: Family, name: &str) -> Result<Option<Table>> {
    let (domain, level) = match family {
        Family::V4 => (libc::AF_INET, libc::IPPROTO_IP),
        Family::V6 => (libc::AF_INET6, libc::IPPROTO_IPV6),
    };
    let failed = |error: io::Error| Error::system(what(family, name), &error);
    let tables = match fs::read_to_string(names(family)) {
        Ok(tables) => tables,
        // A kernel without it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if !tables.lines().any(|table| table == name) {
        return Ok(None);
    }
    let socket = socket(domain).map_err(failed)?;
    let mut info = named(name, INFO);
    get(&socket, level, GET_INFO, &mut info).map_err(failed)?;
    let size = number(&info, SIZE).map(|size| size as usize);
    let size = size.filter(|size| *size <= LARGEST);
    let size = size.ok_or_else(|| malformed(family, name))?;
    let mut entries = named(name, ENTRIES + size);
    entries[32..36].copy_from_slice(&(size as u32).to_ne_bytes());
    get(&socket, level, GET_ENTRIES, &mut entries).map_err(failed)?;
    entries.drain(..ENTRIES);
    Ok(Some(Table { info, entries }))
}

fn names(family: Family) -> &'static str {
    match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    }
}

fn what(family: Family, table: &str) -> String {
    format!("read table {table} of iptables-legacy ({})", names(family))
}

fn malformed(family: Family, table: &str) -> Error {
    Error::Malformed {
        what: what(family, table),
        reason: "its entries lead out of it".into(),
    }
}

/// A request that begins with the table's name.
fn named(table: &str, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    bytes[..table.len()].copy_from_slice(table.as_bytes());
    bytes
}

fn socket(domain: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(domain, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    let fd = Errno::result(fd)?;
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn get(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    bytes: &mut [u8],
) -> io::Result<()> {
    let mut length = bytes.len() as libc::socklen_t;
    // SAFETY: the kernel writes no more bytes than `length` says there are.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(got)?;
    Ok(())
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(four.try_into().ok()?))
}

fn short(bytes: &[u8], at: usize) -> Option<usize> {
    let two = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_ne_bytes(two.try_into().ok()?).into())
}

/// Goes through the entries; none if they are no entries.
fn parse(entries: &[u8], policy: usize, layout: &Layout) -> Option<Filter> {
    // After the address part: nfcache (4 bytes), then the two offsets.
    let (target_at, next_at) = (layout.address + 4, layout.address + 6);
    let target = policy.checked_add(short(entries, policy.checked_add(target_at)?)?)?;
    let verdict = number(entries, target.checked_add(TARGET_HEADER)?)? as i32;
    let mut filter = Filter {
        drops_forwarded: verdict == DROP,
        interfaces: Vec::new(),
    };
    let mut at = 0;
    while at < entries.len() {
        for field in layout.interfaces {
            let name = entries.get(at + field..at + field + NAME)?;
            let length = name.iter().position(|byte| *byte == 0).unwrap_or(NAME);
            if length > 0 {
                filter.interfaces.push(name[..length].to_vec());
            }
        }
        match short(entries, at + next_at)? {
            0 => return None,
            next => at += next,
        }
    }
    (at == entries.len()).then_some(filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_table_is_refused() {
        for layout in [&V4, &V6] {
            for length in 0..400 {
                for fill in [0, 1, 0x7f, 0xff] {
                    let bytes = vec![fill; length];
                    for policy in [0, 8, length, usize::MAX] {
                        assert_eq!(parse(&bytes, policy, layout), None);
                    }
                }
            }
        }
    }
}
