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

/// What a queued message counts beside its bytes. The kernel allocates four times as much for it
/// (`struct sk_msg`), so that a queue may take 4 MB of a reader that pauses before its connection
/// falls back for good, if its pod's budget has them ([`super::queue`]); TCP's own may grow to 6.
pub const MESSAGE_COST: u32 = 256;

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

/// Whether a message of `size` bytes may go to the receiver's socket, or why not. If it may: how
/// many messages at most will then wait there. To be asked while the sender's socket is locked.
#[inline(always)]
pub fn gate(ends: &impl Ends, backlog: &mut Backlog, size: u32) -> Result<u32, Reason> {
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
    let waiting = backlog.messages(queued).saturating_add(1);
    if queued == 0 && size <= LONE_MESSAGE {
        return Ok(waiting);
    }
    let (mut limit, userlocks) = ends.receive_buffer().ok_or(Reason::Closing)?;
    if userlocks & RCVBUF_LOCK == 0 && limit < MIN_QUEUE_LIMIT {
        limit = MIN_QUEUE_LIMIT;
    }
    let cost = waiting.saturating_mul(MESSAGE_COST);
    if queued.saturating_add(size).saturating_add(cost) > limit {
        return Err(Reason::QueueFull);
    }
    Ok(waiting)
}

/// What is known of a server whose connections are older than this is forgotten.
pub const FORGET_NS: u64 = 10 * 60 * 1_000_000_000;
/// Beyond this many bytes for each exchange of messages, copying costs more than TCP's way.
pub const MAX_BYTES_PER_EXCHANGE: u64 = 256 * 1024;
/// Beyond this many messages for each that is answered, a connection streams.
pub const MAX_MESSAGES_PER_EXCHANGE: u64 = 64;
/// Below so many exchanges a connection does not repay its enrolment.
pub const MIN_EXCHANGES: u64 = 4;
/// A connection counts as no more than this: enough to make up for others that only look whether
/// the server is there, and not for long.
pub const LASTING_EXCHANGES: u32 = 64;
/// Nothing is concluded from fewer connections, messages or bytes.
const ENOUGH_CONNECTIONS: u64 = 16;
const ENOUGH_MESSAGES: u64 = 1024;
const ENOUGH_BYTES: u64 = 1 << 20;
/// From here on the past weighs half.
const MANY_CONNECTIONS: u64 = 64;
const MANY_BYTES: u64 = 1 << 28;
const MANY_MESSAGES: u64 = 1 << 18;
/// Segments of at least so many bytes are pieces of longer messages, as long as this one.
const FULL_SEGMENT: u64 = 512;
const LONG_MESSAGE: u64 = 1 << 16;

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
    let per = exchanges.saturating_add(1);
    if bytes > ENOUGH_BYTES && bytes > per.saturating_mul(MAX_BYTES_PER_EXCHANGE)
        || most > ENOUGH_MESSAGES && most > per.saturating_mul(MAX_MESSAGES_PER_EXCHANGE)
    {
        return Some(Skip::Stream);
    }
    if traffic.connections >= ENOUGH_CONNECTIONS
        && traffic.exchanges < traffic.connections.saturating_mul(MIN_EXCHANGES)
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
    let [received, sent] = traffic.messages;
    let many = received > MANY_MESSAGES || sent > MANY_MESSAGES;
    if many || traffic.bytes[0] > MANY_BYTES || traffic.bytes[1] > MANY_BYTES {
        traffic.messages[0] /= 2;
        traffic.messages[1] /= 2;
        traffic.bytes[0] /= 2;
        traffic.bytes[1] /= 2;
    }
}

/// Counts a connection that ended after so many exchanges, or that has lasted for so many.
#[inline(always)]
pub fn count(traffic: &mut Traffic, exchanges: u32) {
    if traffic.connections > MANY_CONNECTIONS {
        traffic.connections /= 2;
        traffic.exchanges /= 2;
    }
    traffic.connections += 1;
    let exchanges = match exchanges < LASTING_EXCHANGES {
        true => exchanges,
        false => LASTING_EXCHANGES,
    };
    traffic.exchanges = traffic.exchanges.saturating_add(exchanges.into());
}

/// About how many messages the segments of a connection through TCP were, each way. A long message
/// is many segments; taken for messages, they would make a stream of every answer of some size.
#[inline(always)]
pub fn messages_of(segments: [u64; 2], bytes: [u64; 2]) -> [u64; 2] {
    let one = |segments: u64, others: u64, bytes: u64| {
        if bytes < segments.saturating_mul(FULL_SEGMENT) {
            return segments;
        }
        segments.min(others.max(bytes / LONG_MESSAGE + 1))
    };
    [
        one(segments[0], segments[1], bytes[0]),
        one(segments[1], segments[0], bytes[1]),
    ]
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

        #[test]
        fn the_gate_opens_only_where_order_and_room_are_certain(
            ends in any_ends(),
            backlog in any_backlog(),
            size: u32,
        ) {
            let mut after = backlog;
            let verdict = gate(&ends, &mut after, size);
            if verdict.is_ok() {
                prop_assert_eq!(ends.shutdown & SEND_SHUTDOWN, 0);
                prop_assert_eq!(ends.unfit, Some(false));
                prop_assert_eq!(Some(ends.write_seq), ends.copied_seq);
                let queued = u64::from(ends.queued.unwrap());
                if queued == 0 && size <= LONE_MESSAGE {
                    return Ok(());
                }
                let (rcvbuf, locks) = ends.receive_buffer.unwrap();
                let limit = match locks & RCVBUF_LOCK {
                    0 => rcvbuf.max(MIN_QUEUE_LIMIT),
                    _ => rcvbuf,
                };
                prop_assert!(queued + u64::from(size) <= limit.into());
            }
        }

        /// Neither opens what was shut, nor shuts what was open, for another reason than room.
        #[test]
        fn the_gate_says_full_only_where_all_else_is_well(
            ends in any_ends(),
            backlog in any_backlog(),
            size: u32,
        ) {
            let verdict = gate(&ends, &mut { backlog }, size);
            let well = ends.shutdown & SEND_SHUTDOWN == 0
                && ends.unfit == Some(false)
                && Some(ends.write_seq) == ends.copied_seq
                && ends.queued.is_some()
                && (ends.queued == Some(0) && size <= LONE_MESSAGE || ends.receive_buffer.is_some());
            prop_assert_eq!(well, matches!(verdict, Ok(_) | Err(Reason::QueueFull)));
        }

        #[test]
        fn nothing_that_is_remembered_makes_learning_fail(
            traffic in any_traffic(),
            received: bool,
            messages: u64,
            bytes: u64,
            exchanges: u32,
            segments: [u64; 2],
            both: [u64; 2],
            now: u64,
        ) {
            let mut traffic = traffic;
            judge(&traffic, now);
            learn(&mut traffic, received, messages, bytes, now);
            judge(&traffic, now);
            count(&mut traffic, exchanges);
            judge(&traffic, now);
            let told = messages_of(segments, both);
            prop_assert!(told[0] <= segments[0] && told[1] <= segments[1]);
        }

        /// Whatever a server did, some thousands of questions and answers make it one that answers.
        #[test]
        fn no_past_is_held_against_a_server_for_long(
            streams in prop::collection::vec((any::<bool>(), 1u64..100_000, 1u64..1 << 20), 1..300),
            body in 1u64..100_000,
        ) {
            let mut traffic = Traffic::default();
            for (received, messages, each) in streams {
                learn(&mut traffic, received, messages, messages * each, 1);
                count(&mut traffic, 0);
            }
            let mut connections = 0;
            while judge(&traffic, 1).is_some() {
                // A hundred of them on each connection, through TCP.
                let (segments, bytes) = ([100, 100 * body.div_ceil(1448)], [100 * 80, 100 * body]);
                let [received, sent] = messages_of(segments, bytes);
                learn(&mut traffic, true, received, bytes[0], 1);
                learn(&mut traffic, false, sent, bytes[1], 1);
                count(&mut traffic, 100);
                connections += 1;
                prop_assert!(connections < 200, "{traffic:?}");
            }
        }
    }

    #[derive(Clone, Debug)]
    struct Told {
        shutdown: u8,
        unfit: Option<bool>,
        write_seq: u32,
        copied_seq: Option<u32>,
        queued: Option<u32>,
        receive_buffer: Option<(u32, u8)>,
    }

    impl Ends for Told {
        fn shutdown(&self) -> u8 {
            self.shutdown
        }
        fn unfit(&self) -> Option<bool> {
            self.unfit
        }
        fn write_seq(&self) -> u32 {
            self.write_seq
        }
        fn copied_seq(&self) -> Option<u32> {
            self.copied_seq
        }
        fn queued(&self) -> Option<u32> {
            self.queued
        }
        fn receive_buffer(&self) -> Option<(u32, u8)> {
            self.receive_buffer
        }
    }

    fn any_ends() -> impl Strategy<Value = Told> {
        let some = prop::option::weighted(0.9, any::<u32>());
        // Sizes and limits that are near each other, and any.
        let size = || prop_oneof![Just(0), 0u32..3 << 20, any::<u32>()];
        (
            prop_oneof![Just(0), 0u8..4],
            prop::option::weighted(0.9, prop::bool::weighted(0.1)),
            any::<u32>(),
            some,
            any::<bool>(),
            prop::option::weighted(0.9, size()),
            prop::option::weighted(0.9, (size(), 0u8..8)),
        )
            .prop_map(
                |(shutdown, unfit, write_seq, copied, same, queued, receive_buffer)| Told {
                    shutdown,
                    unfit,
                    write_seq,
                    copied_seq: copied.map(|seq| if same { write_seq } else { seq }),
                    queued,
                    receive_buffer,
                },
            )
    }

    fn any_backlog() -> impl Strategy<Value = Backlog> {
        let few = || prop_oneof![0u32..2000, any::<u32>()];
        (any::<u32>(), few(), few(), few()).prop_map(|(bytes, mark, before, after)| Backlog {
            bytes,
            mark,
            before,
            after,
        })
    }

    fn any_traffic() -> impl Strategy<Value = Traffic> {
        type Numbers = (u64, u64, [u64; 2], [u64; 2], u64);
        any::<Numbers>().prop_map(
            |(connections, exchanges, messages, bytes, updated_ns)| Traffic {
                connections,
                exchanges,
                messages,
                bytes,
                updated_ns,
            },
        )
    }

    fn after(ways: &[(bool, u64, u64)]) -> Traffic {
        let mut traffic = Traffic::default();
        for &(received, messages, bytes) in ways {
            learn(&mut traffic, received, messages, bytes, 1);
        }
        traffic
    }

    #[test]
    fn streams_are_told_from_questions_and_answers() {
        let judged = |ways: &[_]| judge(&after(ways), 1);
        // Both ways, for a server may send or be sent a stream.
        for server in [true, false] {
            assert_eq!(judged(&[(server, 100, 4 << 20)]), Some(Skip::Stream));
            assert_eq!(judged(&[(server, 5000, 5000)]), Some(Skip::Stream));
            let answered = [(server, 1000, 64_000), (!server, 1000, 64_000_000)];
            assert_eq!(judged(&answered), None, "of 64 kB");
            let answered = [(server, 1000, 64_000), (!server, 1000, 1_000_000_000)];
            assert_eq!(judged(&answered), Some(Skip::Stream), "of a megabyte");
        }
        assert_eq!(judged(&[]), None);
        assert_eq!(judged(&[(true, 10, 500_000)]), None, "not enough to say");
    }

    #[test]
    fn short_connections_are_told_by_what_all_of_them_are_worth() {
        let mut traffic = Traffic::default();
        let mut connections = |exchanges: u32, connections: u32| {
            for _ in 0..connections {
                learn(&mut traffic, true, exchanges.into(), 100, 1);
                learn(&mut traffic, false, exchanges.into(), 100, 1);
                count(&mut traffic, exchanges);
            }
            judge(&traffic, 1)
        };
        assert_eq!(connections(1, 15), None, "not enough to say");
        assert_eq!(connections(1, 1), Some(Skip::Short));
        assert_eq!(
            connections(1_000_000, 1),
            None,
            "one that lasts repays them"
        );
        assert_eq!(connections(1, 15), Some(Skip::Short), "but not for ever");
        assert_eq!(connections(5, 100), None, "the past is forgotten");
    }

    /// As load balancers do, and some load generators.
    #[test]
    fn looking_whether_a_server_is_there_makes_its_other_connections_not_short() {
        let mut traffic = Traffic::default();
        for _ in 0..1000 {
            (0..10).for_each(|_| count(&mut traffic, 0));
            count(&mut traffic, 1_000_000);
        }
        assert_eq!(judge(&traffic, 0), None);
    }

    #[test]
    fn what_was_is_forgotten_with_time() {
        let mut traffic = after(&[(true, 100, 4 << 20)]);
        assert_eq!(judge(&traffic, FORGET_NS + 1), Some(Skip::Stream));
        assert_eq!(judge(&traffic, FORGET_NS + 2), None);
        // And is not brought back by what comes then.
        learn(&mut traffic, true, 1, 1, FORGET_NS + 2);
        assert_eq!(judge(&traffic, FORGET_NS + 2), None);
        assert_eq!(traffic.bytes, [1, 0]);
        // A clock that was read earlier on another processor is no long time.
        let traffic = after(&[(true, 100, 4 << 20)]);
        assert_eq!(judge(&traffic, 0), Some(Skip::Stream));
    }

    #[test]
    fn segments_are_counted_as_the_messages_that_they_were() {
        // Answers of 128 kB.
        assert_eq!(
            messages_of([1000, 91_000], [80_000, 128_000_000]),
            [1000, 1954]
        );
        // Small and middling ones.
        assert_eq!(messages_of([1000, 1000], [80_000, 36_000]), [1000, 1000]);
        assert_eq!(messages_of([1000, 1000], [80_000, 1_400_000]), [1000; 2]);
        // A stream of small messages stays many.
        assert_eq!(messages_of([5000, 0], [5000, 0]), [5000, 0]);
    }
}
