//! Sockets whose data must pass TCP, from the beginning or from some time on.

use super::{
    ask, bound, connect, enrolled, enrolled_at, pattern, read_exact, set, traffic, transfer,
    with_timeout, world,
};
use crate::kit::Pod;
use sinabro_common::abi::acceleration::Reason;
use sinabro_netlink::sysctl;
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io::Write,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
};

fn set_one(socket: &impl AsRawFd, level: i32, name: i32) {
    set(socket, level, name, &1i32.to_ne_bytes()).unwrap();
}

/// Sends with MSG_ZEROCOPY and waits for word that the pages are free again.
fn send_zerocopy(socket: &TcpStream, data: &[u8]) {
    // SAFETY: the slice's own length; it lives until the call below has heard of its end.
    let sent = unsafe {
        libc::send(
            socket.as_raw_fd(),
            data.as_ptr().cast(),
            data.len(),
            libc::MSG_ZEROCOPY,
        )
    };
    assert_eq!(sent, data.len() as isize);
}

fn completion_arrives(socket: &TcpStream) -> bool {
    let mut control = [0u64; 32];
    // SAFETY: all zero is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(2);
    loop {
        // SAFETY: a buffer for control messages of that length.
        let got = unsafe {
            libc::recvmsg(
                socket.as_raw_fd(),
                &raw mut message,
                libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT,
            )
        };
        if got == 0 {
            return true;
        }
        if std::time::Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_socket_with_zerocopy_is_not_enrolled_and_hears_of_its_pages() {
    world(true, true, |w| {
        let client = bound(&w.a, w.a.v4, 0);
        set_one(&client, libc::SOL_SOCKET, libc::SO_ZEROCOPY);
        let listener = w.b.run(|| TcpListener::bind((w.b.v4, 7000)).unwrap());
        client
            .connect(&listener.local_addr().unwrap().into())
            .unwrap();
        let (mut client, mut server) = (
            with_timeout(client.into()),
            with_timeout(listener.accept().unwrap().0),
        );
        assert_eq!(enrolled(), [], "its server's neither");
        let data = pattern(1, 30_000);
        send_zerocopy(&client, &data);
        assert_eq!(read_exact(&mut server, data.len()), data);
        assert!(completion_arrives(&client));
        ask(&mut client, &mut server);
        transfer(server, client, 2, 1 << 20);
    });
}

#[test]
fn clients_that_are_not_enrolled_let_nobody_think_that_a_servers_connections_are_short() {
    world(true, true, |w| {
        let listener = w.b.run(|| TcpListener::bind((w.b.v4, 7000)).unwrap());
        // As many as something is made of.
        for _ in 0..16 {
            let client = bound(&w.a, w.a.v4, 0);
            set_one(&client, libc::SOL_SOCKET, libc::SO_ZEROCOPY);
            client
                .connect(&listener.local_addr().unwrap().into())
                .unwrap();
            let mut client = with_timeout(client.into());
            let mut server = with_timeout(listener.accept().unwrap().0);
            (0..40).for_each(|_| ask(&mut client, &mut server));
        }
        let client =
            w.a.run(|| TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let server = listener.accept().unwrap().0;
        assert_eq!(enrolled().len(), 2, "{:?}", traffic());
        drop((client, server));
    });
}

#[test]
fn a_socket_that_gets_zerocopy_later_goes_through_tcp() {
    world(true, true, |w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        assert_eq!(enrolled().len(), 2);
        ask(&mut client, &mut server);
        set_one(&client, libc::SOL_SOCKET, libc::SO_ZEROCOPY);
        let data = pattern(1, 30_000);
        send_zerocopy(&client, &data);
        assert_eq!(read_exact(&mut server, data.len()), data);
        // tcp_bpf_sendmsg copies, and says nothing: a row of the battery.
        println!("completion: {}", completion_arrives(&client));
        ask(&mut client, &mut server);
        drop((client, server));
        crate::kit::eventually("the end", || enrolled().is_empty());
        let counted = w.counters(&w.a);
        let unfit = counted.passed_messages[Reason::Unfit as usize];
        assert_eq!((counted.redirected_messages, unfit), (1, 2), "{counted:?}");
    });
}

#[test]
fn a_socket_under_repair_goes_through_tcp() {
    world(true, true, |w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        for value in [1i32, 0] {
            set(
                &client,
                libc::IPPROTO_TCP,
                libc::TCP_REPAIR,
                &value.to_ne_bytes(),
            )
            .unwrap();
            if value == 1 {
                // To one that is under repair, and that nobody may give anything beside TCP.
                server.write_all(b"while").unwrap();
            }
        }
        assert_eq!(read_exact(&mut client, 5), b"while");
        ask(&mut client, &mut server);
        transfer(client, server, 1, 1 << 20);
        crate::kit::eventually("the end", || enrolled().is_empty());
        let counted = w.counters(&w.b);
        let unfit = counted.passed_messages[Reason::Unfit as usize];
        assert_eq!((counted.redirected_messages, unfit), (1, 2), "{counted:?}");
    });
}

#[test]
fn a_socket_that_gets_tls_later_goes_through_tcp() {
    world(true, true, |w| {
        let (mut client, mut server) = connect(&w.b, w.b.v4, &w.a, 7000);
        ask(&mut client, &mut server);
        if let Err(error) = set(&client, libc::IPPROTO_TCP, libc::TCP_ULP, b"tls") {
            println!("no TLS here: {error}");
            return;
        }
        ask(&mut client, &mut server);
        transfer(client, server, 1, 1 << 20);
    });
}

fn mptcp(pod: &Pod, at: SocketAddr) -> Socket {
    pod.run(|| {
        let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::MPTCP));
        let socket = socket.unwrap();
        socket.bind(&at.into()).unwrap();
        socket
    })
}

#[test]
fn multipath_sockets_work_and_are_not_enrolled() {
    if !std::fs::read_to_string("/proc/sys/net/mptcp/enabled").is_ok_and(|on| on.trim() == "1") {
        println!("no MPTCP here");
        return;
    }
    world(true, true, |w| {
        for (here, there) in [(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)] {
            for (client_is, server_is) in [(true, true), (true, false), (false, true)] {
                let client = match client_is {
                    true => mptcp(&w.a, (here, 0).into()),
                    false => bound(&w.a, here, 0),
                };
                let server = match server_is {
                    true => mptcp(&w.b, (there, 0).into()),
                    false => bound(&w.b, there, 0),
                };
                server.listen(1).unwrap();
                client.connect(&server.local_addr().unwrap()).unwrap();
                let (accepted, _) = server.accept().unwrap();
                let ends = (enrolled_at(here), enrolled_at(there));
                println!("mptcp {client_is} {server_is}: enrolled {ends:?}");
                assert!(!client_is || ends.0 == 0);
                assert!(!(client_is && server_is) || ends.1 == 0);
                let (mut client, mut server) =
                    (with_timeout(client.into()), with_timeout(accepted.into()));
                ask(&mut client, &mut server);
                transfer(client, server, 1, 1 << 20);
                crate::kit::eventually("the end", || enrolled().is_empty());
            }
        }
    });
}

#[test]
fn data_in_the_first_segment_stays_before_what_follows() {
    world(true, true, |w| {
        for pod in [&w.a, &w.b] {
            pod.run(|| sysctl::write(&["net", "ipv4", "tcp_fastopen"], "3").unwrap());
        }
        let listener = w.b.run(|| TcpListener::bind((w.b.v4, 7000)).unwrap());
        set(
            &listener,
            libc::IPPROTO_TCP,
            libc::TCP_FASTOPEN,
            &16i32.to_ne_bytes(),
        )
        .unwrap();
        let address = socket2::SockAddr::from(SocketAddr::from((w.b.v4, 7000)));
        let mut with_data = 0;
        for n in 0..50u8 {
            let data = pattern(n, 5000);
            let client = bound(&w.a, w.a.v4, 0);
            let sent = client
                .send_to_with_flags(&data[..500], &address, libc::MSG_FASTOPEN)
                .unwrap();
            let mut client = with_timeout(client.into());
            client.write_all(&data[sent..]).unwrap();
            let mut server = with_timeout(listener.accept().unwrap().0);
            with_data += u32::from(syn_had_data(&server));
            server.write_all(b"hello").unwrap();
            assert_eq!(read_exact(&mut server, data.len()), data);
            assert_eq!(read_exact(&mut client, 5), b"hello");
            ask(&mut client, &mut server);
            transfer(server, client, n, 50_000);
        }
        assert!(with_data > 10, "{with_data}");
    });
}

/// TCPI_OPT_SYN_DATA of `tcpi_options`.
fn syn_had_data(socket: &TcpStream) -> bool {
    let mut info = [0u8; 104];
    let mut len = info.len() as u32;
    // SAFETY: a buffer of that length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    assert_eq!(result, 0);
    info[5] & 32 != 0
}
