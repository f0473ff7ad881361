//! The ports that masqueraded flows get, and those that they do not.

use super::{NodeError, sockets};
use crate::{config::Settings, datapath::PortSet, troubles::trouble};
use sinabro_common::api::{PortProtocol, Trouble};
use sinabro_netlink::sysctl;

/// Fewer translated ports than this would fail under ordinary load.
const MIN_PORTS: usize = 1024;
/// All that are not for servers of the system (RFC 6335 §6).
const PORTS: (u16, u16) = (1024, u16::MAX);

/// The ports that masqueraded flows may get, unless they are somebody's: the programs ask for the node's own
/// sockets, and know its own flows.
pub fn masquerade_ports(settings: &Settings) -> (u16, u16) {
    settings.masquerade_ports.unwrap_or(PORTS)
}

/// What is wrong if hardly any are left.
pub(super) fn too_few(settings: &Settings, taken: &PortSet) -> Option<Trouble> {
    let (first, last) = masquerade_ports(settings);
    let free = |protocol: &PortProtocol| {
        let ports = (first..=last).filter(|port| !taken.contains(protocol.number(), *port));
        ports.count()
    };
    let least = PortProtocol::ALL.iter().map(free).min()?;
    (least < MIN_PORTS).then(|| {
        trouble(
            "FewPorts",
            format!(
                "of the ports {first}-{last} only {least} are left for masqueraded flows, --node-ports and net.ipv4.ip_local_reserved_ports have the others: choose others with --masquerade-ports"
            ),
        )
    })
}

/// What is wrong if the kernel gives node ports to the node's own sockets: answers to those that are not connected go to Services
/// where this agent translates them.
///
/// # Errors
/// If the kernel's settings cannot be read.
pub(super) fn given_to_sockets(settings: &Settings) -> Result<Option<Trouble>, NodeError> {
    let Some((first, last)) = settings.node_ports else {
        return Ok(None);
    };
    if !settings.service_proxy.may_be_on() {
        return Ok(None);
    }
    // Two numbers.
    let given = sysctl::read(&["net", "ipv4", "ip_local_port_range"])?;
    let mut given = given
        .split_whitespace()
        .filter_map(|port| port.parse().ok());
    let (Some(from), Some(to)) = (given.next(), given.next()) else {
        return Ok(None);
    };
    let (from, to): (u16, u16) = (first.max(from), last.min(to));
    let reserved = ports_of(&sysctl::read(&["net", "ipv4", "ip_local_reserved_ports"])?);
    let is_reserved = |port: u16| {
        reserved
            .iter()
            .any(|(from, to)| (*from..=*to).contains(&port))
    };
    Ok((from..=to).find(|port| !is_reserved(*port)).map(|port| {
        trouble(
            "NodePortsNotReserved",
            format!(
                "net.ipv4.ip_local_port_range gives node ports such as {port} to the node's own sockets, and answers to UDP sockets that are not connected go to the Services that have them: add {first}-{last} to net.ipv4.ip_local_reserved_ports"
            ),
        )
    }))
}

/// Ports that no masqueraded connection gets although programs find no socket that has them: those of Services, those that
/// are reserved for somebody who binds to them by number, and those of [sockets that they cannot ask for](sockets). What is reserved of the
/// ports that masquerade was given by name is reserved for it.
///
/// # Errors
/// If the kernel's settings or lists cannot be read.
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
    sockets::add_to(&mut ports)?;
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
    fn node_ports_that_sockets_are_given_are_told() {
        let told = |args: &[&str], range: &str, reserved: &str| {
            let all = ["sinabro-agent", "--node-name=n1", "--nodes=/n"];
            let all = all.iter().chain(args).copied();
            let settings = Settings::load(all).unwrap();
            in_fresh(|| {
                sysctl::write(&["net", "ipv4", "ip_local_port_range"], range).unwrap();
                sysctl::write(&["net", "ipv4", "ip_local_reserved_ports"], reserved).unwrap();
                given_to_sockets(&settings).unwrap()
            })
        };
        let ours = ["--service-proxy=on", "--services-file=/s"];
        let is_told = |range, reserved| told(&ours, range, reserved).is_some();
        assert!(!is_told("32768 60999", ""));
        assert!(
            is_told("32767 60999", "") && is_told("1024 65535", "") && is_told("1024 30000", "")
        );
        assert!(!is_told("1024 65535", "8080,30000-32767") && !is_told("1024 65535", "1024-40000"));
        assert!(is_told("1024 65535", "30000-32766") && !is_told("1024 29999", ""));
        let text = told(&ours, "1024 65535", "30000-30010").unwrap().text;
        assert!(
            text.contains("such as 30011") && text.contains("add 30000-32767 to"),
            "{text}"
        );
        assert_eq!(told(&[], "1024 65535", ""), None);
        let none = [&ours[..], &["--node-ports=none"]].concat();
        assert_eq!(told(&none, "1024 65535", ""), None);
    }

    #[test]
    fn hardly_any_ports_are_told() {
        let told = |args: &[&str], reserved: &str| {
            let all = ["sinabro-agent", "--node-name=n1", "--nodes=/n"]
                .iter()
                .chain(args);
            let settings = Settings::load(all.copied()).unwrap();
            let taken = in_fresh(|| {
                sysctl::write(&["net", "ipv4", "ip_local_reserved_ports"], reserved).unwrap();
                host_ports(&settings).unwrap()
            });
            too_few(&settings, &taken).map(|told| told.text)
        };
        assert_eq!(told(&[], "61000-65535"), None);
        let none = told(&[], "1024-65000").unwrap();
        assert!(none.contains("only 535 are left"), "{none}");
        assert_eq!(
            told(&["--masquerade-ports=61000-65535"], "1024-65535"),
            None
        );
        let few = told(&["--masquerade-ports=30000-33000"], "").unwrap();
        assert!(few.contains("only 233 are left"), "{few}");
    }
}
