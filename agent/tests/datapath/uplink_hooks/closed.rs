//! Ports of connections that are over.

use super::{protocols::families, *};

#[test]
fn others_have_the_port_of_a_closed_connection_last() {
    world(|w| {
        for (family, (_, _, far)) in families(&w).into_iter().enumerate() {
            let pods = [[w.a.v4, w.b.v4], [w.a.v6, w.b.v6]][family];
            let own = kit::PORT_MIN;
            let send =
                |pod: usize, flags| w.sent(&packet::tcp((pods[pod], own), (far, 80), flags, b""));
            let first = send(0, SYN);
            assert_eq!(first.ports.0, own);
            w.received(&packet::tcp((far, 80), (first.src, own), SYN | ACK, b""));
            send(0, FIN | ACK);
            w.received(&packet::tcp((far, 80), (first.src, own), FIN | ACK, b""));
            std::thread::sleep(std::time::Duration::from_millis(1100));
            assert_ne!(
                send(1, SYN).ports.0,
                own,
                "its server may have it in TIME_WAIT"
            );
            assert_eq!(send(0, SYN).ports.0, own, "whoever had it knows of that");
        }
        check_table();
    });
}

#[test]
fn the_port_of_a_closed_connection_is_soon_anothers() {
    world(|w| {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (61000, 61000);
        w.datapath.set_node_config(config).unwrap();
        let first = w.sent(&packet::tcp((w.a.v4, 1), (FAR, 80), SYN, b""));
        w.received(&reply_to(&first));
        let ack = |flags| packet::tcp((w.a.v4, 1), (FAR, 80), flags, b"");
        w.sent(&ack(ACK));
        let other = packet::tcp((w.b.v4, 1), (FAR, 80), SYN, b"");
        w.dropped("uplink_out", &other, DropReason::NatPortsExhausted);
        // A reset that is not believed changes nothing.
        w.received(&packet::tcp((FAR, 80), (NODE_IP, 61000), 0x04, b""));
        w.sent(&ack(ACK));
        std::thread::sleep(std::time::Duration::from_millis(1100));
        w.dropped("uplink_out", &other, DropReason::NatPortsExhausted);

        w.sent(&ack(FIN | ACK));
        w.received(&packet::tcp((FAR, 80), (NODE_IP, 61000), FIN | ACK, b""));
        w.dropped("uplink_out", &other, DropReason::NatPortsExhausted);
        // The same pod's next connection from the same port keeps it at once.
        assert_eq!(
            w.sent(&packet::tcp((w.a.v4, 1), (FAR, 80), SYN, b""))
                .ports
                .0,
            61000
        );
        w.dropped("uplink_out", &other, DropReason::NatPortsExhausted);
        w.sent(&ack(0x04));
        std::thread::sleep(std::time::Duration::from_millis(1100));
        let second = w.sent(&other);
        assert_eq!(second.ports.0, 61000);
        assert_eq!(w.received(&reply_to(&second)).dst, w.b.v4);
        assert_eq!(table().len(), 1);
        check_table();
    });
}

#[test]
fn a_port_that_is_taken_over_is_its_last_owners_alone() {
    world(|w| {
        let only = |port| {
            let mut config = kit::node_config();
            (config.nat_port_min, config.nat_port_max) = (port, port);
            w.datapath.set_node_config(config).unwrap();
        };
        only(61001);
        let syn = |pod| packet::tcp((pod, 1), (FAR, 80), SYN, b"");
        assert_eq!(w.sent(&syn(w.a.v4)).ports.0, 61001);
        // The same pod's, of before: it was closed, and lost to somebody who did not come to use it.
        let before = Tuple {
            src: FAR.into(),
            dst: NODE_IP.into(),
            src_port: 80u16.to_be_bytes(),
            dst_port: 61000u16.to_be_bytes(),
            proto: TCP,
            pad: [0; 3],
        };
        let alias = Alias {
            addr: w.a.v4.into(),
            takers: 0,
            noted_ticks: 0,
            port: 1u16.to_be_bytes(),
            pad: [0; 6],
            reusable_ns: 1,
        };
        open("ALIASES").insert(before, alias, 0).unwrap();
        only(61000);
        assert_eq!(w.sent(&syn(w.b.v4)).ports.0, 61000);
        let goes_on = packet::tcp((w.a.v4, 1), (FAR, 80), ACK, b"");
        assert_eq!(w.sent(&goes_on).ports.0, 61001);
        check_table();
    });
}

const DNS: u16 = 53;

/// One port for all, and a first question that is answered.
fn with_a_question(to: u16, test: impl FnOnce(&World, &Seen) + Send) {
    world(|w| {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (61000, 61000);
        w.datapath.set_node_config(config).unwrap();
        let first = w.sent(&question(w.a.v4, to));
        w.refused(to);
        age(10);
        w.refused(to);
        let answered = w.sent(&question(w.a.v4, to));
        assert_eq!(answered.ports, first.ports);
        // A moment only, although it was long for the first answer.
        forget_when_it_began();
        assert_eq!(w.received(&reply_to(&answered)).dst, w.a.v4);
        w.refused(to);
        test(&w, &answered);
        check_table();
    });
}

fn question(pod: IpAddr, to: u16) -> Ip {
    packet::udp((pod, 5000), (FAR, to), b"who?")
}

fn forget_when_it_began() {
    let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
    for (key, mut record) in table() {
        record.began_ns = record.last_seen_ns;
        records.insert(key, record, 0).unwrap();
    }
}

impl World {
    /// The other pod gets no port.
    fn refused(&self, to: u16) {
        let other = question(self.b.v4, to);
        self.dropped("uplink_out", &other, DropReason::NatPortsExhausted);
    }
}

#[test]
fn the_port_of_an_answered_question_is_anothers_when_none_is_left() {
    with_a_question(DNS, |w, first| {
        age(2);
        w.refused(DNS);
        age(1);
        let second = w.sent(&question(w.b.v4, DNS));
        assert_eq!(second.ports, first.ports);
        assert_eq!(w.received(&reply_to(&second)).dst, w.b.v4);
        assert_eq!(table().len(), 1, "the first one's record is gone");
        w.dropped(
            "uplink_out",
            &question(w.a.v4, DNS),
            DropReason::NatPortsExhausted,
        );
    });
}

#[test]
fn a_question_that_is_asked_again_keeps_its_port() {
    with_a_question(DNS, |w, first| {
        age(1);
        w.sent(&question(w.a.v4, DNS));
        age(2);
        w.refused(DNS);
        assert_eq!(w.received(&reply_to(first)).dst, w.a.v4);
    });
}

#[test]
fn a_stream_to_a_resolver_keeps_its_port() {
    with_a_question(DNS, |w, first| {
        age(3);
        w.sent(&question(w.a.v4, DNS));
        age(10);
        w.refused(DNS);
        assert!(
            aliases().values().all(|alias| alias.reusable_ns == 0),
            "nobody tries it again"
        );
        assert_eq!(w.received(&reply_to(first)).dst, w.a.v4);
    });
}

#[test]
fn an_exchange_with_others_than_resolvers_keeps_its_port() {
    with_a_question(DNS + 1, |w, first| {
        age(20);
        w.refused(DNS + 1);
        assert_eq!(w.received(&reply_to(first)).dst, w.a.v4);
    });
}
