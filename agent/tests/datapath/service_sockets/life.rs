//! Agents that come and go, with it on and off.

use super::{
    Service, TCP, UDP, VIP, VIP6, World, answer, at, connect::unanswered, listen, node, peer,
    socket, udp_server, world, world_of_pods,
};
use crate::kit;
use aya::{
    maps::{HashMap, Map, MapData},
    programs::links::{FdLink, PinnedLink},
};
use sinabro_agent::datapath::{Datapath, DatapathConfig, remove};
use sinabro_common::{abi::service::ServiceSocket, names};
use sinabro_lab::traffic::close::close;
use socket2::{Domain, Type};
use std::{collections::BTreeMap, fs, mem::MaybeUninit, net::SocketAddr, path::Path, thread};

/// Kernel id of every link that is ours here, and of its program.
fn links() -> BTreeMap<String, (u32, u32)> {
    let all = fs::read_dir(Path::new(names::BPF_DIR).join(names::BPF_LINKS_DIR)).unwrap();
    all.map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
        .filter(|(name, _)| name.starts_with("service_"))
        .map(|(name, path)| {
            let link: FdLink = PinnedLink::from_pin(path).unwrap().into();
            let info = link.info().unwrap();
            (name, (info.id(), info.program_id()))
        })
        .collect()
}

#[test]
fn a_restart_keeps_links_and_what_sockets_say() {
    world_of_pods(|mut w: World| {
        let listener = listen(&w.b, w.b.v4, 8080);
        let servers: Vec<_> = (0..8).map(|n| udp_server(&w.b, w.b.v4, 5353 + n)).collect();
        let endpoint = listener.local_addr().unwrap();
        Service::new(0, at(VIP, 80), TCP).lead_to(w.datapath(), &[endpoint]);
        let all: Vec<_> = servers.iter().map(|s| s.local_addr().unwrap()).collect();
        Service::new(1, at(VIP, 53), UDP).lead_to(w.datapath(), &all);
        let connected = socket(&w.a.place, Domain::IPV4, Type::STREAM, None);
        connected.connect(&at(VIP, 80).into()).unwrap();
        let client = socket(&node(), Domain::IPV4, Type::DGRAM, None);
        let ask = || {
            client.send_to(b"?", &at(VIP, 53).into()).unwrap();
            let by = answer(&servers);
            let mut got = [MaybeUninit::uninit(); 8];
            let (_, from) = client.recv_from(&mut got).unwrap();
            assert_eq!(from.as_socket().unwrap(), at(VIP, 53));
            by
        };
        let asked = ask();
        let before = links();
        assert_eq!(before.len(), 9, "{before:?}");

        // While there is none.
        w.datapath = None;
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), endpoint);
        assert_eq!((peer(&connected), ask()), (at(VIP, 80), asked));
        w.start(true);
        assert_eq!((peer(&connected), ask()), (at(VIP, 80), asked));
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), endpoint);
        let after = links();
        assert!(before.keys().eq(after.keys()));
        for (name, (link, program)) in &before {
            assert_eq!(after[name].0, *link, "{name} was put in another's place");
            assert_ne!(after[name].1, *program, "{name} is the earlier one's");
        }

        // An agent that is told not to takes it off, and the next one has it again.
        w.start(false);
        assert!(links().is_empty());
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), at(VIP, 80));
        w.start(true);
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), endpoint);
        assert_eq!(peer(&connected), at(VIP, 80));
        w.datapath = None;
        let removed = remove(Path::new(names::BPF_DIR));
        assert!(removed.problems.is_empty(), "{:?}", removed.problems);
        assert!(!Path::new(names::BPF_DIR).exists());
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), at(VIP, 80));
    });
}

/// Sockets of TCP whose frontend is known.
fn streams() -> BTreeMap<u64, ServiceSocket> {
    let data = MapData::from_pin(format!("{}/v2/STREAM_FRONTENDS", names::BPF_DIR)).unwrap();
    let map: HashMap<MapData, u64, ServiceSocket> = Map::LruHashMap(data).try_into().unwrap();
    map.iter().collect::<Result<_, _>>().unwrap()
}

/// Of pods and of the node, of both families; connected, refused, and without having closed by themselves.
#[test]
fn what_a_socket_was_connected_to_is_forgotten_when_it_goes() {
    world(|w| {
        let ends = [(VIP, w.b.v4, Domain::IPV4), (VIP6, w.b.v6, Domain::IPV6)];
        for (number, (vip, server, domain)) in (0..).zip(ends) {
            let listener = listen(&w.b, server, 8080);
            let endpoint = listener.local_addr().unwrap();
            Service::new(number, at(vip, 80), TCP).lead_to(w.datapath(), &[endpoint]);
            let nobody = SocketAddr::new(server, 9);
            Service::new(2 + number, at(vip, 9), TCP).lead_to(w.datapath(), &[nobody]);
            for (whose, place) in w.clients() {
                let client = socket(&place, domain, Type::STREAM, None);
                client.connect(&at(vip, 80).into()).unwrap();
                let other = client.try_clone().unwrap();
                drop(client);
                let known: Vec<_> = streams().into_values().collect();
                let [of] = &known[..] else {
                    panic!("{whose}: {known:?}");
                };
                assert_eq!(of.endpoint, server.into(), "{whose}");
                assert_eq!(peer(&other), at(vip, 80), "{whose}");
                close(other).unwrap();
                assert!(streams().is_empty(), "{whose}: {:?}", streams());

                let client = socket(&place, domain, Type::STREAM, None);
                client.connect(&at(vip, 9).into()).unwrap_err();
                close(client).unwrap();
                assert!(streams().is_empty(), "{whose}: {:?}", streams());
            }
        }
    });
}

/// Pods that went while there was no agent.
#[test]
fn namespaces_of_nobody_are_forgotten() {
    world_of_pods(|mut w: World| {
        let listener = listen(&w.b, w.b.v4, 8080);
        let endpoint = listener.local_addr().unwrap();
        Service::new(0, at(VIP, 80), TCP).lead_to(w.datapath(), &[endpoint]);
        w.datapath = None;
        let datapath = super::load(&w.config, true);
        w.b.attach(&datapath);
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), endpoint);
        datapath.retain_pods(&[w.b.link.clone()].into()).unwrap();
        assert_eq!(unanswered(&w.a.place, at(VIP, 80)), at(VIP, 80));
        assert_eq!(unanswered(&w.b.place, at(VIP, 80)), endpoint);
        assert_eq!(unanswered(&node(), at(VIP, 80)), endpoint);
    });
}

#[test]
fn where_there_is_no_cgroup_the_reason_is_told() {
    kit::fresh(|| {
        let config = DatapathConfig {
            cgroup: Some("/proc".into()),
            service_sockets: true,
            ..kit::config()
        };
        let datapath = Datapath::load(&config).unwrap();
        let mode = &datapath.modes()["serviceSockets"];
        assert!(
            mode.starts_with("off: ") && mode.contains("/proc"),
            "{mode}"
        );
        assert_eq!(datapath.programs().len(), 6);
        let off = Datapath::load(&kit::config()).unwrap();
        assert_eq!(off.modes()["serviceSockets"], "off");
    });
}

/// Sockets that connect at any moment of a restart get the endpoint.
#[test]
fn no_connection_of_a_restart_goes_astray() {
    world_of_pods(|mut w: World| {
        let listener = listen(&w.b, w.b.v4, 8080);
        let endpoint = listener.local_addr().unwrap();
        Service::new(0, at(VIP, 80), TCP).lead_to(w.datapath(), &[endpoint]);
        let done = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let (place, done) = (w.b.place.clone(), &done);
            let client = scope.spawn(move || {
                let mut tried = 0;
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(unanswered(&place, at(VIP, 80)), endpoint);
                    tried += 1;
                }
                tried
            });
            for _ in 0..3 {
                w.start(true);
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            let tried: u32 = client.join().unwrap();
            assert!(tried > 10, "{tried}");
        });
    });
}
