//! sendto(2) and recvfrom(2) of the node's UDP sockets.

use super::{
    OTHER_VIP, OTHER_VIP6, PATIENCE, Service, UDP, VIP, VIP6, answer, at, mapped, node, refuses,
    run, socket, udp_server, world,
};
use sinabro_common::abi::service::{BACKEND_SERVING, Kind};
use socket2::{Domain, Socket, Type};
use std::{
    collections::BTreeSet,
    io::ErrorKind,
    mem::MaybeUninit,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

/// Asks by address, and says which server answered and as whom.
fn ask(client: &Socket, to: SocketAddr, servers: &[UdpSocket]) -> (usize, SocketAddr) {
    client.send_to(b"?", &to.into()).unwrap();
    let by = answer(servers);
    let mut got = [MaybeUninit::uninit(); 8];
    let (_, from) = client.recv_from(&mut got).unwrap();
    (by, from.as_socket().unwrap())
}

#[test]
fn answers_come_from_the_frontend_that_was_asked() {
    world(|w| {
        let families = [(w.b.v4, VIP, OTHER_VIP), (w.b.v6, VIP6, OTHER_VIP6)];
        for (family, (endpoint, one, other)) in families.into_iter().enumerate() {
            let servers = [
                udp_server(&w.b, endpoint, 5353),
                udp_server(&w.b, endpoint, 5354),
            ];
            let at_server = |n: usize| servers[n].local_addr().unwrap();
            let frontends = [at(one, 53), at(other, 54)];
            for (n, frontend) in frontends.into_iter().enumerate() {
                let number = (family * 2 + n) as u32;
                Service::new(number, frontend, UDP).lead_to(w.datapath(), &[at_server(n)]);
            }
            for asked in BTreeSet::from([frontends, frontends.map(mapped)]) {
                let domain = Domain::for_address(asked[0]);
                let client = socket(&node(), domain, Type::DGRAM, None);
                for _ in 0..3 {
                    for (n, to) in asked.into_iter().enumerate() {
                        assert_eq!(ask(&client, to, &servers), (n, to));
                    }
                }
                // Both at once: each is told by whom the answer is from.
                for to in asked {
                    client.send_to(b"?", &to.into()).unwrap();
                }
                let answered = BTreeSet::from([answer(&servers), answer(&servers)]);
                assert_eq!(answered, BTreeSet::from([0, 1]));
                for _ in 0..2 {
                    let mut got = [MaybeUninit::uninit(); 8];
                    let (_, from) = client.recv_from(&mut got).unwrap();
                    // SAFETY: a byte was received.
                    let by = unsafe { got[0].assume_init() };
                    assert_eq!(from.as_socket().unwrap(), asked[usize::from(by)]);
                }
                // An endpoint that is asked itself answers as itself.
                let direct = match domain {
                    Domain::IPV6 => mapped(at_server(0)),
                    _ => at_server(0),
                };
                let other = socket(&node(), domain, Type::DGRAM, None);
                assert_eq!(ask(&other, direct, &servers), (0, direct));
            }
        }
    });
}

/// One that two frontends lead to: as long as one answer is waited for after the other, each is told rightly.
#[test]
fn an_endpoint_answers_for_the_frontend_that_was_asked_last() {
    world(|w| {
        let servers = [udp_server(&w.b, w.b.v4, 5353)];
        let endpoint = [servers[0].local_addr().unwrap()];
        Service::new(0, at(VIP, 53), UDP).lead_to(w.datapath(), &endpoint);
        Service::new(1, at(OTHER_VIP, 53), UDP).lead_to(w.datapath(), &endpoint);
        let client = socket(&node(), Domain::IPV4, Type::DGRAM, None);
        for _ in 0..3 {
            for to in [at(VIP, 53), at(OTHER_VIP, 53)] {
                assert_eq!(ask(&client, to, &servers), (0, to));
            }
        }
    });
}

#[test]
fn a_socket_keeps_its_endpoint_while_that_serves() {
    world(|w| {
        let servers: Vec<UdpSocket> = (0..8).map(|n| udp_server(&w.b, w.b.v4, 5353 + n)).collect();
        let all: Vec<SocketAddr> = servers.iter().map(|s| s.local_addr().unwrap()).collect();
        let vip = at(VIP, 53);
        let mut service = Service::new(1, vip, UDP);
        service.lead_to(w.datapath(), &all);
        let client = socket(&node(), Domain::IPV4, Type::DGRAM, None);
        let (first, _) = ask(&client, vip, &servers);
        for _ in 0..20 {
            assert_eq!(ask(&client, vip, &servers), (first, vip));
        }
        // Other sockets have others.
        let others: BTreeSet<usize> = (0..40)
            .map(|_| {
                let other = socket(&node(), Domain::IPV4, Type::DGRAM, None);
                ask(&other, vip, &servers).0
            })
            .collect();
        assert!(others.len() > 2, "{others:?}");

        // It is not chosen any more, and finishes what it has.
        let rest: Vec<u32> = (0..8).filter(|n| *n != first as u32).collect();
        service.choose_from(w.datapath(), &rest);
        assert_eq!(ask(&client, vip, &servers), (first, vip));
        // It serves no more: another one has the socket.
        service.put_backend(w.datapath(), first as u32, all[first], 0);
        let (second, from) = ask(&client, vip, &servers);
        assert_ne!(second, first);
        assert_eq!(from, vip);
        assert_eq!(ask(&client, vip, &servers), (second, vip));

        // Nobody can be chosen: what does not serve is not asked for that.
        service.put_backend(w.datapath(), second as u32, all[second], 0);
        service.put_set(w.datapath(), Kind::Refuse, 0);
        if refuses() {
            let error = client.send_to(b"?", &vip.into()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        }

        // Its number is another endpoint's: that is not taken for it.
        service.generation = 2;
        let third = (0..8).find(|n| ![first, second].contains(n)).unwrap();
        service.put_backend(w.datapath(), second as u32, all[third], BACKEND_SERVING);
        service.choose_from(w.datapath(), &[second as u32]);
        assert_eq!(ask(&client, vip, &servers), (third, vip));
    });
}

#[test]
fn a_datagram_to_nobody_is_refused_and_what_is_no_services_goes_its_way() {
    world(|w| {
        let servers = [udp_server(&w.b, w.b.v4, 5353)];
        let service = Service::new(0, at(VIP, 53), UDP);
        service.put_frontend(w.datapath());
        service.put_set(w.datapath(), Kind::Refuse, 0);
        let client = socket(&node(), Domain::IPV4, Type::DGRAM, None);
        if refuses() {
            let error = client.send_to(b"?", &at(VIP, 53).into()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        }
        let direct = servers[0].local_addr().unwrap();
        assert_eq!(ask(&client, direct, &servers), (0, direct));
        // It comes and goes.
        service.lead_to(w.datapath(), &[direct]);
        assert_eq!(ask(&client, at(VIP, 53), &servers), (0, at(VIP, 53)));
        let services = w.datapath().services();
        services.remove_frontend(&service.key()).unwrap();
        client
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let _ = client.send_to(b"?", &at(VIP, 53).into());
        let mut got = [MaybeUninit::uninit(); 8];
        assert!(client.recv_from(&mut got).is_err());
        let nothing = servers[0].recv_from(&mut [0; 8]).unwrap_err();
        assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
        // From a pod it does not go by here.
        service.put_frontend(w.datapath());
        let pods = run(&w.a.place, || UdpSocket::bind("0.0.0.0:0").unwrap());
        pods.set_read_timeout(Some(PATIENCE)).unwrap();
        pods.send_to(b"?", direct).unwrap();
        assert_eq!(answer(&servers), 0);
        assert_eq!(pods.recv_from(&mut [0; 8]).unwrap().1, direct);
    });
}
