//! Rows about calls that read.

use super::{
    Class, Connect, Failed, Row,
    stage::{Pair, heard, pair, said},
};

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
        meaning: "programs that ask how much there is to read (FIONREAD) are told another number",
        class: Class::Behaviour,
        quick: true,
        run: bytes_readable,
    },
];

fn read(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = pair(connect)?;
    let mut seen = vec![heard(server.recv(9, libc::MSG_DONTWAIT))];
    client.say(b"hello world")?;
    seen.push(server.hear(connect, 5, 0)?);
    seen.push(server.hear(connect, 50, 0)?);
    seen.push(heard(server.recv(9, libc::MSG_DONTWAIT)));
    Ok(seen.join(", "))
}

fn peek(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = pair(connect)?;
    client.say(b"hello world")?;
    let mut seen = Vec::new();
    for (most, flags) in [
        (5, libc::MSG_PEEK),
        (50, libc::MSG_PEEK),
        (6, 0),
        (50, libc::MSG_PEEK),
        (50, 0),
    ] {
        seen.push(server.hear(connect, most, flags)?);
    }
    seen.push(heard(server.recv(9, libc::MSG_PEEK | libc::MSG_DONTWAIT)));
    Ok(seen.join(", "))
}

fn bytes_readable(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = pair(connect)?;
    let mut seen = vec![said(server.number(libc::FIONREAD))];
    client.say(&[b'x'; 1000])?;
    server.hear(connect, 1, libc::MSG_PEEK)?;
    seen.push(said(server.number(libc::FIONREAD)));
    server.hear(connect, 300, 0)?;
    seen.push(said(server.number(libc::FIONREAD)));
    Ok(seen.join(", "))
}
