//! The ports that masqueraded flows get.

use super::NodeError;
use crate::{config::Settings, troubles::trouble};
use sinabro_common::api::Trouble;
use sinabro_netlink::sysctl;

/// Fewer translated ports than this would fail under ordinary load.
const MIN_PORTS: u32 = 1024;
/// Those above Linux's own default of ip_local_port_range.
const SHARED_PORTS: (u16, u16) = (61_000, u16::MAX);

/// The ports that masqueraded flows get: as set, else those above what the node's own sockets
/// are given, so that the two never claim the same. Where none are left above, the last ones, and
/// that is a trouble unless the node's sockets are kept off them.
///
/// # Errors
/// If the kernel's settings cannot be read.
pub fn masquerade_ports(settings: &Settings) -> Result<((u16, u16), Option<Trouble>), NodeError> {
    if let Some(ports) = settings.masquerade_ports {
        return Ok((ports, None));
    }
    let range = sysctl::read(&["net", "ipv4", "ip_local_port_range"])?;
    // Two numbers, by the kernel's own format.
    let last: u32 = range
        .split_whitespace()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(u32::from(u16::MAX));
    let max = u32::from(u16::MAX);
    if last + MIN_PORTS <= max {
        return Ok(((last as u16 + 1, u16::MAX), None));
    }
    let reserved = sysctl::read(&["net", "ipv4", "ip_local_reserved_ports"])?;
    let shared = (!reserves(&reserved, SHARED_PORTS)).then(|| {
        let (first, last_shared) = SHARED_PORTS;
        trouble(
            "PortsShared",
            format!(
                "net.ipv4.ip_local_port_range ends at {last}, so masqueraded flows share ports {first}-{last_shared} with the node's own sockets and may take each other's answers: end it at {} or set net.ipv4.ip_local_reserved_ports={first}-{last_shared}, or choose others with --masquerade-ports; then start the agent again",
                first - 1
            ),
        )
    });
    Ok((SHARED_PORTS, shared))
}

/// Whether a list such as `8080,61000-65535` has all of a range.
fn reserves(list: &str, (first, last): (u16, u16)) -> bool {
    let mut ranges: Vec<(u16, u16)> = list
        .trim()
        .split(',')
        .filter_map(|text| {
            let (from, to) = text.split_once('-').unwrap_or((text, text));
            Some((from.parse().ok()?, to.parse().ok()?))
        })
        .collect();
    ranges.sort_unstable();
    let mut next = u32::from(first);
    for (from, to) in ranges {
        if u32::from(from) <= next {
            next = next.max(u32::from(to) + 1);
        }
    }
    next > u32::from(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_netlink::netns::in_fresh;

    #[test]
    fn ports_that_the_node_uses_itself_are_shared_and_told() {
        let args = ["sinabro-agent", "--node-name=n1", "--nodes=/n"];
        let settings = Settings::load(args).unwrap();
        let ports = |range: &str, reserved: &str| {
            in_fresh(|| {
                sysctl::write(&["net", "ipv4", "ip_local_port_range"], range).unwrap();
                sysctl::write(&["net", "ipv4", "ip_local_reserved_ports"], reserved).unwrap();
                masquerade_ports(&settings).unwrap()
            })
        };
        assert_eq!(ports("32768 60999", ""), ((61_000, 65_535), None));
        assert_eq!(ports("1024 50000", ""), ((50_001, 65_535), None));
        let (shared, told) = ports("1024 65535", "");
        assert_eq!(shared, (61_000, 65_535));
        let told = told.unwrap();
        assert_eq!(told.reason, "PortsShared");
        assert!(told.text.contains("ip_local_reserved_ports=61000-65535"));
        assert_eq!(ports("1024 65535", "80,61000-65535"), (shared, None));
        assert_eq!(
            ports("1024 65535", "61000-62000,62001-65535"),
            (shared, None)
        );
        assert!(ports("1024 65535", "61000-65534").1.is_some());
    }
}
