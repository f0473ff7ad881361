//! What a pod sends to addresses inside of the overlay.

use super::*;

#[test]
fn node_ports_are_at_the_nodes_own_address_there() {
    edge(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let (service, at) = (e.w.service(number, UDP), (gateway(like), 30_000));
            let to = e.endpoint(like, Place::OtherNodesPod);
            service.balance(&[to], 1);
            service.frontend(at, 0);
            assert_eq!(e.w.goes_to(&make(UDP, (like, 2000), at, 0)), to);
        }
    });
}

/// Whoever may write a Service's `externalIPs`.
#[test]
fn no_service_has_the_address_of_another_nodes_pod() {
    edge(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let (service, at) = (e.w.service(number, UDP), (far(like, 5), 53));
            service.balance(&[e.endpoint(like, Place::Elsewhere)], 1);
            service.frontend(at, 0);
            assert_eq!(e.w.goes_to(&make(UDP, (like, 2000), at, 0)), at);
        }
    });
}

#[test]
fn nor_that_of_this_nodes_pod_to_who_comes_from_outside() {
    edge(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let service = e.w.service(number, TCP);
            let own = if like.is_ipv4() { e.w.a.v4 } else { e.w.a.v6 };
            service.balance(&[e.endpoint(like, Place::Elsewhere)], 1);
            let frontend = Frontend {
                inside: number,
                outside: number,
                service: number,
                affinity_seconds: 0,
                flags: FRONTEND_EXTERNAL,
            };
            let key = service.key((own, 80));
            e.w.datapath.services().put_frontend(key, frontend).unwrap();
            let sent = make(TCP, client(like), (own, 80), SYN);
            e.enters_as(&sent, &sent);
        }
    });
}
