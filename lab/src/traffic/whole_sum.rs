//! Whether the sum of a whole packet that a card, or a tunnel, left (CHECKSUM_COMPLETE, linux/skbuff.h) is still that of the packet
//! where it arrives. Who changes a packet on the way has to change it, too; if not, the kernel adds up all bytes again and says
//! `hw csum failure`, once since it was booted, or drops a datagram as a damaged one.
//!
//! A program of the kernel's looks, at an interface's ingress (Linux 6.6). It is written in the kernel's machine code here, for want of a
//! compiler for it in tests.

use super::offload;
use crate::place::Place;
use anyhow::{Context as _, Result, ensure};
use std::{
    io,
    net::IpAddr,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    process::Command,
};

/// linux/bpf.h.
const MAP_CREATE: libc::c_int = 0;
const MAP_LOOKUP_ELEM: libc::c_int = 1;
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const MAP_TYPE_ARRAY: u32 = 2;
const PROG_TYPE_SCHED_CLS: u32 = 3;
const TCX_INGRESS: u32 = 46;
const LOOKUP_ELEM: u32 = 1;
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
        let index = place.index(interface)?;
        place
            .run(|| {
                // struct bpf_attr of BPF_MAP_CREATE: type, sizes of key and value, entries.
                let counters = bpf(MAP_CREATE, &mut [MAP_TYPE_ARRAY, 4, 8, 2])?;
                let program = load(&program(counters.as_raw_fd()))?;
                let fd = program.as_raw_fd() as u32;
                let link = bpf(LINK_CREATE, &mut [fd, index, TCX_INGRESS, 0])?;
                Ok(Self {
                    counters,
                    _link: link,
                })
            })
            .with_context(|| format!("cannot look at {interface} of {}", place.name()))
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

fn load(program: &[u64]) -> Result<OwnedFd> {
    const LICENSE: &std::ffi::CStr = c"GPL";
    // struct bpf_attr: type and number of instructions, these, license, level and size of a log, its place; up to
    // expected_attach_type.
    let mut attr = [0u64; 9];
    attr[0] = u64::from(PROG_TYPE_SCHED_CLS) | (program.len() as u64) << 32;
    attr[1] = program.as_ptr() as u64;
    attr[2] = LICENSE.as_ptr() as u64;
    attr[8] = u64::from(TCX_INGRESS) << 32;
    bpf(PROG_LOAD, &mut attr)
}

fn bpf<T>(command: libc::c_int, attr: &mut [T]) -> Result<OwnedFd> {
    let fd = call(command, attr).with_context(|| format!("bpf command {command}"))?;
    // SAFETY: these commands give a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn call<T>(command: libc::c_int, attr: &mut [T]) -> io::Result<i32> {
    let (at, len) = (attr.as_mut_ptr(), size_of_val(attr));
    // SAFETY: the callers give the structure of the command, and what it points to lives as long as this.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, at, len) };
    match result {
        0.. => Ok(result as i32),
        _ => Err(io::Error::last_os_error()),
    }
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

/// Instructions (Linux, Documentation/bpf/standardization/instruction-set.rst).
#[derive(Clone, Copy)]
#[repr(u8)]
enum Op {
    Set = 0xb7,
    Move = 0xbf,
    Move32 = 0xbc,
    Add = 0x07,
    Subtract = 0x1f,
    Modulo = 0x97,
    Load32 = 0x61,
    Store32 = 0x62,
    Store64 = 0x7a,
    /// Adds at once for all processors.
    AtomicAdd64 = 0xdb,
    Load64 = 0x18,
    Call = 0x85,
    Always = 0x05,
    IfEqual = 0x1d,
    IfZero = 0x15,
    IfNotLess = 0x3d,
    IfNotMore = 0xb5,
    IfNegative = 0xc5,
    Exit = 0x95,
}

#[derive(Default)]
struct Code {
    instructions: Vec<u64>,
    labels: Vec<(&'static str, usize)>,
    jumps: Vec<(usize, &'static str)>,
}

impl Code {
    fn op(&mut self, op: Op, to: u8, from: u8, offset: i16, value: u32) {
        self.put(op as u8, to, from, offset, value);
    }

    fn put(&mut self, op: u8, to: u8, from: u8, offset: i16, value: u32) {
        let [low, high] = offset.to_le_bytes();
        let [a, b, c, d] = value.to_le_bytes();
        let bytes = [op, to | from << 4, low, high, a, b, c, d];
        self.instructions.push(u64::from_le_bytes(bytes));
    }

    fn call(&mut self, helper: u32) {
        self.op(Op::Call, 0, 0, 0, helper);
    }

    fn jump(&mut self, op: Op, one: u8, other: u8, value: u32, to: &'static str) {
        self.jumps.push((self.instructions.len(), to));
        self.op(op, one, other, 0, value);
    }

    fn label(&mut self, name: &'static str) {
        self.labels.push((name, self.instructions.len()));
    }

    /// One more of what is counted.
    fn count(&mut self, which: u32, counters: i32) {
        const MAP: u8 = 1;
        self.op(Op::Store32, 10, 0, -4, which);
        self.op(Op::Load64, 1, MAP, 0, counters as u32);
        self.put(0, 0, 0, 0, 0);
        self.op(Op::Move, 2, 10, 0, 0);
        self.op(Op::Add, 2, 0, 0, -4i32 as u32);
        self.call(LOOKUP_ELEM);
        // Over the two instructions behind it, which arrays never ask for.
        self.op(Op::IfZero, 0, 0, 2, 0);
        self.op(Op::Set, 1, 0, 0, 1);
        self.op(Op::AtomicAdd64, 0, 1, 0, 0);
    }

    fn linked(mut self) -> Vec<u64> {
        for (at, name) in &self.jumps {
            let target = self.labels.iter().find(|(label, _)| label == name);
            // Every name in this file has its place.
            let Some((_, target)) = target else { continue };
            let offset = (*target as i64 - *at as i64 - 1) as u16;
            self.instructions[*at] |= u64::from(offset) << 16;
        }
        self.instructions
    }
}
