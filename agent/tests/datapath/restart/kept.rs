//! Flows and links go on, and what belongs to nobody goes.

use super::*;

#[test]
fn a_restart_keeps_every_flow() {
    for &mode in kit::modes() {
        kit::fresh(|| {
            let datapath = load(mode);
            datapath.set_node_config(kit::node_config()).unwrap();
            let outside = Outside::new(&datapath);
            let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
            let near = b.run(|| TcpListener::bind((b.v4, 80)).unwrap());
            let mut near = Call::new(near, a.run(|| TcpStream::connect((b.v4, 80)).unwrap()));
            let far = outside.run(|| TcpListener::bind((OUTSIDE, 80)).unwrap());
            let mut far = Call::new(far, a.run(|| TcpStream::connect((OUTSIDE, 80)).unwrap()));
            near.works();
            far.works();
            let counted = datapath.pod_counters(b.ifindex).unwrap().unwrap();
            let before = (maps(), links(), datapath.programs());
            drop(datapath);

            // Nobody at home.
            near.works();
            far.works();

            let datapath = load(mode);
            near.works();
            far.works();
            a.attach(&datapath);
            b.attach(&datapath);
            datapath
                .set_uplinks(&[kit::leads_out(outside.uplink)])
                .unwrap();
            let live = HashSet::from([a.link.clone(), b.link.clone()]);
            assert!(datapath.retain_pods(&live).unwrap().is_empty());
            near.works();
            far.works();
            let now = datapath.pod_counters(b.ifindex).unwrap().unwrap();
            assert!(now.rx_packets > counted.rx_packets);

            assert_eq!(maps(), before.0);
            let ids: HashSet<u32> = datapath.programs().iter().map(|p| p.id).collect();
            assert!(before.2.iter().all(|program| !ids.contains(&program.id)));
            let now = links();
            assert_eq!(now.len(), if mode == AttachMode::Tcx { 6 } else { 0 });
            for (name, (id, program)) in &now {
                assert_eq!(before.1[name].0, *id, "{name}: the same link");
                assert!(ids.contains(program), "{name}: the new program");
            }

            // Each program is there once: fifty packets are fifty, and the few of the pod's own IPv6.
            let sent = datapath
                .pod_counters(a.ifindex)
                .unwrap()
                .unwrap()
                .tx_packets;
            a.run(|| {
                let socket = std::net::UdpSocket::bind((a.v4, 0)).unwrap();
                for _ in 0..50 {
                    socket.send_to(b"x", (OUTSIDE, 9)).unwrap();
                }
            });
            let now = datapath
                .pod_counters(a.ifindex)
                .unwrap()
                .unwrap()
                .tx_packets;
            assert!((50..100).contains(&(now - sent)), "{}", now - sent);
        });
    }
}

#[test]
fn links_are_updated_before_anyone_asks() {
    with_links(|| {
        let datapath = load(AttachMode::Tcx);
        let _pod = Pod::live(&datapath, 5);
        let before = links();
        drop(datapath);
        let datapath = load(AttachMode::Tcx);
        let ids: HashSet<u32> = datapath.programs().iter().map(|p| p.id).collect();
        for (name, (id, program)) in links() {
            assert_eq!(before[&name].0, id);
            assert!(ids.contains(&program), "{name}");
        }
    });
}

#[test]
fn the_way_of_attaching_can_change() {
    with_links(|| {
        let mut datapath = load(AttachMode::Tcx);
        datapath.set_node_config(kit::node_config()).unwrap();
        let outside = Outside::new(&datapath);
        let pod = Pod::live(&datapath, 5);
        for (mode, pins) in [
            (AttachMode::Clsact, 0),
            (AttachMode::Tcx, 4),
            // Links for uplinks, filters for pods.
            (AttachMode::Auto, 2),
        ] {
            drop(datapath);
            datapath = load(mode);
            pod.attach(&datapath);
            datapath
                .set_uplinks(&[kit::leads_out(outside.uplink)])
                .unwrap();
            assert_eq!(links().len(), pins);
            let count = || {
                datapath
                    .pod_counters(pod.ifindex)
                    .unwrap()
                    .unwrap()
                    .tx_packets
            };
            let before = count();
            pod.run(|| {
                let socket = std::net::UdpSocket::bind((pod.v4, 0)).unwrap();
                for _ in 0..100 {
                    socket.send_to(b"x", (OUTSIDE, 9)).unwrap();
                }
            });
            // Once each, and what the pod's IPv6 says by itself.
            let counted = count() - before;
            assert!((100..150).contains(&counted), "{mode:?}: {counted}");
        }
    });
}

#[test]
fn what_vanished_pods_left_is_removed() {
    for &mode in kit::modes() {
        kit::fresh(|| {
            let datapath = load(mode);
            let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
            drop(datapath);
            Conn::new()
                .unwrap()
                .execute(link::delete(a.ifindex))
                .unwrap();

            let datapath = load(mode);
            b.attach(&datapath);
            let gone = datapath
                .retain_pods(&HashSet::from([b.link.clone()]))
                .unwrap();
            if mode == AttachMode::Tcx {
                assert_eq!(gone, std::slice::from_ref(&a.link));
                assert!(links().keys().all(|name| name.starts_with(&b.link)));
                assert_eq!(links().len(), 2);
            }
            assert_eq!(datapath.pod_counters(a.ifindex).unwrap(), None);
            assert!(datapath.pod_counters(b.ifindex).unwrap().is_some());
            // The address leads nowhere any more: the stack is asked.
            let frame = crate::packet::udp((b.v4, 1), (a.v4, 2), b"");
            let frame = crate::packet::eth(names::HOST_MAC, b.mac, 0x0800, &frame.bytes());
            datapath.set_node_config(kit::node_config()).unwrap();
            let (verdict, _) = Programs::of(&datapath).run("pod_out", b.ifindex, &frame);
            assert_eq!(verdict, crate::run::PASS);

            // A pod that this process attached stays, listed or not.
            assert!(datapath.retain_pods(&HashSet::new()).unwrap().is_empty());
            assert!(datapath.pod_counters(b.ifindex).unwrap().is_some());
        });
    }
}

#[test]
fn a_link_of_the_same_name_is_attached_anew() {
    with_links(|| {
        let datapath = load(AttachMode::Tcx);
        let old = Pod::live(&datapath, 5);
        Conn::new()
            .unwrap()
            .execute(link::delete(old.ifindex))
            .unwrap();
        let before = links();
        let new = Pod::live(&datapath, 5);
        assert_ne!(old.ifindex, new.ifindex);
        let after = links();
        assert_eq!(after.len(), 2);
        assert!(after.iter().all(|(name, (id, _))| before[name].0 != *id));
    });
}

#[test]
fn uplinks_come_and_go() {
    for &mode in kit::modes() {
        kit::fresh(|| {
            let datapath = load(mode);
            datapath.set_node_config(kit::node_config()).unwrap();
            let outside = Outside::new(&datapath);
            let pod = Pod::live(&datapath, 5);
            let server = outside.run(|| std::net::UdpSocket::bind((OUTSIDE, 53)).unwrap());
            let client = pod.run(|| std::net::UdpSocket::bind((pod.v4, 0)).unwrap());
            let source = || {
                client.send_to(b"x", (OUTSIDE, 53)).unwrap();
                server.recv_from(&mut [0; 8]).unwrap().1.ip()
            };
            assert_eq!(source(), kit::NODE);
            // Pods' links may serve as uplinks of nothing: both at once.
            datapath
                .set_uplinks(&[kit::leads_out(outside.uplink), kit::leads_out(pod.ifindex)])
                .unwrap();
            assert_eq!(source(), kit::NODE);
            // As fast as a link flaps: gone is gone, and back is back.
            for _ in 0..20 {
                datapath
                    .set_uplinks(&[kit::leads_out(pod.ifindex)])
                    .unwrap();
                assert_eq!(source(), pod.v4);
                datapath
                    .set_uplinks(&[kit::leads_out(outside.uplink)])
                    .unwrap();
                assert_eq!(source(), kit::NODE);
            }
            if mode == AttachMode::Tcx {
                let host = |name: &&String| name.starts_with("host-");
                assert_eq!(links().keys().filter(host).count(), 2);
            }
        });
    }
}
