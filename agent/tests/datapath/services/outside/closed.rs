//! A client outside that uses a port again, by another frontend of the same endpoint.

use super::*;
use std::{thread, time::Duration};

/// To the endpoint both are one connection of one node's, which it may have in TIME_WAIT.
#[test]
fn two_frontends_of_an_endpoint_elsewhere_have_ports_of_their_own() {
    edge(|e| {
        let mut number = 0;
        for place in [Place::OtherNodesPod, Place::Elsewhere] {
            for like in e.w.clients() {
                number += 1;
                let service = e.w.service(number, TCP);
                let to = e.endpoint(like, place);
                service.balance(&[to], 1);
                let ats = [80, 90].map(|port| (vip(like), port + number as u16));
                for at in ats {
                    service.frontend(at, 0);
                }
                // One that may be kept.
                let from = (client(like).0, kit::PORT_MIN + number as u16);
                let port = |flags| {
                    see(&e.forwarded(place, &make(TCP, from, to, flags)))
                        .ports
                        .0
                };
                e.round(place, TCP, from, ats[0], SYN);
                let first = port(ACK);
                e.round(place, TCP, from, ats[0], FIN | ACK);
                thread::sleep(Duration::from_millis(1100));
                e.round(place, TCP, from, ats[1], SYN);
                assert_eq!(first, from.1);
                assert_ne!(port(ACK), first, "{place:?}");
            }
        }
    });
}
