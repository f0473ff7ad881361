//! Real sockets in real pods.

use super::*;
use crate::kit::Outside;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use sinabro_common::abi::config::FLAG_REDIRECT_PEER;
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::Duration,
};

const BYTES: usize = 4 << 20;

struct Live {
    datapath: Datapath,
    a: Pod,
    b: Pod,
}

impl Live {
    fn service(&self, number: u32, proto: u8) -> Service<'_> {
        Service {
            datapath: &self.datapath,
            number,
            proto,
        }
    }

    fn publish(&self, number: u32, proto: u8, endpoint: At) -> SocketAddr {
        let service = self.service(number, proto);
        service.balance(&[endpoint], 1);
        let at = (vip(endpoint.0), 80);
        service.frontend(at, 0);
        at.into()
    }
}

fn in_every_mode(test: impl Fn(Live) + Send + Sync) {
    for &attach in kit::modes() {
        kit::fresh(|| {
            let datapath = kit::load_with(&DatapathConfig {
                attach,
                ..kit::config()
            });
            turn(&datapath, true);
            let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
            test(Live { datapath, a, b });
        });
    }
}

/// Bytes to an echo server and back; both ends' addresses as the client and as the server see them.
fn exchange(
    listener: TcpListener,
    connect: impl FnOnce() -> TcpStream,
) -> (SocketAddr, SocketAddr) {
    let server = thread::spawn(move || {
        let (mut stream, peer) = listener.accept().unwrap();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let len = stream.read(&mut buffer).unwrap();
            if len == 0 {
                return peer;
            }
            stream.write_all(&buffer[..len]).unwrap();
        }
    });
    let mut stream = connect();
    let data: Vec<u8> = (0..BYTES).map(|n| ((n * 31) >> 3) as u8).collect();
    let mut reader = stream.try_clone().unwrap();
    let expected = data.clone();
    let check = thread::spawn(move || {
        let mut got = vec![0; expected.len()];
        reader.read_exact(&mut got).unwrap();
        assert!(got == expected, "the echo differs");
    });
    stream.write_all(&data).unwrap();
    check.join().unwrap();
    let own = stream.local_addr().unwrap();
    drop(stream);
    (own, server.join().unwrap())
}

fn udp(at: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(at).unwrap();
    let timeout = Some(Duration::from_secs(10));
    socket.set_read_timeout(timeout).unwrap();
    socket
}

fn datagrams(client: &UdpSocket, server: &UdpSocket, at: SocketAddr) {
    // The last ones in parts.
    for len in [1, 100, 1400, 4000, 9000] {
        let data = vec![len as u8; len];
        client.send_to(&data, at).unwrap();
        let mut buffer = vec![0; 10_000];
        let (got, peer) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(buffer[..got], data);
        server.send_to(&data, peer).unwrap();
        let (got, from) = client.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..got], from), (&data[..], at));
    }
}

#[test]
fn pods_talk_to_pods_by_a_services_address() {
    in_every_mode(|w| {
        for (number, (client, server)) in (1..).zip([(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)]) {
            let at = w.publish(number, TCP, (server, 8000));
            let listener = w.b.run(|| TcpListener::bind((server, 8000)).unwrap());
            let (own, seen) = exchange(listener, || w.a.run(|| TcpStream::connect(at).unwrap()));
            // The endpoint knows its client.
            assert_eq!((own.ip(), seen), (client, own));

            let at = w.publish(number + 2, UDP, (server, 8000));
            let server = w.b.run(|| udp((server, 8000).into()));
            let socket = w.a.run(|| udp((client, 0).into()));
            datagrams(&socket, &server, at);
        }
        check_table();
    });
}

#[test]
fn pods_talk_to_pods_by_a_services_address_through_the_stack() {
    in_every_mode(|w| {
        let mut config = kit::node_config();
        config.flags &= !FLAG_REDIRECT_PEER;
        w.datapath.set_node_config(config).unwrap();
        for (number, (client, server)) in (1..).zip([(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)]) {
            let at = w.publish(number, TCP, (server, 8000));
            let listener = w.b.run(|| TcpListener::bind((server, 8000)).unwrap());
            let (own, seen) = exchange(listener, || w.a.run(|| TcpStream::connect(at).unwrap()));
            assert_eq!((own.ip(), seen), (client, own));
        }
        check_table();
    });
}

#[test]
fn pods_talk_to_their_node_by_a_services_address() {
    in_every_mode(|w| {
        for (number, client) in (1..).zip([w.a.v4, w.a.v6]) {
            let node = address(client, "10.1.0.1", "fd00:1::1");
            let at = w.publish(number, TCP, (node, 6443));
            let listener = TcpListener::bind((node, 6443)).unwrap();
            let (own, seen) = exchange(listener, || w.a.run(|| TcpStream::connect(at).unwrap()));
            assert_eq!((own.ip(), seen), (client, own));

            let at = w.publish(number + 2, UDP, (node, 6443));
            let server = udp((node, 6443).into());
            let socket = w.a.run(|| udp((client, 0).into()));
            datagrams(&socket, &server, at);
        }
        check_table();
    });
}

#[test]
fn a_pod_talks_to_itself_by_a_services_address() {
    in_every_mode(|w| {
        for (number, client) in (1..).zip([w.a.v4, w.a.v6]) {
            let at = w.publish(number, TCP, (client, 8000));
            let any = address(client, "0.0.0.0", "::");
            let listener = w.a.run(|| TcpListener::bind((any, 8000)).unwrap());
            let (own, seen) = exchange(listener, || w.a.run(|| TcpStream::connect(at).unwrap()));
            let itself = address(client, "169.254.1.1", "100::5342:1");
            assert_eq!((own.ip(), seen.ip()), (client, itself));

            let at = w.publish(number + 2, UDP, (client, 8000));
            // Bound to no address: its answer's source is the stack's choice, by who asks.
            let server = w.a.run(|| udp((any, 8000).into()));
            let socket = w.a.run(|| udp((client, 0).into()));
            socket.send_to(b"question", at).unwrap();
            let mut buffer = [0; 64];
            let (_, peer) = server.recv_from(&mut buffer).unwrap();
            assert_eq!(peer.ip(), itself);
            server.send_to(b"answer", peer).unwrap();
            let (len, from) = socket.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..len], from), (&b"answer"[..], at));
        }
        check_table();
    });
}

#[test]
fn pods_talk_to_the_outside_by_a_services_address() {
    in_every_mode(|w| {
        let outside = Outside::new(&w.datapath);
        let out: IpAddr = kit::OUTSIDE.into();
        let at = w.publish(1, TCP, (out, 443));
        let listener = outside.run(|| TcpListener::bind((out, 443)).unwrap());
        let (_, seen) = exchange(listener, || w.a.run(|| TcpStream::connect(at).unwrap()));
        assert_eq!(seen.ip(), IpAddr::from(kit::NODE));

        let at = w.publish(2, UDP, (out, 443));
        let server = outside.run(|| udp((out, 443).into()));
        let socket = w.a.run(|| udp((w.a.v4, 0).into()));
        datagrams(&socket, &server, at);
        check_table();
    });
}

#[test]
fn who_sends_to_nobody_hears_so_at_once() {
    in_every_mode(|w| {
        for (number, client) in (1..).zip([w.a.v4, w.a.v6]) {
            let server = address(client, "10.1.0.6", "fd00:1::6");
            let at = w.publish(number, TCP, (server, 8000));
            w.service(number, TCP).set(Kind::Refuse, 0);
            w.publish(number + 2, UDP, (server, 8000));
            w.service(number + 2, UDP).set(Kind::Refuse, 0);
            let unused = SocketAddr::new(at.ip(), 81);
            w.a.run(|| {
                for at in [at, unused] {
                    let connected = TcpStream::connect_timeout(&at, Duration::from_secs(5));
                    assert_eq!(connected.unwrap_err().kind(), ErrorKind::ConnectionRefused);
                    let socket = udp((client, 0).into());
                    socket.connect(at).unwrap();
                    socket.send(b"anybody?").unwrap();
                    let heard = socket.recv(&mut [0; 16]).unwrap_err();
                    assert_eq!(heard.kind(), ErrorKind::ConnectionRefused);
                }
            });
            // A port of an endpoint's where nobody listens is refused by the endpoint, in the Service's name.
            w.publish(number, TCP, (server, 9));
            w.publish(number + 2, UDP, (server, 9));
            w.a.run(|| {
                let connected = TcpStream::connect_timeout(&at, Duration::from_secs(5));
                assert_eq!(connected.unwrap_err().kind(), ErrorKind::ConnectionRefused);
                let socket = udp((client, 0).into());
                socket.connect(at).unwrap();
                socket.send(b"anybody?").unwrap();
                let heard = socket.recv(&mut [0; 16]).unwrap_err();
                assert_eq!(heard.kind(), ErrorKind::ConnectionRefused);
            });
        }
    });
}

/// A checksum that a card is to complete is that of the pseudo header: whoever takes the card's place behind the pod, a
/// virtual machine for example, adds the rest.
#[test]
fn a_resets_checksum_is_complete_or_is_said_not_to_be() {
    in_every_mode(|w| {
        for (number, client) in (1..).zip([w.a.v4, w.a.v6]) {
            let at = w.publish(number, TCP, (far(client, 1), 8000));
            w.service(number, TCP).set(Kind::Refuse, 0);
            w.a.run(|| {
                let raw = Raw::new();
                TcpStream::connect(at).unwrap_err();
                let (mut frame, incomplete) = raw.next_from(at.ip());
                let field = frame.len() - 4..frame.len() - 2;
                if incomplete {
                    let pseudo = packet::pseudo_header(at.ip(), client, TCP, 20);
                    let sum = packet::sum(&[&pseudo]);
                    assert_eq!(frame[field.clone()], sum.to_be_bytes());
                    let whole = !packet::sum(&[&frame[frame.len() - 20..]]);
                    frame[field].copy_from_slice(&whole.to_be_bytes());
                }
                assert_eq!(see(&frame).ports.0, 80);
            });
        }
    });
}

/// Sees all that comes to an interface of this namespace.
struct Raw(OwnedFd);

impl Raw {
    fn new() -> Self {
        let all = SockProtocol::EthAll;
        let fd = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), all).unwrap();
        let on: libc::c_int = 1;
        // SAFETY: a number, which is read.
        let set = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_AUXDATA,
                (&raw const on).cast(),
                size_of_val(&on) as u32,
            )
        };
        assert_eq!(set, 0);
        Self(fd)
    }

    /// The next frame from an address, and whether its checksum is to be completed.
    fn next_from(&self, src: IpAddr) -> (Vec<u8>, bool) {
        loop {
            let mut frame = vec![0u8; 2048];
            let mut control = [0u64; 16];
            let mut part = libc::iovec {
                iov_base: frame.as_mut_ptr().cast(),
                iov_len: frame.len(),
            };
            // SAFETY: zeros are a message; all that it points to lives until the call returns, which fills in a message
            // of control with whole values.
            let (len, status) = unsafe {
                let mut message: libc::msghdr = std::mem::zeroed();
                message.msg_iov = &raw mut part;
                message.msg_iovlen = 1;
                message.msg_control = control.as_mut_ptr().cast();
                message.msg_controllen = size_of_val(&control);
                let len = libc::recvmsg(self.0.as_raw_fd(), &raw mut message, 0);
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                assert!(len > 0 && !header.is_null());
                let status = libc::CMSG_DATA(header).cast::<u32>().read_unaligned();
                (len as usize, status)
            };
            frame.truncate(len);
            let at = match src {
                IpAddr::V4(_) => 26..30,
                IpAddr::V6(_) => 22..38,
            };
            let is_from = match src {
                IpAddr::V4(src) => frame.get(at) == Some(&src.octets()[..]),
                IpAddr::V6(src) => frame.get(at) == Some(&src.octets()[..]),
            };
            if is_from {
                return (frame, status & libc::TP_STATUS_CSUMNOTREADY != 0);
            }
        }
    }
}
