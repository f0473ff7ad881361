//! Rows about how connections end.

use super::{
    Class, Connect, Failed, Row,
    stage::{LATE, Pair, Socket, Work, each_way, failed, heard, pair, said},
    stream::{self, Reader},
};
use nix::errno::Errno;

pub static ROWS: &[Row] = &[
    Row {
        id: "half-close",
        title: "a request ended by shutdown, a large answer ended by close",
        meaning: "answers to a client that has ended its side may be cut short",
        class: Class::Behaviour,
        quick: true,
        run: half_close,
    },
    Row {
        id: "close-after-data",
        title: "close right after the last data",
        meaning: "the last bytes before a close may be lost",
        class: Class::Order,
        quick: true,
        run: close_after_data,
    },
    Row {
        id: "end-and-no-more",
        title: "writing after shutdown(WR), reading on",
        meaning: "programs that have ended their side can send more, or receive no more",
        class: Class::Behaviour,
        quick: true,
        run: end_and_no_more,
    },
    Row {
        id: "close-with-unread-data",
        title: "close without having read everything",
        meaning: "who sends to a peer that closes without reading does not learn that its data was lost (end of file, not ECONNRESET)",
        class: Class::Behaviour,
        quick: true,
        run: close_unread,
    },
    Row {
        id: "reset-after-data",
        title: "SO_LINGER 0: a reset right after data",
        meaning: "what can still be read after a reset, and its errors, are other ones",
        class: Class::Behaviour,
        quick: true,
        run: reset_after_data,
    },
    Row {
        id: "reset-while-reading",
        title: "a reset while the peer waits in a read",
        meaning: "a blocking read does not end with ECONNRESET when the peer resets",
        class: Class::Behaviour,
        quick: true,
        run: reset_while_reading,
    },
    Row {
        id: "error-after-reset",
        title: "SO_ERROR after a reset",
        meaning: "programs that ask for a socket's error (SO_ERROR) after a reset get another",
        class: Class::Behaviour,
        quick: true,
        run: error_after_reset,
    },
    Row {
        id: "shutdown-read",
        title: "shutdown(RD), then data",
        meaning: "programs that have shut down reading read other than before",
        class: Class::Behaviour,
        quick: true,
        run: shutdown_read,
    },
    Row {
        id: "duplicate-descriptor",
        title: "a duplicate of a descriptor that is closed",
        meaning: "connections break when one of several descriptors is closed",
        class: Class::Behaviour,
        quick: true,
        run: duplicate,
    },
    Row {
        id: "close-both-ways",
        title: "both ends send much and close at once",
        meaning: "the last bytes may be lost where both ends close at the same time",
        class: Class::Order,
        quick: true,
        run: close_both_ways,
    },
    Row {
        id: "end-wakes-reader",
        title: "the peer ends while a read waits",
        meaning: "a blocking read does not end, or fails, when the peer has ended",
        class: Class::Behaviour,
        quick: true,
        run: end_wakes_reader,
    },
    Row {
        id: "end-while-reading",
        title: "shutdown(WR) while another thread waits for the answer",
        meaning: "blocking reads may fail with EAGAIN in programs that end their side and wait for the \
                  answer",
        class: Class::Behaviour,
        quick: true,
        run: end_while_reading,
    },
    Row {
        id: "shutdown-wakes-reader",
        title: "shutdown while another thread waits in a read",
        meaning: "programs that end their threads' reads by shutdown(2) wait for ever, or see an error",
        class: Class::Behaviour,
        quick: true,
        run: shutdown_wakes_reader,
    },
];

fn half_close(connect: &dyn Connect) -> Result<String, Failed> {
    const ANSWER: u64 = 1 << 20;
    each_way(connect, |from, to| {
        from.say(b"request")?;
        let _ = from.shutdown(libc::SHUT_WR);
        let mut seen = vec![to.hear(connect, 7, 0)?, to.hear(connect, 7, 0)?];
        let answering = Work::start(&[], move || stream::write(&to, 0, ANSWER, &[50_000]))?;
        seen.push(Reader::new().read(&from, u64::MAX, connect.patience()));
        drop(answering);
        Ok(seen.join(", "))
    })
}

fn close_after_data(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        // A busy machine's buffers may have no room for all of it, and nobody reads before it is sent.
        let sender = from.clone();
        let sending = Work::start(&[&from], move || {
            stream::write(&sender, 0, 300_000, &[3000])
        })?;
        let Some(sent) = sending.done(connect) else {
            return Ok(LATE.into());
        };
        sent.map_err(failed("send"))?;
        drop(from);
        Ok(Reader::new().read(&to, u64::MAX, connect.patience()))
    })
}

fn end_and_no_more(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"question")?;
        let mut seen = vec![said(from.shutdown(libc::SHUT_WR).map(|()| "shut"))];
        seen.push(said(from.send(b"more", 0)));
        seen.push(to.hear(connect, 20, 0)?);
        seen.push(to.hear(connect, 20, 0)?);
        for answer in [&b"one"[..], b"two"] {
            to.say(answer)?;
            seen.push(from.hear(connect, 20, 0)?);
        }
        drop(to);
        seen.push(from.hear(connect, 20, 0)?);
        Ok(seen.join(", "))
    })
}

fn close_unread(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"never read")?;
        to.gather(connect, 10);
        drop(to);
        let events = from.poll(libc::POLLIN | libc::POLLRDHUP, connect.patience());
        let mut seen = vec![said(events)];
        seen.push(heard(from.recv(9, libc::MSG_DONTWAIT)));
        seen.push(said(from.send(b"more", 0)));
        Ok(seen.join(", "))
    })
}

/// So that closing is a reset.
fn no_linger(socket: &super::stage::Socket) -> Result<(), Failed> {
    // struct linger: on, no seconds.
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    let set = socket.set_bytes(libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    set.map_err(failed("set SO_LINGER"))
}

fn reset_after_data(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"last words")?;
        to.gather(connect, 10);
        no_linger(&from)?;
        drop(from);
        let mut seen = vec![said(to.poll(libc::POLLRDHUP, connect.patience()))];
        for _ in 0..3 {
            seen.push(heard(to.recv(99, libc::MSG_DONTWAIT)));
        }
        seen.push(said(to.send(b"answer", 0)));
        Ok(seen.join(", "))
    })
}

type Reading = Work<Result<Vec<u8>, Errno>>;

/// Has a thread wait in a read, on a connection that was used once, so that it goes the way that it
/// will go.
fn waiting_reader(
    connect: &dyn Connect,
    from: &Socket,
    to: &Socket,
) -> Result<(Vec<String>, Reading), Failed> {
    from.say(b"hello")?;
    let mut seen = vec![to.hear(connect, 9, 0)?];
    let reader = to.clone();
    let mut reading = Work::start(&[to], move || reader.recv(9, 0))?;
    seen.push(format!("waits: {}", reading.goes_on()));
    Ok((seen, reading))
}

fn reset_while_reading(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let (mut seen, reading) = waiting_reader(connect, &from, &to)?;
        no_linger(&from)?;
        drop(from);
        seen.push(reading.done(connect).map_or_else(|| LATE.into(), heard));
        seen.push(to.hear(connect, 9, 0)?);
        Ok(seen.join(", "))
    })
}

fn error_after_reset(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"hello")?;
        let mut seen = vec![to.hear(connect, 9, 0)?];
        no_linger(&from)?;
        drop(from);
        let _ = to.poll(libc::POLLRDHUP, connect.patience());
        for _ in 0..2 {
            let error = to.get(libc::SOL_SOCKET, libc::SO_ERROR);
            seen.push(match error.map(Errno::from_raw) {
                Ok(Errno::UnknownErrno) => "none".into(),
                error => format!("{error:?}"),
            });
        }
        Ok(seen.join(", "))
    })
}

fn shutdown_read(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"before")?;
        to.gather(connect, 6);
        let mut seen = vec![said(to.shutdown(libc::SHUT_RD).map(|()| "shut"))];
        seen.push(said(
            to.poll(libc::POLLIN | libc::POLLRDHUP, connect.patience()),
        ));
        for _ in 0..2 {
            seen.push(to.hear(connect, 9, 0)?);
        }
        seen.push(said(from.send(b"after", 0)));
        to.gather(connect, 5);
        for _ in 0..2 {
            seen.push(to.hear(connect, 9, 0)?);
        }
        to.say(b"answer")?;
        seen.push(from.hear(connect, 9, 0)?);
        Ok(seen.join(", "))
    })
}

fn duplicate(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let duplicate = |socket: &super::stage::Socket| socket.duplicate();
        let (from_too, to_too) = (duplicate(&from)?, duplicate(&to)?);
        from.say(b"one")?;
        drop(from);
        let mut seen = vec![to_too.hear(connect, 3, 0)?];
        drop(to);
        from_too.say(b"two")?;
        seen.push(to_too.hear(connect, 3, 0)?);
        to_too.say(b"three")?;
        seen.push(from_too.hear(connect, 9, 0)?);
        drop(from_too);
        seen.push(to_too.hear(connect, 3, 0)?);
        Ok(seen.join(", "))
    })
}

fn close_both_ways(connect: &dyn Connect) -> Result<String, Failed> {
    const TOTAL: u64 = 500_000;
    let Pair { client, server } = pair(connect)?;
    let mut ways = Vec::new();
    for end in [&client, &server] {
        let sender = end.clone();
        ways.push(Work::start(&[end], move || {
            stream::write(&sender, 0, TOTAL, &[7000, 11])?;
            sender.shutdown(libc::SHUT_WR)
        })?);
    }
    let reader = client.clone();
    let patience = connect.patience();
    let reading = Work::start(&[&client], move || {
        Reader::new().read(&reader, u64::MAX, patience)
    })?;
    let up = Reader::new().read(&server, u64::MAX, patience);
    let down = reading.done_within(5 * patience);
    for way in ways {
        way.done(connect);
    }
    Ok(format!("{up}; {}", down.unwrap_or_else(|| LATE.into())))
}

fn end_wakes_reader(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let (mut seen, reading) = waiting_reader(connect, &from, &to)?;
        drop(from);
        seen.push(reading.done(connect).map_or_else(|| LATE.into(), heard));
        seen.push(to.hear(connect, 9, 0)?);
        Ok(seen.join(", "))
    })
}

/// Of one thread alone it depends on how soon the end is acknowledged.
fn end_while_reading(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let (mut seen, mut reading) = waiting_reader(connect, &from, &to)?;
        seen.push(said(to.shutdown(libc::SHUT_WR).map(|()| "shut")));
        seen.push(from.hear(connect, 9, 0)?);
        seen.push(format!("waits on: {}", reading.goes_on()));
        from.say(b"answer")?;
        seen.push(reading.done(connect).map_or_else(|| LATE.into(), heard));
        Ok(seen.join(", "))
    })
}

fn shutdown_wakes_reader(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let (mut seen, reading) = waiting_reader(connect, &from, &to)?;
        seen.push(said(to.shutdown(libc::SHUT_RDWR).map(|()| "shut")));
        seen.push(reading.done(connect).map_or_else(|| LATE.into(), heard));
        seen.push(from.hear(connect, 9, 0)?);
        Ok(seen.join(", "))
    })
}
