//! How far a connection is, and how long it may be idle then.
//!
//! Stages and times are those of the kernel's nf_conntrack (Documentation/networking/nf_conntrack-sysctl.rst)
//! but for two: an established connection lives for 24 hours, as kube-proxy sets it, instead of five days,
//! and one that a side has closed for an hour, for the other side may be at work for long.

use super::ct_state::{ACK, FIN, RST, SEEN, SYN};

/// The number is that of the time in [`crate::abi::connection::Limits`].
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Nobody has answered the client's first segment.
    SynSent = 0,
    /// The server has, and the client has not acknowledged that.
    SynReceived = 1,
    Established = 2,
    /// One side has closed.
    HalfClosed = 3,
    /// Both have.
    TimeWait = 4,
    /// One side has reset it.
    Reset = 5,
    /// Datagrams one way.
    Unreplied = 6,
    /// Both ways, for a moment: a question and its answer.
    Replied = 7,
    /// Both ways, for longer (kernel commit d535c8a69c19).
    Stream = 8,
    /// An echo request that nobody has answered.
    Echo = 9,
    /// Of a protocol that says nothing of beginnings and ends.
    Other = 10,
    /// An echo request that has its answer.
    EchoReplied = 11,
}

/// Segments of a closed connection that were late have arrived after so many nanoseconds: from then on it may make way.
pub const LATE_NS: u64 = 1_000_000_000;

/// How long datagrams are waited for, of whose end nothing says anything, if somebody else wants what they have.
pub const MAKES_WAY_AFTER_NS: u64 = 3_000_000_000;

/// Seconds that a connection may be idle, by stage.
pub const LIFETIMES: [u32; 16] = [
    120,
    60,
    24 * 3600,
    3600,
    120,
    10,
    30,
    30,
    120,
    30,
    600,
    30,
    600,
    600,
    600,
    600,
];

/// Seconds that a mapping of UDP is kept after its last connection's last packet: as long as any datagrams' connection may
/// be idle. By default that is what RFC 4787 asks for, two minutes (REQ-5).
pub fn of_mapping(lifetimes: &[u32; 16]) -> u32 {
    let of = |stage: Stage| lifetimes[stage as usize];
    of(Stage::Unreplied)
        .max(of(Stage::Replied))
        .max(of(Stage::Stream))
}

/// From when on datagrams both ways are a stream.
pub const STREAM_NS: u64 = 2_000_000_000;

const PROTO_ICMP: u8 = 1;
const PROTO_TCP: u8 = 6;
const PROTO_UDP: u8 = 17;
const PROTO_ICMPV6: u8 = 58;
const PROTO_UDPLITE: u8 = 136;

/// How far a connection is, by what client and server have sent, and from its first to its last packet.
#[inline(always)]
pub const fn stage(proto: u8, client: u8, server: u8, lived_ns: u64) -> Stage {
    match proto {
        PROTO_TCP => tcp(client, server),
        PROTO_ICMP | PROTO_ICMPV6 => match server & SEEN {
            0 => Stage::Echo,
            _ => Stage::EchoReplied,
        },
        PROTO_UDP | PROTO_UDPLITE => {
            if server & SEEN == 0 {
                Stage::Unreplied
            } else if lived_ns < STREAM_NS {
                Stage::Replied
            } else {
                Stage::Stream
            }
        }
        _ => {
            if server & SEEN == 0 {
                Stage::Unreplied
            } else {
                Stage::Other
            }
        }
    }
}

#[inline(always)]
const fn tcp(client: u8, server: u8) -> Stage {
    if (client | server) & RST != 0 {
        Stage::Reset
    } else if client & server & FIN != 0 {
        Stage::TimeWait
    } else if (client | server) & FIN != 0 {
        Stage::HalfClosed
    } else if server & SEEN == 0 {
        Stage::SynSent
    } else if server & SYN != 0 && client & ACK == 0 {
        Stage::SynReceived
    } else {
        Stage::Established
    }
}

impl Stage {
    /// Whether nobody can say yet that both ends want it. Such connections have a limit of their own.
    #[inline(always)]
    pub const fn is_embryonic(self) -> bool {
        matches!(
            self,
            Self::SynSent | Self::SynReceived | Self::Unreplied | Self::Echo
        )
    }

    /// Whether it is a question that has its answer, most likely: datagrams or an echo both ways, for a moment only.
    #[inline(always)]
    pub const fn is_answered(self) -> bool {
        matches!(self, Self::Replied | Self::EchoReplied)
    }

    /// Whether nothing more is to come but what is late.
    #[inline(always)]
    pub const fn is_closed(self) -> bool {
        Self::is_closed_by_number(self as u8)
    }

    /// The same of a stage by its number, which is all that a function of its own is given.
    #[inline(always)]
    pub const fn is_closed_by_number(stage: u8) -> bool {
        stage == Self::TimeWait as u8 || stage == Self::Reset as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::ct_state::next;

    const TCP: u8 = 6;
    const UDP: u8 = 17;

    #[test]
    fn a_tcp_connection_lives_and_dies() {
        let stage = |client, server| stage(TCP, client, server, 0);
        let client = next(0, TCP, 0x02);
        assert_eq!(stage(client, 0), Stage::SynSent);
        let server = next(0, TCP, 0x12);
        assert_eq!(stage(client, server), Stage::SynReceived);
        let client = next(client, TCP, 0x10);
        assert_eq!(stage(client, server), Stage::Established);
        let client = next(client, TCP, 0x11);
        assert_eq!(stage(client, server), Stage::HalfClosed);
        let server = next(server, TCP, 0x11);
        assert_eq!(stage(client, server), Stage::TimeWait);
        assert_eq!(stage(next(client, TCP, 0x04), server), Stage::Reset);
    }

    #[test]
    fn a_connection_found_in_its_middle_is_established_once_both_are_seen() {
        let middle = next(0, TCP, 0x10);
        assert_eq!(stage(TCP, middle, 0, 0), Stage::SynSent);
        assert_eq!(stage(TCP, middle, middle, 0), Stage::Established);
    }

    #[test]
    fn a_mapping_outlives_each_of_its_connections() {
        assert_eq!(of_mapping(&LIFETIMES), 120);
        for stage in [Stage::Unreplied, Stage::Replied, Stage::Stream] {
            let mut lifetimes = LIFETIMES;
            lifetimes[stage as usize] = 3600;
            assert_eq!(of_mapping(&lifetimes), 3600);
        }
    }

    #[test]
    fn datagrams_live_longer_once_answered_for_a_while() {
        let sent = next(0, UDP, 0);
        assert_eq!(stage(UDP, sent, 0, u64::MAX), Stage::Unreplied);
        assert_eq!(stage(UDP, sent, sent, 0), Stage::Replied);
        assert_eq!(stage(UDP, sent, sent, STREAM_NS), Stage::Stream);
    }
}
