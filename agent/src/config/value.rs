//! Text to values, with the reason if it is none.

use super::{MAX_MTU, MIN_MTU};
use crate::{
    acceleration::choice::Mode,
    cluster_api::servers::ApiServer,
    handover::ServiceProxy,
    plan::{ForwardingMode, MasqueradeIpv6, OverlayMode, Routing, UdpMapping},
};
use ipnet::IpNet;
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

pub fn node_name(text: &str) -> Result<String, String> {
    // Kubernetes names nodes by RFC 1123 subdomains, in lower case; kubelet lowers host names.
    let name = text.to_ascii_lowercase();
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    if name.len() > 253 || !name.split('.').all(label) {
        return Err("not a node name: letters, digits, dashes and dots, at most 253".into());
    }
    Ok(name)
}

pub fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if !path.is_absolute() {
        return Err("must be an absolute path".into());
    }
    Ok(path)
}

/// `https://HOST[:PORT]` or `HOST[:PORT]`; an IPv6 address with a port has brackets.
pub fn api_server(text: &str) -> Result<ApiServer, String> {
    const EXPECTED: &str =
        "expected an API server such as 192.0.2.1:6443 or https://api.example.com";
    if text.starts_with("http:") {
        return Err("the API is asked by https".into());
    }
    let text = text.strip_prefix("https://").unwrap_or(text);
    let text = text.strip_suffix('/').unwrap_or(text);
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').ok_or(EXPECTED)?,
        // An IPv6 address without a port.
        None if text.matches(':').count() > 1 => (text, ""),
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(port) => number(port, 1, u16::MAX)?,
        None if port.is_empty() => 443,
        None => return Err(EXPECTED.into()),
    };
    let is_address = host.parse::<IpAddr>().is_ok();
    if !is_address {
        node_name(host).map_err(|_| EXPECTED)?;
    }
    let host = host.to_owned();
    Ok(ApiServer { host, port })
}

pub fn device(text: &str) -> Result<String, String> {
    // dev_valid_name of the kernel.
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace();
    if text.len() > 15 || text == "." || text == ".." || text.contains(bad) {
        return Err("not a name of a network device".into());
    }
    Ok(text.to_owned())
}

pub fn cidr(text: &str) -> Result<IpNet, String> {
    let net: IpNet = text
        .parse()
        .map_err(|_| "expected an address and a prefix length, such as 10.0.0.0/8")?;
    if net != net.trunc() {
        return Err(format!(
            "has bits beyond its prefix, did you mean {}",
            net.trunc()
        ));
    }
    if let IpNet::V6(v6) = net
        && let Some(v4) = v6.network().to_ipv4_mapped()
        && v6.prefix_len() >= 96
    {
        let len = v6.prefix_len() - 96;
        return Err(format!("is of IPv4 addresses, write {v4}/{len}"));
    }
    Ok(net)
}

pub fn number<T>(text: &str, min: T, max: T) -> Result<T, String>
where
    T: FromStr + PartialOrd + fmt::Display,
{
    match text.parse::<T>() {
        Ok(n) if n >= min && n <= max => Ok(n),
        _ => Err(format!("expected a number from {min} to {max}")),
    }
}

pub fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err("expected true or false".into()),
    }
}

/// An amount of memory as Kubernetes writes it.
pub fn memory(text: &str) -> Result<u64, String> {
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30)];
    let (digits, shift) = units
        .into_iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
        .unwrap_or((text, 0));
    let number = digits.parse::<u64>().ok();
    number
        .filter(|_| digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| "expected bytes, such as 64Mi or 1Gi".into())
}

/// MTU of pods' links, for what stays on the node; none if it is that of all else.
pub fn local_mtu(text: &str) -> Result<Option<u32>, String> {
    match text {
        "auto" => Ok(Some(MAX_MTU)),
        // YAML 1.1, which Helm reads, takes a bare `off` for the boolean.
        "off" | "false" => Ok(None),
        _ => number(text, MIN_MTU, MAX_MTU)
            .map(Some)
            .map_err(|_| format!("expected auto, off or a number from {MIN_MTU} to {MAX_MTU}")),
    }
}

pub fn masquerade_ipv6(text: &str) -> Result<MasqueradeIpv6, String> {
    match text {
        "auto" => Ok(MasqueradeIpv6::Auto),
        // YAML 1.1, which Helm reads, takes a bare `on` or `off` for the boolean.
        "on" | "true" => Ok(MasqueradeIpv6::On),
        "off" | "false" => Ok(MasqueradeIpv6::Off),
        _ => Err("expected auto, on or off".into()),
    }
}

pub fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "on" | "true" => Ok(true),
        "off" | "false" => Ok(false),
        _ => Err("expected on or off".into()),
    }
}

pub fn udp_mapping(text: &str) -> Result<UdpMapping, String> {
    UdpMapping::EVERY
        .into_iter()
        .find(|mapping| mapping.to_string() == text)
        .ok_or_else(|| "expected address-and-port-dependent or endpoint-independent".into())
}

/// Of packets between nodes, and of those between pods and the outside.
pub fn data_path(text: &str) -> Result<(OverlayMode, ForwardingMode), String> {
    match text {
        "auto" => Ok((OverlayMode::Auto, ForwardingMode::Auto)),
        "kernel" => Ok((OverlayMode::Kernel, ForwardingMode::Kernel)),
        _ => Err("expected auto or kernel".into()),
    }
}

pub fn routing(text: &str) -> Result<Routing, String> {
    Routing::EVERY
        .into_iter()
        .find(|routing| routing.to_string() == text)
        .ok_or_else(|| "expected tunnel, native or auto".into())
}

pub fn acceleration_mode(text: &str) -> Result<Mode, String> {
    let text = match text {
        // YAML 1.1, which Helm reads, takes a bare `off` for the boolean.
        "false" => "off",
        // See `deprecated`.
        "auto" => "opt-in",
        text => text,
    };
    Mode::EVERY
        .into_iter()
        .find(|mode| mode.as_str() == text)
        .ok_or_else(|| "expected off, opt-in or all".into())
}

pub fn service_proxy(text: &str) -> Result<ServiceProxy, String> {
    // YAML 1.1, which Helm reads, takes a bare `on` or `off` for the boolean.
    let text = match text {
        "true" => "on",
        "false" => "off",
        text => text,
    };
    ServiceProxy::EVERY
        .into_iter()
        .find(|wish| wish.as_str() == text)
        .ok_or_else(|| "expected off, on or auto".into())
}

pub fn node_ports(text: &str) -> Result<Option<(u16, u16)>, String> {
    match text {
        "none" => Ok(None),
        _ => port_range(text)
            .map(Some)
            .map_err(|reason| format!("{reason}, or none")),
    }
}

pub fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| "expected ADDRESS:PORT, an IPv6 address in brackets".into())
}

pub fn port_range(text: &str) -> Result<(u16, u16), String> {
    text.split_once('-')
        .and_then(|(first, last)| {
            let first: u16 = first.trim().parse().ok()?;
            let last: u16 = last.trim().parse().ok()?;
            (first > 0 && first <= last).then_some((first, last))
        })
        .ok_or_else(|| "expected FIRST-LAST, two ports in ascending order".into())
}
