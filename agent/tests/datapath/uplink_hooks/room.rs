//! Room that closed connections leave.

use super::*;
use sinabro_agent::datapath::ConnectionLimits;
use sinabro_common::abi::config::FLAG_ENDPOINT_INDEPENDENT;

pub const ROOM: u32 = 200;

/// Opens a connection from a port and closes it, if it may be opened.
pub fn is_closed(w: &World, pod: IpAddr, port: u16) -> bool {
    let sent = |flags| packet::tcp((pod, port), (FAR, 80), flags, b"");
    let (verdict, out) = w.out(&sent(SYN));
    if verdict != PASS {
        return false;
    }
    let from = (see(&out).src, see(&out).ports.0);
    let answer = |flags| packet::tcp((FAR, 80), from, flags, b"");
    w.received(&answer(SYN | ACK));
    w.sent(&sent(ACK));
    w.sent(&sent(FIN | ACK));
    w.received(&answer(FIN | ACK));
    w.sent(&sent(ACK));
    true
}

/// Asks from a port and is answered, if it may.
pub fn is_answered(w: &World, pod: IpAddr, port: u16) -> bool {
    let (verdict, out) = w.out(&make(UDP, (pod, port), (FAR, 5353)));
    if verdict == PASS {
        w.received(&reply_to(&see(&out)));
    }
    verdict == PASS
}

/// Until it is refused, and however long that takes: nothing makes way by itself ([`super::finished`]).
pub fn fill(w: &World, does: impl Fn(&World, IpAddr, u16) -> bool) -> u64 {
    let ports = 1000..1000 + ROOM as u16;
    let done = ports.take_while(|port| {
        let may = does(w, w.a.v4, *port);
        finished::put_off();
        may
    });
    done.count() as u64
}

/// Makes datagrams both ways a stream of them.
fn make_stream() {
    let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
    for (key, mut record) in table() {
        record.began_ns -= 3 * SECOND;
        records.insert(key, record, 0).unwrap();
    }
}

/// Of the pod's own, `after` so many seconds, if there is enough for others; `most`: what it may have.
fn what_is_done_makes_room(
    limits: ConnectionLimits,
    most: u64,
    after: u64,
    does: fn(&World, IpAddr, u16) -> bool,
) {
    let config = DatapathConfig {
        connections: Some(ROOM),
        connection_limits: limits,
        ..kit::config()
    };
    world_with(&config, |w| {
        let is_due = || w.datapath.is_sweep_due().unwrap();
        let open = make(TCP, (w.a.v4, 1), (FAR, 80));
        w.received(&reply_to(&w.sent(&open)));
        assert!(is_answered(&w, w.a.v4, 2));
        make_stream();
        assert!(does(&w, w.b.v4, 1));
        assert!(!is_due());
        let done = fill(&w, does);
        assert!((most - 4..=most).contains(&done), "{done}");
        let one_more = make(TCP, (w.a.v4, 3000), (FAR, 80));
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        // More may still come.
        assert!(is_due());
        assert_eq!(w.sweep_at(after - 1), 0);
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        assert!(is_due(), "nothing is left to it");
        assert_eq!(w.sweep_at(after + 1), done);
        assert!(!is_due());
        // What is open stays, and the other pod's.
        assert_eq!(table().len(), 3);
        check_table();
        assert!(does(&w, w.a.v4, 3000));
        assert_eq!(w.sweep_at(after + 1), 0, "there is room");
    });
}

#[test]
fn a_pod_that_has_half_of_the_table_is_not_refused_for_closed_ones() {
    let half = u64::from(ROOM) / 2;
    what_is_done_makes_room(ConnectionLimits::default(), half, 1, is_closed);
}

#[test]
fn a_pod_that_has_half_of_the_table_is_not_refused_for_questions_that_have_their_answers() {
    let half = u64::from(ROOM) / 2;
    what_is_done_makes_room(ConnectionLimits::default(), half, 3, is_answered);
}

#[test]
fn a_pod_that_has_all_that_is_set_is_not_refused_for_closed_ones() {
    let limits = ConnectionLimits {
        per_pod: 40,
        ..ConnectionLimits::default()
    };
    what_is_done_makes_room(limits, 40, 1, is_closed);
}

/// Else the port would be another's, while it is the pod's towards everybody.
#[test]
fn mappings_stay_for_their_time() {
    let config = DatapathConfig {
        connections: Some(ROOM),
        ..kit::config()
    };
    world_with(&config, |w| {
        let mut config = kit::node_config();
        config.flags |= FLAG_ENDPOINT_INDEPENDENT;
        w.datapath.set_node_config(config).unwrap();
        let asked = fill(&w, is_answered);
        assert!((40..=50).contains(&asked), "each has two records: {asked}");
        assert_eq!(w.sweep_at(4), asked);
        assert_eq!(table().len() as u64, asked);
    });
}

/// A sweep ends nothing of that, and comes no sooner for it.
#[test]
fn what_is_open_is_not_looked_at_again_and_again() {
    let config = DatapathConfig {
        connections: Some(ROOM),
        ..kit::config()
    };
    world_with(&config, |w| {
        let is_open = |port: u16| {
            let (verdict, out) = w.out(&make(TCP, (w.a.v4, port), (FAR, 80)));
            if verdict == PASS {
                w.received(&reply_to(&see(&out)));
                w.sent(&packet::tcp((w.a.v4, port), (FAR, 80), ACK, b""));
            }
            verdict == PASS
        };
        let ports = 1000..1000 + ROOM as u16;
        let opened = ports.take_while(|port| is_open(*port)).count();
        assert!((96..=100).contains(&opened), "{opened}");
        assert!(w.datapath.is_sweep_due().unwrap(), "they may be closed");
        assert_eq!(w.sweep_at(2), 0);
        assert!(!w.datapath.is_sweep_due().unwrap());
    });
}
