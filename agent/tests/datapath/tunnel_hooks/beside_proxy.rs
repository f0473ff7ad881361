//! Beside kube-proxy: the stack sees both directions of a connection between pods of two nodes, or neither.

use super::{direct::*, *};
use crate::{
    packet::{ACK, FIN, IcmpError, RST, icmp_error},
    services::publish,
};
use nix::sys::socket::{setsockopt, sockopt};
use sinabro_agent::datapath::{DatapathError, Translation, beside_proxy::OfStack};
use socket2::{Domain, Socket, Type};
use std::net::{SocketAddr, TcpListener};

/// The second node is reached past the stack while others translate Services, alone or with us. Given are connections that they have
/// already.
fn beside(translated: &[OfStack], test: impl Fn(&World) + Sync) {
    while_translated(&BESIDE, translated, test);
}

const BESIDE: [Translation; 3] = [
    Translation::Off,
    Translation::Handover,
    Translation::Draining,
];

/// The same where others may translate nothing, too.
fn with_services_or_without(test: impl Fn(&World) + Sync) {
    let all = [&BESIDE[..], &[Translation::On]].concat();
    while_translated(&all, &[], test);
}

fn while_translated(
    translations: &[Translation],
    translated: &[OfStack],
    test: impl Fn(&World) + Sync,
) {
    for &translation in translations {
        direct(|w| {
            w.datapath.set_services(translation).unwrap();
            let list = || Ok::<_, DatapathError>(translated.to_vec());
            w.datapath.begin_beside_proxy(list).unwrap();
            test(w);
        });
    }
}

/// What goes from one end to the other, and what comes back.
fn both_ways(proto: u8, near: IpAddr, far: (IpAddr, u16)) -> (Ip, Ip) {
    let near = (near, 4000);
    match proto {
        6 => (
            packet::tcp(near, far, ACK, b"a"),
            packet::tcp(far, near, ACK, b"b"),
        ),
        17 => (packet::udp(near, far, b"a"), packet::udp(far, near, b"b")),
        _ => (packet::sctp(near, far, b"a"), packet::sctp(far, near, b"b")),
    }
}

const PROTOCOLS: [u8; 3] = [6, 17, 132];

impl World {
    /// What the programs do with a connection's packets: at the pod's link, at the uplink, and at the VXLAN device where the uplink
    /// has left them to that.
    fn judged(&self, (sent, answer): &(Ip, Ip)) -> [i32; 3] {
        [
            self.leaves(&self.of_pod(sent)).0,
            self.run("uplink_in", 0, &self.comes(answer)).0,
            self.run("overlay_in", 0, &self.stamped(answer)).0,
        ]
    }

    /// A pod's address, and another node's to which the kernel's routes lead by a neighbour that is known.
    fn leads_there(&self) -> (IpAddr, IpAddr) {
        let near = self.of_tunnels();
        let (there, router) = (far(near), self.router());
        kit::lead(UPLINK, there, router);
        let (router, mac) = (router.to_string(), "02:00:00:00:09:09");
        let neighbour = [
            "ip", "neigh", "replace", &router, "lladdr", mac, "dev", UPLINK,
        ];
        kit::this_place().command(&neighbour).unwrap();
        (near, there)
    }

    /// The stack sends what came by the pod's link, or delivers what came by the VXLAN device.
    fn lets(&self, program: &str, frame: &[u8]) {
        let from = match program {
            "overlay_out" => self.a.ifindex,
            _ => 0,
        };
        let ran = self.programs.run_from(program, self.a.ifindex, from, frame);
        let (action, out) = ran.unwrap();
        assert_eq!((action, &out[..]), (PASS, frame), "{program}");
    }
}

#[test]
fn without_a_record_packets_go_past_netfilter_and_with_one_they_do_not() {
    beside(&[], |w| {
        let mut port = 80;
        for near in w.out_of_tunnels() {
            for proto in PROTOCOLS {
                // Where the stack sends, and where it delivers.
                for program in ["overlay_out", "pod_in"] {
                    port += 1;
                    let packets = both_ways(proto, near, (far(near), port));
                    assert_eq!(w.judged(&packets), [REDIRECT; 3], "{program}, {proto}");
                    let (sent, answer) = &packets;
                    match program {
                        "overlay_out" => w.lets(program, &frame(sent)),
                        _ => w.lets(program, &frame(answer)),
                    }
                    assert_eq!(w.judged(&packets), [PASS; 3], "{program}, {proto}");
                }
            }
        }
    });
}

#[test]
fn what_is_not_between_two_pods_is_the_stacks() {
    beside(&[], |w| {
        // Of another node's own address, and of a client that it has let in.
        for src in ["192.0.2.2", "203.0.113.9"] {
            let packet = from_to(ip(src), w.a.v4);
            assert_eq!(
                w.leaves(&w.of_pod(&from_to(w.a.v4, ip(src)))).0,
                PASS,
                "{src}"
            );
            let frame = w.comes(&packet);
            assert_ne!(w.run("uplink_in", 0, &frame).0, REDIRECT, "{src}");
        }
    });
}

/// A connection of a pod of this node, and one of a pod of another, as kube-proxy's rules there have it.
#[test]
fn what_netfilter_translated_before_is_recorded_first() {
    let of = |proto, client: &str, server: &str| OfStack {
        proto,
        client: client.parse().unwrap(),
        server: server.parse().unwrap(),
    };
    let translated = [
        of(6, "10.1.0.5:4000", "10.2.0.7:80"),
        of(17, "10.2.0.7:81", "10.1.0.5:4000"),
        of(6, "[fd00:1::5]:4000", "[fd00:2::7]:80"),
        // Of nobody here.
        of(6, "10.3.0.7:4000", "10.2.0.7:83"),
    ];
    beside(&translated, |w| {
        for (near, proto, port) in [(w.a.v4, 6, 80), (w.a.v4, 17, 81), (w.a.v6, 6, 80)] {
            let packets = both_ways(proto, near, (far(near), port));
            assert_eq!(w.leaves(&w.of_pod(&packets.0)).0, PASS, "{near}, {port}");
        }
        let new = both_ways(6, w.a.v4, (far(w.a.v4), 82));
        assert_eq!(w.leaves(&w.of_pod(&new.0)).0, REDIRECT);
    });
}

/// What goes past netfilter by the VXLAN device is not the stack's, and its mark ends there.
#[test]
fn who_goes_on_without_a_way_goes_past_netfilter_by_the_device() {
    beside(&[], |w| {
        let (near, there) = w.leads_there();
        w.datapath.set_next_hops(&BTreeMap::new()).unwrap();
        let begins = packet::tcp((near, 4000), (there, 80), SYN, b"");
        assert_eq!(
            w.leaves(&w.of_pod(&begins)).0,
            PASS,
            "recorded where it leaves"
        );
        for flags in [ACK, FIN | ACK, SYN | ACK] {
            let goes_on = packet::tcp((near, 4001), (there, 80), flags, b"");
            let (action, out, mark) = w.leaves(&w.of_pod(&goes_on));
            assert_eq!(action, REDIRECT, "{flags:#x}");
            assert_eq!(out[14..], less_a_hop(&goes_on), "{flags:#x}");
            assert_ne!(mark, 0);
            let (from, by) = (w.a.ifindex, w.b.ifindex);
            let ran = w
                .programs
                .run_marked("overlay_out", by, from, mark, &frame(&goes_on));
            let (action, _, mark) = ran.unwrap();
            assert_eq!((action, mark), (PASS, 0), "{flags:#x}");
        }
        w.go_direct();
        w.datapath.set_services(false).unwrap();
        let goes_on = packet::tcp((near, 4001), (there, 80), ACK, b"");
        assert_eq!(w.leaves(&w.of_pod(&goes_on)).0, REDIRECT, "no record");
    });
}

/// Netfilter would take an error about what it has not seen for invalid.
#[test]
fn errors_go_as_what_they_are_about() {
    errors_go_so(|_| {});
}

#[test]
fn while_it_drains_errors_go_as_what_they_are_about() {
    errors_go_so(|w| w.datapath.drain_beside_proxy().unwrap());
}

fn errors_go_so(prepare: impl Fn(&World) + Sync) {
    beside(&[], |w| {
        prepare(w);
        let (near, there) = w.leads_there();
        let (sent, answer) = both_ways(17, near, (there, 80));
        let of_pod = icmp_error(near, there, IcmpError::NoPort, &answer.bytes());
        let of_other = icmp_error(there, near, IcmpError::NoPort, &sent.bytes());
        let judged = |w: &World| {
            let comes = w.run("overlay_in", 0, &w.stamped(&of_other)).0;
            [w.leaves(&w.of_pod(&of_pod)).0, comes]
        };
        assert_eq!(judged(w), [REDIRECT; 2]);
        w.lets("overlay_out", &frame(&sent));
        assert_eq!(judged(w), [PASS; 2]);
    });
}

#[test]
fn while_it_drains_what_netfilter_picks_up_is_the_stacks() {
    with_services_or_without(|w| {
        let tcp = |near: IpAddr, port, flags| {
            let (near, far) = ((near, 4000), (far(near), port));
            let [sent, answer] = [(near, far), (far, near)];
            [sent, answer].map(|(from, to)| packet::tcp(from, to, flags, b""))
        };
        let judged = |near, port, flags| {
            let [sent, answer] = tcp(near, port, flags);
            w.judged(&(sent, answer))
        };
        let near = w.of_tunnels();
        // A busy flow is remembered.
        for _ in 0..20 {
            assert_eq!(judged(near, 80, ACK), [REDIRECT; 3]);
        }
        w.datapath.drain_beside_proxy().unwrap();
        assert_eq!(judged(near, 80, ACK), [PASS; 3], "busy");
        for near in w.out_of_tunnels() {
            for flags in [SYN, ACK] {
                assert_eq!(judged(near, 81, flags), [PASS; 3], "{flags:#x}");
            }
            // Invalid, where no packet of the connection was before it.
            for flags in [SYN | ACK, FIN | ACK, RST, RST | ACK] {
                assert_eq!(judged(near, 81, flags), [REDIRECT; 3], "{flags:#x}");
            }
            let datagrams = both_ways(17, near, (far(near), 81));
            assert_eq!(w.judged(&datagrams), [PASS; 3]);
            let [sent, _] = tcp(near, 82, ACK);
            w.lets("overlay_out", &frame(&sent));
            assert_eq!(judged(near, 82, FIN | ACK), [PASS; 3], "recorded");
        }
        let list = || -> Result<_, DatapathError> { panic!("nothing was missed") };
        w.datapath.begin_beside_proxy(list).unwrap();
        assert_eq!(judged(near, 81, ACK), [REDIRECT; 3]);
        assert_eq!(judged(near, 82, ACK), [PASS; 3]);
    });
}

/// It would take all that it has not seen begin for invalid.
#[test]
fn where_conntrack_is_strict_connections_that_it_has_not_seen_begin_do_not_drain() {
    with_services_or_without(|w| {
        w.datapath.set_conntrack_strict(true).unwrap();
        w.datapath.drain_beside_proxy().unwrap();
        let near = w.of_tunnels();
        let judged = |port, flags| {
            let (near, far) = ((near, 4000), (far(near), port));
            let [sent, answer] =
                [(near, far), (far, near)].map(|(from, to)| packet::tcp(from, to, flags, b""));
            w.judged(&(sent, answer))
        };
        assert_eq!(judged(81, ACK), [REDIRECT; 3]);
        assert_eq!(judged(82, SYN), [PASS; 3]);
        let datagrams = both_ways(17, near, (far(near), 81));
        assert_eq!(w.judged(&datagrams), [PASS; 3]);
        w.datapath.set_conntrack_strict(false).unwrap();
        assert_eq!(judged(83, ACK), [PASS; 3]);
    });
}

/// The pod has a connection with an endpoint, and the stack gives another one, to a Service, the same ends.
#[test]
fn netfilter_leads_nobody_onto_a_connection_that_it_has_not_seen() {
    beside(&[], |w| {
        let pod = Pod::live(&w.datapath, 9);
        for near in [pod.v4, pod.v6] {
            let there = far(near);
            let begins = |port, of: u16| packet::tcp((near, port), (there, of), SYN, b"");
            let clashes = |packet: &Ip| {
                let before = w.datapath.drops().unwrap();
                let from = pod.ifindex;
                let ran = w
                    .programs
                    .run_from("overlay_out", w.b.ifindex, from, &frame(packet));
                let dropped = w.datapath.drops().unwrap() != before;
                assert_eq!(ran.unwrap().0 == DROP, dropped);
                dropped
            };
            let socket = |port, of| {
                let ends = ((near, port).into(), (there, of).into());
                pod.run(|| established(ends))
            };
            let _live = socket(4000, 80);
            let _listener = pod.run(|| TcpListener::bind((near, 4001)).unwrap());
            let _begins = pod.run(|| connecting((near, 4002).into(), (there, 80).into()));
            assert!(clashes(&begins(4000, 80)), "{near}");
            for (port, of) in [(4000, 81), (4001, 80), (4002, 80), (4003, 80)] {
                assert!(!clashes(&begins(port, of)), "{near}, {port}, {of}");
            }
        }
    });
}

/// A socket of an established connection, as checkpoints are restored (TCP_REPAIR).
fn established((from, to): (SocketAddr, SocketAddr)) -> Socket {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
    setsockopt(&socket, sockopt::TcpRepair, &1).unwrap();
    socket.bind(&from.into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket
}

/// A socket that has sent a SYN.
fn connecting(from: SocketAddr, to: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.bind(&from.into()).unwrap();
    let error = socket.connect(&to.into()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{error}");
    socket
}

#[test]
fn when_it_ends_all_is_the_stacks() {
    beside(&[], |w| {
        let packets = both_ways(6, w.of_tunnels(), (far(w.of_tunnels()), 80));
        assert_eq!(w.judged(&packets), [REDIRECT; 3]);
        w.datapath.end_beside_proxy().unwrap();
        assert_eq!(w.judged(&packets), [PASS; 3]);
        w.lets("overlay_out", &frame(&packets.0));
        let list = || Ok::<_, DatapathError>(Vec::new());
        w.datapath.begin_beside_proxy(list).unwrap();
        assert_eq!(w.judged(&packets), [REDIRECT; 3], "nothing was recorded");
    });
}

/// Netfilter sees nothing of a connection with a Service that is translated here until it picks it up, and all of it from then on.
#[test]
fn what_is_translated_here_goes_past_netfilter_until_that_picks_it_up() {
    direct(|w| {
        let ends = w.out_of_tunnels().into_iter().zip(1..);
        let ends = ends.map(|(near, number)| {
            let (_, at) = publish(&w.datapath, number, packet::TCP, &[(far(near), 80)]);
            (near, at)
        });
        let ends: Vec<_> = ends.collect();
        w.datapath.set_services(Translation::Handover).unwrap();
        let list = || Ok::<_, DatapathError>(Vec::new());
        w.datapath.begin_beside_proxy(list).unwrap();
        let goes_on = |near, port, at: (IpAddr, u16), flags| {
            let sent = packet::tcp((near, port), at, flags, b"");
            let (action, out, _) = w.leaves(&w.of_pod(&sent));
            if action == PASS {
                assert_eq!(packet::see(&out).dst, far(near), "translated");
            }
            action
        };
        let comes_back = |near, port, at: (IpAddr, u16), flags| {
            let answer = packet::tcp((far(near), 80), (near, port), flags, b"");
            let [by_uplink, by_device] = [
                w.run("uplink_in", 0, &w.comes(&answer)),
                w.run("overlay_in", 0, &w.stamped(&answer)),
            ];
            assert_eq!(by_uplink.0, by_device.0);
            if by_uplink.0 == REDIRECT {
                for (_, out) in [&by_uplink, &by_device] {
                    assert_eq!(packet::see(out).src, at.0);
                }
            }
            by_uplink.0
        };
        let error_comes = |near, port| {
            let sent = packet::tcp((near, port), (far(near), 80), ACK, b"");
            let error = icmp_error(far(near), near, IcmpError::NoPort, &sent.bytes());
            w.run("overlay_in", 0, &w.stamped(&error)).0
        };
        let translations = [
            Translation::Handover,
            Translation::Draining,
            Translation::On,
        ];
        let ports = [4000, 4001, 4002];
        for (near, at) in &ends {
            for port in ports {
                assert_eq!(goes_on(*near, port, *at, SYN), REDIRECT);
                assert_eq!(comes_back(*near, port, *at, SYN | ACK), REDIRECT);
                assert_eq!(goes_on(*near, port, *at, ACK), REDIRECT);
            }
        }
        w.datapath.drain_beside_proxy().unwrap();
        for (translation, port) in translations.into_iter().zip(ports) {
            w.datapath.set_services(translation).unwrap();
            for (near, at) in &ends {
                let what = format!("{near} {translation:?}");
                // Invalid, as conntrack has seen nothing before.
                assert_eq!(comes_back(*near, port, *at, FIN | ACK), REDIRECT, "{what}");
                assert_eq!(goes_on(*near, port, *at, FIN | ACK), REDIRECT, "{what}");
                assert_eq!(error_comes(*near, port), REDIRECT, "{what}");
                match near.is_ipv4() {
                    true => assert_eq!(comes_back(*near, port, *at, ACK), PASS, "{what}"),
                    false => assert_eq!(goes_on(*near, port, *at, ACK), PASS, "{what}"),
                }
                assert_eq!(comes_back(*near, port, *at, FIN | ACK), PASS, "{what}");
                assert_eq!(goes_on(*near, port, *at, FIN | ACK), PASS, "{what}");
                assert_eq!(error_comes(*near, port), PASS, "{what}");
            }
        }
        // Now Services are translated here alone, and there are no rules any more.
        w.datapath.settle_beside_proxy().unwrap();
        for (near, at) in &ends {
            for port in ports {
                assert_eq!(comes_back(*near, port, *at, ACK), PASS, "{near}");
                assert_eq!(goes_on(*near, port, *at, ACK), PASS, "{near}");
                assert_eq!(goes_on(*near, port, *at, RST), PASS, "{near}");
                assert_eq!(goes_on(*near, port, *at, SYN), REDIRECT, "{near}");
                assert_eq!(comes_back(*near, port, *at, SYN | ACK), REDIRECT, "{near}");
            }
        }
        w.datapath.settle_beside_proxy().unwrap();
        let (near, _) = ends[0];
        let answer = packet::tcp((far(near), 80), (near, 4000), ACK, b"");
        let by_device = w.run("overlay_in", 0, &w.stamped(&answer)).0;
        assert_eq!(by_device, PASS, "it has ended");
    });
}

/// Its answers need the translation for as long as it lives.
#[test]
fn what_netfilter_translates_stays_with_it_when_all_else_is_translated_here() {
    beside(&[], |w| {
        let near = w.of_tunnels();
        let [theirs, new] = [80, 81].map(|port| both_ways(6, near, (far(near), port)));
        w.lets("overlay_out", &frame(&theirs.0));
        w.datapath.drain_beside_proxy().unwrap();
        w.datapath.set_services(true).unwrap();
        assert_eq!(w.judged(&new), [PASS; 3], "rules are to be met");
        w.datapath.settle_beside_proxy().unwrap();
        assert_eq!(w.judged(&theirs), [PASS; 3]);
        assert_eq!(w.judged(&new)[..2], [REDIRECT; 2], "nothing drains");
        // It begins again, past netfilter.
        for flags in [RST, SYN] {
            let sent = packet::tcp((near, 4000), (far(near), 80), flags, b"");
            w.leaves(&w.of_pod(&sent));
        }
        assert_eq!(w.judged(&theirs), [REDIRECT; 3]);
        w.datapath.settle_beside_proxy().unwrap();
        assert_eq!(
            w.judged(&theirs),
            [REDIRECT, REDIRECT, PASS],
            "it has ended"
        );
    });
}
