//! tcx links: each pinned, so that it outlives the agent, and updated in place.

use super::{Classifier, Direction, Hook};
use crate::datapath::{DatapathError, object, sys};
use std::{io, os::fd::AsFd, path::Path};

impl Hook {
    fn tcx(self) -> sys::AttachType {
        match self.direction() {
            Direction::Ingress => sys::AttachType::TcxIngress,
            Direction::Egress => sys::AttachType::TcxEgress,
        }
    }
}

fn failed(hook: Hook, ifindex: u32, error: io::Error) -> DatapathError {
    DatapathError::Attach {
        program: hook.program(),
        target: format!("interface {ifindex} by tcx"),
        source: error.into(),
    }
}

/// Attaches through the pinned link if it is still this interface's, else through a new one.
/// Returns whether a new one was made.
pub fn attach(
    path: &Path,
    hook: Hook,
    program: &Classifier,
    ifindex: u32,
) -> Result<bool, DatapathError> {
    if let Ok(link) = sys::obj_get(path)
        && sys::kind(link.as_fd()).is_ok_and(|kind| kind == sys::Kind::Link)
        && let Ok(info) = sys::link_info(link.as_fd())
        && info.ifindex() == ifindex
    {
        if info.prog_id != program.id {
            sys::link_update(link.as_fd(), program.fd.as_fd())
                .map_err(|error| failed(hook, ifindex, error))?;
        }
        return Ok(false);
    }
    // An interface that is gone, or something that is no link.
    object::remove_link(path)?;
    let link = sys::link_create(program.fd.as_fd(), ifindex, hook.tcx())
        .map_err(|error| failed(hook, ifindex, error))?;
    // Without a pin the link would end with this process: better now, and said.
    sys::obj_pin(link.as_fd(), path).map_err(|source| DatapathError::File {
        what: "pinning link",
        path: path.to_owned(),
        source,
    })?;
    Ok(true)
}

/// Whether the program is where it was attached.
pub fn has(path: &Path, program: &Classifier, ifindex: u32) -> bool {
    sys::obj_get(path)
        .and_then(|link| sys::link_info(link.as_fd()))
        .is_ok_and(|info| info.ifindex() == ifindex && info.prog_id == program.id)
}

/// Attaches through a link that ends at once.
pub fn try_on(hook: Hook, program: &Classifier, ifindex: u32) -> Result<(), DatapathError> {
    sys::link_create(program.fd.as_fd(), ifindex, hook.tcx())
        .map(drop)
        .map_err(|error| failed(hook, ifindex, error))
}

/// Puts a program in the place of a pinned link's.
pub fn update(path: &Path, program: &Classifier) -> io::Result<()> {
    let link = sys::obj_get(path)?;
    sys::link_update(link.as_fd(), program.fd.as_fd())
}
