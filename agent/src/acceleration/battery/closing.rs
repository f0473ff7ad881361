//! Rows about how connections end.

use super::{
    Class, Connect, Failed, Row,
    stage::{Pair, Work, pair},
    stream::{self, Reader},
};

pub static ROWS: &[Row] = &[Row {
    id: "half-close",
    title: "a request ended by shutdown, a large answer ended by close",
    meaning: "answers to a client that has ended its side may be cut short",
    class: Class::Behaviour,
    quick: true,
    run: half_close,
}];

fn half_close(connect: &dyn Connect) -> Result<String, Failed> {
    const ANSWER: u64 = 1 << 20;
    let Pair { client, server } = pair(connect)?;
    client.say(b"request")?;
    let _ = client.shutdown(libc::SHUT_WR);
    let mut seen = vec![server.hear(connect, 7, 0)?, server.hear(connect, 7, 0)?];
    let answering = Work::start(&[], move || stream::write(&server, 0, ANSWER, &[50_000]))?;
    seen.push(Reader::new().read(&client, u64::MAX, connect.patience()));
    drop(answering);
    Ok(seen.join(", "))
}
