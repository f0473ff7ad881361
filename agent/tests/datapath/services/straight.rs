//! Who sends to an endpoint itself, by the port of a conversation with its Service.

use super::{outside::edge, *};
use sinabro_agent::datapath::Way;
use sinabro_common::abi::next_hop::NextHop;
use sinabro_lab::kernel;
use std::collections::BTreeMap;

#[test]
fn who_asks_the_endpoint_itself_after_the_service_is_answered_by_it() {
    world(|w| {
        for (number, (client, server)) in (1..).zip([(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)]) {
            let (from, endpoint) = ((client, 2000), (server, 8000));
            let (_, at) = w.publish(number, UDP, &[endpoint]);
            let answered_by = |who: At| {
                let (verdict, out) = w.sent_by(&w.b, &make(UDP, endpoint, from, ACK));
                assert_eq!((verdict, see(&out).src), (REDIRECT, who.0));
            };
            for to in [at, endpoint, at] {
                let (verdict, out) = w.sent_by(&w.a, &make(UDP, from, to, ACK));
                assert_eq!((verdict, see(&out).dst), (REDIRECT, server));
                answered_by(to);
            }
            check_table();
        }
    });
}

#[test]
fn who_connects_to_the_endpoint_itself_by_the_same_ports_is_not_mixed_up() {
    world(|w| {
        for (number, (client, server)) in (1..).zip([(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)]) {
            let endpoint = (server, 8000);
            let (_, at) = w.publish(number, TCP, &[endpoint]);
            let from = (client, 2000);
            let (verdict, _) = w.sent_by(&w.a, &make(TCP, from, at, SYN));
            assert_eq!(verdict, REDIRECT);
            w.dropped(&make(TCP, from, endpoint, SYN), DropReason::ServiceClash);
            let (verdict, _) = w.sent_by(&w.a, &make(TCP, (client, 2001), endpoint, SYN));
            assert_eq!(verdict, REDIRECT);
            // Once that is closed it can be had.
            let (verdict, _) = w.sent_by(&w.a, &make(TCP, from, at, RST));
            assert_eq!(verdict, REDIRECT);
            let (verdict, out) = w.sent_by(&w.a, &make(TCP, from, endpoint, SYN));
            assert_eq!((verdict, see(&out).dst), (REDIRECT, server));
            let (verdict, out) = w.sent_by(&w.b, &make(TCP, endpoint, from, SYN | ACK));
            assert_eq!((verdict, see(&out).src), (REDIRECT, server));
        }
    });
}

/// Has packets to the other node go past the stack.
fn lead_past_the_stack(w: &World) {
    let next = NextHop {
        gateway: "192.0.2.254".parse::<IpAddr>().unwrap().into(),
        ifindex: w.b.ifindex,
        remote_mac: [2; 6],
        own_mac: [6; 6],
    };
    let way = Way {
        next,
        native_v6: None,
    };
    let other: IpAddr = "192.0.2.2".parse().unwrap();
    kit::lead(&w.b.link, other, next.gateway.into());
    kit::all_carry(&w.datapath, 1450);
    w.datapath
        .set_next_hops(&BTreeMap::from([(other.into(), way)]))
        .unwrap();
}

/// For both families, first where what goes to the other node goes by the stack, then where it goes past it: with what
/// becomes of a whole packet.
fn by_both_ways(proto: u8, test: impl Fn(&World, Between, i32) + Send + Sync) {
    edge(|edge| {
        let w = &edge.w;
        for (number, way) in [(1, PASS), (3, REDIRECT)] {
            if way == REDIRECT && !kernel::wraps().unwrap() {
                println!("skipped: before Linux 5.13 nothing is put into a tunnel past the stack");
                continue;
            }
            if way == REDIRECT {
                lead_past_the_stack(w);
            }
            for (number, client) in (number..).zip(w.clients()) {
                let endpoint = endpoints(client, 1)[0];
                let (_, at) = w.publish(number, proto, &[endpoint]);
                let from = (client, 2000);
                test(w, Between { from, at, endpoint }, way);
            }
        }
        // What leads to a record that is gone is looked for now and then, and goes when it is found twice.
        for _ in 0..=16 {
            w.sweep_at(0);
        }
        check_table();
    });
}

/// A client, a Service's address, and its only endpoint.
struct Between {
    from: At,
    at: At,
    endpoint: At,
}

/// In parts, too, which go by the stack in any case.
#[test]
fn who_asks_an_endpoint_of_another_node_itself_is_answered_by_it() {
    by_both_ways(UDP, |w, Between { from, at, endpoint }, way| {
        for in_parts in [false, true] {
            for to in [at, endpoint, at] {
                let question = packet::udp(from, to, &[7; 64]);
                let sent = match in_parts {
                    true => packet::in_parts(question).to_vec(),
                    false => vec![question],
                };
                for part in sent {
                    let expected = if in_parts { PASS } else { way };
                    let (verdict, _) = w.sent_by(&w.a, &part);
                    assert_eq!(verdict, expected, "{:?}", w.datapath.drops());
                }
                let answer = |who: At| make(UDP, who, from, ACK);
                w.arrives_as(&answer(endpoint), &answer(to));
            }
        }
    });
}

#[test]
fn who_connects_to_an_endpoint_of_another_node_itself_is_not_mixed_up() {
    by_both_ways(TCP, |w, Between { from, at, endpoint }, way| {
        let goes = |to: At, flags| {
            let (verdict, _) = w.sent_by(&w.a, &make(TCP, from, to, flags));
            assert_eq!(verdict, way, "{:?}", w.datapath.drops());
        };
        goes(at, SYN);
        w.dropped(&make(TCP, from, endpoint, SYN), DropReason::ServiceClash);
        // Once that is closed it can be had.
        goes(at, RST);
        goes(endpoint, SYN);
        let answer = make(TCP, endpoint, from, SYN | ACK);
        w.arrives_as(&answer, &answer);
    });
}
