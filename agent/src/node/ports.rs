//! The ports that masqueraded flows get, and those that they do not.

use super::NodeError;
use crate::{config::Settings, datapath::PortSet, troubles::trouble};
use sinabro_common::api::{PortProtocol, Trouble};
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

/// Ports that no masqueraded connection gets although no socket has them: those of Services, and those that
/// are reserved for somebody who binds to them by number. What is reserved of the ports that masquerade was
/// given by name is reserved for it.
///
/// # Errors
/// If the kernel's settings cannot be read.
pub(super) fn host_ports(settings: &Settings) -> Result<PortSet, NodeError> {
    let reserved = sysctl::read(&["net", "ipv4", "ip_local_reserved_ports"])?;
    let mut ranges: Vec<(u16, u16)> = settings.node_ports.into_iter().collect();
    for (from, to) in ports_of(&reserved) {
        match settings.masquerade_ports {
            None => ranges.push((from, to)),
            Some((first, last)) => {
                ranges.extend(first.checked_sub(1).map(|before| (from, to.min(before))));
                ranges.extend(last.checked_add(1).map(|after| (from.max(after), to)));
            }
        }
    }
    let mut ports = PortSet::default();
    for protocol in PortProtocol::ALL {
        for &(from, to) in &ranges {
            ports.add(protocol.number(), from..=to);
        }
    }
    Ok(ports)
}

/// The ranges of a list such as `8080,61000-65535`.
fn ports_of(list: &str) -> Vec<(u16, u16)> {
    let range = |text: &str| {
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        Some((from.parse().ok()?, to.parse().ok()?))
    };
    list.trim().split(',').filter_map(range).collect()
}

/// Whether a list has all of a range.
fn reserves(list: &str, (first, last): (u16, u16)) -> bool {
    let mut ranges = ports_of(list);
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
    fn ports_of_services_and_reserved_ones_are_kept_free() {
        const PROTOCOLS: [u8; 4] = [6, 17, 132, 136];
        let ports = |args: &[&str], reserved: &str| {
            let all = ["sinabro-agent", "--node-name=n1", "--nodes=/n"]
                .iter()
                .chain(args);
            let settings = Settings::load(all.copied()).unwrap();
            in_fresh(|| {
                sysctl::write(&["net", "ipv4", "ip_local_reserved_ports"], reserved).unwrap();
                host_ports(&settings).unwrap()
            })
        };
        let has = |ports: &PortSet, port| {
            let has = PROTOCOLS.map(|proto| ports.contains(proto, port));
            assert!(has.iter().all(|one| *one == has[0]), "{port}: {has:?}");
            has[0]
        };
        let usual = ports(&[], "");
        assert!(has(&usual, 30_000) && has(&usual, 32_767));
        assert!(!has(&usual, 29_999) && !has(&usual, 32_768));
        let none = ports(&["--node-ports=none"], "8080,61000-65535");
        assert!(has(&none, 8080) && has(&none, 61_000) && has(&none, 65_535));
        assert!(!has(&none, 30_000) && !has(&none, 8081) && !has(&none, 60_999));
        // As the node is told to keep its own sockets off what masquerade uses.
        let given = ports(&["--masquerade-ports=61000-65535"], "8080,60990-65535");
        assert!(has(&given, 8080) && has(&given, 60_999) && !has(&given, 61_000));
        assert!(!has(&given, 65_535));
        let given = ports(&["--masquerade-ports=1-60000"], "8080,50000-60001");
        assert!(!has(&given, 8080) && !has(&given, 60_000) && has(&given, 60_001));
    }

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
