//! The kernel's switches for forwarding.
//!
//! `prepare` turns them on; a `sysctl --system` of another package, or a hardening tool, turns
//! them off again later, and every pod is cut off while all seems well. Where /proc/sys can be
//! written they are turned on again; elsewhere it is said.

use super::trouble;
use ipnet::IpNet;
use sinabro_common::api::Trouble;
use sinabro_netlink::sysctl;
use tracing::warn;

const V4: &[&str] = &["net", "ipv4", "ip_forward"];
const V6: &[&str] = &["net", "ipv6", "conf", "all", "forwarding"];

/// Turns forwarding on where it is off; what could not be.
pub fn keep(pod_cidrs: &[IpNet]) -> Vec<Trouble> {
    let v4 = pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv4());
    let v6 = pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6());
    let wanted = [(v4, V4), (v6, V6)];
    let wanted = wanted.into_iter().filter(|(wanted, _)| *wanted);
    wanted.filter_map(|(_, name)| keep_one(name)).collect()
}

fn keep_one(name: &[&str]) -> Option<Trouble> {
    let shown = name.join(".");
    let why = match sysctl::ensure(name, "1") {
        Ok(false) => return None,
        Ok(true) => {
            warn!(
                "{shown} was turned off and is on again: find what does that (grep -r forward /etc/sysctl.d)"
            );
            return None;
        }
        Err(error) => error,
    };
    Some(trouble(
        "ForwardingOff",
        format!(
            "{shown} is 0, so pods reach nothing beyond this node: run `sysctl -w {shown}=1`, and find what turned it off (grep -r forward /etc/sysctl.d): {why}"
        ),
    ))
}
