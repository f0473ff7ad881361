//! Rows that take a while.

use super::{
    Class, Connect, Failed, Row,
    stage::{Pair, Socket, accept, connect_to, each_way, failed, listen, pair, said},
};
use std::time::Duration;

pub static ROWS: &[Row] = &[
    Row {
        id: "keep-alive",
        title: "seconds of silence with keep-alive every second, then data",
        meaning: "connections that are silent for a while break",
        class: Class::Behaviour,
        quick: false,
        run: keep_alive,
    },
    Row {
        id: "long-silence",
        title: "ten seconds without anything, then data both ways",
        meaning: "connections that are silent for a while break",
        class: Class::Behaviour,
        quick: false,
        run: silence,
    },
    Row {
        id: "many-connections",
        title: "10 000 short connections to one server",
        meaning: "some of many short connections fail or get wrong answers",
        class: Class::Order,
        quick: false,
        run: many,
    },
    Row {
        id: "repaired",
        title: "TCP_REPAIR, switched on in the middle",
        meaning: "what checkpoints connections (CRIU) finds no data in them",
        class: Class::Behaviour,
        quick: false,
        run: repaired,
    },
];

/// A question and an answer.
fn exchange(connect: &dyn Connect, from: &Socket, to: &Socket) -> Result<String, Failed> {
    from.say(b"question")?;
    let question = to.hear(connect, 9, 0)?;
    to.say(b"answer")?;
    Ok(format!("{question}, {}", from.hear(connect, 9, 0)?))
}

fn keep_alive(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let mut seen = vec![exchange(connect, &from, &to)?];
        for (level, option) in [
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        ] {
            for socket in [&from, &to] {
                let set = socket.set(level, option, 1);
                set.map_err(failed("set keep-alive"))?;
            }
        }
        // An unanswered probe would end it.
        seen.push(said(from.poll(libc::POLLIN, Duration::from_millis(3500))));
        seen.push(exchange(connect, &from, &to)?);
        Ok(seen.join(", "))
    })
}

fn silence(connect: &dyn Connect) -> Result<String, Failed> {
    let pairs = [pair(connect)?, pair(connect)?];
    let mut seen = Vec::new();
    let ways = |Pair { client, server }: &Pair| {
        Ok::<_, Failed>([
            exchange(connect, client, server)?,
            exchange(connect, server, client)?,
        ])
    };
    // One that was used before, one that was not.
    seen.extend(ways(&pairs[0])?);
    std::thread::sleep(Duration::from_secs(10));
    for pair in &pairs {
        seen.extend(ways(pair)?);
    }
    Ok(seen.join(", "))
}

fn many(connect: &dyn Connect) -> Result<String, Failed> {
    let listener = listen(connect, &[])?;
    for n in 0..10_000u32 {
        let client = connect_to(connect, &listener, &[])?;
        let server = accept(connect, &listener)?;
        // Long enough not to be taken for one that is not worth it.
        for m in 0..5 {
            let number = (n * 5 + m).to_be_bytes();
            client.say(&number)?;
            let up = server.hear_now(connect, 9);
            server.say(&number)?;
            let down = client.hear_now(connect, 9);
            if (up.as_deref(), down.as_deref()) != (Ok(&number), Ok(&number)) {
                return Ok(format!(
                    "{up:?}, {down:?} in exchange {m} of connection {n}"
                ));
            }
        }
    }
    Ok("every answer is right".into())
}

fn repaired(connect: &dyn Connect) -> Result<String, Failed> {
    // linux/tcp.h
    const TCP_REPAIR: i32 = 19;
    const TCP_REPAIR_QUEUE: i32 = 20;
    const TCP_RECV_QUEUE: i32 = 1;
    const OFF_WITHOUT_PROBE: i32 = -1;
    each_way(connect, |from, to| {
        let mut seen = vec![exchange(connect, &from, &to)?];
        from.say(b"waiting")?;
        to.gather(connect, 7);
        let set = |option, value| said(to.set(libc::IPPROTO_TCP, option, value).map(|()| "set"));
        seen.push(set(TCP_REPAIR, 1));
        seen.push(set(TCP_REPAIR_QUEUE, TCP_RECV_QUEUE));
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        seen.push(super::stage::heard(to.recv(9, flags)));
        seen.push(set(TCP_REPAIR, OFF_WITHOUT_PROBE));
        seen.push(to.hear(connect, 9, 0)?);
        for _ in 0..2 {
            seen.push(exchange(connect, &from, &to)?);
            seen.push(exchange(connect, &to, &from)?);
        }
        Ok(seen.join(", "))
    })
}
