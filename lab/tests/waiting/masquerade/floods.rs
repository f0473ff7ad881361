//! More connections are begun than anything has room for, by a pod and by somebody outside: who is there is not harmed, whether
//! there is room for others or none at all.

use super::{
    crowds::crowd,
    kit::{Way, World, eth0, far_router, route_pods},
    pressure::{BEFORE, alone, finish, outside, watch},
};
use sinabro_common::{
    abi::{Addr, connection::Tuple},
    api::{ConnectionFilter, PodConnections, Request, Response, StateClass},
};
use sinabro_lab::{
    amount::amount,
    datapath::Planted,
    traffic::{
        crowd::Kind,
        flood::{Flood, NOWHERE, lose_what_goes_nowhere, nowhere},
        path::Path,
        snmp,
        unbroken::{Pace, Traffic},
    },
    wait::{eventually, wait_for},
};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

/// Somebody outside begins connections from everywhere.
fn from_outside(world: &World, to: SocketAddr) -> Flood {
    let family = usize::from(to.is_ipv6());
    let ends = move |number| (nowhere(family, number), to);
    let (place, router) = (&world.beyond, far_router(world));
    Flood::start(place, eth0(place), router, ends).unwrap()
}

/// In both families: the second pod's, and from outside one to the third pod and one to the node.
struct Floods<'a> {
    world: &'a World,
    of_pod: [Flood; 2],
    to_pod: [Flood; 2],
    to_node: [Flood; 2],
    /// What the third pod's stack and the node's had taken before.
    taken: [[u64; 2]; 2],
}

impl<'a> Floods<'a> {
    fn start(world: &'a World) -> Self {
        let (own, target) = (world.own(), world.pod(3).addresses());
        Self {
            world,
            taken: Self::taken(world),
            of_pod: [0, 1].map(|family| Flood::from_pod(world.pod(2), family, u64::MAX).unwrap()),
            to_pod: [0, 1].map(|family| from_outside(world, (target[family], 80).into())),
            to_node: own.map(|own| from_outside(world, (own, 61_234).into())),
        }
    }

    fn taken(world: &World) -> [[u64; 2]; 2] {
        let places = [world.pod(3).place(), world.node().place()];
        places.map(|place| snmp::delivered(place).unwrap())
    }

    /// Goes on until each has sent so many.
    fn wait(&self, each: u64) {
        let all = [&self.of_pod, &self.to_pod, &self.to_node];
        wait_for("all floods", || {
            let sent = all.iter().flat_map(|floods| floods.iter().map(Flood::sent));
            Ok(sent.min().filter(|least| *least >= each).map(drop))
        })
        .unwrap();
    }

    /// All of them come to the table: most of what the pod sends is refused, more than one family's flood is; what
    /// comes from outside is let in. A busy machine may lose some on the way.
    fn must_arrive(&self) {
        // First, so that one family's flood is not more than was sent.
        let refused = share(self.world, 2).refused;
        let of_pod = self.of_pod.each_ref().map(Flood::sent);
        let at_least = of_pod.into_iter().max().unwrap();
        assert!(refused > at_least, "{refused} refused of {of_pod:?}");
        for (floods, name, before, after) in [
            (
                &self.to_pod,
                "pod",
                self.taken[0],
                Self::taken(self.world)[0],
            ),
            (
                &self.to_node,
                "node",
                self.taken[1],
                Self::taken(self.world)[1],
            ),
        ] {
            for family in 0..2 {
                let (came, sent) = (after[family] - before[family], floods[family].sent());
                assert!(came > sent / 2, "{came} of {sent} came to the {name}");
            }
        }
    }

    fn finish(self) -> u64 {
        let all = [self.of_pod, self.to_pod, self.to_node];
        let sent = all
            .into_iter()
            .flatten()
            .map(|flood| flood.finish().unwrap());
        sent.sum()
    }
}

/// What a pod has of the table.
fn share(world: &World, pod: usize) -> PodConnections {
    let ends = format!("/pod{pod}");
    let mut all = world.stats().pods.into_iter();
    let share = all.find(|share| share.pod.ends_with(&ends));
    share.unwrap_or_else(|| panic!("no {ends}"))
}

/// Whether a pod has any record of a flood.
fn has_records(world: &World, pod: usize, family: usize, state: Option<StateClass>) -> bool {
    let filter = ConnectionFilter {
        pod: Some(share(world, pod).pod),
        remote: Some(NOWHERE[family].parse().unwrap()),
        state,
        ..ConnectionFilter::default()
    };
    let mut from = None;
    loop {
        let filter = filter.clone();
        let request = Request::Connections { filter, from };
        let page = match world.node().ask(request).unwrap() {
            Response::Connections(page) => page,
            other => panic!("{other:?}"),
        };
        if !page.connections.is_empty() {
            return true;
        }
        match page.next {
            Some(next) => from = Some(next),
            None => return false,
        }
    }
}

#[test]
fn floods_harm_nobody_under_load_nightly() {
    let _alone = alone();
    let enough = u64::from(amount(70_000, 500_000));
    for way in Way::BOTH {
        let world = World::by(way, 3, &[], &[]);
        route_pods(&world);
        lose_what_goes_nowhere(world.lab.router().place()).unwrap();
        let traffic = watch(&world, 2);
        traffic.event("the floods began").unwrap();
        let floods = Floods::start(&world);
        floods.wait(enough);
        traffic.must_flow("while it is flooded").unwrap();
        floods.must_arrive();
        for family in 0..2 {
            let unanswered = Some(StateClass::Unanswered);
            assert!(has_records(&world, 2, family, unanswered), "{way:?}");
            assert!(has_records(&world, 3, family, None), "{way:?}");
        }
        // Others begin what they like, the pod that is flooded among them.
        for family in 0..2 {
            for kind in [Kind::Datagrams, Kind::Connections] {
                for pod in [0, 2] {
                    let mut crowd = crowd(&world, &world.pods()[pod..=pod], kind, family);
                    crowd.open(40_000..40_200, 0).unwrap();
                    crowd.close(40_000..40_200, 0).unwrap();
                }
            }
        }
        let sent = floods.finish();
        println!("{way:?}: {sent} SYNs; {}", finish(traffic, &world));
    }
}

/// Connections of the first pod with the range that is there for benchmarks (RFC 2544 §C.2.2).
fn planted(world: &World) -> Planted {
    let pod = Addr::from(world.pod(1).addresses()[0]);
    let tuple = |number: u32| Tuple {
        src: pod,
        dst: IpAddr::from(Ipv4Addr::from_bits(0xc612_0001 + number)).into(),
        src_port: 20_000_u16.to_be_bytes(),
        dst_port: 80_u16.to_be_bytes(),
        proto: 6,
        pad: [0; 3],
    };
    let tuples = (0..2 * ROOM).map(tuple);
    Planted::fill(world.node(), world.own()[0].into(), tuples).unwrap()
}

const ROOM: u32 = 4096;

/// No place is free when the floods begin. Nobody's connection makes way for what they begin.
#[test]
fn floods_of_a_full_table_harm_nobody_under_load_nightly() {
    let _alone = alone();
    let enough = u64::from(amount(20_000, 200_000));
    let room = format!("--connections={ROOM}");
    for way in Way::in_turn(1) {
        let world = World::by(way, 3, &[], &[&room]);
        route_pods(&world);
        lose_what_goes_nowhere(world.lab.router().place()).unwrap();
        // Datagrams both ways, and streams; new connections could not be begun.
        let echoes = |path: Path| path.with_echoes(500);
        let paths: Vec<_> = outside(&world, 2).into_iter().map(echoes).collect();
        let pace = Pace {
            pause: Duration::from_millis(10),
            clients: 0,
        };
        let traffic = Traffic::start(&paths, pace).unwrap();
        let planted = planted(&world);
        let stats = world.stats();
        assert_eq!(stats.capacity, u64::from(ROOM));
        assert_eq!(stats.connections, stats.capacity, "{way:?}");
        traffic.watch(BEFORE);
        // By a sweep; until then it is the map that refuses.
        eventually("what was planted to count", || share(&world, 2).limit == 0);
        traffic.event("the floods began").unwrap();
        let floods = Floods::start(&world);
        floods.wait(enough);
        traffic.must_flow("while it is flooded").unwrap();
        floods.must_arrive();
        let stats = world.stats();
        assert_eq!(stats.connections, stats.capacity, "{way:?}");
        assert!(share(&world, 3).refused > enough, "{way:?}");
        let sent = floods.finish();
        println!("{way:?}: {sent} SYNs; {}", finish(traffic, &world));
        assert_eq!(planted.left(), planted.all(), "{way:?}");
    }
}
