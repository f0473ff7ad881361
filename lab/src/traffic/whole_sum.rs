//! Whether the sum of a whole packet that a card, or a tunnel, left (CHECKSUM_COMPLETE, linux/skbuff.h) is still that of the packet
//! where it arrives. Who changes a packet on the way has to change it, too; if not, the kernel adds up all bytes again and says
//! `hw csum failure`, once since it was booted, or drops a datagram as a damaged one.
//!
//! A program of the kernel's looks, at an interface's ingress ([`machine_code`](super::machine_code)).

use super::{
    machine_code::{Code, Op, bpf, call, see},
    offload,
};
use crate::place::Place;
use anyhow::{Context as _, Result, ensure};
use std::{
    net::IpAddr,
    os::fd::{AsRawFd as _, OwnedFd},
    process::Command,
};

/// linux/bpf.h.
const MAP_CREATE: libc::c_int = 0;
const MAP_LOOKUP_ELEM: libc::c_int = 1;
const MAP_TYPE_ARRAY: u32 = 2;
const SKB_LOAD_BYTES: u32 = 26;
const CSUM_DIFF: u32 = 28;
const CSUM_UPDATE: u32 = 40;

/// Bytes that are added up at once: half of the stack.
const CHUNK: i16 = 256;
const ETH: u32 = 14;

/// What has passed an interface since this was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// With such a sum,
    pub complete: u64,
    /// and those of which it is not right.
    pub wrong: u64,
}

/// Looks as long as it lives.
pub struct WholeSums {
    counters: OwnedFd,
    _link: OwnedFd,
}

impl WholeSums {
    /// # Errors
    /// Those of the kernel; before Linux 6.6 there is nothing to attach it by.
    pub fn watch(place: &Place, interface: &str) -> Result<Self> {
        // struct bpf_attr of BPF_MAP_CREATE: type, sizes of key and value, entries.
        let counters = bpf(MAP_CREATE, &mut [MAP_TYPE_ARRAY, 4, 8, 2])?;
        let link = see(place, interface, &program(counters.as_raw_fd()))?;
        Ok(Self {
            counters,
            _link: link,
        })
    }

    pub fn seen(&self) -> Result<Seen> {
        Ok(Seen {
            complete: self.count(0)?,
            wrong: self.count(1)?,
        })
    }

    fn count(&self, which: u32) -> Result<u64> {
        let mut value = 0u64;
        // struct bpf_attr: map, key, value.
        let mut attr = [
            self.counters.as_raw_fd() as u64,
            (&raw const which) as u64,
            (&raw mut value) as u64,
        ];
        call(MAP_LOOKUP_ELEM, &mut attr).context("cannot read a counter")?;
        Ok(value)
    }
}

/// Makes a link out of whose end at the other place packets come with such sums, which have crossed `under`, a link between the two: a
/// tunnel whose outer checksum is not left to anybody, so that it is added up where it arrives.
pub fn tunnel(place: &Place, under: &str, name: &str, [local, remote]: [IpAddr; 2]) -> Result<()> {
    offload::sum_before(place, under)?;
    let link = format!("link add {name} type vxlan id 9 local {local} remote {remote}");
    let mut ip = Command::new("ip");
    place.put(
        ip.args(link.split(' '))
            .args(["dstport", "4789", "udpcsum"]),
    );
    let output = ip.output().context("cannot run ip")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {link}: {said}");
    Ok(())
}

/// Registers: r6 the packet, r7 its sum as the kernel has it, r8 as it is, r9 how far that is.
fn program(counters: i32) -> Vec<u64> {
    use Op::*;
    let mut code = Code::default();
    code.op(Move, 6, 1, 0, 0);
    // What it adds to the sum is nothing, and what it gives is the sum, or an error where there is none.
    code.op(Set, 2, 0, 0, 0);
    code.call(CSUM_UPDATE);
    code.jump(IfNegative, 0, 0, 0, "end");
    code.op(Move32, 7, 0, 0, 0);
    code.count(0, counters);
    code.op(Set, 8, 0, 0, 0);
    code.op(Set, 9, 0, 0, ETH);
    code.label("more");
    code.op(Load32, 4, 6, 0, 0);
    code.jump(IfNotLess, 9, 4, 0, "compare");
    code.op(Subtract, 4, 9, 0, 0);
    code.jump(IfNotMore, 4, 0, CHUNK as u32, "fits");
    code.op(Set, 4, 0, 0, CHUNK as u32);
    code.label("fits");
    for at in (1..=CHUNK / 8).map(|word| -8 * word) {
        code.op(Store64, 10, 0, at, 0);
    }
    code.op(Move, 1, 6, 0, 0);
    code.op(Move, 2, 9, 0, 0);
    code.op(Move, 3, 10, 0, 0);
    code.op(Add, 3, 0, 0, (-CHUNK) as u32);
    code.call(SKB_LOAD_BYTES);
    code.jump(IfNegative, 0, 0, 0, "end");
    code.op(Set, 1, 0, 0, 0);
    code.op(Set, 2, 0, 0, 0);
    code.op(Move, 3, 10, 0, 0);
    code.op(Add, 3, 0, 0, (-CHUNK) as u32);
    code.op(Set, 4, 0, 0, CHUNK as u32);
    code.op(Move32, 5, 8, 0, 0);
    code.call(CSUM_DIFF);
    code.op(Move32, 8, 0, 0, 0);
    code.op(Add, 9, 0, 0, CHUNK as u32);
    // As long as the largest super-packet.
    code.jump(IfNotMore, 9, 0, 1 << 16, "more");
    code.jump(Always, 0, 0, 0, "end");
    code.label("compare");
    // Sums of one's complement (RFC 1071): the same if what they leave of 65,535 is.
    for sum in [7, 8] {
        code.op(Modulo, sum, 0, 0, 0xffff);
    }
    code.jump(IfEqual, 7, 8, 0, "end");
    code.count(1, counters);
    code.label("end");
    code.op(Set, 0, 0, 0, -1i32 as u32);
    code.op(Exit, 0, 0, 0, 0);
    code.linked()
}
