//! Programs of Sinabro that the kernel holds, by whatever means: a pin, a tcx or cgroup link, a
//! filter, a process's descriptor; and the links and maps of those programs. A map without a program
//! is held by a pin or by a process, which are looked for themselves.

use super::{entries, walk};
use crate::traffic::machine_code;
use anyhow::{Context as _, Result};
use aya::{
    maps::loaded_maps,
    programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_links, loaded_programs},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CString,
    fs::{self, File},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

/// What all programs' names begin with.
const PROGRAMS: [&str; 3] = ["pod_", "uplink_", "overlay_"];

/// `NAME (ID)`, as processes are named, and the ids of the programs that it is of.
pub type Object = (String, Vec<u32>);

pub struct Objects {
    pub programs: Vec<Object>,
    pub links: Vec<Object>,
    pub maps: Vec<Object>,
}

/// What is loaded now. Needs CAP_SYS_ADMIN (bpf(2), BPF_PROG_GET_NEXT_ID); without it there is
/// nothing to be seen and nothing is claimed.
pub fn objects() -> Option<Objects> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let (mut programs, mut used) = (BTreeMap::new(), BTreeMap::<u32, Vec<u32>>::new());
    // One may end between its being listed and its being looked at.
    for info in loaded_programs().filter_map(Result::ok) {
        if let Some(name) = program(&info) {
            programs.insert(info.id(), name);
            for map in info.map_ids().ok().flatten().unwrap_or_default() {
                used.entry(map).or_default().push(info.id());
            }
        }
    }
    let links = loaded_links().filter_map(Result::ok).filter_map(|link| {
        let name = programs.get(&link.program_id())?;
        Some((format!("{name} ({})", link.id()), vec![link.program_id()]))
    });
    let links = links.collect();
    let maps = loaded_maps().filter_map(Result::ok).filter_map(|map| {
        let name = map.name_as_str().unwrap_or_default();
        let of = used.get(&map.id())?;
        Some((format!("{name} ({})", map.id()), of.clone()))
    });
    let maps = maps.collect();
    let programs = programs
        .iter()
        .map(|(id, name)| (format!("{name} ({id})"), vec![*id]))
        .collect();
    Some(Objects {
        programs,
        links,
        maps,
    })
}

/// Programs that one of these processes has a descriptor of, or sees a pin of that is not seen from here, with what
/// is said of the processes.
pub fn held(processes: &BTreeMap<u32, String>) -> BTreeMap<u32, BTreeSet<String>> {
    let mut held = BTreeMap::<u32, BTreeSet<String>>::new();
    let mut seen: BTreeSet<_> = fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    for (pid, said) in processes {
        let of = Path::new("/proc").join(pid.to_string());
        let mut programs = Vec::new();
        for fd in entries(&of.join("fd")) {
            let is_bpf = |kind: PathBuf| kind.to_string_lossy().contains("bpf");
            if fs::read_link(&fd).is_ok_and(is_bpf) {
                let name = fd.file_name().unwrap_or_default();
                programs.extend(program_of(&of.join("fdinfo").join(name)));
            }
        }
        if fs::read_link(of.join("ns/mnt")).is_ok_and(|namespace| seen.insert(namespace)) {
            walk(&of.join("root/sys/fs/bpf"), u32::MAX, &mut |pin| {
                programs.extend(pinned(pin));
            });
        }
        for program in programs {
            held.entry(program).or_default().insert(said.clone());
        }
    }
    held
}

/// The program that a descriptor is of, or of the link that it is of.
fn program_of(fdinfo: &Path) -> Option<u32> {
    let text = fs::read_to_string(fdinfo).ok()?;
    let id = text
        .lines()
        .find_map(|line| line.strip_prefix("prog_id:"))?;
    id.trim().parse().ok()
}

fn pinned(pin: &Path) -> Option<u32> {
    /// linux/bpf.h.
    const OBJ_GET: libc::c_int = 7;
    let path = CString::new(pin.as_os_str().as_encoded_bytes()).ok()?;
    // struct bpf_attr: the path, and no descriptors and flags.
    let fd = machine_code::bpf(OBJ_GET, &mut [path.as_ptr() as u64, 0]).ok()?;
    program_of(Path::new(&format!(
        "/proc/thread-self/fdinfo/{}",
        fd.as_raw_fd()
    )))
}

/// Those that a link of this network namespace carries by tcx, both ways.
pub fn on_link(link: &str) -> Vec<String> {
    let sides = [TcAttachType::Ingress, TcAttachType::Egress];
    // A kernel before 6.6 has no tcx, so nothing there.
    let found = sides.into_iter().filter_map(|side| {
        let (_revision, programs) = SchedClassifier::query_tcx(link, side).ok()?;
        Some(programs)
    });
    found.flatten().filter_map(|info| program(&info)).collect()
}

/// Those that are attached to a cgroup itself, by whatever type of attachment.
pub fn on_cgroup(path: &Path) -> Result<Vec<String>> {
    let all = attached(path)?;
    Ok(all.iter().filter_map(program).collect())
}

/// The same, whosever they are.
pub fn all_on_cgroup(path: &Path) -> Result<Vec<String>> {
    let name = |info: &ProgramInfo| info.name_as_str().unwrap_or_default().to_owned();
    Ok(attached(path)?.iter().map(name).collect())
}

fn attached(path: &Path) -> Result<Vec<ProgramInfo>> {
    /// More than there are (enum bpf_attach_type).
    const TYPES: u32 = 64;
    let cgroup = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let ids: BTreeSet<u32> = (0..TYPES).flat_map(|kind| query(&cgroup, kind)).collect();
    Ok(loaded_programs()
        .filter_map(Result::ok)
        .filter(|info| ids.contains(&info.id()))
        .collect())
}

/// Ids of the programs of one type of attachment; none if the type is not for cgroups.
fn query(cgroup: &File, kind: u32) -> Vec<u32> {
    /// bpf(2).
    const BPF_PROG_QUERY: libc::c_int = 16;
    /// The members of `union bpf_attr` for that command.
    #[repr(C)]
    struct Query {
        target: u32,
        attach_type: u32,
        flags: u32,
        attach_flags: u32,
        ids: u64,
        count: u32,
        padding: u32,
    }
    let mut ids = [0_u32; 64];
    let mut attr = Query {
        target: cgroup.as_raw_fd().cast_unsigned(),
        attach_type: kind,
        flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr() as u64,
        count: ids.len() as u32,
        padding: 0,
    };
    // SAFETY: the structure is as long as said and lives through the call, as do the `count`
    // elements that `ids` points to; the kernel writes no more than that.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_QUERY,
            &raw mut attr,
            size_of::<Query>(),
        )
    };
    match outcome {
        0 => ids.iter().take(attr.count as usize).copied().collect(),
        _ => Vec::new(),
    }
}

fn program(info: &ProgramInfo) -> Option<String> {
    let name = info.name_as_str()?;
    PROGRAMS
        .iter()
        .any(|prefix| name.starts_with(prefix))
        .then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words after `marker` in the sources of the data path.
    fn declared(dir: &Path, marker: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                declared(&path, marker, found);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            found.extend(text.split(marker).skip(1).map(|rest| {
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                rest[..end.unwrap_or(rest.len())].to_owned()
            }));
        }
    }

    #[test]
    fn every_program_of_the_data_path_is_looked_for() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent-ebpf/src");
        let mut programs = Vec::new();
        for kind in ["classifier", "sock_ops", "sk_msg"] {
            declared(&sources, &format!("\n#[{kind}]\npub fn "), &mut programs);
        }
        assert!(programs.len() > 5, "{programs:?}");
        for name in &programs {
            assert!(
                PROGRAMS.iter().any(|prefix| name.starts_with(prefix)),
                "{name}"
            );
        }
    }
}
