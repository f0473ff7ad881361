//! Rows about order: what is sent is what is received.

use super::{
    Class, Connect, Failed, Row, SocketOption,
    stage::{LATE, Pair, Socket, Work, accept, connect_to, each_way, failed, listen, pair, said},
    stream::{self, Reader},
};
use std::time::Duration;

pub static ROWS: &[Row] = &[
    Row {
        id: "first-messages",
        title: "messages sent as soon as connected",
        meaning: "the first messages of a connection may be received in another order than sent",
        class: Class::Order,
        quick: true,
        run: first_messages,
    },
    Row {
        id: "mixed-messages",
        title: "small and large messages both ways, slow and fast readers",
        meaning: "streams may be received in another order than sent",
        class: Class::Order,
        quick: true,
        run: mixed_messages,
    },
    Row {
        id: "message-sizes",
        title: "messages of 1 byte, about 64 KB, 1 MB, 4 MB",
        meaning: "messages of some sizes may not be received as they were sent",
        class: Class::Order,
        quick: true,
        run: message_sizes,
    },
    Row {
        id: "behind-and-again",
        title: "a reader that falls behind and catches up, again and again",
        meaning: "streams may be received in another order than sent once a reader has been behind",
        class: Class::Order,
        quick: true,
        run: behind_again,
    },
    Row {
        id: "deferred-connect",
        title: "TCP_FASTOPEN_CONNECT: connecting with the first data",
        meaning: "the first data of a connection made with TCP Fast Open may come twice, late or not at all",
        class: Class::Order,
        quick: true,
        run: deferred_connect,
    },
];

/// The client sends before the server has accepted, the server before it has read.
fn first_messages(connect: &dyn Connect) -> Result<String, Failed> {
    const ROUNDS: u32 = 40;
    let mut right = 0;
    let mut last = String::new();
    for _ in 0..ROUNDS {
        let listener = listen(connect, &[])?;
        let client = connect_to(connect, &listener, &[])?;
        let greet =
            |socket: &Socket| (0..4).try_for_each(|n| socket.say(&stream::part(n * 1000, 1000)));
        greet(&client)?;
        let server = accept(connect, &listener)?;
        greet(&server)?;
        let [up, down] =
            [&server, &client].map(|socket| Reader::new().read(socket, 4000, connect.patience()));
        let both = format!("up {up}, down {down}");
        if right == 0 || both == last {
            right += 1;
            last = both;
        } else {
            return Ok(format!("{right} times {last}, then {both}"));
        }
    }
    Ok(format!("{right} times {last}"))
}

fn mixed_messages(connect: &dyn Connect) -> Result<String, Failed> {
    const TOTAL: u64 = 1 << 20;
    let sizes: &[&[usize]] = &[
        &[1, 3, 70_000, 17, 4096, 100],
        &[65_536],
        &[100, 1, 1000],
        &[200_000, 5],
    ];
    let mut seen = Vec::new();
    for (n, &sizes) in sizes.iter().enumerate() {
        let Pair { client, server } = pair(connect)?;
        let mut ways = Vec::new();
        for (from, to, slow) in [(&client, &server, n % 2 == 0), (&server, &client, n > 1)] {
            let sender = from.clone();
            let sending = Work::start(&[from], move || stream::write(&sender, 0, TOTAL, sizes))?;
            let (receiver, patience) = (to.clone(), connect.patience());
            let receiving = Work::start(&[to], move || {
                let mut reader = Reader::new();
                if slow {
                    reader.at_once = 40_000;
                    reader.pause = Duration::from_millis(1);
                }
                reader.read(&receiver, TOTAL, patience)
            })?;
            ways.push((sending, receiving));
        }
        for (sending, receiving) in ways {
            let received = receiving.done_within(20 * connect.patience());
            seen.push(received.unwrap_or_else(|| LATE.into()));
            if let Some(Err(errno)) = sending.done(connect) {
                seen.push(format!("sending: {}", said::<u8>(Err(errno))));
            }
        }
    }
    seen.dedup();
    Ok(seen.join("; "))
}

fn message_sizes(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = pair(connect)?;
    let mut seen = Vec::new();
    let (mut place, mut reader) = (0, Reader::new());
    for size in [1, 2, 65_535, 65_536, 65_537, 1 << 20, 4 << 20, 1] {
        let sender = client.clone();
        let sending = Work::start(&[&client], move || {
            stream::write(&sender, place, size, &[size as usize])
        })?;
        place += size;
        seen.push(reader.read(&server, place, connect.patience()));
        if !matches!(sending.done(connect), Some(Ok(()))) {
            seen.push("not sent".into());
        }
    }
    Ok(seen.join("; "))
}

fn behind_again(connect: &dyn Connect) -> Result<String, Failed> {
    each_way(connect, |from, to| {
        let (mut place, mut reader) = (0, Reader::new());
        for size in [5000, 70_000, 1000, 300_000] {
            place = stream::fill(&from, place, 2 << 20, size).map_err(failed("send"))?;
            // Not to the end: what follows comes behind what is still there.
            let most = place - place / 16;
            let read = reader.read(&to, most, connect.patience());
            if read != format!("{most} bytes, all right") {
                return Ok(read);
            }
            // And a few that find a reader who waits.
            let read = reader.read(&to, place, connect.patience());
            if read != format!("{place} bytes, all right") {
                return Ok(read);
            }
            from.say(&stream::part(place, 10))?;
            place += 10;
        }
        drop(from);
        let read = reader.read(&to, u64::MAX, connect.patience());
        Ok(
            match read == format!("{place} bytes, all right, then the end") {
                true => "all right, then the end".into(),
                false => read,
            },
        )
    })
}

fn deferred_connect(connect: &dyn Connect) -> Result<String, Failed> {
    let option = |name, value| SocketOption {
        level: libc::IPPROTO_TCP,
        name,
        value,
    };
    let mut seen = Vec::new();
    // The second connection may know the server's cookie.
    for _ in 0..2 {
        let listener = listen(connect, &[option(libc::TCP_FASTOPEN, 5)])?;
        let option = option(libc::TCP_FASTOPEN_CONNECT, 1);
        let client = connect_to(connect, &listener, &[option])?;
        client.say(&stream::part(0, 1000))?;
        client.say(&stream::part(1000, 1000))?;
        let server = accept(connect, &listener)?;
        server.say(&stream::part(0, 1000))?;
        client.say(&stream::part(2000, 1000))?;
        seen.push(Reader::new().read(&server, 3000, connect.patience()));
        seen.push(Reader::new().read(&client, 1000, connect.patience()));
    }
    Ok(seen.join(", "))
}
