//! Whom a Service leads where, compared with kube-proxy's own code: the same random objects for both.
//!
//! `cargo xtask differential` builds the program that asks kube-proxy's code (`xtask/cluster/proxied`), and says where it is
//! in `SINABRO_PROXIED`; and how many Services in `SINABRO_PROXIED_CASES`.

#![allow(clippy::unwrap_used)]

mod objects;
mod oracle;

use ipnet::IpNet;
use objects::World;
use oracle::{Oracle, Outcome, Port};
use proptest::{
    prelude::ProptestConfig,
    test_runner::{TestCaseError, TestCaseResult, TestRunner},
};
use sinabro_agent::{
    plan::services::{FrontendKind, Here, PortPlan, Protocol, Service, ServicePlan, SetPlan, plan},
    watch::services::parse::{self, Common},
};
use std::{
    cell::RefCell,
    collections::BTreeSet,
    env,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// Enough for each rule of each kind of Service to be met hundreds of times, if nobody says how many.
const CASES: u32 = 5_000;

#[test]
fn a_service_leads_where_kube_proxy_leads() {
    let Some(program) = env::var_os("SINABRO_PROXIED") else {
        println!("skipped: SINABRO_PROXIED names no program, `cargo xtask differential` does");
        return;
    };
    let cases = env::var("SINABRO_PROXIED_CASES").map_or(CASES, |text| text.parse().unwrap());
    let oracle = RefCell::new(Oracle::start(&program));
    let seen = RefCell::new(Seen::default());
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let compared = TestRunner::new(config).run(&objects::world(), |world| {
        let wanted = oracle.borrow_mut().ask(&world);
        seen.borrow_mut().note(&wanted);
        same(&world, &wanted)
    });
    if let Err(error) = compared {
        panic!("{error}");
    }
    let seen = seen.into_inner();
    println!("{cases} Services compared: {seen:?}");
    // Objects that lead nowhere would compare well, too.
    let Seen {
        ports,
        refused,
        dropped,
        led,
        guarded,
    } = seen;
    for count in [ports, refused, dropped, led, guarded] {
        assert!(count > cases as usize / 50, "{seen:?}");
    }
}

/// The node's own addresses: kube-proxy's code leaves it to its rules where node ports are.
const NODE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 77)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x77)),
];

/// What was compared.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    ports: usize,
    refused: usize,
    dropped: usize,
    led: usize,
    guarded: usize,
}

impl Seen {
    fn note(&mut self, ports: &[Port]) {
        self.ports += ports.len();
        for port in ports {
            self.guarded += usize::from(!port.source_ranges.is_empty());
            for outcome in [&port.internal, &port.cluster, &port.external] {
                match outcome.verdict.as_deref() {
                    None => self.led += 1,
                    Some("drop") => self.dropped += 1,
                    Some(_) => self.refused += 1,
                }
            }
        }
    }
}

fn same(world: &World, wanted: &[Port]) -> TestCaseResult {
    let (service, plan) = planned(world);
    let mut left: BTreeSet<(String, bool)> = plan
        .ports
        .iter()
        .flat_map(|(name, port)| {
            let frontends = port.frontends.iter();
            frontends.map(|frontend| (name.clone(), frontend.at.is_ipv4()))
        })
        .collect();
    for want in wanted {
        let found = plan.ports.get(&want.name);
        let port = found.ok_or_else(|| wrong(format!("port {} is missing", want.name)))?;
        same_port(want, port, &plan)?;
        let asked = service.external.as_deref();
        let asked = asked.map_or(0, |external| external.health_check_node_port);
        equal("health check port", &asked, &want.health_check)?;
        left.remove(&(want.name.clone(), want.is_v4()));
    }
    equal("what kube-proxy has not", &left, &BTreeSet::new())
}

/// By the way that objects of the API take.
fn planned(world: &World) -> (Service, ServicePlan) {
    let mut common = Common::default();
    let object = serde_json::from_value(world.service()).unwrap();
    let service = parse::service(&object, &mut common).unwrap();
    let slices: Vec<_> = world
        .slices()
        .into_iter()
        .map(|slice| {
            let object = serde_json::from_value(slice).unwrap();
            parse::slice(&object, &mut common).unwrap()
        })
        .collect();
    let here = Here {
        node: world.node.into(),
        zone: world.zone.into(),
        node_ports_at: NODE.into(),
        link_addresses: Default::default(),
        without_external_ips: false,
    };
    let plan = plan(&service, &slices.iter().collect::<Vec<_>>(), &here);
    (service, plan)
}

fn same_port(want: &Port, port: &PortPlan, plan: &ServicePlan) -> TestCaseResult {
    let protocol = match want.protocol.as_str() {
        "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        _ => Protocol::Sctp,
    };
    equal("protocol", &port.protocol, &protocol)?;
    equal("affinity", &port.affinity_seconds, &want.affinity)?;
    let at = |kind| -> BTreeSet<SocketAddr> {
        let frontends = port.frontends.iter();
        frontends
            .filter(|frontend| frontend.kind == kind && frontend.at.is_ipv4() == want.is_v4())
            .map(|frontend| frontend.at)
            .collect()
    };
    let wanted = |addresses: &[IpAddr]| -> BTreeSet<SocketAddr> {
        let at = |ip: &IpAddr| SocketAddr::new(*ip, want.port);
        addresses.iter().map(at).collect()
    };
    equal(
        "cluster address",
        &at(FrontendKind::ClusterIp),
        &wanted(&[want.cluster_ip]),
    )?;
    let externals = wanted(&want.external_ips);
    equal("external IPs", &at(FrontendKind::ExternalIp), &externals)?;
    let balancers = wanted(&want.load_balancers);
    equal(
        "load balancers",
        &at(FrontendKind::LoadBalancer),
        &balancers,
    )?;
    let node_ports = at(FrontendKind::NodePort);
    let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let wanted: BTreeSet<SocketAddr> = [NODE, loopback]
        .as_flattened()
        .iter()
        .filter(|address| address.is_ipv4() == want.is_v4() && want.node_port != 0)
        .map(|address| SocketAddr::new(*address, want.node_port))
        .collect();
    equal("node port", &node_ports, &wanted)?;
    if !balancers.is_empty() {
        equal("source ranges", &ranges(plan, want), &want.source_ranges)?;
    }
    let sets = &port.sets[usize::from(!want.is_v4())];
    outcome("internal", &sets.internal, &want.internal)?;
    // Without such a frontend nobody asks for them.
    if node_ports.is_empty() && externals.is_empty() && balancers.is_empty() {
        return Ok(());
    }
    outcome("cluster", &sets.cluster, &want.cluster)?;
    outcome("external", &sets.external, &want.external)
}

/// Those of the port's family; one that everybody is in is as none.
fn ranges(plan: &ServicePlan, want: &Port) -> BTreeSet<IpNet> {
    let ranges: BTreeSet<IpNet> = plan
        .source_ranges
        .iter()
        .filter(|range| range.addr().is_ipv4() == want.is_v4())
        .copied()
        .collect();
    match ranges.iter().any(|range| range.prefix_len() == 0) {
        true => BTreeSet::new(),
        false => ranges,
    }
}

fn outcome(what: &str, is: &SetPlan, want: &Outcome) -> TestCaseResult {
    let is = match is {
        SetPlan::Refuse => (Some("refuse"), BTreeSet::new()),
        SetPlan::Drop => (Some("drop"), BTreeSet::new()),
        SetPlan::Balance(endpoints) | SetPlan::Consistent(endpoints) => (None, endpoints.clone()),
    };
    equal(
        what,
        &is,
        &(want.verdict.as_deref(), want.endpoints.clone()),
    )
}

fn equal<T: PartialEq + std::fmt::Debug>(what: &str, is: &T, wanted: &T) -> TestCaseResult {
    match is == wanted {
        true => Ok(()),
        false => Err(wrong(format!("{what}: {is:?}, kube-proxy has {wanted:?}"))),
    }
}

fn wrong(text: String) -> TestCaseError {
    TestCaseError::fail(text)
}
