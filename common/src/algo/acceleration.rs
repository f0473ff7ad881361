//! When a message may go straight to the other end's socket, and whose connections gain by it.
//!
//! **Order.** A receiver reads what was handed to its socket before what came through TCP
//! (`tcp_bpf_recvmsg`, net/ipv4/tcp_bpf.c). A sender may therefore turn from the socket to TCP at
//! any time, but not back: bytes on their way through TCP would be overtaken, and a reader that
//! waits inside `tcp_recvmsg` for the rest of what it wants (MSG_WAITALL, SO_RCVLOWAT) would not
//! be woken. So each direction begins with the socket or never uses it, and what it does begin
//! with is certain: [`gate`] asks that all the sender ever wrote to TCP has been read
//! (`write_seq == copied_seq`). Initial sequence numbers are random (RFC 6528), so the same
//! comparison tells that the two sockets are ends of one connection.
//!
//! **Back-pressure.** The socket's queue has the limit that TCP's has: the receive buffer.

use crate::abi::acceleration::{RCVBUF_LOCK, Reason, SEND_SHUTDOWN, Skip, Traffic};

/// Least limit of a queue where the application has not set SO_RCVBUF: TCP raises its own while
/// a reader keeps up (up to `tcp_rmem`'s maximum, 6 MB by default), which direct data does not make it do.
pub const MIN_QUEUE_LIMIT: u32 = 1 << 20;

/// What decides a message's way, asked for one by one: the last ones are dear, and seldom needed.
pub trait Ends {
    /// Sender: `sk_shutdown`.
    fn shutdown(&self) -> u8;
    /// Either end: its data must pass TCP. None, here and below: the receiver cannot be asked.
    fn unfit(&self) -> Option<bool>;
    /// Sender: the next sequence number that it gives to TCP.
    fn write_seq(&self) -> u32;
    /// Receiver: the next sequence number of TCP that its application reads.
    fn copied_seq(&self) -> Option<u32>;
    /// Receiver: bytes in its queues.
    fn queued(&self) -> Option<u32>;
    /// Receiver: SO_RCVBUF as the kernel counts it, and `sk_userlocks`.
    fn receive_buffer(&self) -> Option<(u32, u8)>;
}

/// Whether a message of `size` bytes may go to the receiver's socket, or why not. To be asked
/// while the sender's socket is locked.
#[inline(always)]
pub fn gate(ends: &impl Ends, size: u32) -> Result<(), Reason> {
    if ends.shutdown() & SEND_SHUTDOWN != 0 {
        return Err(Reason::Closing);
    }
    if ends.write_seq() != ends.copied_seq().ok_or(Reason::Closing)? {
        return Err(Reason::AlreadySent);
    }
    if ends.unfit().ok_or(Reason::Closing)? {
        return Err(Reason::Unfit);
    }
    let queued = ends.queued().ok_or(Reason::Closing)?;
    // One message always fits an empty queue, as one segment does TCP's.
    if queued == 0 {
        return Ok(());
    }
    let (mut limit, userlocks) = ends.receive_buffer().ok_or(Reason::Closing)?;
    if userlocks & RCVBUF_LOCK == 0 && limit < MIN_QUEUE_LIMIT {
        limit = MIN_QUEUE_LIMIT;
    }
    if queued.saturating_add(size) > limit {
        return Err(Reason::QueueFull);
    }
    Ok(())
}

/// What is known of a server whose connections are older than this is forgotten.
pub const FORGET_NS: u64 = 10 * 60 * 1_000_000_000;
/// Beyond this many bytes for each exchange of messages, copying costs more than TCP's way.
pub const MAX_BYTES_PER_EXCHANGE: u64 = 256 * 1024;
/// Beyond this many messages for each that is answered, a connection streams.
pub const MAX_MESSAGES_PER_EXCHANGE: u64 = 64;
/// Below so many exchanges a connection does not repay its enrolment.
pub const MIN_EXCHANGES: u32 = 4;
/// Nothing is concluded from fewer connections, messages or bytes.
const ENOUGH_CONNECTIONS: u64 = 16;
const ENOUGH_MESSAGES: u64 = 1024;
const ENOUGH_BYTES: u64 = 1 << 20;
/// From here on the past weighs half.
const MANY_CONNECTIONS: u64 = 64;
const MANY_BYTES: u64 = 1 << 28;

/// Why a new connection to a server should rather not be enrolled; none if it should.
#[inline(always)]
pub fn judge(traffic: &Traffic, now_ns: u64) -> Option<Skip> {
    if now_ns.saturating_sub(traffic.updated_ns) > FORGET_NS {
        return None;
    }
    let [received, sent] = traffic.messages;
    let (exchanges, most) = if received < sent {
        (received, sent)
    } else {
        (sent, received)
    };
    let bytes = traffic.bytes[0].saturating_add(traffic.bytes[1]);
    let per = exchanges + 1;
    if bytes > ENOUGH_BYTES && bytes > per.saturating_mul(MAX_BYTES_PER_EXCHANGE)
        || most > ENOUGH_MESSAGES && most > per.saturating_mul(MAX_MESSAGES_PER_EXCHANGE)
    {
        return Some(Skip::Stream);
    }
    if traffic.connections >= ENOUGH_CONNECTIONS
        && traffic.short_connections > traffic.connections / 2
    {
        return Some(Skip::Short);
    }
    None
}

/// Adds what a connection did; `received` by the server, else sent by it.
#[inline(always)]
pub fn learn(traffic: &mut Traffic, received: bool, messages: u64, bytes: u64, now_ns: u64) {
    if now_ns.saturating_sub(traffic.updated_ns) > FORGET_NS {
        *traffic = Traffic::default();
    }
    if received {
        traffic.messages[0] = traffic.messages[0].saturating_add(messages);
        traffic.bytes[0] = traffic.bytes[0].saturating_add(bytes);
    } else {
        traffic.messages[1] = traffic.messages[1].saturating_add(messages);
        traffic.bytes[1] = traffic.bytes[1].saturating_add(bytes);
    }
    traffic.updated_ns = now_ns;
    if traffic.bytes[0] > MANY_BYTES || traffic.bytes[1] > MANY_BYTES {
        traffic.messages[0] /= 2;
        traffic.messages[1] /= 2;
        traffic.bytes[0] /= 2;
        traffic.bytes[1] /= 2;
    }
}

/// Counts a connection that ended after so many exchanges.
#[inline(always)]
pub fn ended(traffic: &mut Traffic, exchanges: u32) {
    if traffic.connections > MANY_CONNECTIONS {
        traffic.connections /= 2;
        traffic.short_connections /= 2;
    }
    traffic.connections += 1;
    if exchanges < MIN_EXCHANGES {
        traffic.short_connections += 1;
    }
}
