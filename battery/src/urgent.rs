//! Rows about urgent data (RFC 6093), which few applications still use.

use super::{
    Class, Connect, Failed, Row,
    stage::{Socket, each_way, failed, heard, said},
};
use std::time::Duration;

pub static ROWS: &[Row] = &[
    Row {
        id: "urgent-byte",
        title: "MSG_OOB",
        meaning: "urgent data (MSG_OOB: telnet, rlogin, ABOR in FTP) comes as if it were not urgent",
        class: Class::Behaviour,
        quick: true,
        run: aside,
    },
    Row {
        id: "urgent-byte-inline",
        title: "MSG_OOB with SO_OOBINLINE, and SIOCATMARK",
        meaning: "the mark in the stream (SIOCATMARK) that urgent data sets is not there",
        class: Class::Behaviour,
        quick: true,
        run: inline,
    },
    Row {
        id: "urgent-byte-later",
        title: "MSG_OOB after other data has gone back and forth",
        meaning: "urgent data breaks the order of what is sent before and after it",
        class: Class::Behaviour,
        quick: true,
        run: later,
    },
];

// linux/sockios.h
const SIOCATMARK: libc::Ioctl = 0x8905;

/// Sends it between other data, and ends. Once the end is told, all is there.
fn send_urgent(from: &Socket, to: &Socket, connect: &dyn Connect) -> Result<String, Failed> {
    from.say(b"abc")?;
    from.send(b"!", libc::MSG_OOB)
        .map_err(failed("send urgent data"))?;
    from.say(b"def")?;
    from.shutdown(libc::SHUT_WR).map_err(failed("shut down"))?;
    let _ = to.poll(libc::POLLRDHUP, connect.patience());
    Ok(said(to.poll(libc::POLLPRI, Duration::ZERO)))
}

/// What is read to the end, and before each read whether the mark is there.
fn read_all(to: &Socket) -> String {
    let mut seen = Vec::new();
    // A few reads, whatever they give.
    while seen.len() < 9 {
        let mark = said(to.number(SIOCATMARK));
        let data = to.recv(99, libc::MSG_DONTWAIT);
        let over = data.as_ref().map_or(true, Vec::is_empty);
        seen.push(format!("{mark} {}", heard(data)));
        if over {
            break;
        }
    }
    seen.join(", ")
}

fn aside(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let urgent = |flags| heard(to.recv(9, libc::MSG_OOB | libc::MSG_DONTWAIT | flags));
        let mut seen = vec![urgent(0)];
        seen.push(send_urgent(&from, &to, connect)?);
        seen.push(urgent(libc::MSG_PEEK));
        seen.push(urgent(0));
        seen.push(urgent(0));
        seen.push(read_all(&to));
        Ok(seen.join(", "))
    })
}

fn inline(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        to.set(libc::SOL_SOCKET, libc::SO_OOBINLINE, 1)
            .map_err(failed("set SO_OOBINLINE"))?;
        let mut seen = vec![send_urgent(&from, &to, connect)?];
        seen.push(read_all(&to));
        Ok(seen.join(", "))
    })
}

fn later(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let mut seen = Vec::new();
        for _ in 0..3 {
            from.say(b"question")?;
            seen.push(to.hear(connect, 9, 0)?);
            to.say(b"answer")?;
            seen.push(from.hear(connect, 9, 0)?);
        }
        seen.push(send_urgent(&from, &to, connect)?);
        seen.push(read_all(&to));
        seen.push(heard(to.recv(9, libc::MSG_OOB | libc::MSG_DONTWAIT)));
        to.say(b"answer")?;
        seen.push(from.hear(connect, 9, 0)?);
        Ok(seen.join(", "))
    })
}
