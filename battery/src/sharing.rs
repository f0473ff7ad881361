//! Rows about sockets that several threads or processes use, and processes that are killed.
//!
//! Children of this process may only do system calls: another of its threads may have held a
//! lock, of the allocator for example, when they were made.

use super::{
    Class, Connect, Failed, Row, SocketOption,
    stage::{LATE, MOMENT, Pair, Socket, Work, each_way, failed, heard, pair_with, said},
    stream::{self, Reader},
};
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork},
};
use std::time::{Duration, Instant};

pub static ROWS: &[Row] = &[
    Row {
        id: "two-writers",
        title: "two threads that send on one socket",
        meaning: "messages of threads that share a socket are torn apart or change places",
        class: Class::Order,
        quick: true,
        run: two_writers,
    },
    Row {
        id: "two-processes-write",
        title: "two processes that send on one socket",
        meaning: "messages of processes that share a socket are torn apart or change places",
        class: Class::Order,
        quick: false,
        run: two_processes,
    },
    Row {
        id: "writer-killed",
        title: "a sender killed in the middle of a write",
        meaning: "what a killed program had sent is lost or wrong",
        class: Class::Order,
        quick: false,
        run: writer_killed,
    },
    Row {
        id: "reader-killed",
        title: "a receiver killed while it waits for data",
        meaning: "who talks to a program that is killed does not learn it",
        class: Class::Behaviour,
        quick: false,
        run: reader_killed,
    },
    Row {
        id: "slow-reader-killed",
        title: "a receiver killed with data unread",
        meaning: "who sends to a program that is killed does not learn that data was lost",
        class: Class::Behaviour,
        quick: false,
        run: slow_reader_killed,
    },
];

const RECORD: usize = 16;
const RECORDS: u32 = 2000;

/// Whose it is, its number, and its number again.
fn record(who: u8, n: u32) -> [u8; RECORD] {
    let mut record = [who; RECORD];
    record[4..8].copy_from_slice(&n.to_be_bytes());
    record[12..].copy_from_slice(&n.to_be_bytes());
    record
}

/// Reads records of two writers to the end.
fn read_records(to: &Socket, connect: &dyn Connect) -> Result<String, Failed> {
    let reader = to.clone();
    let reading = Work::start(&[to], move || {
        let mut all = Vec::new();
        loop {
            match reader.recv(5000, libc::MSG_DONTWAIT) {
                Ok(data) if data.is_empty() => return Ok(all),
                Ok(data) => all.extend(data),
                Err(Errno::EAGAIN) => drop(reader.poll(libc::POLLIN, MOMENT)),
                Err(errno) => return Err(errno),
            }
        }
    })?;
    let all = match reading.done_within(5 * connect.patience()) {
        Some(Ok(all)) => all,
        Some(Err(errno)) => return Ok(format!("{errno:?}")),
        None => return Ok(LATE.into()),
    };
    let mut next = [0; 2];
    for got in all.chunks(RECORD) {
        let who = usize::from(got[0] == b'B');
        if got != record(b"AB"[who], next[who]) {
            return Ok(format!("a torn or displaced message after {next:?}"));
        }
        next[who] += 1;
    }
    Ok(format!("{next:?} messages, each whole and in its order"))
}

/// With room for all that is sent: a sender that waits for room lets others in between, in the
/// middle of a message, also on plain connections.
fn roomy_pair(connect: &dyn Connect) -> Result<Pair, Failed> {
    let roomy = [libc::SO_RCVBUF, libc::SO_SNDBUF].map(|name| SocketOption {
        level: libc::SOL_SOCKET,
        name,
        value: 1 << 20,
    });
    pair_with(connect, &roomy, &roomy)
}

fn write_records(to: &Socket, who: u8) -> Result<(), Errno> {
    for n in 0..RECORDS {
        let record = record(who, n);
        if to.send(&record, 0)? != record.len() {
            return Err(Errno::EMSGSIZE);
        }
    }
    Ok(())
}

fn two_writers(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = roomy_pair(connect)?;
    let other = client.clone();
    let writing = Work::start(&[&client], move || write_records(&other, b'A'))?;
    let both = Work::start(&[&client], {
        let (patience, client) = (connect.patience(), client.clone());
        move || {
            let own = write_records(&client, b'B');
            let others = writing.done_within(5 * patience);
            let _ = client.shutdown(libc::SHUT_WR);
            (own, others)
        }
    })?;
    let read = read_records(&server, connect)?;
    Ok(match both.done(connect) {
        Some((Ok(()), Some(Ok(())))) => read,
        Some((own, others)) => format!("{read}; sending: {own:?}, {others:?}"),
        None => format!("{read}; sending: {LATE}"),
    })
}

/// A child that has only one socket of this process, makes system calls with it and ends.
struct Child {
    pid: Pid,
    ended: bool,
}

impl Child {
    fn start(keep: &Socket, work: impl FnOnce(libc::c_int)) -> Result<Self, Failed> {
        // SAFETY: the child does system calls only, and never returns.
        match unsafe { fork() }.map_err(failed("fork"))? {
            ForkResult::Parent { child } => Ok(Self {
                pid: child,
                ended: false,
            }),
            ForkResult::Child => {
                let fd = keep.raw();
                // SAFETY: system calls without memory; the descriptors are the child's own copies,
                // which nothing in it will use or close again.
                unsafe {
                    libc::syscall(libc::SYS_close_range, 0, fd - 1, 0);
                    libc::syscall(libc::SYS_close_range, fd + 1, u32::MAX, 0);
                }
                work(fd);
                // SAFETY: does not return.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Whether it ends by itself.
    fn ends(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.ended && Instant::now() < deadline {
            let alive = Ok(WaitStatus::StillAlive);
            self.ended = waitpid(self.pid, Some(WaitPidFlag::WNOHANG)) != alive;
            std::thread::sleep(Duration::from_millis(1));
        }
        self.ended
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Its number is its own until it is waited for.
        if !self.ended {
            let _ = kill(self.pid, Signal::SIGKILL);
            let _ = waitpid(self.pid, None);
        }
    }
}

/// Only a system call.
fn wait_to_be_killed() {
    loop {
        // SAFETY: waits for a signal.
        unsafe { libc::pause() };
    }
}

/// Sends what is prepared; only system calls.
fn send_raw(fd: libc::c_int, data: &[u8], size: usize) {
    for message in data.chunks(size) {
        // SAFETY: a pointer and the length of what it points to.
        let sent = unsafe {
            libc::send(
                fd,
                message.as_ptr().cast(),
                message.len(),
                libc::MSG_NOSIGNAL,
            )
        };
        if sent < 0 {
            return;
        }
    }
}

fn two_processes(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = roomy_pair(connect)?;
    let records: Vec<u8> = (0..RECORDS).flat_map(|n| record(b'B', n)).collect();
    let mut child = Child::start(&client, |fd| send_raw(fd, &records, RECORD))?;
    let (writer, patience) = (client.clone(), 5 * connect.patience());
    let writing = Work::start(&[&client], move || {
        let own = write_records(&writer, b'A');
        let other = child.ends(patience);
        let _ = writer.shutdown(libc::SHUT_WR);
        (own, other)
    })?;
    let read = read_records(&server, connect)?;
    Ok(match writing.done(connect) {
        Some((Ok(()), true)) => read,
        other => format!("{read}; sending: {other:?}"),
    })
}

fn writer_killed(connect: &dyn Connect) -> Result<String, Failed> {
    const TOTAL: usize = 16 << 20;
    let data = stream::part(0, TOTAL);
    each_way(connect, |from, to| {
        let child = Child::start(&from, |fd| {
            send_raw(fd, &data, 70_000);
            wait_to_be_killed();
        })?;
        drop(from);
        let mut reader = Reader::new();
        reader.read(&to, 1 << 20, connect.patience());
        // It has filled the buffers by now, and waits in the middle of a message.
        std::thread::sleep(MOMENT);
        drop(child);
        let read = reader.read(&to, u64::MAX, connect.patience());
        let own = format!("{} bytes, all right, then the end", reader.got);
        Ok(match read == own && reader.got < TOTAL as u64 {
            true => "what it had sent, then the end".into(),
            false => read,
        })
    })
}

/// What the other end is told.
fn told(from: &Socket, connect: &dyn Connect) -> String {
    let events = from.poll(libc::POLLRDHUP, connect.patience());
    let mut seen = vec![said(events)];
    seen.push(heard(from.recv(9, libc::MSG_DONTWAIT)));
    // The first may be what the peer's kernel answers by a reset.
    let _ = from.send(b"more", 0);
    let _ = from.poll(libc::POLLERR, connect.patience());
    seen.push(said(from.send(b"more", 0)));
    seen.join(", ")
}

fn reader_killed(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        from.say(b"question")?;
        let mut buffer = [0u8; 100];
        let child = Child::start(&to, |fd| {
            loop {
                // SAFETY: a pointer and the length of what it points to.
                let got = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
                if got == 8 {
                    send_raw(fd, b"answer", 6);
                }
            }
        })?;
        drop(to);
        let mut seen = vec![from.hear(connect, 9, 0)?];
        std::thread::sleep(MOMENT);
        drop(child);
        seen.push(told(&from, connect));
        Ok(seen.join(", "))
    })
}

fn slow_reader_killed(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let child = Child::start(&to, |_| wait_to_be_killed())?;
        drop(to);
        from.say(b"never read")?;
        std::thread::sleep(MOMENT);
        drop(child);
        Ok(told(&from, connect))
    })
}
