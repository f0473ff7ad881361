//! Maps of a later version, of which this one knows the names of fields alone, and of an earlier one that this one has not.

use super::*;
use aya::maps::{Array, HashMap, Map};
use sinabro_common::abi::{
    config::NodeConfig,
    connection::{Connection, PORT_TABLES, TakenPorts},
    layout::{FieldKey, FieldSpan, MapRecord, OF_VALUE, Place, key},
};

const SIZE: usize = size_of::<Connection>();
/// The first field of a record, which the later version has last.
const TIME: usize = size_of::<u64>();

type Table = HashMap<MapData, [u8; 40], [u8; SIZE]>;

fn hash<K: aya::Pod, V: aya::Pod>(name: &str) -> HashMap<MapData, K, V> {
    let map = Map::HashMap(MapData::from_pin(pin(name)).unwrap());
    map.try_into().unwrap()
}

fn array<V: aya::Pod>(name: &str) -> Array<MapData, V> {
    let map = Map::Array(MapData::from_pin(pin(name)).unwrap());
    map.try_into().unwrap()
}

const fn connections(number: u32) -> Place<'static> {
    Place {
        name: "CONNECTIONS",
        number,
    }
}

/// Has the table of connections in the place and in the layout of a later generation, whose programs run.
fn lay_out_anew() {
    // Another map of the same size.
    let other = pin("other");
    drop(
        Datapath::load(&DatapathConfig {
            bpf_dir: other.clone(),
            ..kit::config()
        })
        .unwrap(),
    );
    fs::create_dir(pin("v4")).unwrap();
    let map = MapData::from_pin(other.join("v3/CONNECTIONS")).unwrap();
    let id = map.info().unwrap().id();
    map.pin(pin("v4/CONNECTIONS")).unwrap();
    assert!(datapath::remove(&other).problems.is_empty());

    let before: Table = hash("v3/CONNECTIONS");
    let mut later: Table = hash("v4/CONNECTIONS");
    for entry in before.iter() {
        let (key, mut value) = entry.unwrap();
        value.rotate_left(TIME);
        later.insert(key, value, 0).unwrap();
    }
    let record = MapRecord {
        layout: 7,
        id,
        pad: 0,
    };
    let mut layouts = hash::<u64, MapRecord>("LAYOUTS");
    layouts.insert(key(connections(4)), record, 0).unwrap();
    let mut fields = hash::<FieldKey, FieldSpan>("LAYOUT_FIELDS");
    let known: Vec<_> = fields.iter().map(Result::unwrap).collect();
    for (field, mut span) in known {
        if field.map != key(connections(3)) {
            continue;
        }
        if field.part == OF_VALUE {
            span.offset = (span.offset + (SIZE - TIME) as u32) % SIZE as u32;
        }
        let map = key(connections(4));
        fields.insert(FieldKey { map, ..field }, span, 0).unwrap();
    }
    let mut config = array::<NodeConfig>("CONFIG");
    let now = config.get(&0, 0).unwrap();
    assert_eq!(now.generation(), 3);
    config.set(0, now.with_generation(4), 0).unwrap();
    fs::remove_file(pin("v3/CONNECTIONS")).unwrap();
}

#[test]
fn connections_of_a_later_layout_go_on() {
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        datapath.set_node_config(kit::node_config()).unwrap();
        let outside = Outside::new(&datapath);
        let pod = Pod::live(&datapath, 5);
        let listener = outside.run(|| TcpListener::bind((OUTSIDE, 80)).unwrap());
        let client = pod.run(|| TcpStream::connect((OUTSIDE, 80)).unwrap());
        let mut call = Call::new(listener, client);
        call.works();
        drop(datapath);
        lay_out_anew();
        // By programs that have another table, as the later version's would.
        call.works();
        let before = links();

        let datapath = load(AttachMode::Auto);
        assert!(pin("v4/CONNECTIONS").exists(), "pods' may still use it");
        let carried: Table = hash("v3/CONNECTIONS");
        assert!(carried.iter().count() > 0);
        call.works();
        pod.attach(&datapath);
        datapath.set_node_config(kit::node_config()).unwrap();
        datapath.retain_pods(&HashSet::new()).unwrap();
        datapath
            .set_uplinks(&[kit::leads_out(outside.uplink)])
            .unwrap();
        call.works();
        let ids: HashSet<u32> = datapath.programs().iter().map(|p| p.id).collect();
        assert!(links().values().all(|(_, program)| ids.contains(program)));
        assert_eq!(before.len(), links().len());
        assert!(!pin("v4").exists());
        let config = array::<NodeConfig>("CONFIG").get(&0, 0).unwrap();
        assert_eq!(config.generation(), 3);
        let layouts = hash::<u64, MapRecord>("LAYOUTS");
        assert!(layouts.get(&key(connections(4)), 0).is_err());
        let fields = hash::<FieldKey, FieldSpan>("LAYOUT_FIELDS");
        let mut keys = fields.keys();
        assert!(keys.all(|field| field.unwrap().map != key(connections(4))));
    });
}

/// Maps of release 0.1.0 that have another name by now, because their bits mean something else, and what its agents leave as
/// they end.
#[test]
fn maps_of_an_earlier_release_go_once_nothing_uses_them() {
    const GONE: [&str; 4] = ["v2/CROWDED", "v2/UNUSABLE_PORTS", "NAT", "STACK_FLOWS"];
    kit::fresh(|| {
        drop(load(AttachMode::Auto));
        let place = |name: &'static str| match name.strip_prefix("v2/") {
            Some(name) => Place { name, number: 2 },
            None => Place { name, number: 1 },
        };
        let leave = || {
            for name in GONE {
                let map = MapData::from_pin(pin("DROPS")).unwrap();
                map.pin(pin(name)).unwrap();
            }
        };
        leave();
        let record = MapRecord {
            layout: 7,
            id: 7,
            pad: 0,
        };
        let mut layouts = hash::<u64, MapRecord>("LAYOUTS");
        for name in GONE {
            layouts.insert(key(place(name)), record, 0).unwrap();
        }
        // Of one that knew no others, the next has to make these.
        for name in ["v2/PORT_BITMAPS", "v2/RESERVED_PORTS"] {
            fs::remove_file(pin(name)).unwrap();
        }
        let before = maps_but(&["v2/PORT_BITMAPS", "v2/RESERVED_PORTS"]);
        let datapath = load(AttachMode::Auto);
        assert_eq!(maps_but(&["v2/PORT_BITMAPS", "v2/RESERVED_PORTS"]), before);
        assert!(GONE.iter().all(|name| pin(name).exists()));
        let outside = Outside::new(&datapath);
        for name in GONE {
            assert!(!pin(name).exists(), "{name}");
            assert!(layouts.get(&key(place(name)), 0).is_err(), "{name}");
        }
        drop((datapath, outside));
        leave();
        let directory = Path::new(names::BPF_DIR);
        let removed = datapath::remove(directory);
        assert!(removed.problems.is_empty(), "{:?}", removed.problems);
        assert!(!directory.exists());
    });
}

/// Programs may look for a port as soon as they are swapped.
#[test]
fn a_new_map_of_reserved_ports_is_filled_before_programs_use_it() {
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        datapath.set_node_config(kit::node_config()).unwrap();
        let all = || -> Vec<TakenPorts> {
            let map = array("v2/RESERVED_PORTS");
            let tables = (0..PORT_TABLES).map(|table| map.get(&table, 0));
            tables.map(Result::unwrap).collect()
        };
        let before = all();
        assert!(before.iter().all(|ports| ports.count() > 0));
        drop(datapath);
        fs::remove_file(pin("v2/RESERVED_PORTS")).unwrap();
        drop(load(AttachMode::Auto));
        assert!(all() == before);
    });
}
