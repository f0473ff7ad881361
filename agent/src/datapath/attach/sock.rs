//! The TCP acceleration: `pod_sockets` on a cgroup, `pod_messages` on the map of sockets.

use crate::datapath::{DatapathError, ProgramReport, cgroup, object, sys};
use aya::{
    Ebpf,
    maps::Map,
    programs::{ProgramError, ProgramInfo, SkMsg, SockOps},
};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

/// Name of the cgroup link's pin.
pub const PIN: &str = "sock";

const SOCKET_PROGRAM: &str = "pod_sockets";
const MESSAGE_PROGRAM: &str = "pod_messages";

/// What each is attached to.
pub const MODES: [(&str, &str); 2] = [(SOCKET_PROGRAM, "cgroup"), (MESSAGE_PROGRAM, "socket map")];

/// The acceleration, attached.
pub struct Attached {
    pub cgroup: PathBuf,
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
    let cgroup = cgroup::find(cgroup).map_err(DatapathError::Cgroup)?;
    let on_map = |error: Box<dyn std::error::Error + Send + Sync>| DatapathError::Attach {
        program: MESSAGE_PROGRAM,
        target: "the map `SOCKETS`".into(),
        source: error,
    };
    let on_cgroup = |error: Box<dyn std::error::Error + Send + Sync>| DatapathError::Attach {
        program: SOCKET_PROGRAM,
        target: format!("the cgroup {}", cgroup.display()),
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
    let program = enrol.fd().map_err(|error| on_cgroup(error.into()))?;
    let programs = [
        report(SOCKET_PROGRAM, enrol.info()).map_err(|error| on_cgroup(error.into()))?,
        report(MESSAGE_PROGRAM, messages.info()).map_err(|error| on_map(error.into()))?,
    ];

    let directory = File::open(&cgroup).map_err(|error| on_cgroup(error.into()))?;
    let inode = directory
        .metadata()
        .map_err(|error| on_cgroup(error.into()))?
        .ino();
    let attached = |cgroup, link| Attached {
        cgroup,
        programs,
        link,
    };
    let path = links.map(|links| links.join(PIN));
    if let Some(path) = &path
        && let Ok(link) = sys::obj_get(path)
        && sys::kind(link.as_fd()).is_ok_and(|kind| kind == sys::Kind::Link)
        && sys::link_info(link.as_fd()).is_ok_and(|info| info.cgroup_id() == inode)
    {
        sys::link_update(link.as_fd(), program.as_fd()).map_err(|error| on_cgroup(error.into()))?;
        return Ok(attached(cgroup, None));
    }
    if let Some(path) = &path {
        object::remove_link(path)?;
    }
    let link = sys::link_create(
        program.as_fd(),
        directory.as_raw_fd() as u32,
        sys::AttachType::CgroupSockOps,
    )
    .map_err(|error: io::Error| on_cgroup(error.into()))?;
    let Some(path) = path else {
        return Ok(attached(cgroup, Some(link)));
    };
    sys::obj_pin(link.as_fd(), &path).map_err(|source| DatapathError::File {
        what: "pinning link",
        path,
        source,
    })?;
    Ok(attached(cgroup, None))
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
