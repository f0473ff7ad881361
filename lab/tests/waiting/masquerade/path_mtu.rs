//! Packets that are too large for a link on their way: whoever sent them hears of it, on either side of
//! the translation.

use super::kit::{FAMILIES, World, far, narrow, routers};
use sinabro_lab::{
    Pod,
    traffic::{PATIENCE, any, close::close, errors, path::Path, readable, stream::Stream, udp},
    wait::eventually,
};
use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Instant,
};

const NARROW: u32 = 1400;
/// IP and UDP.
const HEADERS: [u32; 2] = [20 + 8, 40 + 8];
const STREAM: usize = 64 << 20;

/// What TCP announces fits the node's links, and not the one in the middle: both ends have to be told.
#[test]
fn streams_pass_a_narrow_link_both_ways() {
    for world in World::by_both_ways(1) {
        narrow(&world, NARROW);
        for (family, far) in far().into_iter().enumerate() {
            let name = format!("behind a narrow link, {}", FAMILIES[family]);
            let path = Path::new(&name, world.pod(1).place(), &world.beyond, far);
            let stream = Stream::open(&path).unwrap();
            stream.carry(STREAM, 64 << 10).unwrap();
            for said in stream.said().unwrap() {
                assert!(said.mss < NARROW as usize, "{name}: {said:?}");
            }
        }
    }
}

/// A socket of a pod's and one of the far host's, each connected to what it knows of the other.
fn pair(world: &World, pod: &Pod, far: IpAddr) -> [UdpSocket; 2] {
    let server = world.beyond.run(|| Ok(UdpSocket::bind((far, 0))?)).unwrap();
    let target = server.local_addr().unwrap();
    let client = pod.place().run(|| {
        let client = UdpSocket::bind((any(far), 0))?;
        client.connect(target)?;
        Ok(client)
    });
    let client = client.unwrap();
    client.send(b"here I am").unwrap();
    server.connect(next(&server).1).unwrap();
    [client, server]
}

fn next(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    assert!(
        readable(socket, Instant::now() + PATIENCE).unwrap(),
        "nothing arrived"
    );
    let mut buffer = vec![0; 1 << 16];
    let (len, from) = socket.recv_from(&mut buffer).unwrap();
    buffer.truncate(len);
    (buffer, from)
}

/// The next datagram of that size is refused by the sender's own kernel.
fn is_refused(socket: &UdpSocket, size: u32) {
    let packet = vec![b'x'; size as usize];
    eventually("a datagram to be too long", || {
        let sent = socket.send(&packet);
        sent.is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE))
    });
}

#[test]
fn a_pod_hears_what_a_link_on_the_way_carries() {
    for world in World::by_both_ways(1) {
        narrow(&world, NARROW);
        for (family, far) in far().into_iter().enumerate() {
            let [client, server] = pair(&world, world.pod(1), far);
            udp::never_cut(&client, far).unwrap();
            errors::keep(&client, far.is_ipv4()).unwrap();
            let fits = NARROW - HEADERS[family];
            client.send(&vec![b'x'; fits as usize + 1]).unwrap();
            let heard = errors::error(&client, Instant::now() + PATIENCE);
            let heard = heard.unwrap_or_else(|error| panic!("{}: {error}", FAMILIES[family]));
            assert!(heard.is_too_big(), "{heard:?}");
            assert_eq!((heard.from, heard.mtu), (routers()[family][0], NARROW));
            is_refused(&client, fits + 1);
            assert_eq!(errors::path_mtu(&client, far.is_ipv4()).unwrap(), NARROW);
            client.send(&vec![b'y'; fits as usize]).unwrap();
            assert_eq!(next(&server).0, vec![b'y'; fits as usize]);
        }
    }
}

/// The node itself cannot hand a reply to the pod: it says so as the one that the far host knows.
#[test]
fn the_far_host_hears_what_a_pods_link_carries() {
    for world in World::by_both_ways(1) {
        let node = world.node();
        let small = node
            .add_pod_with("small", &[("SINABRO_LOCAL_MTU", "off")])
            .unwrap();
        let mtu = node.endpoint(&small).unwrap().unwrap().mtu.unwrap();
        assert!(mtu < 1500);
        for (family, far) in far().into_iter().enumerate() {
            let [client, server] = pair(&world, &small, far);
            udp::never_cut(&server, far).unwrap();
            errors::keep(&server, far.is_ipv4()).unwrap();
            let fits = mtu - HEADERS[family];
            server.send(&vec![b'x'; fits as usize + 1]).unwrap();
            let heard = errors::error(&server, Instant::now() + PATIENCE);
            let heard = heard.unwrap_or_else(|error| panic!("{}: {error}", FAMILIES[family]));
            assert!(heard.is_too_big(), "{heard:?}");
            assert_eq!((heard.from, heard.mtu), (world.own()[family], mtu));
            is_refused(&server, fits + 1);
            server.send(&vec![b'y'; fits as usize]).unwrap();
            assert_eq!(next(&client).0, vec![b'y'; fits as usize]);
        }
    }
}

#[test]
fn the_far_host_hears_that_a_pods_port_is_closed() {
    for world in World::by_both_ways(1) {
        for (family, far) in far().into_iter().enumerate() {
            let [client, server] = pair(&world, world.pod(1), far);
            errors::keep(&server, far.is_ipv4()).unwrap();
            close(client).unwrap();
            server.send(b"too late").unwrap();
            let heard = errors::error(&server, Instant::now() + PATIENCE);
            let heard = heard.unwrap_or_else(|error| panic!("{}: {error}", FAMILIES[family]));
            assert!(heard.is_closed_port(), "{heard:?}");
            assert_eq!(heard.from, world.own()[family]);
            assert_eq!(heard.quoted, b"too late");
        }
    }
}
