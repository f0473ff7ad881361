//! Rows about calls that send, and about splice both ways.

use super::{
    Class, Connect, Failed, Row, SocketOption, message,
    stage::{LATE, MOMENT, Pair, Socket, Work, each_way, failed, heard, pair_with, said},
    stream::{self, Reader},
};
use nix::{errno::Errno, sys::memfd};
use std::{
    os::fd::{AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

pub static ROWS: &[Row] = &[
    Row {
        id: "splice-out",
        title: "splice from a socket to a pipe",
        meaning: "programs that read by splice(2) (Go's io.Copy, HAProxy) get EAGAIN for ever",
        class: Class::Behaviour,
        quick: true,
        run: splice_out,
    },
    Row {
        id: "splice-in",
        title: "splice from a pipe to a socket",
        meaning: "programs that send by splice(2) (Go's io.Copy, HAProxy) send other data",
        class: Class::Order,
        quick: true,
        run: splice_in,
    },
    Row {
        id: "sendfile",
        title: "sendfile",
        meaning: "programs that send files by sendfile(2) (nginx, Kafka) send other data",
        class: Class::Order,
        quick: true,
        run: sendfile,
    },
    Row {
        id: "zerocopy",
        title: "MSG_ZEROCOPY, SO_ZEROCOPY set before connecting",
        meaning: "programs that send without copying (MSG_ZEROCOPY) wait for \
                  completions that never come, or send other data",
        class: Class::Behaviour,
        quick: true,
        run: zerocopy,
    },
    Row {
        id: "zerocopy-later",
        title: "MSG_ZEROCOPY, SO_ZEROCOPY set in the middle",
        meaning: "programs that turn MSG_ZEROCOPY on for an open connection are told of other \
                  sends than they made, or of none",
        class: Class::Behaviour,
        quick: true,
        run: zerocopy_later,
    },
    Row {
        id: "more-to-come",
        title: "MSG_MORE and TCP_CORK",
        meaning: "data sent with MSG_MORE or TCP_CORK comes late, or in another order",
        class: Class::Order,
        quick: true,
        run: more_to_come,
    },
    Row {
        id: "no-delay",
        title: "TCP_NODELAY and many small messages",
        meaning: "small messages are lost or change places with TCP_NODELAY",
        class: Class::Order,
        quick: true,
        run: no_delay,
    },
    Row {
        id: "many-buffers",
        title: "writev with hundreds of buffers",
        meaning: "programs that send many buffers by one call (writev) send other data",
        class: Class::Order,
        quick: true,
        run: many_buffers,
    },
    Row {
        id: "send-timeout",
        title: "SO_SNDTIMEO with a reader that does not read",
        meaning: "sends with a timeout (SO_SNDTIMEO) never end",
        class: Class::Behaviour,
        quick: true,
        run: send_timeout,
    },
    Row {
        id: "send-nothing",
        title: "sending no bytes",
        meaning: "sending nothing sends something, or fails",
        class: Class::Behaviour,
        quick: true,
        run: send_nothing,
    },
];

/// The ends of a pipe, to read from and to write to.
fn pipe() -> Result<(OwnedFd, OwnedFd), Failed> {
    nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(failed("make a pipe"))
}

fn splice(from: i32, to: i32, len: usize, flags: u32) -> Result<usize, Errno> {
    let none = std::ptr::null_mut();
    // SAFETY: no offsets are given.
    let moved = unsafe { libc::splice(from, none, to, none, len, flags) };
    Errno::result(moved).map(|moved| moved as usize)
}

fn splice_out(connect: &dyn Connect) -> Result<String, Failed> {
    const LEN: usize = 100_000;
    each_way(connect, |from, to| {
        let (reading, writing) = pipe()?;
        // SPLICE_F_NONBLOCK is about the pipe.
        // SAFETY: no pointers.
        let set = unsafe { libc::fcntl(to.raw(), libc::F_SETFL, libc::O_NONBLOCK) };
        Errno::result(set).map_err(failed("make a socket non-blocking"))?;
        let sender = from.clone();
        let sending = Work::start(&[&from], move || sender.say(&stream::part(0, LEN)))?;
        let mut reader = Reader::new();
        // Readable, and nothing there: that many times is for ever.
        let mut tries = 50;
        while reader.got < LEN as u64 {
            to.poll(libc::POLLIN, connect.patience())
                .map_err(failed("poll"))?;
            let flags = libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MOVE;
            match splice(to.raw(), writing.as_raw_fd(), LEN, flags) {
                Ok(0) => return Ok(format!("{}, then the end", reader.verdict())),
                Ok(moved) => {
                    let mut data = vec![0; moved];
                    let got = nix::unistd::read(&reading, &mut data);
                    let got = got.map_err(failed("read from a pipe"))?;
                    reader.check(&data[..got]);
                }
                Err(Errno::EAGAIN) if tries > 0 => {
                    tries -= 1;
                    std::thread::sleep(MOMENT / 50);
                }
                Err(errno) => return Ok(format!("{}, then {errno:?}", reader.verdict())),
            }
        }
        sending.done(connect);
        Ok(reader.verdict())
    })
}

fn splice_in(connect: &dyn Connect) -> Result<String, Failed> {
    const TOTAL: u64 = 300_000;
    each_way(connect, |from, to| {
        let sender = from.clone();
        let sending = Work::start(&[&from], move || {
            let (reading, writing) = pipe().map_err(|_| Errno::EMFILE)?;
            let mut place = 0;
            while place < TOTAL {
                // Less than a pipe holds, in odd parts, and some sent the other way in between.
                let len = (TOTAL - place).min(30_011);
                let data = stream::part(place, len as usize);
                let (spliced, sent) = data.split_at(data.len() - data.len() / 8);
                nix::unistd::write(&writing, spliced)?;
                let mut left = spliced.len();
                while left > 0 {
                    let flags = libc::SPLICE_F_MOVE | libc::SPLICE_F_MORE;
                    left -= splice(reading.as_raw_fd(), sender.raw(), left, flags)?;
                }
                stream::write(
                    &sender,
                    place + spliced.len() as u64,
                    sent.len() as u64,
                    &[5000],
                )?;
                place += len;
            }
            Ok::<_, Errno>(())
        })?;
        let read = Reader::new().read(&to, TOTAL, connect.patience());
        Ok(match sending.done(connect) {
            Some(Ok(())) => read,
            Some(Err(errno)) => format!("{read}; sending: {errno:?}"),
            None => format!("{read}; sending: {LATE}"),
        })
    })
}

/// A file with the stream in it.
fn file(len: usize) -> Result<OwnedFd, Failed> {
    let file = memfd::memfd_create(c"tcp-battery", memfd::MFdFlags::MFD_CLOEXEC);
    let file = file.map_err(failed("make a file"))?;
    let data = stream::part(0, len);
    let mut rest = &data[..];
    while !rest.is_empty() {
        let written = nix::unistd::write(&file, rest).map_err(failed("write a file"))?;
        rest = &rest[written..];
    }
    Ok(file)
}

fn sendfile(connect: &dyn Connect) -> Result<String, Failed> {
    const TOTAL: usize = 1 << 20;
    let file = std::sync::Arc::new(file(TOTAL)?);
    each_way(connect, |from, to| {
        let (sender, file) = (from.clone(), file.clone());
        let sending = Work::start(&[&from], move || {
            // Not from the beginning of a page on.
            stream::write(&sender, 0, 1001, &[1001])?;
            let mut offset: libc::off_t = 1001;
            while (offset as usize) < TOTAL {
                let left = TOTAL - offset as usize;
                // SAFETY: the offset is valid while this runs.
                let sent = unsafe {
                    libc::sendfile(sender.raw(), file.as_raw_fd(), &raw mut offset, left)
                };
                if Errno::result(sent)? == 0 {
                    return Err(Errno::ENODATA);
                }
            }
            Ok(())
        })?;
        let read = Reader::new().read(&to, TOTAL as u64, connect.patience());
        Ok(match sending.done(connect) {
            Some(Ok(())) => read,
            Some(Err(errno)) => format!("{read}; sending: {errno:?}"),
            None => format!("{read}; sending: {LATE}"),
        })
    })
}

/// Sends without copying, and waits to be told that it is done, by one number for each send.
fn without_copying(connect: &dyn Connect, from: &Socket, to: &Socket) -> Result<String, Failed> {
    const SENDS: u32 = 3;
    const LEN: usize = 100_000;
    let sender = from.clone();
    let sending = Work::start(&[from], move || {
        let data = stream::part(0, LEN * SENDS as usize);
        for message in data.chunks(LEN) {
            if sender.send(message, libc::MSG_ZEROCOPY)? != LEN {
                return Err(Errno::EMSGSIZE);
            }
        }
        // Not to be touched before it is told.
        Ok(data)
    })?;
    let mut seen = vec![Reader::new().read(to, (LEN * SENDS as usize) as u64, connect.patience())];
    let Some(Ok(data)) = sending.done(connect) else {
        seen.push("not sent".into());
        return Ok(seen.join(", "));
    };
    let (mut numbers, mut deadline) = (0, Instant::now() + connect.patience());
    while Instant::now() < deadline {
        let before = numbers;
        // Errors are always polled for.
        let _ = from.poll(0, MOMENT / 10);
        numbers += told_of(from);
        if before < SENDS && numbers >= SENDS {
            // There should be no more.
            deadline = Instant::now() + MOMENT;
        }
    }
    drop(data);
    seen.push(match numbers {
        SENDS => "told of each".into(),
        0 => format!("told of none, {LATE}"),
        some if some < SENDS => format!("told of {some}, {LATE}"),
        _ => "told of more than there were".into(),
    });
    Ok(seen.join(", "))
}

/// The numbers of sends that are told to be done.
fn told_of(from: &Socket) -> u32 {
    const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    let (_, beside) = message::receive(from, &mut [], flags).unwrap_or_default();
    // struct sock_extended_err: an errno, its origin in the fifth byte, the first and the last
    // number from the ninth on.
    let numbers = beside.iter().filter_map(|beside| {
        let word = |at: usize| {
            let bytes = beside.data.get(at..at + 4)?;
            Some(u32::from_ne_bytes(bytes.try_into().ok()?))
        };
        let of_zerocopy = beside.data.get(4) == Some(&SO_EE_ORIGIN_ZEROCOPY);
        of_zerocopy.then_some(word(12)?.wrapping_sub(word(8)?).wrapping_add(1))
    });
    numbers.fold(0, u32::wrapping_add)
}

fn zerocopy(connect: &dyn Connect) -> Result<String, Failed> {
    let set = [SocketOption {
        level: libc::SOL_SOCKET,
        name: libc::SO_ZEROCOPY,
        value: 1,
    }];
    // A kernel without it says so here.
    let Pair { client, server } = pair_with(connect, &set, &set)?;
    let up = without_copying(connect, &client, &server)?;
    let down = without_copying(connect, &server, &client)?;
    Ok(format!("{up}; {down}"))
}

fn zerocopy_later(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"question")?;
        let mut seen = vec![to.hear(connect, 9, 0)?];
        let set = from.set(libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1);
        seen.push(said(set.map(|()| "set")));
        seen.push(without_copying(connect, &from, &to)?);
        from.say(b"question")?;
        seen.push(to.hear(connect, 9, 0)?);
        Ok(seen.join(", "))
    })
}

fn more_to_come(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let send = |data: &[u8], flags| said(from.send(data, flags));
        let mut seen = vec![
            send(b"one, ", libc::MSG_MORE),
            send(b"two, ", libc::MSG_MORE),
        ];
        seen.push(send(b"three", 0));
        to.gather(connect, 15);
        seen.push(heard(to.recv(20, libc::MSG_DONTWAIT)));
        // Never the rest of it: it goes when nothing has followed for a while.
        seen.push(send(b"four", libc::MSG_MORE));
        seen.push(to.hear(connect, 20, 0)?);
        let cork = |on| from.set(libc::IPPROTO_TCP, libc::TCP_CORK, on);
        cork(1).map_err(failed("set TCP_CORK"))?;
        seen.extend([send(b"five, ", 0), send(b"six, ", 0), send(b"seven", 0)]);
        cork(0).map_err(failed("set TCP_CORK"))?;
        to.gather(connect, 16);
        seen.push(heard(to.recv(20, libc::MSG_DONTWAIT)));
        Ok(seen.join(", "))
    })
}

fn no_delay(connect: &dyn Connect) -> Result<String, Failed> {
    const TOTAL: u64 = 30_000;
    each_way(connect, |from, to| {
        for socket in [&from, &to] {
            let set = socket.set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
            set.map_err(failed("set TCP_NODELAY"))?;
        }
        let sender = from.clone();
        let sending = Work::start(&[&from], move || {
            stream::write(&sender, 0, TOTAL, &[1, 2, 3, 50, 7])
        })?;
        let read = Reader::new().read(&to, TOTAL, connect.patience());
        sending.done(connect);
        Ok(read)
    })
}

fn many_buffers(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let mut seen = Vec::new();
        let (mut place, mut reader) = (0, Reader::new());
        // One message of the kernel's own holds 17 pages.
        for (buffers, size) in [(1024, 3), (64, 5000), (200, 4096), (3, 100_000)] {
            let total = (buffers * size) as u64;
            let sender = from.clone();
            let sending = Work::start(&[&from], move || {
                let data = stream::part(place, buffers * size);
                let mut rest = &data[..];
                while !rest.is_empty() {
                    let vectors: Vec<_> = rest
                        .chunks(size)
                        .map(|buffer| libc::iovec {
                            iov_base: buffer.as_ptr().cast_mut().cast(),
                            iov_len: buffer.len(),
                        })
                        .collect();
                    let (pointer, len) = (vectors.as_ptr(), vectors.len() as i32);
                    // SAFETY: so many buffers with their lengths, which are only read.
                    let sent = unsafe { libc::writev(sender.raw(), pointer, len) };
                    rest = &rest[Errno::result(sent)? as usize..];
                }
                Ok::<_, Errno>(())
            })?;
            place += total;
            seen.push(reader.read(&to, place, connect.patience()));
            if !matches!(sending.done(connect), Some(Ok(()))) {
                seen.push("not sent".into());
            }
        }
        Ok(seen.join("; "))
    })
}

fn send_timeout(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let moment = Duration::from_millis(50);
        let words = [moment.as_secs() as i64, moment.subsec_micros().into()];
        let time: Vec<u8> = words
            .iter()
            .flat_map(|&word| (word as libc::time_t).to_ne_bytes())
            .collect();
        let set = from.set_bytes(libc::SOL_SOCKET, libc::SO_SNDTIMEO, &time);
        set.map_err(failed("set SO_SNDTIMEO"))?;
        let sender = from.clone();
        let sending = Work::start(&[&from], move || {
            let data = stream::part(0, 64 << 10);
            let (mut place, most) = (0, 64 << 20);
            loop {
                match sender.send(&data, 0) {
                    Ok(sent) => place += sent as u64,
                    Err(errno) => return (place, format!("{errno:?}")),
                }
                if place >= most {
                    return (place, "endless".into());
                }
            }
        })?;
        let Some((sent, why)) = sending.done(connect) else {
            return Ok(LATE.into());
        };
        // What was sent is there, whatever it is.
        let (mut got, mut data) = (0, vec![0; 1 << 16]);
        while got < sent && to.poll(libc::POLLIN, connect.patience()) != Ok(0) {
            match to.recv_into(&mut data, libc::MSG_DONTWAIT) {
                Ok(0) => break,
                Ok(len) => got += len as u64,
                Err(Errno::EAGAIN) => {}
                Err(errno) => return Ok(format!("{why}, {errno:?}")),
            }
        }
        Ok(format!("{why}, all of it is there: {}", got == sent))
    })
}

fn send_nothing(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let mut seen = vec![said(from.send(b"", 0))];
        seen.push(heard(to.recv(9, libc::MSG_DONTWAIT)));
        from.say(b"data")?;
        seen.push(said(from.send(b"", 0)));
        seen.push(to.hear(connect, 9, 0)?);
        seen.push(heard(to.recv(9, libc::MSG_DONTWAIT)));
        Ok(seen.join(", "))
    })
}
