//! Whether the running kernel takes every program: each is loaded, with maps of its own, and attached
//! in every way that the kernel has for it, in a network namespace made for that. Nothing stays, and
//! no program that runs is touched.
//!
//! What a program does by the node's settings (to redirect, to masquerade) it reads from a map: the
//! verifier walks all of it. The acceleration's programs have constants, which are this kernel's.

use super::{
    DatapathError, apart,
    attach::{self, Hook, Mode, service_sock, sock},
    object::{self, Tried},
    statistics,
};
use crate::chain::Chain;
use aya::programs::ProgramInfo;
use sinabro_common::{
    api::{VerifiedProgram, VerifyReport},
    names,
};
use sinabro_netlink::NetNs;
use std::{fs, path::Path};

/// Objects and their programs, in a packet's order.
const CLASSIFIERS: [(&str, &[Hook]); 3] = [
    ("pod", &Hook::POD),
    ("uplink", &Hook::UPLINK),
    ("overlay", &Hook::OVERLAY),
];

/// Verifies them. `cgroup` is where the acceleration's program is attached for a moment; it enrols no
/// connection.
///
/// # Errors
/// If none could be tried. What the kernel thinks of a program is in the report.
pub fn verify(bpf_dir: &Path, cgroup: Option<&Path>) -> Result<VerifyReport, DatapathError> {
    let directory = bpf_dir.join(names::BPF_VERIFY_DIR);
    // Left by a process that was killed.
    apart::remove(&directory)?;
    let is_new = !bpf_dir.exists();
    let programs = all(&directory, cgroup);
    let removed = apart::remove(&directory);
    if is_new {
        // Unless an agent has started meanwhile.
        let _ = fs::remove_dir(bpf_dir);
    }
    let programs = programs?;
    removed?;
    Ok(VerifyReport {
        kernel: release(),
        programs,
    })
}

fn all(directory: &Path, cgroup: Option<&Path>) -> Result<Vec<VerifiedProgram>, DatapathError> {
    // Where no map can be pinned nothing is learnt of any program.
    object::make_directory(directory)?;
    let scratch = NetNs::create();
    let scratch = scratch.as_ref().map_err(|error| Chain(error).to_string());
    let mut rows = Vec::new();
    for (object, hooks) in CLASSIFIERS {
        match object::try_each(directory, object) {
            Ok(mut tried) => {
                for &hook in hooks {
                    rows.extend(classifier(&mut tried, hook, scratch.as_ref().copied()));
                }
            }
            Err(DatapathError::NotBuilt) => return Err(DatapathError::NotBuilt),
            Err(error) => rows.extend(hooks.iter().map(|hook| VerifiedProgram {
                required: true,
                ..refused(hook.program(), "-", &error)
            })),
        }
    }
    rows.extend(sockets(directory, cgroup));
    rows.extend(service_sockets(directory, cgroup));
    Ok(rows)
}

fn refused(name: &str, mode: &str, error: &DatapathError) -> VerifiedProgram {
    VerifiedProgram {
        name: name.into(),
        mode: mode.into(),
        detail: Chain(error).to_string(),
        ..VerifiedProgram::default()
    }
}

/// What the kernel thinks of a program, by each way of attaching it.
fn classifier(
    tried: &mut Tried,
    hook: Hook,
    scratch: Result<&NetNs, &String>,
) -> Vec<VerifiedProgram> {
    let name = hook.program();
    let verified = match verified(tried, name) {
        Ok(verified) => VerifiedProgram {
            required: true,
            ..verified
        },
        Err(row) => {
            return vec![VerifiedProgram {
                required: true,
                ..*row
            }];
        }
    };
    let modes = match attach::modes(&mut tried.ebpf, hook) {
        Ok(modes) => modes,
        Err(error) => {
            return vec![VerifiedProgram {
                required: true,
                ..refused(name, "-", &error)
            }];
        }
    };
    let attached = |mode: Mode| {
        let row = VerifiedProgram {
            mode: mode.to_string(),
            ..verified.clone()
        };
        let netns = match scratch {
            Ok(netns) => netns,
            Err(error) => {
                return VerifiedProgram {
                    detail: format!("verified, but not attached for a try: {error}"),
                    ..row
                };
            }
        };
        match netns.run(|| attach::try_on_loopback(&mut tried.ebpf, hook, mode)) {
            Ok(Ok(())) => row,
            Ok(Err(error)) => VerifiedProgram {
                ok: false,
                detail: Chain(&error).to_string(),
                ..row
            },
            Err(error) => VerifiedProgram {
                ok: false,
                detail: Chain(&error).to_string(),
                ..row
            },
        }
    };
    modes.into_iter().map(attached).collect()
}

/// The acceleration's, which a node can do without.
fn sockets(directory: &Path, cgroup: Option<&Path>) -> Vec<VerifiedProgram> {
    let tried = match object::try_each(directory, object::SOCK_OBJECT) {
        Ok(tried) => tried,
        Err(error) => {
            return sock::MODES
                .map(|(name, mode)| refused(name, mode, &error))
                .into();
        }
    };
    let mut rows = sock::MODES.map(|(name, mode)| {
        let row = verified(&tried, name).unwrap_or_else(|row| *row);
        VerifiedProgram {
            mode: mode.into(),
            ..row
        }
    });
    // They are of use together only.
    if rows.iter().all(|row| row.ok)
        && let Err(error) = sock::attach(&tried.ebpf, None, cgroup)
    {
        for row in &mut rows {
            row.ok = false;
            row.detail = Chain(&error).to_string();
        }
    }
    rows.into()
}

/// Those that translate Services at sockets, which a pod can do without. Attached they do nothing, as no setting says
/// that there are Services.
fn service_sockets(directory: &Path, cgroup: Option<&Path>) -> Vec<VerifiedProgram> {
    let mode = service_sock::MODE;
    let programs = service_sock::PROGRAMS.iter().map(|(name, _)| *name);
    let tried = match object::try_each(directory, object::SERVICE_SOCK_OBJECT) {
        Ok(tried) => tried,
        Err(error) => return programs.map(|name| refused(name, mode, &error)).collect(),
    };
    let row = |name| {
        let row = verified(&tried, name).unwrap_or_else(|row| *row);
        let mode = mode.into();
        VerifiedProgram { mode, ..row }
    };
    let mut rows: Vec<_> = programs.map(row).collect();
    let (missing, nothing) = match service_sock::attach(tried, None, cgroup) {
        Ok(attached) => (attached.missing, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    for row in rows.iter_mut().filter(|row| row.ok) {
        let of_row = missing.iter().find(|(name, _)| row.name == *name);
        if let Some(error) = of_row.map(|(_, error)| error).or(nothing.as_ref()) {
            row.ok = false;
            row.detail = Chain(error).to_string();
        }
    }
    rows
}

/// A program that the verifier took, or the row that says why not.
fn verified(tried: &Tried, name: &str) -> Result<VerifiedProgram, Box<VerifiedProgram>> {
    let fail = |error: &DatapathError| Err(Box::new(refused(name, "-", error)));
    let missing = DatapathError::Missing {
        what: "program",
        name: "of that name",
    };
    match tried.programs.iter().find(|(of, _)| of == name) {
        Some((_, Ok(()))) => {}
        Some((_, Err(error))) => return fail(error),
        None => return fail(&missing),
    }
    let info = tried.ebpf.program(name).and_then(info);
    let told = info
        .as_ref()
        .and_then(ProgramInfo::verified_instruction_count);
    let instructions =
        told.or_else(|| statistics::instructions(&tried.bytes, &tried.ebpf, name).ok());
    Ok(VerifiedProgram {
        name: name.into(),
        instructions,
        jited: info
            .map(|info| info.size_jitted())
            .filter(|&bytes| bytes > 0),
        ok: true,
        ..VerifiedProgram::default()
    })
}

fn info(program: &aya::programs::Program) -> Option<ProgramInfo> {
    use aya::programs::Program;
    match program {
        Program::SchedClassifier(program) => program.info().ok(),
        Program::SockOps(program) => program.info().ok(),
        Program::SkMsg(program) => program.info().ok(),
        Program::CgroupSock(program) => program.info().ok(),
        Program::CgroupSockAddr(program) => program.info().ok(),
        _ => None,
    }
}

/// As `uname -r` prints it.
fn release() -> String {
    let found = nix::sys::utsname::uname();
    found.map_or_else(
        |_| String::new(),
        |uname| uname.release().to_string_lossy().into_owned(),
    )
}
