//! How much of the stack programs take: a program and what it calls may have 512 bytes (`MAX_BPF_STACK`).
//!
//! Which they are depends on the kernel: the part of each function counts as a multiple of 32 bytes where there is no JIT
//! compiler, and everywhere up to Linux 6.8; with one 6.12 counts multiples of 16 (`round_up_stack_depth`, kernel/bpf/verifier.c).
//! So the machine that builds may take what others refuse, and the build is what says so.

use anyhow::{Context as _, bail};
use object::{
    build::{
        Id as _,
        elf::{Builder, SectionData},
    },
    elf::{STT_FUNC, STT_SECTION},
};
use std::collections::{BTreeMap, BTreeSet};

const MOST: u32 = 512;
const UNIT: u32 = 32;
/// Functions that have called each other (`MAX_CALL_FRAMES`).
const MOST_FRAMES: usize = 8;

/// Instructions have eight bytes (RFC 9669 §3).
const INSTRUCTION: usize = 8;
/// BPF_CALL of a function of the program (RFC 9669 §4.3.1).
const CALL: u8 = 0x85;
const OF_PROGRAM: u8 = 1;
/// Copies a register, adds a number to one.
const MOV: u8 = 0xbf;
const ADD: u8 = 0x07;
/// The frame pointer.
const FRAME: u8 = 10;
/// Classes: loads and stores by a register.
const LDX: u8 = 1;
const ST: u8 = 2;
const STX: u8 = 3;

/// Where a function is: its section and its first byte.
type Place = (usize, u64);

struct Function {
    name: String,
    /// Of its own stack, in bytes.
    takes: u32,
    calls: BTreeSet<Place>,
}

#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    dst: u8,
    src: u8,
    offset: i32,
    number: i32,
}

impl Instruction {
    fn read(bytes: &[u8]) -> Option<Self> {
        let &[code, registers, a, b, c, d, e, f] = bytes else {
            return None;
        };
        Some(Self {
            code,
            dst: registers & 15,
            src: registers >> 4,
            offset: i16::from_le_bytes([a, b]).into(),
            number: i32::from_le_bytes([c, d, e, f]),
        })
    }

    /// How far below the frame pointer it goes, with the one behind it: an address is copied first and then lowered.
    fn reaches(self, next: Option<Self>) -> u32 {
        let below = match (self.code & 7, next) {
            (LDX, _) if self.src == FRAME => self.offset,
            (ST | STX, _) if self.dst == FRAME => self.offset,
            (_, Some(next))
                if self.code == MOV
                    && self.src == FRAME
                    && next.code == ADD
                    && next.dst == self.dst =>
            {
                next.number
            }
            _ => 0,
        };
        below.min(0).unsigned_abs()
    }
}

/// Says which calls take too much, if any do.
///
/// # Errors
/// If they do, or a function cannot be read.
pub fn check(elf: &Builder<'_>) -> anyhow::Result<()> {
    let functions = functions(elf)?;
    let called: BTreeSet<&Place> = functions.values().flat_map(|f| &f.calls).collect();
    for place in functions.keys().filter(|place| !called.contains(place)) {
        let (takes, way) = deepest(&functions, place, MOST_FRAMES)?;
        if takes > MOST {
            bail!("calls take {takes} of {MOST} bytes of stack:{way}");
        }
    }
    Ok(())
}

/// What a function takes with all that it calls, and by which calls that is most.
fn deepest(
    functions: &BTreeMap<Place, Function>,
    place: &Place,
    frames: usize,
) -> anyhow::Result<(u32, String)> {
    let function = functions
        .get(place)
        .context("a call leads to no function")?;
    let Some(frames) = frames.checked_sub(1) else {
        bail!(
            "more than {MOST_FRAMES} functions call each other, the last one is {}",
            function.name
        );
    };
    let mut most = (0, String::new());
    for called in &function.calls {
        let found = deepest(functions, called, frames)?;
        if found.0 > most.0 {
            most = found;
        }
    }
    let Function { name, takes, .. } = function;
    let counted = (*takes).max(1).next_multiple_of(UNIT);
    Ok((counted + most.0, format!("\n  {takes:3} {name}{}", most.1)))
}

fn functions(elf: &Builder<'_>) -> anyhow::Result<BTreeMap<Place, Function>> {
    // Where calls lead, if that is in another section.
    let mut leads = BTreeMap::new();
    for section in &elf.sections {
        if let (SectionData::Relocation(all), Some(of)) = (&section.data, section.sh_info_section) {
            for relocation in all {
                leads.insert((of.index(), relocation.r_offset), relocation.symbol);
            }
        }
    }
    let mut functions = BTreeMap::new();
    for symbol in &elf.symbols {
        let (STT_FUNC, Some(section)) = (symbol.st_type(), symbol.section) else {
            continue;
        };
        let SectionData::Data(data) = &elf.sections.get(section).data else {
            continue;
        };
        let section = section.index();
        let first = usize::try_from(symbol.st_value)?;
        let last = first + usize::try_from(symbol.st_size)?;
        let bytes = data
            .get(first..last)
            .context("a function beyond its section")?;
        let all: Vec<_> = bytes
            .chunks(INSTRUCTION)
            .filter_map(Instruction::read)
            .collect();
        let mut function = Function {
            name: symbol.name.to_string(),
            takes: 0,
            calls: BTreeSet::new(),
        };
        for (index, instruction) in all.iter().enumerate() {
            let next = all.get(index + 1).copied();
            function.takes = function.takes.max(instruction.reaches(next));
            if instruction.code != CALL || instruction.src != OF_PROGRAM {
                continue;
            }
            let at = symbol.st_value + (index * INSTRUCTION) as u64;
            let ahead = (i64::from(instruction.number) + 1) * INSTRUCTION as i64;
            let place = match leads.get(&(section, at)) {
                None => (section, at.wrapping_add_signed(ahead)),
                Some(symbol) => {
                    let symbol = elf.symbols.get(symbol.context("a call to nowhere")?);
                    let section = symbol
                        .section
                        .context("a call to what is not in the object")?;
                    match symbol.st_type() {
                        STT_SECTION => (section.index(), ahead.unsigned_abs()),
                        _ => (section.index(), symbol.st_value),
                    }
                }
            };
            function.calls.insert(place);
        }
        functions.insert((section, symbol.st_value), function);
    }
    Ok(functions)
}
