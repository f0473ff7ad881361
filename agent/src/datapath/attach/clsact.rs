//! Filters on a clsact qdisc, for kernels without tcx links. They belong to the interface, so
//! they outlive the agent without a pin, and are replaced in place by their priority and handle.

use super::{Direction, Hook};
use crate::datapath::DatapathError;
use aya::programs::{
    ProgramError, SchedClassifier, TcAttachType,
    links::Link,
    tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle},
};
use nix::net::if_::{if_indextoname, if_nameindex};
use std::{io, iter};

/// Where our filter is among others': anywhere, but always the same.
const PRIORITY: u16 = 91;
const HANDLE: TcHandle = TcHandle::new(0, 1);

impl Hook {
    fn tc(self) -> TcAttachType {
        match self.direction() {
            Direction::Ingress => TcAttachType::Ingress,
            Direction::Egress => TcAttachType::Egress,
        }
    }
}

/// Attaches the filter or replaces its program.
pub fn attach(
    hook: Hook,
    program: &mut SchedClassifier,
    ifindex: u32,
) -> Result<(), DatapathError> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| DatapathError::Attach {
        program: hook.program(),
        target: format!("interface {ifindex} by clsact"),
        source: error,
    };
    let name = name(ifindex).map_err(|error| failed(error.into()))?;
    match tc::qdisc_add_clsact(&name) {
        Err(error) if errno(&error) != Some(libc::EEXIST) => return Err(failed(error.into())),
        _ => {}
    }
    let there = SchedClassifierLink::attached(&name, hook.tc(), PRIORITY, HANDLE, None)
        .map_err(|error| failed(error.into()))?;
    let id = match program.attach_to_link(there) {
        Err(ProgramError::TcError(error)) if errno(&error) == Some(libc::ENOENT) => {
            let options = TcAttachOptions::Netlink(NlOptions {
                priority: PRIORITY,
                handle: HANDLE,
                classid: None,
            });
            program.attach_with_options(&name, hook.tc(), options)
        }
        other => other,
    }
    .map_err(|error| failed(error.into()))?;
    // aya takes a filter away with the value that stands for it; ours is to stay.
    let link = program
        .take_link(id)
        .map_err(|error| failed(error.into()))?;
    std::mem::forget(link);
    Ok(())
}

/// Removes the filter, if there is one.
pub fn detach(hook: Hook, ifindex: u32) {
    if let Ok(name) = name(ifindex)
        && let Ok(link) = SchedClassifierLink::attached(&name, hook.tc(), PRIORITY, HANDLE, None)
    {
        // No such filter, as a rule.
        let _ = link.detach();
    }
}

/// Removes these hooks' filters from every interface but `keep`; what there was, in words.
pub fn detach_others(hooks: &[Hook], keep: &[u32]) -> Result<Vec<String>, DatapathError> {
    let mut detached = Vec::new();
    let interfaces = if_nameindex().map_err(|error| DatapathError::Probe(error.into()))?;
    for interface in &interfaces {
        if keep.contains(&interface.index()) {
            continue;
        }
        let name = interface.name().to_string_lossy();
        for hook in hooks {
            for program in iter::once(hook.program()).chain(hook.earlier_program()) {
                // The program's name tells our filter from others'; most interfaces have none.
                if tc::qdisc_detach_program(&name, hook.tc(), program).is_ok() {
                    detached.push(format!("filter {program} of {name}"));
                }
            }
        }
    }
    Ok(detached)
}

/// aya wants names. One that changes meanwhile is found again at the next attempt.
fn name(ifindex: u32) -> io::Result<String> {
    Ok(if_indextoname(ifindex)?.to_string_lossy().into_owned())
}

fn errno(error: &TcError) -> Option<i32> {
    match error {
        TcError::NetlinkError(error) => error.raw_os_error(),
        TcError::IoError(error) => error.raw_os_error(),
        _ => None,
    }
}
