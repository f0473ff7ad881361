//! What an object says becomes a fact, or the reason why it says nothing.
//!
//! The API server checks objects, so what it lets through and nobody could implement is rare and belongs to whoever
//! wrote it: the reason names the field, and costs that object alone.

use super::objects::{ApiEndpoint, ApiService, ApiSlice, Metadata, Port};
use crate::{
    plan::services::{
        Endpoint, Protocol, Service, ServiceName, Slice,
        facts::{Condition, Exclusion, External, Place, ServicePort, Shared, SlicePort},
    },
    watch::nodes_parse::cut,
};
use ipnet::IpNet;
use sinabro_common::names::{MAGLEV, SERVICE_BALANCING_ANNOTATION};
use std::{net::IpAddr, sync::Arc};

/// sessionAffinityConfig's default.
const AFFINITY_SECONDS: i64 = 10_800;
/// The most it may be, a day.
const MAX_AFFINITY_SECONDS: i64 = 86_400;

/// What many facts have in common.
#[derive(Debug, Default)]
pub struct Common {
    names: Shared<str>,
    places: Shared<Place>,
    ports: Shared<[ServicePort]>,
    slice_ports: Shared<[SlicePort]>,
}

impl Common {
    /// How many different places there are.
    pub fn places(&self) -> usize {
        self.places.len()
    }
}

/// Whose object it is.
///
/// # Errors
/// If it has no name.
pub fn name(metadata: &Metadata) -> Result<ServiceName, String> {
    for (field, text) in [("namespace", &metadata.namespace), ("name", &metadata.name)] {
        // A slash would make two names one.
        if text.is_empty() || text.contains('/') {
            return Err(format!("metadata.{field} `{}` is not a name", cut(text)));
        }
    }
    Ok(ServiceName::new(&metadata.namespace, &metadata.name))
}

/// Whose endpoints a slice has; none if it belongs to no Service.
pub fn owner(metadata: &Metadata) -> Option<ServiceName> {
    let name = metadata.labels.owner.as_deref()?;
    (!name.is_empty() && !name.contains('/')).then(|| ServiceName::new(&metadata.namespace, name))
}

/// # Errors
/// The field that cannot be used, and why.
pub fn service(object: &ApiService, common: &mut Common) -> Result<Service, String> {
    let spec = &object.spec;
    let one = std::slice::from_ref(&spec.cluster_ip);
    let cluster_ips = match spec.cluster_ips.is_empty() {
        true => one,
        false => &spec.cluster_ips,
    };
    let excluded = if object.metadata.labels.proxy.is_some() {
        Some(Exclusion::OtherProxy)
    } else if spec.r#type == "ExternalName" {
        Some(Exclusion::ExternalName)
    } else if cluster_ips.iter().all(|ip| ip.is_empty() || ip == "None") {
        Some(Exclusion::Headless)
    } else {
        None
    };
    if excluded.is_some() {
        let mut service = Service {
            excluded,
            ..Service::default()
        };
        // What another proxy translates is its business, but for its address not to be taken for nobody's.
        let is_anothers = excluded == Some(Exclusion::OtherProxy);
        for address in cluster_ips.iter().filter_map(|ip| lenient(ip)) {
            match address {
                IpAddr::V4(ip) if is_anothers => service.cluster_v4 = Some(ip),
                IpAddr::V6(ip) if is_anothers => service.cluster_v6 = Some(ip),
                _ => {}
            }
        }
        return Ok(service);
    }
    let mut service = Service {
        affinity_seconds: affinity(object)?,
        internal_local: spec.internal_traffic_policy.as_deref() == Some("Local"),
        ..Service::default()
    };
    for text in cluster_ips {
        match address("spec.clusterIPs", text)? {
            IpAddr::V4(ip) if service.cluster_v4.is_none() => service.cluster_v4 = Some(ip),
            IpAddr::V6(ip) if service.cluster_v6.is_none() => service.cluster_v6 = Some(ip),
            ip => {
                return Err(format!(
                    "spec.clusterIPs: {ip} is a second one of its family"
                ));
            }
        }
    }
    let mut ports = Vec::with_capacity(spec.ports.len());
    for port in &spec.ports {
        let port = ServicePort {
            name: common.names.get(port.name.as_str()),
            protocol: protocol("spec.ports", port)?,
            port: number("spec.ports.port", port.port.unwrap_or(0))?,
            node_port: optional("spec.ports.nodePort", port.node_port)?,
        };
        if ports
            .iter()
            .any(|other: &ServicePort| other.name == port.name)
        {
            return Err(format!("spec.ports: two are called `{}`", cut(&port.name)));
        }
        ports.push(port);
    }
    service.ports = common.ports.get(ports);
    let balances = spec.r#type == "LoadBalancer";
    let is_reached = balances || spec.r#type == "NodePort" || !spec.external_ips.is_empty();
    service.external_local = is_reached && spec.external_traffic_policy == "Local";
    service.external_consistent = is_reached && object.metadata.balancing() == MAGLEV;
    let external = external(object, balances && service.external_local)?;
    service.external = (external != External::default()).then(|| Box::new(external));
    Ok(service)
}

/// What a Service asks for that is nothing, and changes nothing.
pub fn unknown_wish(metadata: &Metadata) -> Option<String> {
    match metadata.balancing() {
        "" | MAGLEV => None,
        other => Some(format!(
            "metadata.annotations: {SERVICE_BALANCING_ANNOTATION} `{}` is not `{MAGLEV}`",
            cut(other)
        )),
    }
}

fn affinity(object: &ApiService) -> Result<u32, String> {
    if object.spec.session_affinity != "ClientIP" {
        return Ok(0);
    }
    let config = object.spec.session_affinity_config.as_ref();
    let seconds = config
        .and_then(|config| config.client_ip.as_ref())
        .and_then(|client_ip| client_ip.timeout_seconds)
        .unwrap_or(AFFINITY_SECONDS);
    match u32::try_from(seconds) {
        Ok(good) if (1..=MAX_AFFINITY_SECONDS).contains(&seconds) => Ok(good),
        _ => Err(format!(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds {seconds} is not from 1 to {MAX_AFFINITY_SECONDS}"
        )),
    }
}

fn external(object: &ApiService, is_asked: bool) -> Result<External, String> {
    let spec = &object.spec;
    let ips = spec.external_ips.iter();
    let ingress = object.status.load_balancer.ingress.iter();
    // Without ipMode it is VIP, as with a server that does not know it yet.
    let arrives = ingress
        .filter(|at| !at.ip.is_empty() && at.ip_mode.as_deref().is_none_or(|mode| mode == "VIP"));
    let ranges = spec.load_balancer_source_ranges.iter();
    let range = |text: &String| {
        // Validation lets spaces pass.
        let range: Result<IpNet, _> = text.trim().parse();
        let wrong = |_| {
            format!(
                "spec.loadBalancerSourceRanges: `{}` is not a prefix such as 10.0.0.0/8",
                cut(text)
            )
        };
        range.map(|range| range.trunc()).map_err(wrong)
    };
    Ok(External {
        ips: ips
            .map(|ip| address("spec.externalIPs", ip))
            .collect::<Result<_, _>>()?,
        load_balancer: arrives
            .map(|at| address("status.loadBalancer.ingress.ip", &at.ip))
            .collect::<Result<_, _>>()?,
        source_ranges: ranges.map(range).collect::<Result<_, _>>()?,
        health_check_node_port: match is_asked {
            true => optional("spec.healthCheckNodePort", spec.health_check_node_port)?,
            false => 0,
        },
    })
}

/// # Errors
/// As of [`service`].
pub fn slice(object: &ApiSlice, common: &mut Common) -> Result<Slice, String> {
    let v4 = match object.address_type.as_str() {
        "IPv4" => true,
        "IPv6" => false,
        // Names are nothing that a packet could be sent to.
        "FQDN" => return Ok(Slice::default()),
        other => {
            return Err(format!(
                "addressType `{}` is none of IPv4, IPv6 and FQDN",
                cut(other)
            ));
        }
    };
    let mut ports = Vec::with_capacity(object.ports.len());
    for port in &object.ports {
        // Without a number it stands for all ports, which no Service's port can lead to.
        let Some(number @ 1..) = port.port else {
            continue;
        };
        ports.push(SlicePort {
            name: common.names.get(port.name.as_str()),
            protocol: protocol("ports", port)?,
            port: self::number("ports.port", number)?,
        });
    }
    let mut endpoints = Vec::with_capacity(object.endpoints.len());
    for from in &object.endpoints {
        // Further ones have no meaning (KEP-752).
        let Some(first) = from.addresses.first() else {
            continue;
        };
        let address = address("endpoints.addresses", first)?;
        if address.is_ipv4() != v4 {
            return Err(format!(
                "endpoints.addresses: {address} is not of addressType {}",
                object.address_type
            ));
        }
        endpoints.push(Endpoint {
            address,
            condition: condition(from),
            place: place(from, common),
        });
    }
    Ok(Slice {
        ports: common.slice_ports.get(ports),
        endpoints: endpoints.into(),
    })
}

/// What is not said is as the API's documentation has it.
fn condition(endpoint: &ApiEndpoint) -> Condition {
    let said = &endpoint.conditions;
    Condition::default()
        .with(Condition::READY, said.ready.unwrap_or(true))
        .with(Condition::SERVING, said.serving.unwrap_or(true))
        .with(Condition::TERMINATING, said.terminating.unwrap_or(false))
}

fn place(endpoint: &ApiEndpoint, common: &mut Common) -> Arc<Place> {
    let names = |hints: &[super::objects::Named]| {
        let mut names: Vec<Box<str>> = hints.iter().map(|hint| hint.name.as_str().into()).collect();
        names.sort();
        names.dedup();
        names.into()
    };
    common.places.get(Place {
        node: endpoint.node_name.as_deref().unwrap_or_default().into(),
        for_zones: names(&endpoint.hints.for_zones),
        for_nodes: names(&endpoint.hints.for_nodes),
    })
}

fn protocol(field: &str, port: &Port) -> Result<Protocol, String> {
    match port.protocol.as_deref() {
        None | Some("" | "TCP") => Ok(Protocol::Tcp),
        Some("UDP") => Ok(Protocol::Udp),
        Some("SCTP") => Ok(Protocol::Sctp),
        Some(other) => Err(format!(
            "{field}.protocol `{}` is none of TCP, UDP and SCTP",
            cut(other)
        )),
    }
}

fn number(field: &str, number: i64) -> Result<u16, String> {
    match optional(field, number)? {
        0 => Err(format!("{field} is missing")),
        port => Ok(port),
    }
}

fn optional(field: &str, number: i64) -> Result<u16, String> {
    u16::try_from(number).map_err(|_| format!("{field} {number} is not from 1 to 65535"))
}

/// An address that packets can be sent to from anywhere.
fn address(field: &str, text: &str) -> Result<IpAddr, String> {
    let Some(ip) = lenient(text) else {
        return Err(format!("{field}: `{}` is not an IP address", cut(text)));
    };
    let is_special = match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
    };
    match is_special || ip.is_unspecified() || ip.is_multicast() {
        true => Err(format!(
            "{field}: {ip} means something of its own on every machine"
        )),
        false => Ok(ip),
    }
}

/// As the API server reads it: octets may begin with zeros, and have done so in objects of before 1.33, and a mapped
/// IPv4 address is an IPv4 address.
fn lenient(text: &str) -> Option<IpAddr> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Some(ip.to_canonical());
    }
    let octet = |octet: &str| match octet.trim_start_matches('0') {
        "" if octet.is_empty() => None,
        "" => Some("0".to_owned()),
        rest => Some(rest.to_owned()),
    };
    let octets: Option<Vec<String>> = text.split('.').map(octet).collect();
    octets?.join(".").parse().ok().map(IpAddr::V4)
}
