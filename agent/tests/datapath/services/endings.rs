//! Who gets no endpoint, who gets another, and what is left when it is over.

use super::*;
use crate::uplink_hooks::{age, finished};
use sinabro_agent::datapath::ConnectionLimits;
use sinabro_common::abi::{connection::ALL_SHARES, service::BACKEND_DRAINING};

#[test]
fn who_may_have_no_endpoint_is_dropped() {
    world(|w| {
        for (number, proto) in (1..).zip(PROTOCOLS) {
            for client in w.clients() {
                let number = number * 2 + u32::from(client.is_ipv6());
                let (service, at) = w.publish(number, proto, &endpoints(client, 1));
                let sent = make(proto, (client, 2000), at, SYN);
                service.set(Kind::Drop, 0);
                w.dropped(&sent, DropReason::ServiceNotHere);
            }
        }
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn a_node_port_is_the_stacks_where_no_connection_begins() {
    world(|w| {
        let (service, _) = w.publish(1, TCP, &endpoints(w.a.v4, 1));
        // An address that is not a Service's own.
        let at = (address(w.a.v4, "192.0.2.77", ""), 30_000);
        service.frontend(at, 0);
        let services = w.datapath.services();
        let own = FrontendKey::address(at.0.into());
        services.remove_frontend(&own).unwrap();
        assert_eq!(
            w.goes_to(&make(TCP, (w.a.v4, 2000), at, SYN)),
            (far(w.a.v4, 1), 8001)
        );
        let sent = make(TCP, (w.a.v4, 2001), at, ACK);
        w.leaves_as(&sent, &sent);
        let sent = make(TCP, (w.a.v4, 2001), (at.0, 30_001), SYN);
        w.leaves_as(&sent, &sent);
    });
}

#[test]
fn udp_moves_away_from_an_endpoint_that_does_not_serve_and_tcp_stays() {
    world(|w| {
        let clients = w.clients().into_iter();
        let cases = clients.flat_map(|client| [UDP, TCP, SCTP].map(|proto| (client, proto)));
        // All side by side, as every step has to settle.
        let cases: Vec<_> = cases
            .map(|(client, proto)| {
                let number = u32::from(proto) + u32::from(client.is_ipv6());
                let all = endpoints(client, 3);
                let (service, at) = w.publish(number, proto, &all[..1]);
                let sent = move |flags| make(proto, (client, 2000), at, flags);
                assert_eq!(w.goes_to(&sent(SYN)), all[0]);
                w.to_pod(&w.a, &make(proto, all[0], (client, 2000), SYN | ACK));
                assert_eq!(w.goes_to(&sent(ACK)), all[0]);
                // It takes nothing new, and finishes what it has.
                service.backend(1, all[1], BACKEND_SERVING, 1);
                service.slots(1, [1]);
                (client, proto, all, service, at, sent)
            })
            .collect();
        settle();
        for (_, _, all, service, _, sent) in &cases {
            assert_eq!(w.goes_to(&sent(ACK)), all[0]);
            // It does not serve, and there is no other.
            service.backend(0, all[0], 0, 1);
            service.set(Kind::Refuse, 0);
        }
        settle();
        for (_, proto, all, service, _, sent) in &cases {
            match *proto {
                TCP => assert_eq!(w.goes_to(&sent(ACK)), all[0]),
                _ => drop(w.refused(&sent(ACK), DropReason::ServiceNoEndpoint)),
            }
            service.set(Kind::Balance, 1);
        }
        settle();
        for (_, proto, all, service, _, sent) in &cases {
            let moved = w.goes_to(&sent(ACK));
            assert_eq!(moved, if *proto == TCP { all[0] } else { all[1] });
            // Its number is somebody else's.
            service.backend(0, all[2], BACKEND_SERVING, 2);
        }
        settle();
        for (client, proto, all, service, at, sent) in &cases {
            let (client, proto, at) = (*client, *proto, *at);
            let moved = if proto == TCP { all[0] } else { all[1] };
            assert_eq!(w.goes_to(&sent(ACK)), moved);
            w.arrives_as(
                &make(proto, moved, (client, 2000), ACK),
                &make(proto, at, (client, 2000), ACK),
            );
            // A client that nobody has answered asks for another one.
            if proto == TCP {
                service.balance(&all[..1], 3);
                let syn = make(TCP, (client, 2001), at, SYN);
                assert_eq!(w.goes_to(&syn), all[0]);
                service.backend(0, all[0], 0, 3);
                service.backend(1, all[1], BACKEND_SERVING, 3);
                service.slots(3, [1]);
                assert_eq!(w.goes_to(&syn), all[1]);
                // So does one whose endpoint went without an end, once it begins anew; what goes on stays.
                let of = |flags| make(TCP, (client, 2002), at, flags);
                service.balance(&all[..1], 4);
                assert_eq!(w.goes_to(&of(SYN)), all[0]);
                w.to_pod(&w.a, &make(TCP, all[0], (client, 2002), SYN | ACK));
                assert_eq!(w.goes_to(&of(ACK)), all[0]);
                // A segment of before is no reason to leave one that serves.
                assert_eq!(w.goes_to(&of(SYN)), all[0]);
                service.backend(0, all[0], 0, 4);
                service.backend(1, all[1], BACKEND_SERVING, 4);
                service.slots(4, [1]);
                assert_eq!(w.goes_to(&of(ACK)), all[0]);
                assert_eq!(w.goes_to(&of(SYN)), all[1]);
            }
        }
        check_table();
    });
}

/// Whoever asks from a port that was used before asks anew, and of an endpoint that has ended the cluster hears late.
#[test]
fn udp_asks_an_endpoint_that_is_about_to_end_nothing_new() {
    world(|w| {
        for (number, client) in (1..).zip(w.clients()) {
            let all = endpoints(client, 2);
            let (service, at) = w.publish(number, UDP, &all[..1]);
            let ask = |port| w.goes_to(&make(UDP, (client, port), at, 0));
            let answer = |port| {
                let said = |by| make(UDP, by, (client, port), 0);
                w.arrives_as(&said(all[0]), &said(at));
            };
            let [question, waits, stream, apart] = [2000, 2001, 2002, 2003];
            assert_eq!(ask(stream), all[0]);
            age(3);
            for port in [question, waits, stream, apart] {
                assert_eq!(ask(port), all[0]);
            }
            for port in [question, stream, apart] {
                answer(port);
            }
            // What comes at once belongs to what was before.
            service.backend(0, all[0], BACKEND_SERVING | BACKEND_DRAINING, 1);
            assert_eq!(ask(question), all[0]);
            // Nobody else is there.
            age(2);
            assert_eq!(ask(apart), all[0]);
            answer(apart);
            service.backend(1, all[1], BACKEND_SERVING, 1);
            service.slots(1, [1]);
            assert_eq!(ask(question), all[1]);
            assert_eq!(ask(waits), all[0]);
            assert_eq!(ask(stream), all[0]);
            age(4);
            assert_eq!(ask(waits), all[1]);
            assert_eq!(ask(stream), all[1]);
            check_table();
        }
    });
}

/// As long as a busy connection's record is not looked at.
fn settle() {
    std::thread::sleep(std::time::Duration::from_millis(1100));
}

#[test]
fn a_closed_connection_makes_way_for_the_next_by_the_same_ports() {
    world(|w| {
        for (number, client) in (1..).zip(w.clients()) {
            let all = endpoints(client, 2);
            let (service, at) = w.publish(number, TCP, &all[..1]);
            let from = (client, 2000);
            assert_eq!(w.goes_to(&make(TCP, from, at, SYN)), all[0]);
            w.to_pod(&w.a, &make(TCP, all[0], from, SYN | ACK));
            w.goes_to(&make(TCP, from, at, ACK));
            service.backend(1, all[1], BACKEND_SERVING, 1);
            service.slots(1, [1]);
            // Sent again, not begun again.
            assert_eq!(w.goes_to(&make(TCP, from, at, SYN)), all[0]);
            w.goes_to(&make(TCP, from, at, FIN | ACK));
            w.to_pod(&w.a, &make(TCP, all[0], from, FIN | ACK));
            // The last acknowledgement.
            assert_eq!(w.goes_to(&make(TCP, from, at, ACK)), all[0]);
            assert_eq!(w.goes_to(&make(TCP, from, at, SYN)), all[1]);
            assert_eq!(table().len(), number as usize);
        }
        check_table();
    });
}

#[test]
fn sweeps_leave_nothing_behind() {
    world(|w| {
        let uplink = w.b.ifindex;
        set_source(uplink, kit::NODE.into(), kit::NODE6.into());
        let outside = address(w.a.v4, "203.0.113.5", "");
        for (number, client) in (1..).zip(w.clients()) {
            let (_, at) = w.publish(number, UDP, &endpoints(client, 2));
            w.goes_to(&make(UDP, (client, 2000), at, 0));
        }
        let (service, _) = w.publish(5, TCP, &[(outside, 6443)]);
        let at = (vip(w.a.v4), 443);
        service.frontend(at, 0);
        let (verdict, out) = w.sent_by(&w.a, &make(TCP, (w.a.v4, 2000), at, SYN));
        assert_eq!(verdict, PASS);
        let (verdict, _) = w
            .programs
            .run_from("uplink_out", uplink, w.a.ifindex, &out)
            .unwrap();
        assert_eq!(verdict, PASS);
        check_table();
        assert_eq!((table().len(), aliases().len()), (3, 4));
        let share = || w.datapath.connection_usage().connections;
        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(share(), 3);
        // What takes a translated port is counted, the others are not.
        assert_eq!(w.datapath.connection_usage().aliases, 1);
        assert_eq!(w.sweep_at(31), 2);
        check_table();
        assert_eq!(w.sweep_at(121), 1);
        assert!(table().is_empty() && aliases().is_empty());
        assert_eq!(share(), 0);
    });
}

#[test]
fn a_pod_that_goes_takes_its_connections_along() {
    world(|w| {
        let (_, at) = w.publish(1, TCP, &endpoints(w.a.v4, 1));
        w.goes_to(&make(TCP, (w.a.v4, 2000), at, SYN));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        assert_eq!(w.sweep_at(0), 1);
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn a_pod_has_its_share_and_no_more() {
    let limits = ConnectionLimits {
        per_pod: 3,
        ..ConnectionLimits::default()
    };
    let config = DatapathConfig {
        connection_limits: limits,
        ..kit::config()
    };
    world_with(&config, |w| {
        let (_, at) = w.publish(1, UDP, &endpoints(w.a.v4, 2));
        for port in 2000..2003 {
            w.goes_to(&make(UDP, (w.a.v4, port), at, 0));
        }
        let more = make(UDP, (w.a.v4, 2003), at, 0);
        w.dropped(&more, DropReason::ConnectionShare);
        // Those that it has go on.
        w.goes_to(&make(UDP, (w.a.v4, 2000), at, 0));
        assert_eq!((table().len(), aliases().len()), (3, 3));
        assert_eq!(w.sweep_at(31), 3);
        w.goes_to(&more);
        let shares = w.datapath.connections().shares().unwrap();
        let all = shares.iter().find(|(key, _)| *key == ALL_SHARES).unwrap();
        assert_eq!((all.1.connections, all.1.embryonic), (1, 1));
    });
}

#[test]
fn closed_connections_of_a_pod_make_way_for_its_next() {
    let limits = ConnectionLimits {
        per_pod: 10,
        ..ConnectionLimits::default()
    };
    let config = DatapathConfig {
        connection_limits: limits,
        ..kit::config()
    };
    world_with(&config, |w| {
        for (number, client) in (1..).zip(w.clients()) {
            let server = endpoints(client, 1)[0];
            let (_, at) = w.publish(number, TCP, &[server]);
            let asks = |port, flags| make(TCP, (client, port), at, flags);
            let closes = |port| {
                assert_eq!(w.goes_to(&asks(port, SYN)), server);
                let answers =
                    |flags| w.to_pod(&w.a, &make(TCP, server, (client, port), flags | ACK));
                answers(SYN);
                w.goes_to(&asks(port, ACK));
                w.goes_to(&asks(port, FIN | ACK));
                answers(FIN);
                finished::put_off();
            };
            (2000..2010).for_each(closes);
            w.dropped(&asks(3000, SYN), DropReason::ConnectionShare);
            assert_eq!(table().len(), 10);
            finished::since(1.1);
            (3000..3004).for_each(closes);
            assert!(table().len() <= 10);
            check_table();
            w.sweep_at(125);
        }
    });
}
