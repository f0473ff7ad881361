//! A sender that never stops against a reader that does not read.

use super::{World, connect_enrolled, enrolled, pattern, read, world};
use crate::kit;
use sinabro_common::abi::acceleration::Reason;
use socket2::SockRef;
use std::{
    io::ErrorKind,
    net::{Shutdown, TcpStream},
    os::fd::AsRawFd,
    thread,
    time::Duration,
};

/// Sends until it has been told to wait for this long.
const BLOCKED: Duration = Duration::from_millis(300);
/// No sender gets this far.
const TOO_MUCH: usize = 8 << 20;

/// Sends messages of a size until the socket takes no more, and returns how many bytes it took.
fn fill(socket: &TcpStream, bytes: &[u8], message: usize) -> usize {
    let mut sent = 0;
    loop {
        let piece = &bytes[sent..][..message];
        // SAFETY: the slice's own length.
        let len = unsafe {
            libc::send(
                socket.as_raw_fd(),
                piece.as_ptr().cast(),
                piece.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if len >= 0 {
            sent += len as usize;
            assert!(sent < TOO_MUCH, "never told to wait");
            continue;
        }
        let error = std::io::Error::last_os_error();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        let mut poll = libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: one structure.
        if unsafe { libc::poll(&raw mut poll, 1, BLOCKED.as_millis() as i32) } == 0 {
            return sent;
        }
    }
}

/// What a full connection has taken.
#[derive(Debug)]
struct Filled {
    bytes: usize,
    redirected_bytes: u64,
    redirected_messages: u64,
    queue_full: u64,
}

/// Fills a connection, then reads it all.
fn fill_and_drain(
    w: &World,
    data: &[u8],
    v6: bool,
    message: usize,
    rcvbuf: Option<usize>,
) -> Filled {
    let at = if v6 { w.b.v6 } else { w.b.v4 };
    let (client, mut server) = connect_enrolled(w, at);
    if let Some(size) = rcvbuf {
        SockRef::from(&server).set_recv_buffer_size(size).unwrap();
    }
    let before = w.counters(&w.a);
    let bytes = fill(&client, data, message);
    let mut got = 0;
    let mut piece = vec![0; 50_000];
    let closer = thread::spawn(move || client.shutdown(Shutdown::Write).unwrap());
    while got < bytes {
        let len = read(&mut server, &mut piece);
        assert!(len > 0, "the end after {got} of {bytes} bytes");
        assert!(piece[..len] == data[got..][..len], "bytes differ");
        got += len;
    }
    assert_eq!(read(&mut server, &mut piece), 0);
    closer.join().unwrap();
    drop(server);
    // What the sender's socket has counted is carried over at its end.
    kit::eventually("the end", || enrolled().is_empty());
    let after = w.counters(&w.a);
    let full = Reason::QueueFull as usize;
    Filled {
        bytes,
        redirected_bytes: after.redirected_bytes - before.redirected_bytes,
        redirected_messages: after.redirected_messages - before.redirected_messages,
        queue_full: after.passed_messages[full] - before.passed_messages[full],
    }
}

#[test]
fn a_sender_is_blocked_by_a_reader_that_never_reads_and_nothing_is_lost() {
    world(true, true, |w| {
        let data = &pattern(3, TOO_MUCH + (1 << 20));
        let sizes = [&[1, 4096, 1 << 16, 1 << 20][..], &[1 << 16][..]];
        for (v6, sizes) in [false, true].into_iter().zip(sizes) {
            for &message in sizes {
                let usual = fill_and_drain(&w, data, v6, message, None);
                println!("{message}: {usual:?}");
                assert!(
                    usual.redirected_bytes > 0 && usual.queue_full > 0,
                    "{usual:?}, {:?}",
                    w.all_counters()
                );
                // Each has a structure of the kernel's of about a kilobyte.
                assert!(usual.redirected_messages <= 4096, "{usual:?}");
                assert!(usual.redirected_bytes <= 1 << 20, "{usual:?}");
                let small = fill_and_drain(&w, data, v6, message, Some(20_000));
                println!("{message}, small buffer: {small:?}");
                assert!(small.queue_full > 0, "{small:?}, {:?}", w.all_counters());
                assert!(small.redirected_bytes <= 1 << 16, "{small:?}");
                assert!(small.redirected_bytes < usual.redirected_bytes, "{small:?}");
                // What TCP takes behind that is its own affair: of single bytes that is nearly all, and about the same.
                assert!(message == 1 || small.bytes < usual.bytes, "{small:?}");
            }
        }
    });
}
