//! How long a translated flow lives.
//!
//! Each direction's entry gathers [`SEEN`], [`SYN`], [`FIN`], [`RST`] bits; the two together
//! give the lifetime. Values follow the kernel's nf_conntrack defaults
//! (Documentation/networking/nf_conntrack-sysctl.rst), except established TCP, for which they
//! follow kube-proxy's 24 hours instead of five days.

/// At least one packet went this way.
pub const SEEN: u8 = 1 << 0;
/// A SYN went this way.
pub const SYN: u8 = 1 << 1;
/// A FIN went this way.
pub const FIN: u8 = 1 << 2;
/// A RST went this way.
pub const RST: u8 = 1 << 3;

const PROTO_ICMP: u8 = 1;
const PROTO_TCP: u8 = 6;

const TCP_FLAG_FIN: u8 = 0x01;
const TCP_FLAG_SYN: u8 = 0x02;
const TCP_FLAG_RST: u8 = 0x04;

/// The bits of a direction after one more packet.
///
/// `tcp_flags` is byte 13 of the TCP header (RFC 9293 §3.1), ignored for other protocols. A SYN
/// begins again: a client may reuse a port whose old connection is still remembered.
#[inline(always)]
pub const fn next(state: u8, proto: u8, tcp_flags: u8) -> u8 {
    if proto != PROTO_TCP {
        return state | SEEN;
    }
    if tcp_flags & TCP_FLAG_SYN != 0 {
        return SEEN | SYN;
    }
    let mut state = state | SEEN;
    if tcp_flags & TCP_FLAG_FIN != 0 {
        state |= FIN;
    }
    if tcp_flags & TCP_FLAG_RST != 0 {
        state |= RST;
    }
    state
}

/// Seconds that a flow may stay idle, from the bits of both directions.
pub const fn lifetime_secs(proto: u8, forward: u8, reverse: u8) -> u64 {
    match proto {
        PROTO_TCP => {
            if (forward | reverse) & RST != 0 {
                10
            } else if forward & FIN != 0 && reverse & FIN != 0 {
                // TIME_WAIT: late segments must still find their way, twice the maximum
                // segment lifetime (RFC 9293 §3.6.1) as Linux counts it.
                120
            } else if (forward | reverse) & FIN != 0 {
                // One side goes on sending: a half-closed connection is alive.
                3600
            } else if reverse & SEEN == 0 {
                120
            } else {
                24 * 3600
            }
        }
        PROTO_ICMP => 30,
        _ => {
            if reverse & SEEN == 0 {
                30
            } else {
                120
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: u8 = 6;
    const UDP: u8 = 17;

    #[test]
    fn a_tcp_connection_lives_and_dies() {
        let client = next(0, TCP, 0x02);
        assert_eq!(lifetime_secs(TCP, client, 0), 120);
        let server = next(0, TCP, 0x12);
        assert_eq!(lifetime_secs(TCP, client, server), 24 * 3600);
        let client = next(client, TCP, 0x11);
        assert_eq!(lifetime_secs(TCP, client, server), 3600);
        let server = next(server, TCP, 0x11);
        assert_eq!(lifetime_secs(TCP, client, server), 120);
        assert_eq!(lifetime_secs(TCP, next(client, TCP, 0x04), server), 10);
    }

    #[test]
    fn a_new_syn_forgets_the_old_connection() {
        let closed = next(next(next(0, TCP, 0x02), TCP, 0x11), TCP, 0x04);
        assert_eq!(next(closed, TCP, 0x02), SEEN | SYN);
    }

    #[test]
    fn udp_lives_longer_once_answered() {
        let sent = next(0, UDP, 0xff);
        assert_eq!(sent, SEEN);
        assert!(lifetime_secs(UDP, sent, 0) < lifetime_secs(UDP, sent, sent));
    }
}
