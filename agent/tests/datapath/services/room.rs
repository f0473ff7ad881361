//! What is published stays so where an agent starts with room for more.

use super::*;
use sinabro_agent::{
    apply::services::Publisher,
    datapath::ServiceRoom,
    plan::services::{
        FrontendKind, FrontendPlan, PortPlan, Protocol, ServiceName, ServicePlan, SetPlan, Sets,
    },
};
use sinabro_common::names;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    time::Instant,
};

const FEW: u32 = 1024;
/// More than a window of any array, and no power of two.
const MANY: u32 = 100_000;

fn room_of(endpoints: u32) -> DatapathConfig {
    DatapathConfig {
        services: ServiceRoom::of_endpoints(endpoints),
        ..kit::config()
    }
}

fn name(number: u32) -> ServiceName {
    ServiceName::new("lab", &format!("s{number}"))
}

/// A Service that leads to these.
fn plan(at: SocketAddr, endpoints: BTreeSet<SocketAddr>) -> ServicePlan {
    let refuses = Sets {
        internal: SetPlan::Refuse,
        cluster: SetPlan::Refuse,
        external: SetPlan::Refuse,
        draining: BTreeSet::new(),
    };
    let mut sets = [refuses.clone(), refuses];
    sets[usize::from(at.is_ipv6())].internal = SetPlan::Balance(endpoints);
    let port = PortPlan {
        protocol: Protocol::Tcp,
        frontends: BTreeSet::from([FrontendPlan {
            kind: FrontendKind::ClusterIp,
            at,
        }]),
        sets,
        affinity_seconds: 0,
    };
    ServicePlan {
        ports: BTreeMap::from([(String::new(), port)]),
        addresses: BTreeSet::from([at.ip()]),
        ..ServicePlan::default()
    }
}

/// Two Services, and one with nearly all endpoints that there is room for.
fn plans(server: &Pod) -> Vec<(ServiceName, ServicePlan)> {
    let small = [server.v4, server.v6].map(|pod| {
        let endpoints = BTreeSet::from([SocketAddr::new(pod, 8000)]);
        plan((vip(pod), 80).into(), endpoints)
    });
    let many = (1..FEW - 10).map(|port| SocketAddr::new(far(server.v4, 1), port as u16));
    let other = "10.96.0.11:80".parse().unwrap();
    let all = small.into_iter().chain([plan(other, many.collect())]);
    (0..).map(name).zip(all).collect()
}

/// A frontend, its set, and the endpoints of that by id.
type Content = (FrontendKey, Frontend, Set, Vec<(u32, Backend)>);

/// Everything that is in the maps.
fn published(datapath: &Datapath) -> Vec<Content> {
    let services = datapath.services();
    let mut frontends = services.frontends().unwrap();
    frontends.sort_by_key(|(key, _)| *key);
    let content = |(key, frontend): (FrontendKey, Frontend)| {
        let set = services.set(frontend.inside).unwrap();
        let slots = set.base()..set.base() + set.count();
        let endpoint = |slot| {
            let slot = services.slot(slot).unwrap();
            let backend = services.backend(slot.backend).unwrap();
            assert_eq!(backend.generation, slot.generation);
            (slot.backend, backend)
        };
        (key, frontend, set, slots.map(endpoint).collect())
    };
    frontends.into_iter().map(content).collect()
}

fn apply(publisher: &mut Publisher<Arc<Datapath>>, plans: &[(ServiceName, ServicePlan)]) {
    let now = Instant::now();
    publisher.apply_all(now, plans.iter().map(|(name, plan)| (name, Some(plan))));
    publisher.complete(now).unwrap();
}

#[test]
fn an_agent_with_more_room_takes_over_all_that_is_published() {
    let directory = Path::new(names::BPF_DIR);
    kit::fresh(|| {
        assert_eq!(ServiceRoom::in_use(directory), None);
        let datapath = Arc::new(kit::load_with(&room_of(FEW)));
        turn(&datapath, true);
        assert_eq!(ServiceRoom::in_use(directory), None);
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        let plans = plans(&b);
        let mut publisher = Publisher::restore(datapath.clone()).unwrap();
        apply(&mut publisher, &plans);
        assert_eq!(publisher.waiting().count(), 0);
        // One more does not fit.
        let others = (1..40)
            .map(|port| SocketAddr::new(far(b.v4, 2), port))
            .collect();
        let more = plan("10.96.0.12:80".parse().unwrap(), others);
        let error = publisher.apply(Instant::now(), &name(9), Some(&more));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("serviceEndpoints"), "{error}");
        drop(publisher);

        let listeners = [b.v4, b.v6].map(|at| b.run(|| TcpListener::bind((at, 8000)).unwrap()));
        let connect = |which: usize| {
            let at = (vip([a.v4, a.v6][which]), 80);
            let mut client = a.run(|| TcpStream::connect(at).unwrap());
            let (mut server, _) = listeners[which].accept().unwrap();
            client.write_all(b"question").unwrap();
            server.read_exact(&mut [0; 8]).unwrap();
            (client, server)
        };
        let mut calls = [0, 1].map(connect);
        let before = published(&datapath);
        drop(datapath);
        let in_use = ServiceRoom::in_use(directory).unwrap();
        assert_eq!(in_use, ServiceRoom::of_endpoints(FEW));
        let wanted = ServiceRoom::of_endpoints(MANY);
        assert_eq!(wanted.at_least(&in_use), wanted);
        assert_eq!(in_use.at_least(&wanted), wanted);

        // At once, before anybody said again what there is.
        let datapath = Arc::new(kit::load_with(&room_of(MANY)));
        assert_eq!(datapath.services().room(), wanted);
        assert!(published(&datapath) == before, "not all was taken over");
        for (client, server) in &mut calls {
            client.write_all(b"question").unwrap();
            server.read_exact(&mut [0; 8]).unwrap();
        }
        drop([0, 1].map(connect));

        // To the new agent it is what it wants, and there is room for more.
        let mut publisher = Publisher::restore(datapath.clone()).unwrap();
        apply(&mut publisher, &plans);
        assert!(
            published(&datapath) == before,
            "what is as it should be was changed"
        );
        publisher
            .apply(Instant::now(), &name(9), Some(&more))
            .unwrap();
        drop([0, 1].map(connect));
    });
}
