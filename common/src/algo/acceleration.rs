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
//! **Back-pressure.** The socket's queue has the limit that TCP's has: the receive buffer. As with
//! TCP, what the kernel itself needs for each message counts, or a million messages of a byte
//! would take a gigabyte that is nobody's. The queue tells its bytes only; [`Backlog`] infers how
//! many messages they are.

use crate::abi::acceleration::{Backlog, RCVBUF_LOCK, Reason, SEND_SHUTDOWN, Skip, Traffic};

/// Least limit of a queue where the application has not set SO_RCVBUF: TCP raises its own while
/// a reader keeps up (up to `tcp_rmem`'s maximum, 6 MB by default), which direct data does not make it do.
pub const MIN_QUEUE_LIMIT: u32 = 1 << 20;

/// A message no longer than this always fits an empty queue, as a segment does TCP's.
pub const LONE_MESSAGE: u32 = 1 << 16;

/// What the kernel allocates for a queued message beside its bytes (`struct sk_msg`).
pub const MESSAGE_COST: u32 = 1024;

impl Backlog {
    /// Not fewer messages than are among the bytes still queued, nor many more.
    #[inline(always)]
    pub fn messages(&mut self, queued: u32) -> u32 {
        let read = self.bytes.wrapping_sub(queued);
        if (read.wrapping_sub(self.mark) as i32) >= 0 {
            // All from before the mark is read. A new mark: the old one's messages are its past.
            self.before = if queued == 0 { 0 } else { self.after };
            self.after = 0;
            self.mark = self.bytes;
        }
        self.before.saturating_add(self.after)
    }

    /// A message was handed over.
    #[inline(always)]
    pub fn add(&mut self, size: u32) {
        self.bytes = self.bytes.wrapping_add(size);
        self.after = self.after.saturating_add(1);
    }
}

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
pub fn gate(ends: &impl Ends, backlog: &mut Backlog, size: u32) -> Result<(), Reason> {
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
    let messages = backlog.messages(queued);
    if queued == 0 && size <= LONE_MESSAGE {
        return Ok(());
    }
    let (mut limit, userlocks) = ends.receive_buffer().ok_or(Reason::Closing)?;
    if userlocks & RCVBUF_LOCK == 0 && limit < MIN_QUEUE_LIMIT {
        limit = MIN_QUEUE_LIMIT;
    }
    let cost = messages.saturating_add(1).saturating_mul(MESSAGE_COST);
    if queued.saturating_add(size).saturating_add(cost) > limit {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{collections::VecDeque, vec::Vec};

    proptest! {
        /// Against a queue of messages that a reader takes bytes from.
        #[test]
        fn a_backlog_is_never_less_than_what_is_queued(
            start: u32,
            steps in prop::collection::vec((1u32..100_000, 0u32..300_000), 1..300),
        ) {
            let mut backlog = Backlog { bytes: start, mark: start, ..Backlog::default() };
            let mut queue = VecDeque::new();
            for (size, read) in steps {
                let queued = queue.iter().sum::<u32>();
                let told = backlog.messages(queued);
                prop_assert!(told as usize >= queue.len(), "{told} for {}", queue.len());
                if queued == 0 {
                    prop_assert_eq!(told, 0);
                }
                backlog.add(size);
                queue.push_back(size);
                let mut read = read;
                while let Some(first) = queue.front_mut() {
                    let now = read.min(*first);
                    *first -= now;
                    read -= now;
                    if *first > 0 {
                        break;
                    }
                    queue.pop_front();
                }
            }
        }

        /// A reader that keeps so many messages behind, and never empties the queue.
        #[test]
        fn a_backlog_is_not_much_more_than_what_is_queued(behind in 1usize..200) {
            let mut backlog = Backlog::default();
            for _ in 0..behind {
                backlog.add(7);
            }
            let told: Vec<u32> = (0..2000)
                .map(|_| {
                    backlog.add(7);
                    backlog.messages(7 * behind as u32)
                })
                .collect();
            let most = told.iter().max().copied().unwrap_or_default() as usize;
            prop_assert!(most <= 2 * behind + 2, "{most} for {behind}");
        }
    }
}
