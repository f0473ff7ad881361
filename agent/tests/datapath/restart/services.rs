//! What is published of Services, and whether they are translated.

use super::*;
use aya::maps::{Array, Map};
use sinabro_agent::datapath::ServiceRoom;
use sinabro_common::abi::{
    Addr,
    config::{FLAG_SERVICES, NodeConfig},
    service::{BACKEND_SERVING, Backend, Frontend, FrontendKey, Kind, Set, Slot},
};

fn is_on() -> bool {
    let map = Map::Array(MapData::from_pin(pin("CONFIG")).unwrap());
    let map: Array<_, NodeConfig> = map.try_into().unwrap();
    map.get(&0, 0).unwrap().flags & FLAG_SERVICES != 0
}

#[test]
fn services_go_on_until_an_agent_leaves_them_to_others() {
    kit::fresh(|| {
        let datapath = kit::load();
        assert!(!is_on());
        let services = datapath.services();
        let key = |host| FrontendKey {
            addr: Addr::v4([10, 96, 0, host]),
            port: 80u16.to_be_bytes(),
            proto: 6,
            pad: 0,
        };
        let frontend = Frontend {
            inside: 3,
            outside: 4,
            service: 5,
            affinity_seconds: 6,
            flags: 0,
        };
        let backend = Backend {
            addr: Addr::v4([10, 244, 0, 9]),
            port: 8080u16.to_be_bytes(),
            flags: BACKEND_SERVING,
            generation: 7,
        };
        let slot = Slot {
            backend: 65_535,
            generation: 7,
        };
        let (keys, frontends) = ([key(1), key(2)], [frontend; 2]);
        let (written, result) = services.put_frontends(&keys, &frontends);
        result.unwrap();
        assert_eq!(written, 2);
        services.put_backend(65_535, backend).unwrap();
        services.put_slots(131_070, &[slot, slot]).unwrap();
        services
            .put_set(3, Set::new(Kind::Balance, 131_070, 2))
            .unwrap();
        assert!(services.put_slots(131_071, &[slot, slot]).is_err());
        assert!(services.backend(65_536).is_err() && services.set(u32::MAX).is_err());

        datapath.set_services(true).unwrap();
        assert!(is_on());
        // Whatever else is set of the node.
        datapath.set_node_config(kit::node_config()).unwrap();
        assert!(is_on());
        drop(datapath);
        let datapath = kit::load();
        assert!(is_on());
        let services = datapath.services();
        let mut found = services.frontends().unwrap();
        found.sort_by_key(|(key, _)| *key);
        assert_eq!(found, [(key(1), frontend), (key(2), frontend)]);
        assert_eq!(services.backend(65_535).unwrap(), backend);
        assert_eq!(services.slot(131_071).unwrap(), slot);
        assert_eq!(services.set(3).unwrap().count(), 2);
        datapath.set_services(false).unwrap();
        assert!(!is_on());
        drop(datapath);

        // Without them the maps take no room, and with them again none are left that lead anywhere.
        let none = DatapathConfig {
            services: ServiceRoom::NONE,
            ..kit::config()
        };
        let datapath = kit::load_with(&none);
        assert_eq!(datapath.services().room(), ServiceRoom::NONE);
        drop(datapath);
        let datapath = kit::load();
        let services = datapath.services();
        assert_eq!(services.room(), ServiceRoom::default());
        assert_eq!(services.set(3).unwrap(), Set(0));
        assert!(services.frontends().unwrap().len() <= 1);
    });
}

#[test]
fn a_full_map_says_how_far_it_came() {
    kit::fresh(|| {
        let room = ServiceRoom {
            frontends: 3,
            ..ServiceRoom::NONE
        };
        let datapath = kit::load_with(&DatapathConfig {
            services: room,
            ..kit::config()
        });
        let keys: Vec<_> = (0..5)
            .map(|host| FrontendKey::address(Addr::v4([10, 96, 0, host])))
            .collect();
        let nowhere = Frontend {
            inside: 0,
            outside: 0,
            service: 0,
            affinity_seconds: 0,
            flags: 0,
        };
        let (written, result) = datapath.services().put_frontends(&keys, &[nowhere; 5]);
        assert!(result.is_err());
        let mut found = datapath.services().frontends().unwrap();
        found.sort_by_key(|(key, _)| *key);
        let found: Vec<_> = found.into_iter().map(|(key, _)| key).collect();
        assert_eq!((written, &found[..]), (3, &keys[..3]));
    });
}
