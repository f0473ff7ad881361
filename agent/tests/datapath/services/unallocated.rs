//! What is for an address of the Services' ranges that no Service has.

use super::*;
use sinabro_agent::datapath::{ClientPrefix, Translation, client_prefixes};
use std::collections::BTreeSet;

pub const RANGES: [&str; 2] = ["10.96.0.0/16", "fd00:96::/112"];

fn prefixes(texts: &[&str]) -> BTreeSet<ClientPrefix> {
    let parsed = texts.iter().map(|text| text.parse().unwrap());
    parsed.flat_map(|net| client_prefixes(&net)).collect()
}

pub fn set(w: &World, ranges: &[&str], others: &[&str]) {
    let services = w.datapath.services();
    services
        .set_ranges(&prefixes(ranges), &prefixes(others))
        .unwrap();
}

/// Of the range, and nobody's.
pub fn nobody(like: IpAddr) -> IpAddr {
    address(like, "10.96.0.77", "fd00:96::77")
}

/// Everything that a pod may send to an address, but for the rest of a connection.
fn all(from: IpAddr, to: IpAddr) -> Vec<Ip> {
    let of_protocol = |proto| make(proto, (from, 2000), (to, 80), SYN);
    let mut all: Vec<Ip> = PROTOCOLS.into_iter().map(of_protocol).collect();
    let echo_request = if from.is_ipv4() { 8 } else { 128 };
    all.push(packet::icmp(from, to, echo_request, 7));
    // A part of a datagram whose first part nobody saw.
    let mut part = packet::udp((from, 2000), (to, 80), b"hello");
    part.fragment = if from.is_ipv4() { 0x0002 } else { 0x0010 };
    all.push(part);
    all
}

#[test]
fn an_address_of_nobody_leads_nowhere_whatever_is_sent() {
    world(|w| {
        for (number, client) in (1..).zip(w.clients()) {
            let (_, at) = w.publish(number, TCP, &endpoints(client, 1));
            let sent = all(client, nobody(client));
            let pass = |ip: &Ip| w.leaves_as(ip, ip);
            sent.iter().for_each(pass);
            set(&w, &RANGES, &[]);
            for ip in &sent {
                w.dropped(ip, DropReason::ServiceUnallocated);
            }
            pass(&make(TCP, (client, 2000), (nobody(client), 80), ACK));
            // Next to the range, and a Service's.
            let beside = address(client, "10.97.0.1", "fd00:96::1:1");
            all(client, beside).iter().for_each(pass);
            let to = w.goes_to(&make(TCP, (client, 2001), at, SYN));
            assert_eq!(to, endpoints(client, 1)[0]);
            // While they are not ours, or somebody else has what began before.
            turn(&w.datapath, false);
            sent.iter().for_each(pass);
            turn(&w.datapath, true);
            for translation in [Translation::Handover, Translation::Draining] {
                w.datapath.set_services(translation).unwrap();
                sent.iter().for_each(pass);
            }
            turn(&w.datapath, true);
            w.dropped(&sent[0], DropReason::ServiceUnallocated);
            // Somebody else's.
            let bits = if client.is_ipv4() { 32 } else { 128 };
            let other = format!("{}/{bits}", nobody(client));
            set(&w, &RANGES, &[&other]);
            sent.iter().for_each(pass);
            set(&w, &["10.96.0.0/28", "fd00:96::/124"], &[]);
            sent.iter().for_each(pass);
            set(&w, &[], &[]);
            sent.iter().for_each(pass);
        }
    });
}
