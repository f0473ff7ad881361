//! Rows about back-pressure: who does not read holds back who sends.

use super::{
    Class, Connect, Failed, Row, SocketOption,
    stage::{Pair, failed, pair, pair_with},
    stream::{self, Reader},
};

pub static ROWS: &[Row] = &[
    Row {
        id: "endless-sender",
        title: "a sender that never stops, a reader that never reads",
        meaning: "a slow reader does not hold back its sender, memory fills up without limit",
        class: Class::BackPressure,
        quick: true,
        run: endless_sender,
    },
    Row {
        id: "small-receive-buffer",
        title: "a reader with a small SO_RCVBUF",
        meaning: "SO_RCVBUF and SO_SNDBUF do not limit what a slow reader has waiting",
        class: Class::BackPressure,
        quick: true,
        run: small_receive_buffer,
    },
];

fn endless_sender(connect: &dyn Connect) -> Result<String, Failed> {
    held_back(connect, &pair(connect)?, 8 << 20)
}

fn small_receive_buffer(connect: &dyn Connect) -> Result<String, Failed> {
    let small = |name| SocketOption {
        level: libc::SOL_SOCKET,
        name,
        value: 16 << 10,
    };
    let pair = pair_with(
        connect,
        &[small(libc::SO_RCVBUF)],
        &[small(libc::SO_SNDBUF)],
    )?;
    held_back(connect, &pair, 512 << 10)
}

/// Whether a sender is held back before it has sent `limit` bytes, and whether they all come.
fn held_back(connect: &dyn Connect, pair: &Pair, limit: u64) -> Result<String, Failed> {
    let Pair { client, server } = pair;
    let sent = stream::fill(client, 0, limit, 10_000).map_err(failed("send"))?;
    let held = match sent < limit {
        true => format!("held back before {limit} bytes"),
        false => format!("not held back before {limit} bytes"),
    };
    let received = Reader::new().read(server, sent, connect.patience());
    // How many there are is not the same each time.
    let all = received == format!("{sent} bytes, all right");
    Ok(format!(
        "{held}, {}",
        if all { "all right" } else { &received }
    ))
}
