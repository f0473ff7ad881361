//! What programs are told of ways out and of the host's ports.

use super::*;
use aya::maps::{Array, HashMap, Map};
use sinabro_agent::datapath::{PortSet, PortsOf};
use sinabro_common::abi::{
    Addr,
    connection::{HOST_PORT_WORDS, host_port_word},
    uplink::Uplink,
};

fn known() -> BTreeMap<u32, Uplink> {
    let data = MapData::from_pin(pin("v2/UPLINKS")).unwrap();
    let map: HashMap<_, u32, Uplink> = Map::HashMap(data).try_into().unwrap();
    map.iter().collect::<Result<_, _>>().unwrap()
}

#[test]
fn programs_know_the_uplinks_there_are_and_no_others() {
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        let outside = Outside::new(&datapath);
        let loopback = nix::net::if_::if_nametoindex("lo").unwrap();
        let [one, two] = [outside.uplink, loopback].map(kit::leads_out);
        assert_eq!(known(), BTreeMap::from([one]));
        datapath.set_uplinks(&[two, one]).unwrap();
        assert_eq!(known(), BTreeMap::from([one, two]));
        // Another address; and what an agent that was killed had written is gone.
        drop(datapath);
        let moved = Uplink {
            v4: Addr::v4([192, 0, 2, 77]),
            v6: Addr::UNSPECIFIED,
            header_len: 0,
            pad: 0,
        };
        let datapath = load(AttachMode::Auto);
        assert_eq!(known(), BTreeMap::from([one, two]));
        datapath.set_uplinks(&[(two.0, moved)]).unwrap();
        assert_eq!(known(), BTreeMap::from([(two.0, moved)]));
        datapath.set_uplinks(&[]).unwrap();
        assert!(known().is_empty());
        // An interface that is not there is an error, and leaves the rest.
        datapath.set_uplinks(&[one]).unwrap();
        assert!(datapath.set_uplinks(&[one, (4_000_000, moved)]).is_err());
        assert_eq!(known().get(&one.0), Some(&one.1));
    });
}

#[test]
fn the_hosts_ports_are_the_nodes_and_its_pods() {
    const TCP: u8 = 6;
    let open = || -> Array<MapData, u64> {
        let data = MapData::from_pin(pin("HOST_PORTS")).unwrap();
        Map::Array(data).try_into().unwrap()
    };
    let count = || -> u32 {
        let map = open();
        let words = (0..HOST_PORT_WORDS).map(|at| map.get(&at, 0).unwrap());
        words.map(u64::count_ones).sum()
    };
    let has = |port| {
        let (word, bit) = host_port_word(TCP, port).unwrap();
        open().get(&word, 0).unwrap() & bit != 0
    };
    let set = |datapath: &Datapath, of, first: u16, last: u16| {
        let mut ports = PortSet::default();
        ports.add(TCP, first..=last);
        datapath.set_host_ports(of, ports).unwrap();
    };
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        set(&datapath, PortsOf::Node, 30_000, 32_767);
        assert_eq!(count(), 2768);
        assert!(has(30_000) && has(32_767) && !has(29_999) && !has(32_768));
        // One of them is in both.
        set(&datapath, PortsOf::Pods, 32_767, 32_768);
        assert_eq!(count(), 2769);
        set(&datapath, PortsOf::Pods, 8080, 8080);
        assert_eq!((count(), has(32_767), has(32_768)), (2769, true, false));
        set(&datapath, PortsOf::Node, 65_535, 65_535);
        assert_eq!((count(), has(8080), has(65_535)), (2, true, true));
        // The next agent does not know all at once.
        drop(datapath);
        let datapath = load(AttachMode::Auto);
        assert_eq!(count(), 2);
        set(&datapath, PortsOf::Node, 1, 1);
        assert!(has(1) && has(8080));
        set(&datapath, PortsOf::Pods, 2, 2);
        assert_eq!((count(), has(1), has(2)), (2, true, true));
    });
}
