//! How many instructions the verifier walks through, from what it says itself: before Linux 5.16 a
//! loaded program does not tell.
//!
//! The loader gives away no log of a program that was accepted, so the program is loaded once more,
//! with the maps that it has already. Its types say which functions are verified by themselves.

use super::sys::{self, Functions};
use aya::{Ebpf, maps::Map};
use aya_obj::{
    Features, Object, ProgramSection,
    btf::{Btf, BtfFeatures},
    generated::bpf_attach_type,
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

/// What the loader tries of the kernel; all of it is older than Linux 5.10.
const FEATURES: Features = Features::new(true, true, true, true, true, true, true, None);

/// Types of functions and of data; others are newer, and put into words that any kernel knows.
const TYPES: BtfFeatures = BtfFeatures::new(true, true, true, true, false, false, false, false);

/// `enum bpf_prog_type`.
const SCHED_CLS: u32 = 3;
const SOCK_OPS: u32 = 13;
const SK_MSG: u32 = 16;
const CGROUP_SOCK: u32 = 9;
const CGROUP_SOCK_ADDR: u32 = 18;

/// Instructions walked through in a program of an object that was loaded.
pub fn instructions(bytes: &[u8], loaded: &Ebpf, program: &str) -> io::Result<u32> {
    let log = log(bytes, loaded, program)?;
    parse(&log).ok_or_else(|| io::Error::other(format!("the verifier says only: {}", log.trim())))
}

fn log(bytes: &[u8], loaded: &Ebpf, program: &str) -> io::Result<String> {
    let mut object = Object::parse(bytes).map_err(io::Error::other)?;
    let types = object.fixup_and_sanitize_btf(&TYPES);
    let types = types.map_err(io::Error::other)?.map(Btf::to_bytes);
    let types = sys::load_types(&types.unwrap_or_default())?;
    let text = object.functions.keys().map(|(section, _)| *section);
    let text = text.collect();
    let maps = std::mem::take(&mut object.maps);
    let descriptors = maps.iter().filter_map(|(name, map)| {
        // Those that the kernel does not know are in no program.
        let of = loaded.maps().find(|(other, _)| other == name);
        let fd = of.and_then(|(_, map)| descriptor(map))?;
        Some((name.as_str(), fd.as_raw_fd(), map))
    });
    object
        .relocate_maps(descriptors, &text)
        .and_then(|()| object.relocate_calls(&text))
        .map_err(io::Error::other)?;
    object.sanitize_functions(&FEATURES);
    let found = object.programs.get(program);
    let function = found.and_then(|found| object.functions.get(&found.function_key()));
    let (Some(found), Some(function)) = (found, function) else {
        return Err(io::Error::other(format!("there is no program {program}")));
    };
    let (kind, hook) = match found.section {
        ProgramSection::SchedClassifier => (SCHED_CLS, None),
        ProgramSection::SockOps => (SOCK_OPS, None),
        ProgramSection::SkMsg => (SK_MSG, None),
        ProgramSection::CgroupSock { attach_type } => {
            (CGROUP_SOCK, Some(bpf_attach_type::from(attach_type)))
        }
        ProgramSection::CgroupSockAddr { attach_type } => {
            (CGROUP_SOCK_ADDR, Some(bpf_attach_type::from(attach_type)))
        }
        _ => return Err(io::ErrorKind::Unsupported.into()),
    };
    let hook = hook.map_or(0, |hook| hook as u32);
    let functions = Functions {
        types: types.as_fd(),
        records: &function.func_info.func_info_bytes(),
        record_len: function.func_info_rec_size,
    };
    let program = &function.instructions;
    sys::verifier_statistics(kind, hook, program, &functions, &found.license)
}

/// The verifier's last line begins `processed N insns (limit 1000000)` (`print_verification_stats`).
fn parse(log: &str) -> Option<u32> {
    let line = log.lines().find(|line| line.starts_with("processed "))?;
    let mut words = line.split_whitespace().skip(1);
    let count = words.next()?.parse().ok()?;
    (words.next() == Some("insns")).then_some(count)
}

fn descriptor(map: &Map) -> Option<BorrowedFd<'_>> {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LpmTrie(data)
        | Map::LruHashMap(data)
        | Map::PerCpuArray(data)
        | Map::PerCpuHashMap(data)
        | Map::Queue(data)
        | Map::RingBuf(data)
        | Map::SkStorage(data)
        | Map::SockHash(data) => Some(data.fd().as_fd()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::object, instructions, parse};
    use aya::programs::Program;
    use sinabro_common::names;
    use sinabro_lab::{Lifetime, Namespace};
    use std::path::Path;

    /// Where a loaded program tells, what the verifier says is the same.
    #[test]
    fn both_ways_of_counting_agree() {
        let node = Namespace::new("node", Lifetime::Process).unwrap();
        let compare = || {
            for object in ["pod", "uplink", "overlay", "sock", "service_sock"] {
                let tried = object::try_each(Path::new(names::BPF_DIR), object)?;
                for (name, program) in tried.ebpf.programs() {
                    let info = match program {
                        Program::SchedClassifier(program) => program.info()?,
                        Program::SockOps(program) => program.info()?,
                        Program::SkMsg(program) => program.info()?,
                        Program::CgroupSock(program) => program.info()?,
                        Program::CgroupSockAddr(program) => program.info()?,
                        _ => unreachable!(),
                    };
                    let said = instructions(&tried.bytes, &tried.ebpf, name)?;
                    let told = info.verified_instruction_count();
                    assert!(
                        told.is_none_or(|told| told == said),
                        "{name}: {told:?}, {said}"
                    );
                }
            }
            Ok(())
        };
        node.run(compare).unwrap();
    }

    #[test]
    fn the_count_is_found_and_garbage_is_none() {
        let log = "func#0 @0\nverification time 812 usec\nstack depth 88+0\nprocessed 4711 insns \
                   (limit 1000000) max_states_per_insn 4 total_states 90 peak_states 90 mark_read 5\n";
        assert_eq!(parse(log), Some(4711));
        for garbage in [
            "",
            "processed",
            "processed many insns",
            "processed 7",
            "processed 7 days",
        ] {
            assert_eq!(parse(garbage), None, "{garbage}");
        }
    }
}
