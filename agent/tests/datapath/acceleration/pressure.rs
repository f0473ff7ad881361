//! A sender that never stops against a reader that does not read.

use super::{World, connect, pattern, read, world};
use sinabro_common::abi::acceleration::Reason;
use socket2::SockRef;
use std::{
    fs,
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

/// What the kernel has allocated for itself, in bytes.
fn kernel_memory() -> i64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("Slab:")).unwrap();
    let kilobytes: i64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes << 10
}

struct Filled {
    sent: usize,
    memory: i64,
}

/// Fills a connection, then reads it all.
fn fill_and_drain(w: &World, v6: bool, message: usize, rcvbuf: Option<usize>) -> Filled {
    let at = if v6 { w.b.v6 } else { w.b.v4 };
    let (client, mut server) = connect(&w.b, at, &w.a, 0);
    if let Some(size) = rcvbuf {
        SockRef::from(&server).set_recv_buffer_size(size).unwrap();
    }
    let bytes = pattern(3, TOO_MUCH + message);
    let before = kernel_memory();
    let sent = fill(&client, &bytes, message);
    let memory = kernel_memory() - before;
    let mut got = 0;
    let mut piece = vec![0; 50_000];
    let closer = thread::spawn(move || client.shutdown(Shutdown::Write).unwrap());
    loop {
        match read(&mut server, &mut piece) {
            0 => break,
            len => {
                assert!(piece[..len] == bytes[got..][..len], "bytes differ");
                got += len;
            }
        }
    }
    closer.join().unwrap();
    assert_eq!(got, sent);
    Filled { sent, memory }
}

#[test]
fn a_sender_is_blocked_by_a_reader_that_never_reads_and_nothing_is_lost() {
    world(true, true, |w| {
        for v6 in [false, true] {
            for message in [1, 100, 4096, 1 << 16, 1 << 20] {
                let full = |w: &World| {
                    let counted = w.counters(&w.a);
                    (
                        counted.redirected_bytes,
                        counted.passed_messages[Reason::QueueFull as usize],
                    )
                };
                let before = full(&w);
                let usual = fill_and_drain(&w, v6, message, None);
                let after = full(&w);
                println!("{message}: {} slab {}", usual.sent, usual.memory);
                assert!(after.0 > before.0 && after.1 > before.1, "{after:?}");
            }
        }
    });
}
