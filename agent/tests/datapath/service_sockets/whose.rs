//! Whose sockets are translated, and as whose.

use super::{
    Service, TCP, UDP, VIP, at, connect::unanswered, listen, node, real_peer, run, socket,
    world_of_pods,
};
use crate::kit::Pod;
use aya::maps::{HashMap, Map, MapData};
use sinabro_common::{
    abi::{
        Addr,
        service::{Affinity, AffinityKey},
    },
    names,
};
use sinabro_lab::Place;
use sinabro_netlink::{Family, route::Route};
use socket2::{Domain, Type};
use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
};

/// A network by itself, out of which nothing comes.
fn nowhere() -> Place {
    let place = Place::fresh("nowhere").unwrap();
    let lo = place
        .set_up("lo", &["10.9.9.9/32".parse().unwrap()])
        .unwrap();
    let mut conn = place.conn().unwrap();
    conn.execute(Route::default_of(Family::V4).dev(lo).add())
        .unwrap();
    place
}

#[test]
fn a_namespace_that_is_not_known_is_left_alone() {
    world_of_pods(|w| {
        let listener = listen(&w.b, w.b.v4, 8080);
        let endpoint = listener.local_addr().unwrap();
        Service::new(0, at(VIP, 80), TCP).lead_to(w.datapath(), &[endpoint]);
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), endpoint);
        // One that a pod made within its own looks like this.
        assert_eq!(unanswered(&nowhere(), at(VIP, 80)), at(VIP, 80));
        // A pod that is not ours, or not yet.
        let pod = Pod::new(7);
        assert_eq!(unanswered(&pod.place, at(VIP, 80)), at(VIP, 80));
        pod.attach(w.datapath());
        assert_eq!(unanswered(&pod.place, at(VIP, 80)), endpoint);
        // And one that went.
        for _ in 0..2 {
            w.datapath()
                .detach_pod(pod.ifindex, &pod.link, &pod.addresses())
                .unwrap();
            assert_eq!(unanswered(&pod.place, at(VIP, 80)), at(VIP, 80));
        }
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), endpoint);
    });
}

/// A process with descriptors of others' sockets gets by them what is theirs.
#[test]
fn a_socket_is_its_namespaces_whoever_uses_it() {
    world_of_pods(|w| {
        let endpoint = at("10.1.0.6", 5353);
        Service::new(0, at(VIP, 53), UDP).lead_to(w.datapath(), &[endpoint]);
        let (pod, node) = (&w.a.place, &node());
        for (owner, user, expected) in [(pod, node, at(VIP, 53)), (node, pod, endpoint)] {
            let client = socket(owner, Domain::IPV4, Type::DGRAM, None);
            run(user, || client.connect(&at(VIP, 53).into()).unwrap());
            assert_eq!(real_peer(owner, &client), expected);
        }
    });
}

fn affinities() -> Vec<(Addr, u32)> {
    let path = Path::new(names::BPF_DIR).join("v2/AFFINITY");
    let map: HashMap<_, AffinityKey, Affinity> = Map::LruHashMap(MapData::from_pin(path).unwrap())
        .try_into()
        .unwrap();
    let mut all: Vec<_> = map
        .iter()
        .map(|entry| entry.unwrap())
        .map(|(key, affinity)| (key.client, affinity.backend))
        .collect();
    all.sort();
    all
}

/// Root in a pod may give its interface any address: what it has of Services stays its own.
#[test]
fn a_pod_with_anothers_address_is_still_itself() {
    world_of_pods(|w| {
        let listeners: Vec<TcpListener> = (9000..9008)
            .map(|port| listen(&w.b, w.b.v4, port))
            .collect();
        let all: Vec<SocketAddr> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        let service = Service {
            affinity_seconds: 3600,
            ..Service::new(0, at(VIP, 80), TCP)
        };
        service.lead_to(w.datapath(), &all);
        let victim = Pod::live(w.datapath(), 7);
        let of_victim = unanswered(&victim.place, at(VIP, 80));
        assert!(all.contains(&of_victim));
        let before = affinities();
        assert_eq!(before.len(), 1);
        assert_eq!(before[0].0, Addr::from(victim.v4));

        w.a.place.set_up("eth0", &[victim.v4.into()]).unwrap();
        for _ in 0..20 {
            let client = socket(&w.a.place, Domain::IPV4, Type::STREAM, None);
            client.set_nonblocking(true).unwrap();
            client.bind(&SocketAddr::new(victim.v4, 0).into()).unwrap();
            let error = client.connect(&at(VIP, 80).into()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS));
        }
        let after = affinities();
        assert_eq!(after.len(), 2, "{after:?}");
        assert!(after.contains(&before[0]), "{after:?}");
        assert!(
            after
                .iter()
                .any(|(client, _)| *client == Addr::from(w.a.v4))
        );
        assert_eq!(unanswered(&victim.place, at(VIP, 80)), of_victim);
    });
}
