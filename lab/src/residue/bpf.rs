//! Programs of Sinabro that the kernel holds, by whatever means: a pin, a tcx or cgroup link, a
//! filter, a process's descriptor; and the links and maps of those programs. A map without a program
//! is held by a pin or by a process, which are looked for themselves.

use anyhow::{Context as _, Result};
use aya::{
    maps::loaded_maps,
    programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_links, loaded_programs},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::fd::AsRawFd as _,
    path::Path,
};

/// What all programs' names begin with.
const PROGRAMS: [&str; 3] = ["pod_", "uplink_", "overlay_"];
pub struct Objects {
    /// `NAME (ID)`, as processes are named.
    pub programs: Vec<String>,
    pub links: Vec<String>,
    pub maps: Vec<String>,
}

/// What is loaded now. Needs CAP_SYS_ADMIN (bpf(2), BPF_PROG_GET_NEXT_ID); without it there is
/// nothing to be seen and nothing is claimed.
pub fn objects() -> Option<Objects> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let (mut programs, mut used) = (BTreeMap::new(), BTreeSet::new());
    // One may end between its being listed and its being looked at.
    for info in loaded_programs().filter_map(Result::ok) {
        if let Some(name) = program(&info) {
            programs.insert(info.id(), name);
            used.extend(info.map_ids().ok().flatten().unwrap_or_default());
        }
    }
    let links = loaded_links().filter_map(Result::ok).filter_map(|link| {
        let name = programs.get(&link.program_id())?;
        Some(format!("{name} ({})", link.id()))
    });
    let links = links.collect();
    let maps = loaded_maps().filter_map(Result::ok).filter_map(|map| {
        let name = map.name_as_str().unwrap_or_default();
        used.contains(&map.id())
            .then(|| format!("{name} ({})", map.id()))
    });
    let maps = maps.collect();
    let programs = programs
        .iter()
        .map(|(id, name)| format!("{name} ({id})"))
        .collect();
    Some(Objects {
        programs,
        links,
        maps,
    })
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
    use std::{fs, path::Path};

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
