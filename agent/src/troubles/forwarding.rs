//! The kernel's switches for forwarding.
//!
//! `prepare` turns them on, for the families that it finds pods to have; a `sysctl --system` of
//! another package, or a hardening tool, turns them off again later, and every pod is cut off while
//! all seems well. Where /proc/sys can be written they are turned on again; elsewhere it is said.

use super::{Standing, trouble};
use crate::{
    chain::Chain,
    node::NodeState,
    prepare::{self, Families},
};
use sinabro_common::api::Trouble;
use std::sync::PoisonError;
use tracing::warn;

const REASON: &str = "ForwardingOff";

/// Turns forwarding on where it is off; what could not be.
pub fn keep(node: &NodeState) -> Vec<Trouble> {
    let wanted = Families::of(&node.pod_cidrs);
    let v4 = Families {
        v6: false,
        ..wanted
    };
    let v6 = Families {
        v4: false,
        ..wanted
    };
    let one = |(families, name)| keep_one(node, families, name);
    let families = [
        (v4, "net.ipv4.ip_forward"),
        (v6, "net.ipv6.conf.all.forwarding"),
    ];
    families.into_iter().filter_map(one).collect()
}

/// Puts this in place of what was said before.
pub fn say(standing: &Standing, found: Vec<Trouble>) {
    let mut all = standing.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|trouble| trouble.reason != REASON);
    all.extend(found);
}

fn keep_one(node: &NodeState, families: Families, name: &str) -> Option<Trouble> {
    if prepare::is_forwarding(families) {
        return None;
    }
    let uplinks: Vec<_> = node.uplinks.iter().map(|link| link.name.clone()).collect();
    match prepare::forwarding(&uplinks, families) {
        Ok(prepared) => {
            for change in &prepared.changes {
                warn!(
                    "{change}, for pods need it: if something turns it off, find what (grep -r forward /etc/sysctl.d)"
                );
            }
            None
        }
        Err(error) => Some(trouble(
            REASON,
            format!(
                "{name} is 0, so pods reach nothing beyond this node: run `sysctl -w {name}=1`, and find what turned it off (grep -r forward /etc/sysctl.d): {}",
                Chain(&error)
            ),
        )),
    }
}
