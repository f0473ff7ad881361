//! Real sockets in real pods, in every way of attaching.

use crate::kit::{self, NODE, OUTSIDE, Outside, PORT_MIN, Pod};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
};
use sinabro_agent::datapath::{Datapath, DatapathConfig};
use sinabro_common::{abi::drop::DropReason, names::HOST_MAC};
use sinabro_netlink::{Conn, addr::Addr as Address};
use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    thread,
    time::Duration,
};

const OUT: IpAddr = IpAddr::V4(OUTSIDE);

/// Runs a test in every mode that the kernel has, each in a world of its own.
fn in_every_mode(test: impl Fn(Datapath) + Send + Sync) {
    for &attach in kit::modes() {
        kit::fresh(|| {
            test(kit::load_with(&DatapathConfig {
                attach,
                ..kit::config()
            }))
        });
    }
}

/// Packets that the stack has sent out of an interface of the calling thread's namespace.
fn stack_sent(link: &str) -> u64 {
    let table = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = table
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(link)?.strip_prefix(':'))
        .unwrap();
    line.split_whitespace().nth(9).unwrap().parse().unwrap()
}

fn udp(at: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(at).unwrap();
    let timeout = Some(Duration::from_secs(10));
    socket.set_read_timeout(timeout).unwrap();
    socket
}

fn receive(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = [0; 2048];
    let (len, from) = socket.recv_from(&mut buffer).unwrap();
    (buffer[..len].to_vec(), from)
}

/// An echo server for one connection; returns the client's address.
fn echo_once(listener: &TcpListener) -> SocketAddr {
    let (mut stream, from) = listener.accept().unwrap();
    let mut buffer = vec![0; 65536];
    loop {
        let len = stream.read(&mut buffer).unwrap();
        if len == 0 {
            return from;
        }
        stream.write_all(&buffer[..len]).unwrap();
    }
}

/// Sends bytes through an echo server and checks that they come back.
fn echo_through(mut stream: TcpStream, bytes: usize) {
    let data: Vec<u8> = (0..bytes).map(|n| ((n * 31) >> 3) as u8).collect();
    let mut reader = stream.try_clone().unwrap();
    let expected = data.clone();
    let check = thread::spawn(move || {
        let mut got = vec![0; expected.len()];
        reader.read_exact(&mut got).unwrap();
        assert!(got == expected, "the echo differs");
    });
    stream.write_all(&data).unwrap();
    check.join().unwrap();
}

#[test]
fn pods_of_a_node_talk_past_its_stack() {
    in_every_mode(|datapath| {
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        for (from, to) in [(a.v4, b.v4), (a.v6, b.v6)] {
            // Neighbour discovery and the like go through the stack; some packets of it.
            let counters = |pod: &Pod| datapath.pod_counters(pod.ifindex).unwrap().unwrap();
            let (sent, seen) = (stack_sent(&b.link), counters(&b).rx_packets);

            let server = b.run(|| udp((to, 7000).into()));
            let client = a.run(|| udp((from, 0).into()));
            for n in 0..100u8 {
                client.send_to(&[n; 100], (to, 7000)).unwrap();
                let (data, peer) = receive(&server);
                assert_eq!((&data[..], peer.ip()), (&[n; 100][..], from));
                server.send_to(&data, peer).unwrap();
                assert_eq!(receive(&client), (data, (to, 7000).into()));
            }
            let listener = b.run(|| TcpListener::bind((to, 8000)).unwrap());
            let server = thread::spawn(move || echo_once(&listener));
            let stream = a.run(|| TcpStream::connect((to, 8000)).unwrap());
            echo_through(stream, 4 << 20);
            assert_eq!(server.join().unwrap().ip(), from);

            assert!(counters(&b).rx_packets - seen > 150);
            assert!(stack_sent(&b.link) - sent < 20, "redirected");
        }
    });
}

#[test]
fn forged_and_broken_packets_do_not_get_out_of_a_pod() {
    in_every_mode(|datapath| {
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        let forged: IpAddr = "10.1.0.99".parse().unwrap();
        let server = b.run(|| udp((b.v4, 7000).into()));
        a.run(|| {
            let mut conn = Conn::new().unwrap();
            let eth0 = conn.link_by_name("eth0").unwrap().index;
            conn.execute(Address::new(eth0, forged.into()).add())
                .unwrap();
            let socket = udp((forged, 0).into());
            socket.send_to(b"forged", (b.v4, 7000)).unwrap();
        });
        kit::eventually("the drop", || {
            kit::dropped(&datapath, DropReason::SourceAddr) > 0
        });
        let honest = a.run(|| udp((a.v4, 0).into()));
        honest.send_to(b"honest", (b.v4, 7000)).unwrap();
        assert_eq!(receive(&server).0, b"honest", "only what came after");

        // Frames that end in the middle of their IP header, past everything that checks them.
        a.run(|| {
            let raw = socket(
                AddressFamily::Packet,
                SockType::Raw,
                SockFlag::empty(),
                SockProtocol::EthAll,
            )
            .unwrap();
            let whole = [
                &HOST_MAC[..],
                &a.mac,
                &[
                    0x08, 0x00, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 1, 0, 5,
                ],
            ]
            .concat();
            let index = Conn::new().unwrap().link_by_name("eth0").unwrap().index;
            let to = libc::sockaddr_ll {
                sll_family: libc::AF_PACKET as u16,
                sll_protocol: 0x0008,
                sll_ifindex: index as i32,
                sll_hatype: 0,
                sll_pkttype: 0,
                sll_halen: 6,
                sll_addr: [0; 8],
            };
            for len in 15..=whole.len() {
                // SAFETY: buffer and address live until the call returns.
                let sent = unsafe {
                    libc::sendto(
                        raw.as_raw_fd(),
                        whole.as_ptr().cast(),
                        len,
                        0,
                        (&raw const to).cast(),
                        size_of_val(&to) as u32,
                    )
                };
                assert_eq!(sent, len as isize);
            }
        });
        kit::eventually("16 drops", || {
            kit::dropped(&datapath, DropReason::Malformed) == 16
        });
    });
}

#[test]
fn the_outside_sees_the_node() {
    in_every_mode(|datapath| {
        let outside = Outside::new(&datapath);
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        let server = outside.run(|| udp((OUT, 53).into()));
        let mut seen = Vec::new();
        for pod in [&a, &b] {
            let client = pod.run(|| udp((pod.v4, 5353).into()));
            for _ in 0..3 {
                client.send_to(b"question", (OUT, 53)).unwrap();
                let (data, from) = receive(&server);
                assert_eq!((&data[..], from.ip()), (&b"question"[..], NODE.into()));
                assert!(from.port() >= PORT_MIN);
                seen.push(from.port());
                server.send_to(b"answer", from).unwrap();
                assert_eq!(receive(&client), (b"answer".to_vec(), (OUT, 53).into()));
            }
        }
        // The same source port in both pods, three packets each.
        assert_eq!(seen[..3], [seen[0]; 3]);
        assert_eq!(seen[3..], [seen[3]; 3]);
        assert_ne!(seen[0], seen[3]);

        for pod in [&a, &b] {
            let listener = outside.run(|| TcpListener::bind((OUT, 80)).unwrap());
            let server = thread::spawn(move || echo_once(&listener));
            let stream = pod.run(|| TcpStream::connect((OUT, 80)).unwrap());
            // Large enough for segmentation offload.
            echo_through(stream, 4 << 20);
            assert_eq!(server.join().unwrap().ip(), NODE);
        }

        // The node's own traffic is its own.
        let own = udp((NODE, 5353).into());
        own.send_to(b"mine", (OUT, 53)).unwrap();
        assert_eq!(receive(&server).1, (NODE, 5353).into());
    });
}

#[test]
fn echo_requests_reach_the_outside_and_their_replies_the_pod() {
    in_every_mode(|datapath| {
        let outside = Outside::new(&datapath);
        let raw = || {
            let socket = socket(
                AddressFamily::Inet,
                SockType::Raw,
                SockFlag::empty(),
                SockProtocol::Icmp,
            )
            .unwrap();
            let socket = UdpSocket::from(socket);
            let timeout = Some(Duration::from_secs(10));
            socket.set_read_timeout(timeout).unwrap();
            socket
        };
        let listener = outside.run(raw);
        for n in [5, 6] {
            let pod = Pod::live(&datapath, n);
            let socket = pod.run(raw);
            // The same id in both pods.
            let crate::packet::Ip { payload, .. } = crate::packet::icmp(pod.v4, OUT, 8, 77);
            let to = SockaddrIn::from(std::net::SocketAddrV4::new(OUTSIDE, 0));
            sendto(socket.as_raw_fd(), &payload, &to, MsgFlags::empty()).unwrap();

            let mut request = [0; 256];
            let len = listener.recv(&mut request).unwrap();
            let seen = crate::packet::see(&[&[0; 14][..], &request[..len]].concat());
            assert_eq!(seen.src, IpAddr::from(NODE));
            assert_eq!(seen.data, b"ping!");

            let mut reply = [0; 256];
            let len = socket.recv(&mut reply).unwrap();
            let got = crate::packet::see(&[&[0; 14][..], &reply[..len]].concat());
            assert_eq!((got.src, got.dst), (OUT, pod.v4));
            assert_eq!((got.ports.0, &got.data[..]), (77, &b"ping!"[..]));
        }
    });
}

#[test]
fn the_outside_can_call_a_pod_by_its_address() {
    in_every_mode(|datapath| {
        let outside = Outside::new(&datapath);
        outside.route_to_pods();
        let pod = Pod::live(&datapath, 5);
        let listener = pod.run(|| TcpListener::bind((pod.v4, 80)).unwrap());
        let server = thread::spawn(move || echo_once(&listener));
        let stream = outside.run(|| TcpStream::connect((pod.v4, 80)).unwrap());
        echo_through(stream, 1 << 20);
        assert_eq!(server.join().unwrap().ip(), OUT);
        // Its own connections are masqueraded all the same.
        let server = outside.run(|| udp((OUT, 53).into()));
        let client = pod.run(|| udp((pod.v4, 80).into()));
        client.send_to(b"x", (OUT, 53)).unwrap();
        assert_eq!(receive(&server).1.ip(), IpAddr::from(NODE));
    });
}

#[test]
fn a_detached_pod_is_left_to_the_stack() {
    in_every_mode(|datapath| {
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        let client = a.run(|| udp((a.v4, 0).into()));
        let server = b.run(|| udp((b.v4, 7000).into()));
        client.send_to(b"x", (b.v4, 7000)).unwrap();
        receive(&server);
        datapath
            .detach_pod(b.ifindex, &b.link, &b.addresses())
            .unwrap();
        // As long as there are routes, its neighbours reach it.
        client.send_to(b"y", (b.v4, 7000)).unwrap();
        assert_eq!(receive(&server).0, b"y");
        assert_eq!(datapath.pod_counters(b.ifindex).unwrap(), None);
        datapath
            .detach_pod(b.ifindex, &b.link, &b.addresses())
            .unwrap();
    });
}
