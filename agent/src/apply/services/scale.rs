//! How long it takes to publish very many Services. By hand, and optimized:
//! `cargo test --config profile.test.package.sinabro-agent.opt-level=3 -p sinabro-agent --lib -- --ignored --nocapture scale`.

use super::*;
use crate::{
    datapath::Services,
    plan::services::{FrontendKind, FrontendPlan, PortPlan, SetPlan, Sets},
};
use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

/// Of each Service.
const ENDPOINTS: u32 = 5;

impl Tables for Services {
    fn maps(&self) -> &Services {
        self
    }
}

pub(super) fn name(at: u32) -> ServiceName {
    let namespace = format!("namespace-{}", at % 100);
    ServiceName::new(&namespace, &format!("service-{at}"))
}

pub(super) fn plan(at: u32, endpoints: impl Iterator<Item = u32>) -> ServicePlan {
    let address: IpAddr = Ipv4Addr::from_bits(0x0a60_0001 + at).into();
    let endpoint = |n: u32| SocketAddr::new(Ipv4Addr::from_bits(0x0af4_0001 + n).into(), 8080);
    let set = SetPlan::Balance(endpoints.map(endpoint).collect());
    let none = || Sets {
        internal: SetPlan::Refuse,
        cluster: SetPlan::Refuse,
        external: SetPlan::Refuse,
        draining: BTreeSet::new(),
    };
    let sets = Sets {
        internal: set.clone(),
        cluster: set.clone(),
        external: set,
        draining: BTreeSet::new(),
    };
    let port = PortPlan {
        protocol: Protocol::Tcp,
        frontends: BTreeSet::from([FrontendPlan {
            kind: FrontendKind::ClusterIp,
            at: SocketAddr::new(address, 80),
        }]),
        sets: [sets, none()],
        affinity_seconds: 0,
    };
    ServicePlan {
        ports: BTreeMap::from([(String::new(), port)]),
        addresses: BTreeSet::from([address]),
        ..ServicePlan::default()
    }
}

/// Time that this thread had a processor: what the machine does besides is no part of it.
fn on_processor() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    time.into()
}

/// Bytes of this process in memory.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("RssAnon:"))
        .unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

fn measure(services: u32) {
    let room = ServiceRoom {
        frontends: 2 * services,
        sets: services + 10,
        slots: 2 * ENDPOINTS * services,
        backends: 2 * ENDPOINTS * services,
    };
    let maps = Services::apart(&room).unwrap();
    let plans: Vec<_> = (0..services)
        .map(|at| (name(at), plan(at, at * ENDPOINTS..(at + 1) * ENDPOINTS)))
        .collect();
    let memory = resident();
    let mut publisher = Publisher::restore(maps).unwrap();
    publisher.complete(Instant::now()).unwrap();
    let began = Instant::now();
    let from_empty = on_processor();
    publisher.apply_all(began, plans.iter().map(|(name, plan)| (name, Some(plan))));
    let from_empty = on_processor() - from_empty;
    assert_eq!(publisher.waiting().count(), 0);
    assert_eq!(publisher.usage().endpoints, (services * ENDPOINTS) as usize);
    let memory = resident().saturating_sub(memory);

    // One endpoint of a Service is another.
    let mut changes: Vec<Duration> = (0..2000u32)
        .map(|round| {
            let at = round * 7919 % services;
            let own = at * ENDPOINTS..(at + 1) * ENDPOINTS;
            let other = services * ENDPOINTS + round;
            let plan = plan(at, own.skip(1).chain([other]));
            let began = on_processor();
            let done = publisher.apply(Instant::now(), &name(at), Some(&plan));
            done.unwrap();
            on_processor() - began
        })
        .collect();
    changes.sort();
    let percentile = |share: usize| changes[changes.len() * share / 1000 - 1];

    let Publisher { tables, .. } = publisher;
    let now = Instant::now();
    let began = on_processor();
    let mut publisher = Publisher::restore(tables).unwrap();
    let restored = on_processor() - began;
    publisher.apply_all(now, plans.iter().map(|(name, plan)| (name, Some(plan))));
    publisher.complete(Instant::now()).unwrap();
    let again = on_processor() - began;
    println!(
        "{services} services, {} endpoints: from empty {from_empty:?}, {} MiB; one change p50 {:?}, p99 {:?}, p99.9 {:?}; restart: read {restored:?}, all {again:?}",
        services * ENDPOINTS,
        memory >> 20,
        percentile(500),
        percentile(990),
        percentile(999),
    );
}

#[test]
#[ignore = "figures, by hand"]
fn how_long_it_takes() {
    for services in [5_000, 5_000, 50_000, 50_000] {
        measure(services);
    }
}
