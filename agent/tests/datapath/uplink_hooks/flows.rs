//! The table of flows: where they come from, when they end, and when it is full.

use super::*;

#[test]
fn connections_from_outside_keep_the_pods_address() {
    world(|w| {
        for proto in [TCP, UDP] {
            let ip = make(proto, (FAR, 4000), (w.a.v4, 80));
            assert_eq!(w.come(&ip), (PASS, World::frame(&ip)));
            let reply = reply_to(&see(&World::frame(&ip)));
            assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));
            // What the pod begins itself is masqueraded as ever.
            let own = make(proto, (w.a.v4, 81), (FAR, 4000));
            assert_eq!(w.sent(&own).src, NODE_IP);
        }
        let inbound = |entry: &&NatEntry| entry.kind == KIND_INBOUND;
        assert_eq!(table().values().filter(inbound).count(), 2);

        // An answer to an echo request needs no memory.
        let reply = packet::icmp(w.a.v4, FAR, 0, 9);
        assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));

        // A reset to nobody, and peers that know pods, leave no trace.
        let before = table().len();
        w.come(&packet::tcp((FAR, 4001), (w.a.v4, 80), 0x04, b""));
        let near = "192.0.2.200".parse().unwrap();
        w.datapath
            .set_non_masquerade(&["192.0.2.192/26".parse().unwrap()])
            .unwrap();
        w.come(&packet::tcp((near, 4001), (w.a.v4, 80), SYN, b""));
        assert_eq!(table().len(), before);
    });
}

#[test]
fn ports_run_out_for_one_destination_and_not_for_another() {
    world(|w| {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (61000, 61001);
        w.datapath.set_node_config(config).unwrap();

        let to = |port| (FAR, port);
        let first = w.sent(&make(UDP, (w.a.v4, 1), to(53)));
        let second = w.sent(&make(UDP, (w.b.v4, 1), to(53)));
        assert_eq!(
            HashSet::from([first.ports.0, second.ports.0]),
            HashSet::from([61000, 61001])
        );
        let third = make(UDP, (w.a.v4, 2), to(53));
        w.dropped("uplink_out", &third, DropReason::NatPortsExhausted);
        w.sent(&make(UDP, (w.a.v4, 2), to(54)));
        assert_eq!(table().len(), 6);

        assert_eq!(w.sweep_at(31), 3);
        w.sent(&third);
    });
}

#[test]
fn a_full_table_drops_new_flows_and_keeps_old_ones() {
    let config = DatapathConfig {
        nat_entries: Some(4),
        ..kit::config()
    };
    world_with(&config, |w| {
        let old = make(UDP, (w.a.v4, 1), (FAR, 53));
        let sent = w.sent(&old);
        // The kernel keeps a few entries per CPU beyond the limit out of everyone's reach, or
        // gives a few more: fill up to where it refuses.
        let mut refused = None;
        let began = Instant::now();
        for port in 2..200 {
            let ip = make(UDP, (w.a.v4, port), (FAR, 53));
            if w.out(&ip).0 == DROP {
                refused = Some(ip);
                break;
            }
        }
        let refused = refused.unwrap();
        let entries = table();
        assert!(entries.len() <= 4);
        for _ in 0..20 {
            assert_eq!(w.out(&refused).0, DROP);
        }
        logs::assert_said_rarely(
            &w.datapath,
            began,
            "WARN masquerade table is full, new flows are dropped until others end object=\"uplink\"",
        );
        // Half a flow was taken back: none leads nowhere.
        let kind = |kind| entries.values().filter(|entry| entry.kind == kind).count();
        assert_eq!(kind(KIND_FORWARD), kind(KIND_REVERSE));
        w.dropped("uplink_out", &refused, DropReason::NatTableFull);
        let inbound = make(UDP, (FAR, 9), (w.b.v4, 80));
        if entries.len() == 4 {
            w.dropped("uplink_in", &inbound, DropReason::NatTableFull);
        }
        assert_eq!(w.sent(&old), sent);
        assert_eq!(w.received(&reply_to(&sent)).dst, w.a.v4);
        assert_eq!(w.datapath.nat_usage().capacity, 2);
    });
}

#[test]
fn flows_end_when_both_directions_are_idle() {
    world(|w| {
        let udp = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        let answered = w.sent(&make(UDP, (w.a.v4, 2), (FAR, 53)));
        w.received(&reply_to(&answered));
        w.sent(&make(ICMP, (w.a.v4, 3), (FAR, 0)));
        let tcp = w.sent(&make(TCP, (w.a.v4, 4), (FAR, 80)));
        w.received(&reply_to(&tcp));
        w.sent(&make(TCP, (w.a.v4, 5), (FAR, 80)));
        w.come(&make(UDP, (FAR, 6), (w.a.v4, 80)));
        assert_eq!(table().len(), 11);

        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(w.datapath.nat_usage().flows, 6);
        assert_eq!(w.sweep_at(29), 0);
        assert_eq!(w.sweep_at(31), 3, "unanswered UDP both ways, echo");
        assert_eq!(w.received(&reply_to(&answered)).dst, w.a.v4);
        assert_eq!(w.come(&reply_to(&udp)).1, World::frame(&reply_to(&udp)));
        assert_eq!(w.sweep_at(119), 0);
        assert_eq!(w.sweep_at(125), 2, "answered UDP, unanswered SYN");
        assert_eq!(w.sweep_at(23 * 3600), 0, "an open connection");
        assert_eq!(w.datapath.nat_usage().flows, 1);

        // Both ends say goodbye.
        w.sent(&packet::tcp((w.a.v4, 4), (FAR, 80), FIN | ACK, b""));
        assert_eq!(w.sweep_at(3500), 0, "half closed");
        let goodbye = packet::tcp((FAR, 80), (NODE_IP, tcp.ports.0), FIN | ACK, b"");
        assert_eq!(w.received(&goodbye).dst, w.a.v4);
        assert_eq!(w.sweep_at(119), 0);
        assert_eq!(w.sweep_at(125), 1);
        assert!(table().is_empty());
    });
}

#[test]
fn flows_of_pods_that_are_gone_end_at_once() {
    world(|w| {
        w.sent(&make(TCP, (w.a.v4, 1), (FAR, 53)));
        w.come(&make(TCP, (FAR, 1), (w.a.v4, 80)));
        let kept = w.sent(&make(TCP, (w.b.v4, 1), (FAR, 53)));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        assert_eq!(w.sweep_at(0), 2);
        assert_eq!(table().len(), 2);
        assert_eq!(w.received(&reply_to(&kept)).dst, w.b.v4);
    });
}

#[test]
fn an_address_that_is_given_again_comes_without_the_flows_of_its_last_pod() {
    world(|w| {
        let old = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        w.come(&make(TCP, (FAR, 1), (w.a.v4, 80)));
        let kept = w.sent(&make(UDP, (w.b.v4, 1), (FAR, 53)));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        w.a.attach(&w.datapath);
        let late = reply_to(&old);
        assert_eq!(w.come(&late), (PASS, World::frame(&late)));
        assert_eq!(table().len(), 2);
        assert_eq!(w.received(&reply_to(&kept)).dst, w.b.v4);
        // Attached again without having left, as after a restart, it keeps its flows.
        let own = w.sent(&make(UDP, (w.a.v4, 2), (FAR, 53)));
        w.a.attach(&w.datapath);
        assert_eq!(w.received(&reply_to(&own)).dst, w.a.v4);
    });
}

#[test]
fn flows_end_when_the_node_changes_its_address() {
    world(|w| {
        let ip = make(UDP, (w.a.v4, 1), (FAR, 53));
        w.sent(&ip);
        w.come(&make(UDP, (FAR, 1), (w.a.v4, 80)));
        let mut config = kit::node_config();
        config.masquerade_v4 = Addr::v4([192, 0, 2, 2]);
        w.datapath.set_node_config(config).unwrap();
        assert_eq!(w.sweep_at(0), 1);
        let new: IpAddr = "192.0.2.2".parse().unwrap();
        assert_eq!(w.sent(&ip).src, new);
    });
}

#[test]
fn reverse_entries_that_lead_nowhere_go_at_the_second_sweep() {
    world(|w| {
        let kept = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        let flow = NatKey {
            src: w.a.v4.into(),
            dst: FAR.into(),
            src_port: [0, 2],
            dst_port: [0, 53],
            proto: UDP,
            pad: [0; 3],
        };
        let entry = NatEntry {
            addr: flow.src,
            port: flow.src_port,
            kind: KIND_REVERSE,
            state: 0,
            peer_state: 0,
            pad: [0; 3],
            last_seen_ns: monotonic_ns(),
        };
        insert(flow.reply_to(NODE_IP.into(), [0xff, 1]), entry);
        assert_eq!(table().len(), 3);
        assert_eq!(w.sweep_at(0), 0, "it may be a flow in the making");
        assert_eq!(w.sweep_at(0), 1);
        assert_eq!(table().len(), 2);
        assert_eq!(w.received(&reply_to(&kept)).dst, w.a.v4);
    });
}
