//! Filters on a clsact qdisc, for kernels without tcx links. They belong to the interface, so
//! they outlive the agent without a pin, and are replaced in place by their priority and handle.

use super::{Classifier, Hook};
use crate::datapath::DatapathError;
use aya::programs::{TcAttachType, tc};
use nix::net::if_::if_nameindex;
use sinabro_netlink::{
    Conn, ResultExt as _,
    tc::{Direction, Filter, Place, add_clsact, delete_filter, set_program},
};
use std::{io, iter};

/// Where our filter is among others': anywhere, but always the same.
const PRIORITY: u16 = 91;
const HANDLE: u32 = 1;

impl Hook {
    fn place(self) -> Place {
        Place {
            direction: self.direction(),
            priority: PRIORITY,
            handle: HANDLE,
        }
    }
}

/// Attaches filters to an interface or replaces their programs, in one exchange with the kernel:
/// each part of it waits for the lock that every link being made needs, too.
pub fn attach(programs: &[(Hook, &Classifier)], ifindex: u32) -> Result<(), DatapathError> {
    let failed = |hook: Hook| {
        move |error: sinabro_netlink::Error| DatapathError::Attach {
            program: hook.program(),
            target: format!("interface {ifindex} by clsact"),
            source: error.into(),
        }
    };
    let Some((first, _)) = programs.first() else {
        return Ok(());
    };
    let mut conn = Conn::new().map_err(failed(*first))?;
    let set = |(hook, program): &(Hook, &Classifier)| {
        set_program(ifindex, hook.place(), hook.program(), &program.fd)
    };
    let requests = iter::once(add_clsact(ifindex)).chain(programs.iter().map(set));
    let mut outcomes = conn.execute_each(requests).into_iter();
    match outcomes.next() {
        Some(Err(error)) if !error.is_exists() => return Err(failed(*first)(error)),
        _ => {}
    }
    programs
        .iter()
        .zip(outcomes)
        .try_for_each(|((hook, _), outcome)| outcome.map_err(failed(*hook)))
}

/// The filters of an interface; none if it is gone.
pub fn filters(ifindex: u32) -> Result<Option<Vec<Filter>>, DatapathError> {
    let filters = Conn::new().and_then(|mut conn| conn.filters(ifindex));
    filters
        .ignore_not_found()
        .map_err(|error| DatapathError::Probe(io::Error::other(error)))
}

/// Whether the program is where it was attached.
pub fn has(filters: &[Filter], hook: Hook, program: &Classifier) -> bool {
    let place = hook.place();
    filters.iter().any(|filter| {
        let id = filter.program.as_ref().map(|(_, id)| *id);
        (filter.direction, filter.priority, filter.handle)
            == (place.direction, place.priority, place.handle)
            && id == Some(program.id)
    })
}

/// Removes the filter, if there is one.
pub fn detach(hook: Hook, ifindex: u32) {
    let deleted = Conn::new()
        .and_then(|mut conn| conn.execute(delete_filter(ifindex, hook.place())))
        .ignore_not_found();
    if let Err(error) = deleted {
        // No such qdisc, as a rule.
        tracing::debug!(%error, "no filter removed");
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
                if tc::qdisc_detach_program(&name, attach_type(*hook), program).is_ok() {
                    detached.push(format!("filter {program} of {name}"));
                }
            }
        }
    }
    Ok(detached)
}

fn attach_type(hook: Hook) -> TcAttachType {
    match hook.direction() {
        Direction::Ingress => TcAttachType::Ingress,
        Direction::Egress => TcAttachType::Egress,
    }
}
