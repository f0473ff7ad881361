//! Which endpoint a connection gets.

use super::*;
use crate::uplink_hooks::age;
use aya::maps::{HashMap, Map, MapData};
use sinabro_common::{
    abi::service::{Affinity, AffinityKey, BACKEND_DRAINING},
    names,
};

#[test]
fn connections_go_to_all_endpoints_and_each_stays_with_its_own() {
    world(|w| {
        for (number, proto) in (1..).zip(PROTOCOLS) {
            for client in w.clients() {
                let number = number * 2 + u32::from(client.is_ipv6());
                let endpoints = endpoints(client, 4);
                let (_, at) = w.publish(number, proto, &endpoints);
                let mut hit = HashSet::new();
                for port in 2000..2064 {
                    let from = (client, port);
                    let chosen = w.goes_to(&make(proto, from, at, SYN));
                    assert!(endpoints.contains(&chosen), "{chosen:?}");
                    hit.insert(chosen);
                    for flags in [ACK, ACK, SYN] {
                        // The same packet in every other respect.
                        let next = make(proto, from, at, flags);
                        w.leaves_as(&next, &make(proto, from, chosen, flags));
                        let answer = make(proto, chosen, from, flags | ACK);
                        w.arrives_as(&answer, &make(proto, at, from, flags | ACK));
                    }
                }
                assert_eq!(hit.len(), 4);
            }
        }
        check_table();
        assert_eq!(table().len(), 6 * 64);
    });
}

#[test]
fn nothing_is_translated_where_services_are_somebody_elses() {
    world(|w| {
        let endpoints = endpoints(w.a.v4, 1);
        let (_, at) = w.publish(1, TCP, &endpoints);
        turn(&w.datapath, false);
        let sent = make(TCP, (w.a.v4, 1), at, SYN);
        w.leaves_as(&sent, &sent);
        turn(&w.datapath, true);
        // Nor what is to no Service.
        for proto in PROTOCOLS {
            for client in w.clients() {
                for to in [(far(client, 1), 80), (far(client, 1), 8001)] {
                    let sent = make(proto, (client, 1), to, SYN);
                    w.leaves_as(&sent, &sent);
                    let back = make(proto, to, (client, 1), ACK);
                    w.arrives_as(&back, &back);
                }
            }
        }
        // A Service's address can be asked whether it is there, by nobody's answer.
        let echo = packet::icmp(w.a.v4, at.0, 8, 7);
        w.leaves_as(&echo, &echo);
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn a_client_with_affinity_keeps_its_endpoint_for_all_connections() {
    world(|w| {
        for (number, client) in (1..).zip(w.clients()) {
            let endpoints = endpoints(client, 8);
            let (service, at) = w.publish(number, TCP, &endpoints);
            // By one address of the Service as by the other.
            let other = (address(client, "10.96.0.11", "fd00:96::11"), 443);
            for at in [at, other] {
                service.frontend(at, 3);
            }
            let first = w.goes_to(&make(TCP, (client, 2000), at, SYN));
            for port in 2001..2020 {
                for (at, port) in [(at, port), (other, port + 100)] {
                    assert_eq!(w.goes_to(&make(TCP, (client, port), at, SYN)), first);
                }
            }
            // That one connection cannot have it changes nothing for the others.
            let apart = w.goes_to(&make(TCP, (client, 2000), other, SYN));
            assert_ne!(apart, first);
            assert_eq!(w.goes_to(&make(TCP, (client, 2200), other, SYN)), first);
        }
    });
}

#[test]
fn affinity_ends_with_its_time_or_its_endpoint() {
    world(|w| {
        let client = w.a.v4;
        let endpoints = endpoints(client, 8);
        let (service, at) = w.publish(1, UDP, &endpoints);
        service.frontend(at, 1);
        let chosen = |ports: std::ops::Range<u16>| -> HashSet<At> {
            ports
                .map(|port| w.goes_to(&make(UDP, (client, port), at, 0)))
                .collect()
        };
        let first = chosen(2000..2020);
        assert_eq!(first.len(), 1);
        // It finishes what it has, and is in no set.
        let gone = endpoints.iter().position(|at| first.contains(at)).unwrap();
        let flags = BACKEND_SERVING | BACKEND_DRAINING;
        service.backend(gone as u32, endpoints[gone], flags, 1);
        let count = service.slots(1, (0..8).filter(|id| *id != gone as u32));
        service.set(Kind::Balance, count);
        let second = chosen(2100..2120);
        assert!(second.len() == 1 && second != first, "{first:?} {second:?}");
        // Who has it already stays.
        assert_eq!(chosen(2000..2020), first);
        // Its number is another's: nobody is sent there by what was.
        let again = endpoints.iter().position(|at| second.contains(at)).unwrap();
        service.backend(again as u32, (far(client, 99), 9), BACKEND_SERVING, 2);
        let third = chosen(2200..2220);
        assert!(third.len() == 1 && third != second, "{second:?} {third:?}");
        assert!(!third.contains(&(far(client, 99), 9)));
        // So long ago that it is forgotten, or not quite.
        let mut kept = affinities();
        let mut after = |port, ago_ns| {
            let (key, mut affinity) = kept.iter().next().unwrap().unwrap();
            affinity.last_ns = monotonic_ns() - ago_ns;
            kept.insert(key, affinity, 0).unwrap();
            w.goes_to(&make(UDP, (client, port), at, 0))
        };
        for port in 2300..2320 {
            assert!(third.contains(&after(port, SECOND / 2)));
        }
        let later: HashSet<_> = (2400..2420).map(|port| after(port, SECOND)).collect();
        assert!(later.len() > 1);
    });
}

fn affinities() -> HashMap<MapData, AffinityKey, Affinity> {
    let data = MapData::from_pin(format!("{}/v2/AFFINITY", names::BPF_DIR)).unwrap();
    Map::LruHashMap(data).try_into().unwrap()
}

#[test]
fn two_frontends_of_one_endpoint_do_not_mix_up_a_clients_port() {
    world(|w| {
        for (number, client) in (0..).zip(w.clients()) {
            let endpoints = endpoints(client, 2);
            let (service, at) = w.publish(1 + number, TCP, &endpoints);
            let other = (at.0, 443);
            service.frontend(other, 0);
            for port in 2000..2020 {
                let one = w.goes_to(&make(TCP, (client, port), at, SYN));
                let two = w.goes_to(&make(TCP, (client, port), other, SYN));
                assert_ne!(one, two);
                let back = |from: At| make(TCP, from, (client, port), ACK);
                w.arrives_as(&back(one), &back(at));
                w.arrives_as(&back(two), &back(other));
            }
            // Of one endpoint, the port can have one connection.
            let third = (at.0, 444);
            service.frontend(third, 0);
            let sent = make(TCP, (client, 2000), third, SYN);
            w.dropped(&sent, DropReason::ServiceClash);
            assert_ne!(w.goes_to(&make(TCP, (client, 2020), third, SYN)), third);
        }
        check_table();
    });
}

/// A client's port is drawn again after a while, and a question that has its answer is done with.
#[test]
fn datagrams_make_way_for_those_that_the_same_port_sends_elsewhere() {
    world(|w| {
        for (number, client) in (0..).zip(w.clients()) {
            let endpoint = endpoints(client, 1)[0];
            let (service, at) = w.publish(1 + number, UDP, &[endpoint]);
            let other = (at.0, 443);
            service.frontend(other, 0);
            let from = (client, 2000);
            let ask = |to: At| make(UDP, from, to, ACK);
            let answered_by = |from_there: At| {
                let answer = |as_whom: At| make(UDP, as_whom, from, ACK);
                w.arrives_as(&answer(endpoint), &answer(from_there));
            };
            assert_eq!(w.goes_to(&ask(at)), endpoint);
            w.dropped(&ask(other), DropReason::ServiceClash);
            answered_by(at);
            for to in [other, at, other, other, at, at, other] {
                assert_eq!(w.goes_to(&ask(to)), endpoint);
                answered_by(to);
                check_table();
            }
            // Nobody has answered, and nobody has asked again.
            assert_eq!(w.goes_to(&ask(at)), endpoint);
            age(2);
            w.dropped(&ask(other), DropReason::ServiceClash);
            age(2);
            assert_eq!(w.goes_to(&ask(other)), endpoint);
            answered_by(other);
            check_table();
        }
    });
}

#[test]
fn a_slot_of_before_is_nobodys() {
    world(|w| {
        let endpoints = endpoints(w.a.v4, 4);
        let (service, at) = w.publish(1, TCP, &endpoints);
        // Three of the four numbers are others' by now.
        for id in 1..4 {
            service.backend(id, (far(w.a.v4, 99), 9), BACKEND_SERVING, 2);
        }
        for port in 2000..2020 {
            let sent = make(TCP, (w.a.v4, port), at, SYN);
            assert_eq!(w.goes_to(&sent), endpoints[0]);
        }
        service.backend(0, endpoints[0], 0, 1);
        let sent = make(TCP, (w.a.v4, 3000), at, SYN);
        w.dropped(&sent, DropReason::ServiceNoEndpoint);
        assert_eq!(table().len(), 20);
        check_table();
    });
}
