//! Programs of the kernel's that look at packets, in the kernel's machine code: for want of a compiler for it in tests.

use crate::place::Place;
use anyhow::{Context as _, Result};
use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

/// linux/bpf.h.
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const PROG_TYPE_SCHED_CLS: u32 = 3;
const TCX_INGRESS: u32 = 46;
const LOOKUP_ELEM: u32 = 1;

/// Has a program see what comes in by an interface, for as long as what this gives lives.
///
/// # Errors
/// Those of the kernel; before Linux 6.6 there is nothing to attach it by.
pub fn see(place: &Place, interface: &str, program: &[u64]) -> Result<OwnedFd> {
    let index = place.index(interface)?;
    place
        .run(|| {
            let program = load(program)?;
            let fd = program.as_raw_fd() as u32;
            bpf(LINK_CREATE, &mut [fd, index, TCX_INGRESS, 0])
        })
        .with_context(|| format!("cannot look at {interface} of {}", place.name()))
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

/// A command of the kernel's that gives a descriptor.
pub fn bpf<T>(command: libc::c_int, attr: &mut [T]) -> Result<OwnedFd> {
    let fd = call(command, attr).with_context(|| format!("bpf command {command}"))?;
    // SAFETY: these commands give a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Any command, by its structure.
pub fn call<T>(command: libc::c_int, attr: &mut [T]) -> io::Result<i32> {
    let (at, len) = (attr.as_mut_ptr(), size_of_val(attr));
    // SAFETY: the callers give the structure of the command, and what it points to lives as long as this.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, at, len) };
    match result {
        0.. => Ok(result as i32),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Instructions (Linux, Documentation/bpf/standardization/instruction-set.rst).
#[derive(Clone, Copy)]
#[repr(u8)]
pub enum Op {
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

/// A program as it is written: jumps are to names until it is [linked](Self::linked).
#[derive(Default)]
pub struct Code {
    instructions: Vec<u64>,
    labels: Vec<(&'static str, usize)>,
    jumps: Vec<(usize, &'static str)>,
}

impl Code {
    pub fn op(&mut self, op: Op, to: u8, from: u8, offset: i16, value: u32) {
        self.put(op as u8, to, from, offset, value);
    }

    fn put(&mut self, op: u8, to: u8, from: u8, offset: i16, value: u32) {
        let [low, high] = offset.to_le_bytes();
        let [a, b, c, d] = value.to_le_bytes();
        let bytes = [op, to | from << 4, low, high, a, b, c, d];
        self.instructions.push(u64::from_le_bytes(bytes));
    }

    pub fn call(&mut self, helper: u32) {
        self.op(Op::Call, 0, 0, 0, helper);
    }

    pub fn jump(&mut self, op: Op, one: u8, other: u8, value: u32, to: &'static str) {
        self.jumps.push((self.instructions.len(), to));
        self.op(op, one, other, 0, value);
    }

    pub fn label(&mut self, name: &'static str) {
        self.labels.push((name, self.instructions.len()));
    }

    /// One more of what is counted.
    pub fn count(&mut self, which: u32, counters: i32) {
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

    pub fn linked(mut self) -> Vec<u64> {
        for (at, name) in &self.jumps {
            let target = self.labels.iter().find(|(label, _)| label == name);
            // Whoever jumps to a name gives it its place.
            let Some((_, target)) = target else { continue };
            let offset = (*target as i64 - *at as i64 - 1) as u16;
            self.instructions[*at] |= u64::from(offset) << 16;
        }
        self.instructions
    }
}
