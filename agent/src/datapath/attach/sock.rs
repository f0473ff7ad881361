//! The TCP acceleration: `pod_sockets` on a cgroup, `pod_messages` on the map of sockets.

use super::on_cgroup::Cgroup;
use crate::datapath::{DatapathError, ProgramReport, object, sys};
use aya::{
    Ebpf,
    maps::Map,
    programs::{ProgramError, ProgramInfo, SkMsg, SockOps},
};
use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

/// Name of the cgroup link's pin.
pub const PIN: &str = "sock";

const SOCKET_PROGRAM: &str = "pod_sockets";
const MESSAGE_PROGRAM: &str = "pod_messages";

/// What each is attached to.
pub const MODES: [(&str, &str); 2] = [(SOCKET_PROGRAM, "cgroup"), (MESSAGE_PROGRAM, "socket map")];

/// The acceleration, attached.
pub struct Attached {
    pub cgroup: Cgroup,
    pub programs: [ProgramReport; 2],
    /// What keeps the program on the cgroup, where that is not a pin.
    pub link: Option<OwnedFd>,
}

/// Attaches both programs: in the place of earlier ones if there is a directory of pinned links,
/// else beside whatever is there, for as long as the result is kept.
pub fn attach(
    ebpf: &Ebpf,
    links: Option<&Path>,
    cgroup: Option<&Path>,
) -> Result<Attached, DatapathError> {
    let mut cgroup = Cgroup::open(cgroup)?;
    let on_map = |error: Box<dyn std::error::Error + Send + Sync>| DatapathError::Attach {
        program: MESSAGE_PROGRAM,
        target: "the map `SOCKETS`".into(),
        source: error,
    };

    let missing = |what, name| DatapathError::Missing { what, name };
    let Some(Map::SockHash(sockets)) = ebpf.map("SOCKETS") else {
        return Err(missing("sock hash", "SOCKETS"));
    };
    let messages: &SkMsg = ebpf
        .program(MESSAGE_PROGRAM)
        .and_then(|program| program.try_into().ok())
        .ok_or(missing("program", MESSAGE_PROGRAM))?;
    let fd = messages.fd().map_err(|error| on_map(error.into()))?;
    sys::prog_attach(
        fd.as_fd(),
        sockets.fd().as_fd(),
        sys::AttachType::SkMsgVerdict,
    )
    .map_err(|error| on_map(error.into()))?;

    let enrol: &SockOps = ebpf
        .program(SOCKET_PROGRAM)
        .and_then(|program| program.try_into().ok())
        .ok_or(missing("program", SOCKET_PROGRAM))?;
    let on_cgroup = |error: ProgramError| cgroup.error(SOCKET_PROGRAM)(error.into());
    let program = enrol.fd().map_err(on_cgroup)?;
    let programs = [
        report(SOCKET_PROGRAM, enrol.info()).map_err(on_cgroup)?,
        report(MESSAGE_PROGRAM, messages.info()).map_err(|error| on_map(error.into()))?,
    ];

    let pin = links.map(|links| links.join(PIN));
    let hook = sys::AttachType::CgroupSockOps;
    let link = cgroup.put(program.as_fd(), SOCKET_PROGRAM, hook, pin.as_deref())?;
    Ok(Attached {
        cgroup,
        programs,
        link,
    })
}

fn report(
    name: &'static str,
    info: Result<ProgramInfo, ProgramError>,
) -> Result<ProgramReport, ProgramError> {
    let info = info?;
    Ok(ProgramReport {
        name,
        id: info.id(),
        instructions: info.verified_instruction_count(),
    })
}

/// Enrols no more connections; those enrolled stay what they are until they close.
pub fn detach(links: &Path) -> Result<(), DatapathError> {
    object::remove_link(&links.join(PIN))
}
