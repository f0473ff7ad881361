//! Rows about calls that read.

use super::{
    Class, Connect, Failed, Row, message,
    stage::{MOMENT, Socket, Work, each_way, failed, heard, said},
    stream::{self, Reader},
};
use nix::errno::Errno;
use std::time::{Duration, Instant};

pub static ROWS: &[Row] = &[
    Row {
        id: "read",
        title: "read",
        meaning: "reading from a socket behaves otherwise",
        class: Class::Behaviour,
        quick: true,
        run: read,
    },
    Row {
        id: "peek",
        title: "MSG_PEEK",
        meaning: "programs that look at data before they take it (protocol detection in proxies) \
                  see other data",
        class: Class::Behaviour,
        quick: true,
        run: peek,
    },
    Row {
        id: "bytes-readable",
        title: "FIONREAD",
        meaning: "programs that ask how much there is to read (FIONREAD) get another number",
        class: Class::Behaviour,
        quick: true,
        run: bytes_readable,
    },
    Row {
        id: "bytes-readable-after-pressure",
        title: "FIONREAD after a reader fell behind",
        meaning: "programs that read as much as FIONREAD says wait for data that is there, or lose some",
        class: Class::Behaviour,
        quick: true,
        run: bytes_readable_after_pressure,
    },
    Row {
        id: "vectored-read",
        title: "read, readv and recvmsg across messages",
        meaning: "programs that read into several buffers get other bytes",
        class: Class::Order,
        quick: true,
        run: vectored,
    },
    Row {
        id: "wait-all",
        title: "MSG_WAITALL, data in pieces",
        meaning: "programs that ask for a whole message at once (MSG_WAITALL) get a part of it",
        class: Class::Behaviour,
        quick: true,
        run: wait_all,
    },
    Row {
        id: "wait-all-to-the-end",
        title: "MSG_WAITALL when the peer ends early",
        meaning: "programs that ask for more (MSG_WAITALL) than their peer sends do not get what it sent",
        class: Class::Behaviour,
        quick: true,
        run: wait_all_to_the_end,
    },
    Row {
        id: "receive-low-water",
        title: "SO_RCVLOWAT with poll and with a blocking read",
        meaning: "programs that want to be woken for a whole message only (SO_RCVLOWAT: gRPC) are \
                  woken too early or never",
        class: Class::Behaviour,
        quick: true,
        run: low_water,
    },
    Row {
        id: "receive-timeout",
        title: "SO_RCVTIMEO",
        meaning: "reads with a timeout (SO_RCVTIMEO) end too early or never",
        class: Class::Behaviour,
        quick: true,
        run: timeout,
    },
    Row {
        id: "discard",
        title: "MSG_TRUNC",
        meaning: "programs that throw data away unread (MSG_TRUNC) lose other data",
        class: Class::Behaviour,
        quick: true,
        run: discard,
    },
    Row {
        id: "peek-offset",
        title: "SO_PEEK_OFF",
        meaning: "programs that look further ahead with each MSG_PEEK (SO_PEEK_OFF) see the same again",
        class: Class::Behaviour,
        quick: true,
        run: peek_offset,
    },
    Row {
        id: "bytes-left-beside-data",
        title: "TCP_INQ",
        meaning: "programs that ask with each receive how much is left (TCP_INQ) do not learn it",
        class: Class::Behaviour,
        quick: true,
        run: bytes_left,
    },
    Row {
        id: "receive-time",
        title: "SO_TIMESTAMPNS",
        meaning: "programs that measure when data arrived (SO_TIMESTAMPNS) do not learn it",
        class: Class::Behaviour,
        quick: true,
        run: receive_time,
    },
    Row {
        id: "several-readers",
        title: "threads that read from one socket at the same time",
        meaning: "blocking reads fail with EAGAIN where several threads or processes read one socket",
        class: Class::Behaviour,
        quick: true,
        run: several_readers,
    },
    Row {
        id: "peek-all",
        title: "MSG_PEEK with MSG_WAITALL, data in pieces",
        meaning: "programs that look at a whole header at once (MSG_PEEK with MSG_WAITALL) see a part of it",
        class: Class::Behaviour,
        quick: true,
        run: peek_all,
    },
];

fn read(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let mut seen = vec![heard(to.recv(9, libc::MSG_DONTWAIT))];
        from.say(b"hello world")?;
        seen.push(to.hear(connect, 5, 0)?);
        seen.push(to.hear(connect, 50, 0)?);
        seen.push(heard(to.recv(9, libc::MSG_DONTWAIT)));
        Ok(seen.join(", "))
    })
}

fn peek(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"hello world")?;
        let mut seen = Vec::new();
        for (most, flags) in [
            (5, libc::MSG_PEEK),
            (50, libc::MSG_PEEK),
            (6, 0),
            (50, libc::MSG_PEEK),
            (50, 0),
        ] {
            seen.push(to.hear(connect, most, flags)?);
        }
        seen.push(heard(to.recv(9, libc::MSG_PEEK | libc::MSG_DONTWAIT)));
        Ok(seen.join(", "))
    })
}

fn bytes_readable(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let mut seen = vec![said(to.number(libc::FIONREAD))];
        from.say(&[b'x'; 1000])?;
        to.hear(connect, 1, libc::MSG_PEEK)?;
        seen.push(said(to.number(libc::FIONREAD)));
        to.hear(connect, 300, 0)?;
        seen.push(said(to.number(libc::FIONREAD)));
        Ok(seen.join(", "))
    })
}

fn bytes_readable_after_pressure(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let sent = stream::fill(&from, 0, 64 << 20, 10_000).map_err(failed("send"))?;
        let mut reader = Reader::new();
        while reader.got < sent {
            if to.poll(libc::POLLIN, connect.patience()) == Ok(0) {
                return Ok("not readable, although there is more".into());
            }
            // A read of so much must not have to wait.
            let there = to.number(libc::FIONREAD).map_err(failed("ask"))?;
            if there <= 0 {
                return Ok(format!("{there}, although there is more"));
            }
            let data = to.recv(there as usize, libc::MSG_DONTWAIT);
            let data = data.map_err(failed("receive"))?;
            if data.len() != there as usize {
                return Ok(format!("{there}, but {} could be read", data.len()));
            }
            reader.check(&data);
        }
        let left = said(to.number(libc::FIONREAD));
        let right = reader.verdict() == format!("{sent} bytes, all right");
        Ok(format!(
            "what can be read, and {left} at the end, all right: {right}"
        ))
    })
}

fn vectored(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"one, two, ")?;
        from.say(b"three, four, five")?;
        to.gather(connect, 27);
        let mut seen = Vec::new();
        let (mut a, mut b, mut c) = ([0; 2], [0; 5], [0; 6]);
        // SAFETY: a pointer and the length of what it points to.
        let got = unsafe { libc::read(to.raw(), a.as_mut_ptr().cast(), a.len()) };
        seen.push(said(Errno::result(got)));
        let vectors = [&mut b[..], &mut c].map(|data| libc::iovec {
            iov_base: data.as_mut_ptr().cast(),
            iov_len: data.len(),
        });
        // SAFETY: two buffers with their lengths.
        let got = unsafe { libc::readv(to.raw(), vectors.as_ptr(), 2) };
        seen.push(said(Errno::result(got)));
        let (mut d, mut e, mut f) = ([0; 1], [0; 20], [0; 20]);
        let got = message::receive(&to, &mut [&mut d, &mut e, &mut f], libc::MSG_DONTWAIT);
        seen.push(said(got.map(|(len, _)| len)));
        let all = [&a[..], &b, &c, &d, &e].concat();
        seen.push(String::from_utf8_lossy(&all[..27]).into_owned());
        Ok(seen.join(", "))
    })
}

/// Sends pieces with a little time between them.
fn pieces(from: &Socket) -> Result<Work<()>, Failed> {
    let sender = from.clone();
    Work::start(&[from], move || {
        for piece in [&b"one "[..], b"two ", b"three ", b"four"] {
            std::thread::sleep(Duration::from_millis(5));
            // That it fails shows at the receiver.
            let _ = sender.say(piece);
        }
    })
}

fn wait_all(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let sending = pieces(&from)?;
        let got = to.hear(connect, 18, libc::MSG_WAITALL)?;
        sending.done(connect);
        Ok(got)
    })
}

fn wait_all_to_the_end(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let sending = pieces(&from)?;
        let receiver = to.clone();
        let receiving = Work::start(&[&to], move || receiver.recv(24, libc::MSG_WAITALL))?;
        sending.done(connect);
        let _ = from.shutdown(libc::SHUT_WR);
        let got = receiving.done(connect);
        let got = got.map_or_else(|| super::stage::LATE.into(), heard);
        Ok(format!("{got}, {}", to.hear(connect, 9, 0)?))
    })
}

fn low_water(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let set = to.set(libc::SOL_SOCKET, libc::SO_RCVLOWAT, 10);
        let mut seen = vec![said(set.map(|()| "set"))];
        // A reader that has taken a part is not woken by the kernel for the rest: it starts first.
        let receiver = to.clone();
        let mut reading = Work::start(&[&to], move || receiver.recv(20, 0))?;
        seen.push(format!("waits: {}", reading.goes_on()));
        from.say(b"12345")?;
        seen.push(format!("waits: {}", reading.goes_on()));
        from.say(b"67890")?;
        let got = reading.done(connect);
        seen.push(got.map_or_else(|| super::stage::LATE.into(), heard));
        from.say(b"12345")?;
        seen.push(said(to.poll(libc::POLLIN, MOMENT)));
        from.say(b"67890")?;
        seen.push(said(to.poll(libc::POLLIN, connect.patience())));
        seen.push(to.hear(connect, 20, 0)?);
        Ok(seen.join(", "))
    })
}

fn timeout(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        // Half of a moment.
        let half = libc::timeval {
            tv_sec: 0,
            tv_usec: MOMENT.as_micros() as libc::suseconds_t / 2,
        };
        // SAFETY: any bytes of a structure without padding.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const half).cast::<u8>(), size_of_val(&half))
        };
        let set = to.set_bytes(libc::SOL_SOCKET, libc::SO_RCVTIMEO, bytes);
        set.map_err(failed("set SO_RCVTIMEO"))?;
        let mut seen = Vec::new();
        let began = Instant::now();
        seen.push(to.hear(connect, 9, 0)?);
        seen.push(match began.elapsed() > MOMENT / 3 {
            true => "after its time".into(),
            false => "too early".into(),
        });
        from.say(b"hello")?;
        seen.push(to.hear(connect, 9, 0)?);
        seen.push(to.hear(connect, 9, libc::MSG_WAITALL)?);
        Ok(seen.join(", "))
    })
}

fn discard(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"hello ")?;
        from.say(b"world")?;
        to.gather(connect, 11);
        let mut untouched = [b'-'; 8];
        let got = to.recv_into(&mut untouched, libc::MSG_TRUNC | libc::MSG_DONTWAIT);
        let buffer = String::from_utf8_lossy(&untouched).into_owned();
        Ok(format!(
            "{}, {buffer}, {}",
            said(got),
            to.hear(connect, 9, 0)?
        ))
    })
}

fn peek_offset(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"abc")?;
        from.say(b"defghi")?;
        to.gather(connect, 9);
        let set = to.set(libc::SOL_SOCKET, libc::SO_PEEK_OFF, 0);
        let mut seen = vec![said(set.map(|()| "set"))];
        for _ in 0..3 {
            seen.push(heard(to.recv(2, libc::MSG_PEEK | libc::MSG_DONTWAIT)));
        }
        seen.push(heard(to.recv(4, libc::MSG_DONTWAIT)));
        seen.push(heard(to.recv(2, libc::MSG_PEEK | libc::MSG_DONTWAIT)));
        Ok(seen.join(", "))
    })
}

/// What comes beside four bytes of data of a kind.
fn beside(to: &Socket, level: i32, kind: i32) -> Result<Option<Vec<u8>>, Errno> {
    let (_, beside) = message::receive(to, &mut [&mut [0; 4]], libc::MSG_DONTWAIT)?;
    let mut found = beside
        .into_iter()
        .filter(|b| b.level == level && b.kind == kind);
    Ok(found.next().map(|beside| beside.data))
}

fn bytes_left(connect: &dyn Connect) -> Result<String, Failed> {
    // linux/tcp.h, the same number for the option and for the message.
    const TCP_INQ: i32 = 36;
    each_way(connect, |from, to| {
        let set = to.set(libc::IPPROTO_TCP, TCP_INQ, 1);
        let mut seen = vec![said(set.map(|()| "set"))];
        from.say(b"hello world")?;
        to.gather(connect, 11);
        for _ in 0..3 {
            let left = beside(&to, libc::IPPROTO_TCP, TCP_INQ);
            seen.push(said(left.map(|left| match left.as_deref() {
                Some(&[a, b, c, d]) => format!("{} left", i32::from_ne_bytes([a, b, c, d])),
                _ => "not told".into(),
            })));
        }
        Ok(seen.join(", "))
    })
}

fn receive_time(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let set = to.set(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1);
        let mut seen = vec![said(set.map(|()| "set"))];
        // The kernel begins to note times a while after the first socket asks (`net_enable_timestamp`): once a worker of its
        // own has had a processor.
        let deadline = Instant::now() + connect.patience();
        let told = loop {
            std::thread::sleep(MOMENT);
            from.say(b"time")?;
            to.gather(connect, 4);
            let time = beside(&to, libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS);
            if !matches!(time, Ok(None)) || Instant::now() >= deadline {
                break time;
            }
        };
        seen.push(said(told.map(|time| match time.is_some() {
            true => "told",
            false => "not told",
        })));
        Ok(seen.join(", "))
    })
}

fn several_readers(connect: &dyn Connect) -> Result<String, Failed> {
    const MESSAGES: usize = 2000;
    each_way(connect, |from, to| {
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let receiver = to.clone();
                Work::start(&[&to], move || {
                    let mut got = 0;
                    loop {
                        match receiver.recv(10, 0) {
                            Ok(data) if data.is_empty() => return Ok(got),
                            Ok(data) => got += data.len(),
                            Err(errno) => return Err(errno),
                        }
                    }
                })
            })
            .collect::<Result<_, _>>()?;
        for n in 0..MESSAGES {
            from.say(b"0123456789")?;
            // So that readers wait again and again.
            if n % 10 == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        let _ = from.shutdown(libc::SHUT_WR);
        let mut all = Ok(0);
        for reader in readers {
            match (reader.done(connect), all) {
                (Some(Ok(got)), Ok(sum)) => all = Ok(sum + got),
                (None, Ok(_)) => all = Err(Errno::ETIMEDOUT),
                (Some(Err(errno)), Ok(_)) => all = Err(errno),
                (_, Err(_)) => {}
            }
        }
        Ok(said(all))
    })
}

fn peek_all(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let sending = pieces(&from)?;
        let peeked = to.hear(connect, 18, libc::MSG_PEEK | libc::MSG_WAITALL)?;
        sending.done(connect);
        to.gather(connect, 18);
        Ok(format!("{peeked}, then {}", to.hear(connect, 18, 0)?))
    })
}
