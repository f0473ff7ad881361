//! Rows about waiting for a socket.

use super::{
    Class, Connect, Failed, Row,
    stage::{LATE, MOMENT, Socket, Work, each_way, failed, heard, said},
    stream::{self, Reader},
};
use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use std::{os::fd::BorrowedFd, time::Duration};

pub static ROWS: &[Row] = &[
    Row {
        id: "poll",
        title: "poll",
        meaning: "programs that wait by poll(2) wait too long, or for nothing",
        class: Class::Behaviour,
        quick: true,
        run: poll,
    },
    Row {
        id: "select",
        title: "select",
        meaning: "programs that wait by select(2) wait too long, or for nothing",
        class: Class::Behaviour,
        quick: true,
        run: select,
    },
    Row {
        id: "epoll-level",
        title: "epoll, level-triggered, and EPOLLONESHOT",
        meaning: "programs that wait by epoll (Redis, Node.js, Python) wait too long, or for nothing",
        class: Class::Behaviour,
        quick: true,
        run: epoll_level,
    },
    Row {
        id: "epoll-edge",
        title: "epoll, edge-triggered: every message is reported",
        meaning: "programs with edge-triggered loops (nginx, Envoy, Go, tokio) miss data and hang",
        class: Class::Behaviour,
        quick: true,
        run: epoll_edge,
    },
    Row {
        id: "end-is-told",
        title: "EPOLLRDHUP and EPOLLHUP",
        meaning: "programs that wait for their peer to hang up (EPOLLRDHUP) are told too early, late \
                  or never",
        class: Class::Behaviour,
        quick: true,
        run: end_is_told,
    },
    Row {
        id: "room-to-send",
        title: "poll for room to send, before, while and after a reader is behind",
        meaning: "programs that wait until they can send (POLLOUT) wait too long, or for nothing",
        class: Class::Behaviour,
        quick: true,
        run: room,
    },
    Row {
        id: "read-while-there-is-room",
        title: "a blocking read while another thread waits for room to send",
        meaning: "blocking reads fail with EAGAIN in programs that send from another thread",
        class: Class::Behaviour,
        quick: true,
        run: read_while_room,
    },
];

fn poll(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let events = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
        let now = |seen: &mut Vec<String>| seen.push(said(to.poll(events, Default::default())));
        let mut seen = Vec::new();
        now(&mut seen);
        from.say(b"hello")?;
        seen.push(said(to.poll(libc::POLLIN, connect.patience())));
        now(&mut seen);
        seen.push(to.hear(connect, 9, 0)?);
        now(&mut seen);
        Ok(seen.join(", "))
    })
}

fn select(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        // Which of reading, writing and exceptions are ready. Sets are as long as the descriptor needs: the kernel takes longer ones
        // than `fd_set`, whose 1,024 a program with many sockets exceeds.
        const BITS: usize = libc::c_ulong::BITS as usize;
        let ready = |wait: Duration| {
            let (word, bit) = (to.raw() as usize / BITS, to.raw() as usize % BITS);
            let mut sets = [const { Vec::<libc::c_ulong>::new() }; 3];
            for set in &mut sets {
                set.resize(word + 1, 0);
                set[word] = 1 << bit;
            }
            let mut time = libc::timeval {
                tv_sec: wait.as_secs() as libc::time_t,
                tv_usec: wait.subsec_micros().into(),
            };
            let [read, write, except] = sets.each_mut().map(|set| set.as_mut_ptr().cast());
            // SAFETY: sets of this many descriptors, of which the kernel reads and writes whole words.
            Errno::result(unsafe { libc::select(to.raw() + 1, read, write, except, &mut time) })?;
            Ok(sets.each_ref().map(|set| set[word] >> bit & 1 != 0))
        };
        let ready = |wait| said(ready(wait).map(|sets| format!("{sets:?}")));
        let mut seen = vec![ready(Duration::ZERO)];
        from.say(b"hello")?;
        to.gather(connect, 5);
        seen.push(ready(connect.patience()));
        seen.push(to.hear(connect, 9, 0)?);
        seen.push(ready(Duration::ZERO));
        Ok(seen.join(", "))
    })
}

/// Waits for one socket.
struct Watch(Epoll);

impl Watch {
    fn new(of: &Socket, events: EpollFlags) -> Result<Self, Failed> {
        let what = "make an epoll";
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed(what))?;
        // SAFETY: open as long as the socket is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(of.raw()) };
        epoll
            .add(fd, EpollEvent::new(events, 0))
            .map_err(failed(what))?;
        Ok(Self(epoll))
    }

    /// Asks again, for a socket that was told once.
    fn again(&self, of: &Socket, events: EpollFlags) -> Result<(), Failed> {
        // SAFETY: open as long as the socket is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(of.raw()) };
        self.0
            .modify(fd, &mut EpollEvent::new(events, 0))
            .map_err(failed("change an epoll"))
    }

    fn wait(&self, wait: Duration) -> Result<Option<EpollFlags>, Errno> {
        let mut events = [EpollEvent::empty()];
        let wait = EpollTimeout::try_from(wait).unwrap_or(EpollTimeout::ZERO);
        Ok(match self.0.wait(&mut events, wait)? {
            0 => None,
            _ => Some(events[0].events()),
        })
    }

    /// As [`Self::wait`], in words.
    fn told(&self, wait: Duration) -> String {
        let names = |events: EpollFlags| {
            let names = events.iter_names().map(|(name, _)| name);
            names.collect::<Vec<_>>().join("|")
        };
        said(
            self.wait(wait)
                .map(|events| events.map_or("nothing".into(), names)),
        )
    }
}

const NOW: Duration = Duration::ZERO;

fn epoll_level(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let watch = Watch::new(&to, EpollFlags::EPOLLIN)?;
        let mut seen = vec![watch.told(NOW)];
        from.say(b"hello")?;
        for _ in 0..2 {
            seen.push(watch.told(connect.patience()));
        }
        seen.push(to.hear(connect, 3, 0)?);
        seen.push(watch.told(NOW));
        seen.push(to.hear(connect, 3, 0)?);
        seen.push(watch.told(NOW));
        // Somebody who waits already.
        let sender = from.clone();
        let later = Work::start(&[&from], move || {
            std::thread::sleep(MOMENT / 10);
            sender.say(b"later")
        })?;
        seen.push(watch.told(connect.patience()));
        later.done(connect);
        // Told once; asked for again, what is still there is told again.
        let once = EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT;
        for _ in 0..2 {
            watch.again(&to, once)?;
            seen.push(watch.told(connect.patience()));
            seen.push(watch.told(NOW));
        }
        seen.push(to.hear(connect, 9, 0)?);
        watch.again(&to, once)?;
        seen.push(watch.told(NOW));
        Ok(seen.join(", "))
    })
}

fn epoll_edge(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let watch = Watch::new(&to, EpollFlags::EPOLLIN | EpollFlags::EPOLLET)?;
        // One after the other, each read until there is no more.
        for n in 0..300u32 {
            from.say(&n.to_be_bytes())?;
            let mut got = Vec::new();
            while got.len() < 4 {
                if watch.wait(connect.patience()) == Ok(None) {
                    return Ok(format!("message {n}: {LATE}"));
                }
                loop {
                    match to.recv(9, libc::MSG_DONTWAIT) {
                        Ok(data) if !data.is_empty() => got.extend(data),
                        Err(Errno::EAGAIN) => break,
                        other => return Ok(format!("message {n}: {}", heard(other))),
                    }
                }
            }
            if got != n.to_be_bytes() {
                return Ok(format!("message {n}: {got:?}"));
            }
        }
        // What is left is told with what comes later, and only then.
        let mut seen = vec!["every message".to_owned()];
        for piece in [b"a", b"b"] {
            from.say(piece)?;
            seen.push(watch.told(connect.patience()));
            seen.push(watch.told(MOMENT / 4));
        }
        Ok(seen.join(", "))
    })
}

fn end_is_told(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let watch = Watch::new(&to, EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP)?;
        from.say(b"last")?;
        to.gather(connect, 4);
        let mut seen = vec![watch.told(NOW)];
        let _ = from.shutdown(libc::SHUT_WR);
        let _ = to.poll(libc::POLLRDHUP, connect.patience());
        seen.push(watch.told(NOW));
        seen.push(to.hear(connect, 9, 0)?);
        seen.push(watch.told(NOW));
        seen.push(to.hear(connect, 9, 0)?);
        to.say(b"answer")?;
        let _ = to.shutdown(libc::SHUT_WR);
        let _ = to.poll(libc::POLLHUP, connect.patience());
        seen.push(watch.told(NOW));
        let watch = Watch::new(&from, EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP)?;
        let _ = from.poll(libc::POLLHUP, connect.patience());
        seen.push(watch.told(NOW));
        seen.push(from.hear(connect, 9, 0)?);
        seen.push(from.hear(connect, 9, 0)?);
        Ok(seen.join(", "))
    })
}

fn room(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let watch = Watch::new(&from, EpollFlags::EPOLLOUT | EpollFlags::EPOLLET)?;
        let mut seen = vec![watch.told(connect.patience())];
        let sent = stream::fill(&from, 0, 64 << 20, 10_000).map_err(failed("send"))?;
        while watch.wait(NOW).map_err(failed("wait"))?.is_some() {}
        seen.push(said(from.poll(libc::POLLOUT, NOW)));
        let mut reader = Reader::new();
        let read = reader.read(&to, sent, connect.patience());
        seen.push((read == format!("{sent} bytes, all right")).to_string());
        seen.push(watch.told(connect.patience()));
        seen.push(said(from.poll(libc::POLLOUT, connect.patience())));
        Ok(seen.join(", "))
    })
}

fn read_while_room(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let reader = to.clone();
        let mut reading = Work::start(&[&to], move || reader.recv(9, 0))?;
        let sent = stream::fill(&to, 0, 64 << 20, 10_000).map_err(failed("send"))?;
        let sender = to.clone();
        let sending = Work::start(&[&to], move || {
            stream::write(&sender, sent, 10_000, &[10_000])
        })?;
        // That one is woken when there is room; the reader must not be.
        let mut drain = Reader::new();
        let all = sent + 10_000;
        let drained = drain.read(&from, all, connect.patience());
        sending.done(connect);
        let mut seen = vec![(drained == format!("{all} bytes, all right")).to_string()];
        seen.push(format!("waits: {}", reading.goes_on()));
        from.say(b"data")?;
        let got = reading.done(connect);
        seen.push(got.map_or_else(|| LATE.into(), heard));
        Ok(seen.join(", "))
    })
}
