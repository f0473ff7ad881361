//! Room that closed connections leave.

use super::*;
use sinabro_agent::datapath::ConnectionLimits;

const ROOM: u32 = 200;

/// Opens a connection from a port and closes it, if it may be opened.
fn is_open_and_closed(w: &World, pod: IpAddr, port: u16) -> bool {
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

fn fill(w: &World, pod: IpAddr) -> u64 {
    let ports = 1000..1000 + ROOM as u16;
    let opened = ports.take_while(|port| is_open_and_closed(w, pod, *port));
    opened.count() as u64
}

/// Of the pod's own, if there is enough for others; `most`: what it may have.
fn closed_ones_make_room(limits: ConnectionLimits, most: u64) {
    let config = DatapathConfig {
        connections: Some(ROOM),
        connection_limits: limits,
        ..kit::config()
    };
    world_with(&config, |w| {
        let is_due = || w.datapath.is_sweep_due().unwrap();
        let open = make(TCP, (w.a.v4, 1), (FAR, 80));
        w.received(&reply_to(&w.sent(&open)));
        assert!(is_open_and_closed(&w, w.b.v4, 1));
        assert!(!is_due());
        let closed = fill(&w, w.a.v4);
        assert!((most - 4..=most).contains(&closed), "{closed}");
        let one_more = make(TCP, (w.a.v4, 3000), (FAR, 80));
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        // Late segments may still come.
        assert!(is_due());
        assert_eq!(w.sweep_at(0), 0);
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        assert!(is_due(), "nothing is left to it");
        assert_eq!(w.sweep_at(2), closed);
        assert!(!is_due());
        // What is open stays, and the other pod's.
        assert_eq!(table().len(), 2);
        check_table();
        assert!(is_open_and_closed(&w, w.a.v4, 3000));
        assert_eq!(w.sweep_at(2), 0, "there is room");
    });
}

#[test]
fn a_pod_that_has_half_of_the_table_is_not_refused_for_closed_ones() {
    closed_ones_make_room(ConnectionLimits::default(), u64::from(ROOM) / 2);
}

#[test]
fn a_pod_that_has_all_that_is_set_is_not_refused_for_closed_ones() {
    let limits = ConnectionLimits {
        per_pod: 40,
        ..ConnectionLimits::default()
    };
    closed_ones_make_room(limits, 40);
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
