//! Destinations that are named as not masqueraded, and are not named any more, while connections go on.

use super::*;

const NAMED: [&str; 2] = ["192.0.2.0/28", "2001:db8:2::/64"];

fn name(w: &World, cidrs: &[&str]) {
    let cidrs: Vec<_> = cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect();
    w.datapath.set_non_masquerade(&cidrs).unwrap();
}

fn keeps_source(w: &World, ip: &Ip) {
    assert_eq!(w.out(ip), (PASS, World::frame(ip)));
}

#[test]
fn a_connection_keeps_the_source_that_it_began_with() {
    let node6 = NODE_IP6.parse().unwrap();
    for (far, node) in [(FAR, NODE_IP), ("2001:db8:2::10".parse().unwrap(), node6)] {
        world(|w| {
            let pod = if far.is_ipv4() { w.a.v4 } else { w.a.v6 };
            let segment = |port, flags| packet::tcp((pod, port), (far, 443), flags, b"");
            name(&w, &[]);
            let translated = w.sent(&segment(4000, SYN));
            assert_eq!(translated.src, node);

            name(&w, &NAMED);
            assert_eq!(w.sent(&segment(4000, ACK)).ports, translated.ports);
            for flags in [SYN, ACK] {
                keeps_source(&w, &segment(4001, flags));
            }

            name(&w, &[]);
            assert_eq!(w.sent(&segment(4000, ACK)).ports, translated.ports);
            for flags in [ACK, SYN | ACK, FIN | ACK] {
                keeps_source(&w, &segment(4001, flags));
            }
            assert_eq!(w.sent(&segment(4002, SYN)).src, node, "a new one");
            assert_eq!(w.sent(&segment(4002, ACK)).src, node, "a new one");
            assert_eq!(w.sent(&make(UDP, (pod, 4001), (far, 443))).src, node);
            check_table();

            // The port of one that went on.
            assert_eq!(w.sent(&segment(4001, SYN)).src, node);
            assert_eq!(w.sent(&segment(4001, ACK)).src, node);
        });
    }
}

#[test]
fn what_was_never_named_is_masqueraded_in_the_middle_too() {
    world(|w| {
        name(&w, &NAMED);
        name(&w, &[]);
        let far: IpAddr = "198.51.100.1".parse().unwrap();
        let segment = packet::tcp((w.a.v4, 4000), (far, 443), ACK, b"");
        assert_eq!(w.sent(&segment).src, NODE_IP);
    });
}

#[test]
fn more_destinations_than_are_remembered_are_no_obstacle() {
    world(|w| {
        let list = |first: u32| {
            let cidrs = (first..first + 4096).map(|n| {
                let address = std::net::Ipv4Addr::from(0x0b00_0000 + 2 * n);
                ipnet::IpNet::from(IpAddr::from(address))
            });
            w.datapath
                .set_non_masquerade(&cidrs.collect::<Vec<_>>())
                .unwrap();
        };
        for n in 0..3 {
            list(n * 4096);
        }
        name(&w, &NAMED);
        name(&w, &[]);
        let segment = packet::tcp((w.a.v4, 4000), (FAR, 443), ACK, b"");
        keeps_source(&w, &segment);
    });
}
