//! Rows about what a socket tells of itself, and about options that should change nothing.

use super::{
    Class, Connect, Failed, Row, SocketOption,
    stage::{MOMENT, Pair, Socket, each_way, failed, pair_with, said},
    stream::{self, Reader},
};
use nix::errno::Errno;
use std::time::Instant;

pub static ROWS: &[Row] = &[
    Row {
        id: "counted-bytes",
        title: "TCP_INFO: bytes sent, acknowledged and received",
        meaning: "what watches connections (ss -i, monitoring, some load balancers) sees no bytes pass",
        class: Class::Behaviour,
        quick: true,
        run: counted_bytes,
    },
    Row {
        id: "bytes-under-way",
        title: "SIOCOUTQ",
        meaning: "programs that wait until their peer's kernel has all they sent (SIOCOUTQ) wait too \
                  long or not at all",
        class: Class::Behaviour,
        quick: true,
        run: under_way,
    },
    Row {
        id: "buffer-sizes",
        title: "SO_RCVBUF and SO_SNDBUF, before connecting and later",
        meaning: "programs that choose the size of their buffers lose data, or get another size",
        class: Class::Order,
        quick: true,
        run: buffer_sizes,
    },
    Row {
        id: "harmless-options",
        title: "TCP_NODELAY, TCP_QUICKACK, TCP_USER_TIMEOUT and others, set in the middle",
        meaning: "programs that set common options fail or lose data",
        class: Class::Behaviour,
        quick: true,
        run: harmless,
    },
];

/// A number of `struct tcp_info`, by where it begins.
fn info(socket: &Socket, at: usize) -> Result<u64, Errno> {
    let mut info = [0; 256];
    let len = socket.get_bytes(libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    match info[..len].get(at..at + 8) {
        Some(bytes) => Ok(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))),
        None => Err(Errno::ENODATA),
    }
}

/// Little end first, as [`info`] puts them together.
const fn native(value: u64) -> u64 {
    value.to_le()
}

fn counted_bytes(connect: &dyn Connect) -> Result<String, Failed> {
    // linux/tcp.h
    const BYTES_ACKED: usize = 120;
    const BYTES_RECEIVED: usize = 128;
    const BYTES_SENT: usize = 200;
    each_way(connect, |from, to| {
        let count = |socket: &Socket, at| info(socket, at).map(native);
        let before = [
            count(&from, BYTES_SENT),
            count(&from, BYTES_ACKED),
            count(&to, BYTES_RECEIVED),
        ];
        for _ in 0..10 {
            from.say(&[b'x'; 100])?;
            to.hear(connect, 100, libc::MSG_WAITALL)?;
            to.say(b"answer")?;
            from.hear(connect, 6, libc::MSG_WAITALL)?;
        }
        let since = |socket: &Socket, at, before: Result<u64, Errno>| {
            said(count(socket, at).and_then(|now| Ok(now.wrapping_sub(before?))))
        };
        Ok(format!(
            "sent {}, acknowledged {}, received {}",
            since(&from, BYTES_SENT, before[0]),
            since(&from, BYTES_ACKED, before[1]),
            since(&to, BYTES_RECEIVED, before[2]),
        ))
    })
}

fn under_way(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let empty = || {
            let deadline = Instant::now() + connect.patience();
            loop {
                match from.number(libc::TIOCOUTQ) {
                    Ok(0) => return "all is there".to_owned(),
                    Ok(_) if Instant::now() < deadline => std::thread::sleep(MOMENT / 50),
                    other => return format!("still under way: {}", said(other)),
                }
            }
        };
        from.say(b"hello")?;
        let mut seen = vec![empty()];
        // With nobody who reads, some stays here.
        let sent = stream::fill(&from, 5, 64 << 20, 10_000).map_err(failed("send"))?;
        let some = from.number(libc::TIOCOUTQ).map(|under_way| under_way > 0);
        seen.push(format!("behind: {}", said(some)));
        to.hear(connect, 5, 0)?;
        let mut reader = Reader::new();
        reader.got = 5;
        let read = reader.read(&to, sent, connect.patience());
        seen.push((read == format!("{sent} bytes, all right")).to_string());
        seen.push(empty());
        Ok(seen.join(", "))
    })
}

fn buffer_sizes(connect: &dyn Connect) -> Result<String, Failed> {
    // Small buffers are slow: they wait for delayed acknowledgements.
    const TOTAL: u64 = 60_000;
    let option = |name, value| SocketOption {
        level: libc::SOL_SOCKET,
        name,
        value,
    };
    let mut seen = Vec::new();
    for (before, later) in [
        (10_000, None),
        (100_000, Some(10_000)),
        (10_000, Some(200_000)),
    ] {
        let both = [
            option(libc::SO_RCVBUF, before),
            option(libc::SO_SNDBUF, before),
        ];
        let Pair { client, server } = pair_with(connect, &both, &both)?;
        for (from, to) in [(&client, &server), (&server, &client)] {
            from.say(&stream::part(0, 1000))?;
            // With data waiting.
            if let Some(later) = later {
                for socket in [from, to] {
                    for name in [libc::SO_RCVBUF, libc::SO_SNDBUF] {
                        socket
                            .set(libc::SOL_SOCKET, name, later)
                            .map_err(failed("set the size of a buffer"))?;
                    }
                }
            }
            let sender = from.clone();
            let sending = super::stage::Work::start(&[from], move || {
                stream::write(&sender, 1000, TOTAL, &[700, 20_000])
            })?;
            let read = Reader::new().read(to, 1000 + TOTAL, connect.patience());
            sending.done(connect);
            let size = |name| said(to.get(libc::SOL_SOCKET, name));
            seen.push(format!(
                "{}, {}: {read}",
                size(libc::SO_RCVBUF),
                size(libc::SO_SNDBUF)
            ));
        }
    }
    seen.dedup();
    Ok(seen.join("; "))
}

fn harmless(connect: &dyn Connect) -> Result<String, Failed> {
    let options = [
        ("TCP_NODELAY", libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
        ("TCP_NODELAY", libc::IPPROTO_TCP, libc::TCP_NODELAY, 0),
        ("TCP_QUICKACK", libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1),
        ("TCP_QUICKACK", libc::IPPROTO_TCP, libc::TCP_QUICKACK, 0),
        (
            "TCP_USER_TIMEOUT",
            libc::IPPROTO_TCP,
            libc::TCP_USER_TIMEOUT,
            3000,
        ),
        (
            "TCP_NOTSENT_LOWAT",
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            16_384,
        ),
        ("TCP_MAXSEG", libc::IPPROTO_TCP, libc::TCP_MAXSEG, 1000),
        ("TCP_KEEPIDLE", libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5),
        ("SO_KEEPALIVE", libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        ("SO_PRIORITY", libc::SOL_SOCKET, libc::SO_PRIORITY, 3),
        ("SO_BUSY_POLL", libc::SOL_SOCKET, libc::SO_BUSY_POLL, 10),
        ("IP_TOS", libc::IPPROTO_IP, libc::IP_TOS, 16),
    ];
    each_way(connect, |from, to| {
        let mut seen = Vec::new();
        for (name, level, option, value) in options {
            for socket in [&from, &to] {
                if let Err(errno) = socket.set(level, option, value) {
                    seen.push(format!("{name}: {errno:?}"));
                }
            }
            from.say(b"question")?;
            seen.push(to.hear(connect, 9, 0)?);
            to.say(b"answer")?;
            seen.push(from.hear(connect, 9, 0)?);
        }
        let sent = stream::fill(&from, 0, 300_000, 3000).map_err(failed("send"))?;
        let read = Reader::new().read(&to, sent, connect.patience());
        seen.push((read == format!("{sent} bytes, all right")).to_string());
        seen.dedup();
        Ok(seen.join(", "))
    })
}
