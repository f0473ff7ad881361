//! Services at sockets: a program for each system call, on a cgroup. What a kernel lacks of them is told; the rest is
//! of use without, but for datagrams, which are sent to an endpoint only where its answers can be told.

use super::on_cgroup::Cgroup;
use crate::datapath::{
    DatapathError, ProgramReport,
    object::{self, Tried},
    sys::AttachType,
};
use aya::programs::{Program, ProgramError};
use std::{
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

/// Each program is named as its hook is. The first ones are those that undo what the others do.
pub const PROGRAMS: [(&str, AttachType); 9] = [
    ("sock_release", AttachType::InetSockRelease),
    ("getpeername4", AttachType::Inet4Getpeername),
    ("getpeername6", AttachType::Inet6Getpeername),
    ("recvmsg4", AttachType::Udp4Recvmsg),
    ("recvmsg6", AttachType::Udp6Recvmsg),
    ("sendmsg4", AttachType::Udp4Sendmsg),
    ("sendmsg6", AttachType::Udp6Sendmsg),
    ("connect4", AttachType::Inet4Connect),
    ("connect6", AttachType::Inet6Connect),
];

/// What they are attached to.
pub const MODE: &str = "cgroup";

/// Names of links' pins begin with this, and no interface's name is in them.
const PIN: &str = "service_";

/// Whether a pin of that name is one of these links'.
pub fn is_pin(name: &str) -> bool {
    name.strip_prefix(PIN)
        .is_some_and(|hook| PROGRAMS.iter().any(|(program, _)| *program == hook))
}

/// Whether an earlier agent attached any.
pub fn are_pinned(links: &Path) -> bool {
    PROGRAMS
        .iter()
        .any(|(program, _)| pin(links, program).exists())
}

fn pin(links: &Path, program: &str) -> PathBuf {
    links.join(format!("{PIN}{program}"))
}

/// Services at sockets, attached.
pub struct Attached {
    pub cgroup: Cgroup,
    pub programs: Vec<ProgramReport>,
    /// Those that are not, and why.
    pub missing: Vec<(&'static str, DatapathError)>,
    /// What keeps the programs on the cgroup, where that is not a pin.
    pub links: Vec<OwnedFd>,
}

/// Attaches what the kernel takes: in the place of earlier ones if there is a directory of pinned links, else beside
/// whatever is there, for as long as the result is kept.
///
/// # Errors
/// If no socket can be connected to a Service so; then nothing is attached.
pub fn attach(
    tried: Tried,
    links: Option<&Path>,
    cgroup: Option<&Path>,
) -> Result<Attached, DatapathError> {
    let mut attached = Attached {
        cgroup: Cgroup::open(cgroup)?,
        programs: Vec::new(),
        missing: Vec::new(),
        links: Vec::new(),
    };
    let Tried { programs, ebpf, .. } = tried;
    let mut refused: Vec<_> = programs
        .into_iter()
        .filter_map(|(name, result)| Some((name, result.err()?)))
        .collect();
    for (name, hook) in PROGRAMS {
        let pin = links.map(|links| pin(links, name));
        let is_deaf = attached
            .missing
            .iter()
            .any(|(of, _)| of.starts_with("recv"));
        let mut put = || {
            if let Some(at) = refused.iter().position(|(of, _)| of == name) {
                return Err(refused.swap_remove(at).1);
            }
            if name.starts_with("send") && is_deaf {
                return Err(DatapathError::Unsupported(
                    "what tells whom datagrams are from",
                ));
            }
            let cgroup = &mut attached.cgroup;
            let error = |error: ProgramError| cgroup.error(name)(error.into());
            let (fd, info) = match ebpf.program(name) {
                Some(Program::CgroupSock(program)) => (program.fd(), program.info()),
                Some(Program::CgroupSockAddr(program)) => (program.fd(), program.info()),
                _ => {
                    return Err(DatapathError::Missing {
                        what: "program",
                        name,
                    });
                }
            };
            let (fd, info) = (fd.map_err(error)?, info.map_err(error)?);
            let link = cgroup.put(fd.as_fd(), name, hook, pin.as_deref())?;
            let report = ProgramReport {
                name,
                id: info.id(),
                instructions: info.verified_instruction_count(),
            };
            Ok((report, link))
        };
        match put() {
            Ok((report, link)) => {
                attached.programs.push(report);
                attached.links.extend(link);
            }
            Err(error) => {
                // An earlier agent's.
                if let Some(pin) = &pin {
                    object::remove_link(pin)?;
                }
                attached.missing.push((name, error));
            }
        }
    }
    let connects = |program: &ProgramReport| program.name.starts_with("connect");
    if !attached.programs.iter().any(connects) {
        if let Some(links) = links {
            detach(links)?;
        }
        // The last two, each of which is missing.
        if let Some((_, error)) = attached.missing.pop() {
            return Err(error);
        }
    }
    Ok(attached)
}

/// Sockets get no more endpoints; those that have one keep it, and tell it.
pub fn detach(links: &Path) -> Result<(), DatapathError> {
    // In the opposite order: what is undone is done no more.
    let mut programs = PROGRAMS.iter().rev();
    programs.try_for_each(|(program, _)| object::remove_link(&pin(links, program)))
}

#[cfg(test)]
mod tests {
    use super::{super::Hook, *};

    #[test]
    fn pins_are_told_from_those_of_others() {
        for (program, _) in PROGRAMS {
            let pin = pin(Path::new(""), program);
            let name = pin.to_str().unwrap();
            assert!(is_pin(name), "{name}");
            assert_eq!(Hook::of_pin(name), None, "{name}");
        }
        for name in ["connect4", "service_", "service_connect", "sock"] {
            assert!(!is_pin(name), "{name}");
        }
    }
}
