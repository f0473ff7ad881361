//! Rows about waiting for a socket.

use super::{
    Class, Connect, Failed, Row,
    stage::{Pair, pair, said},
};

pub static ROWS: &[Row] = &[Row {
    id: "poll",
    title: "poll",
    meaning: "programs that wait by poll(2) wait too long, or for nothing",
    class: Class::Behaviour,
    quick: true,
    run: poll,
}];

fn poll(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = pair(connect)?;
    let events = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
    let now = |seen: &mut Vec<String>| seen.push(said(server.poll(events, Default::default())));
    let mut seen = Vec::new();
    now(&mut seen);
    client.say(b"hello")?;
    seen.push(said(server.poll(libc::POLLIN, connect.patience())));
    now(&mut seen);
    seen.push(server.hear(connect, 9, 0)?);
    now(&mut seen);
    Ok(seen.join(", "))
}
