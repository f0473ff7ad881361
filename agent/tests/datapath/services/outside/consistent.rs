//! Maglev for clients outside: the same endpoint by whichever node they come.

use super::*;
use sinabro_agent::{
    apply::services::{Publisher, tables::Tables},
    datapath::Services,
    plan::services::{
        FrontendKind, FrontendPlan, PortPlan, Protocol, ServiceName, ServicePlan, SetPlan, Sets,
    },
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Instant,
};

/// The maps of a node, as its agent writes them.
struct Of<'a>(&'a Datapath);

impl Tables for Of<'_> {
    fn maps(&self) -> &Services {
        self.0.services()
    }
}

type Agent<'a> = Publisher<Of<'a>>;

fn agent(datapath: &Datapath) -> Agent<'_> {
    let mut agent = Publisher::restore(Of(datapath)).unwrap();
    agent.complete(Instant::now()).unwrap();
    agent
}

/// What the Service is reached by besides its own address.
fn external(like: IpAddr) -> At {
    (address(like, "198.51.100.11", "2001:db8:51::11"), 80)
}

fn node_port(like: IpAddr) -> At {
    (node(like), 30_080)
}

fn plan(like: IpAddr, proto: u8, endpoints: &[At], affinity_seconds: u32) -> ServicePlan {
    let all: BTreeSet<SocketAddr> = endpoints.iter().map(|at| SocketAddr::from(*at)).collect();
    let of_family = |is_ipv4| {
        let set = |plan: fn(BTreeSet<SocketAddr>) -> SetPlan| match is_ipv4 == like.is_ipv4() {
            true => plan(all.clone()),
            false => SetPlan::Refuse,
        };
        Sets {
            internal: set(SetPlan::Balance),
            cluster: set(SetPlan::Balance),
            external: set(SetPlan::Consistent),
            draining: BTreeSet::new(),
        }
    };
    let frontend = |kind, at: At| FrontendPlan {
        kind,
        at: at.into(),
    };
    let port = PortPlan {
        protocol: match proto {
            TCP => Protocol::Tcp,
            UDP => Protocol::Udp,
            _ => Protocol::Sctp,
        },
        frontends: BTreeSet::from([
            frontend(FrontendKind::ClusterIp, (vip(like), 80)),
            frontend(FrontendKind::ExternalIp, external(like)),
            frontend(FrontendKind::NodePort, node_port(like)),
        ]),
        sets: [of_family(true), of_family(false)],
        affinity_seconds,
    };
    ServicePlan {
        ports: BTreeMap::from([(String::new(), port)]),
        addresses: BTreeSet::from([vip(like)]),
        ..ServicePlan::default()
    }
}

fn publish(agent: &mut Agent<'_>, name: &str, plan: Option<&ServicePlan>) {
    let name = ServiceName::new("default", name);
    agent.apply(Instant::now(), &name, plan).unwrap();
}

impl Edge {
    /// Where a client outside is led to.
    fn leads(&self, proto: u8, from: At, to: At) -> At {
        let (verdict, out) = self.run("uplink_in", 0, &framed(&make(proto, from, to, SYN)));
        assert_eq!(verdict, PASS, "{:?}", self.w.datapath.drops());
        let seen = see(&out);
        assert_eq!((seen.src, seen.ports.0), from);
        (seen.dst, seen.ports.1)
    }

    /// All of them, and forgets them.
    fn all_lead(&self, proto: u8, clients: &[At], to: At) -> Vec<At> {
        let led = clients.iter().map(|from| self.leads(proto, *from, to));
        let led = led.collect();
        self.w.sweep_at(25 * 3600);
        led
    }
}

/// Of each of a few neighbours the ports that follow one another.
fn clients(like: IpAddr) -> Vec<At> {
    let addr = |n: u16| {
        address(
            like,
            &format!("203.0.113.{n}"),
            &format!("2001:db8:77::{n:x}"),
        )
    };
    (0..600u16).map(|n| (addr(n % 6), 40_000 + n)).collect()
}

/// Two nodes that know the same endpoints by other numbers.
fn two_nodes<T: Send>(test: impl Fn(&Edge, &mut Agent<'_>) -> T + Send + Sync) -> [T; 2] {
    [false, true].map(|is_second| {
        edge(|e| {
            let datapath = &e.w.datapath;
            let mut agent = agent(datapath);
            let like = e.w.a.v4;
            if is_second {
                // Others came first, and some of them went.
                let mut others = plan(like, SCTP, &endpoints(like, 9), 0);
                others.addresses.clear();
                for port in others.ports.values_mut() {
                    port.frontends = BTreeSet::from([FrontendPlan {
                        kind: FrontendKind::ExternalIp,
                        at: ([192, 0, 2, 200], 80).into(),
                    }]);
                }
                publish(&mut agent, "other", Some(&others));
                let some: Vec<At> = endpoints(like, 7).into_iter().rev().skip(2).collect();
                for proto in [UDP, TCP] {
                    publish(&mut agent, "web", Some(&plan(like, proto, &some, 0)));
                    publish(&mut agent, "web", None);
                }
            }
            test(&e, &mut agent)
        })
    })
}

#[test]
fn a_client_has_the_same_endpoint_by_both_nodes() {
    for proto in PROTOCOLS {
        let [one, other] = two_nodes(|e, agent| {
            e.w.clients().map(|like| {
                let endpoints = endpoints(like, 5);
                publish(agent, "web", Some(&plan(like, proto, &endpoints, 0)));
                let led = e.all_lead(proto, &clients(like), external(like));
                // By any of its addresses, which other nodes have others of.
                assert_eq!(e.all_lead(proto, &clients(like), node_port(like)), led);
                for at in &endpoints {
                    // 120 each, were they even.
                    let share = led.iter().filter(|other| *other == at).count();
                    assert!((80..160).contains(&share), "{at:?}: {share}");
                }
                // Who is inside has none of that, nor who uses the cluster's address.
                let own = if like.is_ipv4() { e.w.a.v4 } else { e.w.a.v6 };
                let [once, again] = [(); 2].map(|()| -> Vec<At> {
                    let sent =
                        (2000..2040).map(|port| make(proto, (own, port), external(like), SYN));
                    let led = sent.map(|sent| e.w.goes_to(&sent)).collect();
                    e.w.sweep_at(25 * 3600);
                    led
                });
                assert_ne!(once, again);
                let by_chance = e.all_lead(proto, &clients(like), (vip(like), 80));
                assert_ne!(by_chance, led);
                publish(agent, "web", None);
                led
            })
        });
        assert_eq!(one, other);
    }
}

#[test]
fn a_client_with_affinity_has_one_endpoint_by_both_nodes() {
    let [one, other] = two_nodes(|e, agent| {
        e.w.clients().map(|like| {
            let plan = plan(like, TCP, &endpoints(like, 5), 30);
            publish(agent, "web", Some(&plan));
            let mut of_client: BTreeMap<IpAddr, BTreeSet<At>> = BTreeMap::new();
            for to in [external(like), node_port(like)] {
                let all = clients(like);
                for (from, at) in all.iter().zip(e.all_lead(TCP, &all, to)) {
                    of_client.entry(from.0).or_default().insert(at);
                }
            }
            assert!(of_client.values().all(|endpoints| endpoints.len() == 1));
            let used: BTreeSet<_> = of_client.values().flatten().collect();
            assert!(used.len() > 1, "{of_client:?}");
            publish(agent, "web", None);
            of_client
        })
    });
    assert_eq!(one, other);
}

#[test]
fn an_endpoint_that_goes_takes_hardly_anybody_along() {
    edge(|e| {
        let mut agent = agent(&e.w.datapath);
        for like in e.w.clients() {
            let all = endpoints(like, 10);
            let to = external(like);
            publish(&mut agent, "web", Some(&plan(like, UDP, &all, 0)));
            let before = e.all_lead(UDP, &clients(like), to);
            // Its flow stays until its endpoint goes, and then has the one that any node says it has.
            let from = clients(like)[0];
            assert_eq!(e.leads(UDP, from, to), before[0]);
            let rest: Vec<At> = all.iter().copied().filter(|at| *at != before[0]).collect();
            publish(&mut agent, "web", Some(&plan(like, UDP, &rest, 0)));
            let now = e.leads(UDP, from, to);
            let after = e.all_lead(UDP, &clients(like), to);
            assert_eq!(now, after[0]);
            assert!(!after.contains(&before[0]));
            let others = before
                .iter()
                .zip(&after)
                .filter(|(old, _)| **old != before[0]);
            let moved = others.clone().filter(|(old, new)| old != new).count();
            // By chance nine in ten would.
            assert!(moved * 50 < others.count(), "{moved} moved");
            // And comes back to its own.
            publish(&mut agent, "web", Some(&plan(like, UDP, &all, 0)));
            assert_eq!(e.all_lead(UDP, &clients(like), to), before);
            publish(&mut agent, "web", None);
        }
        check_table();
    });
}

#[test]
fn another_agent_finds_its_tables_and_leaves_them() {
    edge(|e| {
        let like = e.w.a.v4;
        let plan = plan(like, TCP, &endpoints(like, 5), 0);
        publish(&mut agent(&e.w.datapath), "web", Some(&plan));
        let services = e.w.datapath.services();
        let sets = || {
            let frontends = services.frontends().unwrap();
            let mut sets: Vec<_> = frontends
                .iter()
                .map(|(key, value)| (*key, *value, services.set(value.outside).unwrap()))
                .collect();
            sets.sort_by_key(|(key, ..)| *key);
            sets
        };
        let before = sets();
        let mut next = Publisher::restore(Of(&e.w.datapath)).unwrap();
        publish(&mut next, "web", Some(&plan));
        next.complete(Instant::now()).unwrap();
        assert_eq!(sets(), before);
        assert!(before.iter().any(|(.., set)| set.count() == 16_381));
        // A table of whoever thought that another one is right is none.
        let (.., set) = before
            .iter()
            .find(|(.., set)| set.count() == 16_381)
            .unwrap();
        let [one, two] = [0, 1].map(|at| services.slot(set.base() + at).unwrap());
        let other = (0..set.count())
            .map(|at| services.slot(set.base() + at).unwrap())
            .find(|slot| *slot != one)
            .unwrap();
        services.put_slots(set.base(), &[other, two]).unwrap();
        let mut next = Publisher::restore(Of(&e.w.datapath)).unwrap();
        publish(&mut next, "web", Some(&plan));
        next.complete(Instant::now()).unwrap();
        assert_ne!(sets(), before);
    });
}
