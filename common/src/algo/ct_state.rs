//! What each end of a connection has sent so far, as bits: [`super::lifetime`] makes of both ends' bits how
//! far a connection is.

/// At least one packet.
pub const SEEN: u8 = 1 << 0;
/// A SYN.
pub const SYN: u8 = 1 << 1;
/// A FIN.
pub const FIN: u8 = 1 << 2;
/// A RST.
pub const RST: u8 = 1 << 3;
/// A segment that acknowledges and is no SYN: the handshake is over for this end.
pub const ACK: u8 = 1 << 4;

const PROTO_TCP: u8 = 6;

const TCP_FLAG_FIN: u8 = 0x01;
const TCP_FLAG_SYN: u8 = 0x02;
const TCP_FLAG_RST: u8 = 0x04;
const TCP_FLAG_ACK: u8 = 0x10;

/// The bits of an end after one more packet of it.
///
/// `tcp_flags` is byte 13 of the TCP header (RFC 9293 §3.1), ignored for other protocols.
#[inline(always)]
pub const fn next(state: u8, proto: u8, tcp_flags: u8) -> u8 {
    if proto != PROTO_TCP {
        return state | SEEN;
    }
    // Without a branch for each flag: the verifier walks all of them.
    let others = tcp_flags & TCP_FLAG_ACK
        | (tcp_flags & TCP_FLAG_FIN) << 2
        | (tcp_flags & TCP_FLAG_RST) << 1;
    let syn = tcp_flags & TCP_FLAG_SYN;
    // All ones if it is none.
    let unless_syn = (syn >> 1).wrapping_sub(1);
    state | SEEN | syn | others & unless_syn
}

/// Whether a packet asks for a connection: a SYN without ACK. Of another protocol any packet does.
#[inline(always)]
pub const fn begins(proto: u8, tcp_flags: u8) -> bool {
    proto != PROTO_TCP || tcp_flags & (TCP_FLAG_SYN | TCP_FLAG_ACK | TCP_FLAG_RST) == TCP_FLAG_SYN
}

/// Whether conntrack creates an entry for a packet of a connection that it does not know: for a SYN, and with `nf_conntrack_tcp_loose` for
/// a segment that only acknowledges (`tcp_conntracks` in net/netfilter/nf_conntrack_proto_tcp.c). All others are invalid.
#[inline(always)]
pub const fn is_picked_up(proto: u8, tcp_flags: u8, is_loose: bool) -> bool {
    const ALL: u8 = TCP_FLAG_SYN | TCP_FLAG_ACK | TCP_FLAG_FIN | TCP_FLAG_RST;
    begins(proto, tcp_flags) || is_loose && tcp_flags & ALL == TCP_FLAG_ACK
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: u8 = 6;
    const UDP: u8 = 17;

    #[test]
    fn each_flag_is_remembered() {
        assert_eq!(next(0, TCP, 0x02), SEEN | SYN);
        assert_eq!(next(0, TCP, 0x12), SEEN | SYN);
        assert_eq!(next(SEEN | SYN, TCP, 0x10), SEEN | SYN | ACK);
        assert_eq!(next(SEEN | SYN, TCP, 0x11), SEEN | SYN | ACK | FIN);
        assert_eq!(next(SEEN, TCP, 0x04), SEEN | RST);
        assert_eq!(next(0, UDP, 0xff), SEEN);
    }

    #[test]
    fn only_a_syn_alone_begins() {
        assert!(begins(TCP, 0x02) && begins(TCP, 0xc2) && begins(UDP, 0));
        assert!(!begins(TCP, 0x12) && !begins(TCP, 0x10) && !begins(TCP, 0x06));
    }

    #[test]
    fn conntrack_picks_up_what_begins_and_what_only_acknowledges() {
        for (flags, strictly) in [(0x02, true), (0x10, false), (0x18, false), (0xc2, true)] {
            assert!(is_picked_up(TCP, flags, true), "{flags:#x}");
            assert_eq!(is_picked_up(TCP, flags, false), strictly, "{flags:#x}");
        }
        for flags in [0x12, 0x11, 0x01, 0x04, 0x14, 0x00] {
            assert!(!is_picked_up(TCP, flags, true), "{flags:#x}");
        }
        assert!(is_picked_up(UDP, 0, false));
    }
}
