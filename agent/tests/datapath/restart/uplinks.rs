//! What programs are told of ways out and of the host's ports.

use super::*;
use aya::maps::{Array, HashMap, Map};
use sinabro_agent::datapath::PortSet;
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
fn the_hosts_ports_are_those_that_were_set_last() {
    const TCP: u8 = 6;
    let set = || -> Vec<u64> {
        let data = MapData::from_pin(pin("HOST_PORTS")).unwrap();
        let map: Array<_, u64> = Map::Array(data).try_into().unwrap();
        (0..HOST_PORT_WORDS)
            .map(|at| map.get(&at, 0).unwrap())
            .collect()
    };
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        let mut ports = PortSet::default();
        ports.add(TCP, 30_000..=32_767);
        datapath.set_host_ports(&ports).unwrap();
        let of = |port| host_port_word(TCP, port).unwrap();
        let has = |port| {
            let (word, bit) = of(port);
            set()[word as usize] & bit != 0
        };
        assert_eq!(
            set().iter().map(|word| word.count_ones()).sum::<u32>(),
            2768
        );
        assert!(has(30_000) && has(32_767) && !has(29_999) && !has(32_768));
        let mut ports = PortSet::default();
        ports.add(TCP, 65_535..=65_535);
        datapath.set_host_ports(&ports).unwrap();
        assert_eq!(set().iter().map(|word| word.count_ones()).sum::<u32>(), 1);
        assert!(has(65_535));
    });
}
