//! Files of the state directory. Only root writes there, but what is in them may be of another
//! release, or damaged.

use crate::is_planted;
use sinabro_agent::{
    endpoint::gc::parse_delete, endpoint::record::EndpointRecord, ipam::file::Lease, watch::cache,
};
use std::net::{IpAddr, Ipv4Addr};

/// Where the records of the corpus belong.
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 244, 1, 7));

pub fn run(bytes: &[u8]) -> bool {
    let lease = Lease::parse(bytes, ADDRESS);
    if let Ok(lease) = &lease {
        assert_eq!(lease.address, ADDRESS);
        let text = serde_json::to_vec(lease).expect("a lease is written");
        assert_eq!(Lease::parse(&text, ADDRESS).as_ref(), Ok(lease));
    }
    let text = String::from_utf8_lossy(bytes);
    // A record belongs to a link, and names it.
    for link in text.split('"').filter(|word| word.starts_with("snb")) {
        if let Ok(record) = EndpointRecord::parse(bytes, link) {
            assert_eq!((&*record.link, &*record.owner.link()), (link, link));
            assert!((1..=2).contains(&record.addresses.len()));
            let text = serde_json::to_vec(&record).expect("a record is written");
            assert_eq!(EndpointRecord::parse(&text, link), Ok(record));
        }
        if let Ok(owner) = parse_delete(bytes, link) {
            assert_eq!(owner.link(), link);
        }
    }
    if let Ok(facts) = cache::parse(bytes) {
        let nodes: Vec<_> = facts.nodes.values().collect();
        let text = serde_json::to_vec(&nodes).expect("nodes are written");
        assert_eq!(cache::parse(&text), Ok(facts));
    }
    lease.is_ok_and(|lease| is_planted(&lease.network))
}
