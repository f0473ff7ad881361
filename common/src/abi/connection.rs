//! The one table of connections.
//!
//! - map `CONNECTIONS`, hash: [`ConnectionKey`] → [`Connection`]: one record for each connection that
//!   anything has to be remembered of. The key is the tuple between the *real ends*: the client's own
//!   address and that of whoever answers. No translated address is in it.
//! - map `ALIASES`, hash: [`Tuple`] → [`Alias`]: a packet as it is on the wire where an address of it is a
//!   translated one. The alias gives the real destination, and with it the key of the record.
//! - map `FRAGMENTS`, LRU hash: [`FragmentKey`] → [`Fragment`]: what the first fragment of a packet said of
//!   all of them. What comes before its first: [`super::fragment`].
//! - map `SHARES`, hash: index of a pod's host-side link (u32) → [`Share`]: what the pod's connections take.
//! - map `FINISHED`, queue: [`Finished`]: connections that are over, in the order in which they ended, while room is scarce. A
//!   hint: the record decides.
//! - map `LIMITS`, array of one: 0 → [`Limits`].
//! - map `HOST_PORTS`, array of [`HOST_PORT_WORDS`] u64: ports that no connection gets, a bit each
//!   ([`host_port_word`]).
//! - map `PORT_BITMAPS`, LRU hash: [`Tuple::crowd`] of an alias's key → [`TakenPorts`]: which ports are known to be taken
//!   towards a remote end where few are left. A hint: the claim of the alias decides.
//! - map `RESERVED_PORTS`, array of [`PORT_TABLES`]: [`port_table`] → [`TakenPorts`] with which an entry of
//!   `PORT_BITMAPS` begins: ports that no connection gets.
//!
//! A mapping (RFC 4787 §4.1) is a record of the same table: a pod's UDP port has one port outside towards all remote
//! ends. Its key is between the pod's end and one that no packet has ([`Tuple::mapping`]); its alias keeps the port from
//! other mappings, and leads no packet anywhere: each connection has an alias of its own.
//!
//! Invariants. An alias is claimed (NOEXIST) before its record is written and removed after it: a translated port
//! has one owner, and it is free only once nothing is translated to it. Whoever loses the race for the
//! record takes its own alias back. The agent removes what is over ([`crate::algo::lifetime`]); the
//! programs take what is over for not there.

use super::{Addr, map_type};
use crate::algo::port_pick;

/// Records, if the settings do not say.
pub const MAX_CONNECTIONS: u32 = 131_072;
/// What a record may have of them: a Service's that is masqueraded has two.
pub const ALIASES_EACH: u32 = 2;
/// Entries of `SHARES` that are no pod's, of which one is in a pod's place: a table of another size would be another layout.
pub const OTHER_SHARES: u32 = 3;
/// Fragmented packets under way at a time.
pub const MAX_FRAGMENTS: u32 = 8192;

/// Connections that are over and wait to make way for others. What there is no place for waits for the agent.
pub const MAX_FINISHED: u32 = 16_384;

/// A packet's ends as they are on the wire.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    pub src: Addr,
    pub dst: Addr,
    /// Network order; the id of an echo message, in both; zero where the protocol has none.
    pub src_port: [u8; 2],
    /// As `src_port`.
    pub dst_port: [u8; 2],
    /// IP protocol number.
    pub proto: u8,
    /// Zero.
    pub pad: [u8; 3],
}
map_type!(Tuple, 40, 2, [src, dst, src_port, dst_port, proto, pad]);

/// Both ends of a connection; `low` is the smaller of the two, by address and then by port, so that both
/// directions have the same key.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    pub low: Addr,
    pub high: Addr,
    /// As in [`Tuple`].
    pub low_port: [u8; 2],
    pub high_port: [u8; 2],
    /// IP protocol number.
    pub proto: u8,
    /// Zero.
    pub pad: [u8; 3],
}
map_type!(
    ConnectionKey,
    40,
    2,
    [low, high, low_port, high_port, proto, pad]
);

/// The client, who began, is `high`.
pub const FLAG_CLIENT_IS_HIGH: u16 = 1 << 0;
/// What the client sends leaves the node as [`Connection::nat`].
pub const FLAG_MASQUERADED: u16 = 1 << 1;
/// Begun by an outside end with a pod's own address, which the pod keeps in its replies.
pub const FLAG_INBOUND: u16 = 1 << 2;
/// Between two pods of this node, and translated by the host's stack, to which it keeps.
pub const FLAG_STACK: u16 = 1 << 3;
/// Counted among its payer's connections that nobody has answered yet.
pub const FLAG_EMBRYONIC: u16 = 1 << 4;

/// No connection but a mapping, which connections have their port from.
pub const FLAG_MAPPING: u16 = 1 << 5;
/// Its port is that of its client's mapping, which lives as long as it.
pub const FLAG_MAPPED: u16 = 1 << 6;
/// Its client has a mapping whose port was somebody else's towards this remote end, or no port was left for one.
pub const FLAG_APART: u16 = 1 << 7;

/// The client sends to [`Connection::frontend`], which the programs on pods' links, and on uplinks where the client is
/// outside of the cluster ([`OUTSIDE_SHARE`] pays then), make the server's address of: an alias leads from there to the
/// server ([`Connection::service_alias`]). Such a record may be masqueraded, too, and has two aliases then.
pub const FLAG_SERVICE: u16 = 1 << 8;
/// With [`FLAG_SERVICE`]: conntrack has picked up the connection while the fast path drained
/// ([`FLAG_BESIDE_PROXY_DRAINS`](super::config::FLAG_BESIDE_PROXY_DRAINS)). It goes by the stack until it ends.
pub const FLAG_TRACKED: u16 = 1 << 9;

/// What is known of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// `bpf_ktime_get_ns` of the last packet in either direction, at most a second old.
    pub last_seen_ns: u64,
    /// The same of the first.
    pub began_ns: u64,
    /// Source that the client's packets have outside; [`Addr::UNSPECIFIED`]: their own. Of a pod that is its own Service's
    /// endpoint it is the pod's gateway: that is whom the endpoint sees.
    pub nat: Addr,
    /// Destination that the client sends to; [`Addr::UNSPECIFIED`]: the server's own. For Services.
    pub frontend: Addr,
    /// Port (or echo id) that goes with `nat`, network order.
    pub nat_port: [u8; 2],
    /// Port that goes with `frontend`, network order.
    pub frontend_port: [u8; 2],
    /// [`crate::algo::ct_state`] bits of what `low` sent and of what `high` sent.
    pub states: [u8; 2],
    /// `FLAG_*`.
    pub flags: u16,
    /// Index of the host-side link of the pod whose share it is in; zero: nobody's.
    pub payer: u32,
    /// Of a Service: who answers, and which of those that had the number. Zero.
    pub endpoint: u32,
    pub endpoint_generation: u32,
    /// Policy of `low` and of `high`: at which state of it, and how, they were judged. Zero.
    pub policy_epochs: [u32; 2],
    /// The lower half of the kernel's `jiffies` when `last_seen_ns` was written.
    pub seen_ticks: u32,
    pub verdicts: [u8; 2],
    /// Zero.
    pub pad: [u8; 6],
    /// Of TCP: the window ([`crate::algo::tcp_window`]) that `low` announced last, and `high`. Zero of an end whose packets
    /// come by an alias: they do not read the record.
    pub receive_windows: [u64; 2],
    /// Zero.
    pub reserved: [u64; 4],
}
map_type!(
    Connection,
    136,
    3,
    [
        last_seen_ns,
        began_ns,
        nat,
        frontend,
        nat_port,
        frontend_port,
        states,
        flags,
        payer,
        endpoint,
        endpoint_generation,
        policy_epochs,
        seen_ticks,
        verdicts,
        pad,
        receive_windows,
        reserved
    ]
);

/// What comes by an alias with this keeps its source: it is no endpoint's answer that has to have its Service's address.
/// Without it the record says so.
pub const KEEPS_SOURCE: u8 = 1;

/// Where packets with a translated destination really go.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The real destination.
    pub addr: Addr,
    /// How many are about to take it over; none of several may.
    pub takers: u32,
    /// The lower half of the kernel's `jiffies` when a packet that came by it was last noted in the record.
    pub noted_ticks: u32,
    /// Its port (or echo id), network order.
    pub port: [u8; 2],
    /// The first is [`KEEPS_SOURCE`] or zero, the others are zero.
    pub pad: [u8; 6],
    /// From when on another connection may take it over, `bpf_ktime_get_ns`; zero: not yet.
    pub reusable_ns: u64,
}
map_type!(
    Alias,
    40,
    2,
    [addr, takers, noted_ticks, port, pad, reusable_ns]
);

impl Alias {
    /// One that leads there and that nobody may take over yet.
    pub const fn to(addr: Addr, port: [u8; 2]) -> Self {
        Self {
            addr,
            takers: 0,
            noted_ticks: 0,
            port,
            pad: [0; 6],
            reusable_ns: 0,
        }
    }
}

/// Which packet a fragment is of (RFC 791 §3.2, RFC 8200 §4.5).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentKey {
    pub src: Addr,
    pub dst: Addr,
    /// As it is on the wire; of IPv4 in the first two bytes.
    pub id: [u8; 4],
    /// IP protocol number; zero of IPv6, whose ids are not by protocol.
    pub proto: u8,
    /// The first is one if it is the source that is written, zero if the destination; the others are zero.
    pub pad: [u8; 3],
}
map_type!(FragmentKey, 40, 2, [src, dst, id, proto, pad]);

/// What becomes of the fragments of a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// The address to write: of the source in what leaves, of the destination in what comes in.
    pub addr: Addr,
    /// When the first came, `bpf_ktime_get_ns`.
    pub seen_ns: u64,
}
map_type!(Fragment, 24, 2, [addr, seen_ns]);

/// What a pod's connections take. The programs add to it; the agent, which counts as it looks for what is
/// over, sets it right.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    pub connections: u64,
    /// Of those, the ones that nobody has answered yet.
    pub embryonic: u64,
    /// Connections refused because of a limit.
    pub refused: u64,
}
map_type!(Share, 24, 2, [connections, embryonic, refused]);

impl Share {
    /// What a count of it is: nothing where more was given back than taken. The agent sets a count to what it found a moment
    /// ago, and what began since is not in it when it ends.
    #[inline(always)]
    pub const fn counted(count: u64) -> u64 {
        match count >> 63 {
            0 => count,
            _ => 0,
        }
    }
}

/// A connection that is over, of those whose room others want.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    pub key: ConnectionKey,
    /// Since when, and from when on it may make way: `bpf_ktime_get_ns`.
    pub ended_ns: u64,
    pub from_ns: u64,
}
map_type!(Finished, 56, 2, [key, ended_ns, from_ns]);

/// Key in `SHARES`: the host's own connections that had to get another port, which nobody is charged for.
pub const HOST_SHARE: u32 = 0;
/// Key in `SHARES`: connections of clients outside of the cluster with Services, which came in by an uplink.
pub const OUTSIDE_SHARE: u32 = u32::MAX - 1;
/// Key in `SHARES`: the same of other protocols than TCP, of which two forged datagrams and an answer make a connection.
pub const OUTSIDE_DATAGRAMS: u32 = u32::MAX - 2;
/// Key in `SHARES`: all connections.
pub const ALL_SHARES: u32 = u32::MAX;

/// Who pays for a connection of a client outside.
#[inline(always)]
pub const fn outside_share(proto: u8) -> u32 {
    match proto {
        6 => OUTSIDE_SHARE,
        _ => OUTSIDE_DATAGRAMS,
    }
}

/// Whether a client outside pays for a connection.
#[inline(always)]
pub const fn is_outside(payer: u32) -> bool {
    payer == OUTSIDE_SHARE || payer == OUTSIDE_DATAGRAMS
}

/// Whether a pod pays for a connection.
#[inline(always)]
pub const fn is_of_pod(payer: u32) -> bool {
    payer != HOST_SHARE && payer < OUTSIDE_DATAGRAMS
}

/// Sizes and times, host order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections that there is room for.
    pub capacity: u32,
    /// Connections of one pod, however much room there is.
    pub per_pod: u32,
    /// Connections of one pod that nobody has answered yet, however much room there is.
    pub embryonic_per_pod: u32,
    /// Zero.
    pub pad: u32,
    /// Seconds that a connection may be idle, by [`crate::algo::lifetime::Stage`].
    pub lifetimes: [u32; 16],
}
map_type!(
    Limits,
    80,
    2,
    [capacity, per_pod, embryonic_per_pod, pad, lifetimes]
);

/// Words of `HOST_PORTS`: a bit for each port, for TCP, UDP and SCTP.
pub const HOST_PORT_WORDS: u32 = 3 * 1024;

/// Where the bit of a port (host order) of a protocol is: index of the word, and the bit in it; none for
/// protocols without ports.
#[inline(always)]
pub const fn host_port_word(proto: u8, port: u16) -> Option<(u32, u64)> {
    let table = match proto {
        6 => 0,
        17 | 136 => 1,
        132 => 2,
        _ => return None,
    };
    Some((table * 1024 + port as u32 / 64, 1 << (port % 64)))
}

/// Entries of `PORT_BITMAPS`.
pub const MAX_PORT_BITMAPS: u32 = 64;

/// A bit for each port that is taken (or id of echo messages), at its [`port_pick::place`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenPorts {
    /// A bit for each word of `taken` that is all ones.
    pub full: [u64; 16],
    pub taken: [u64; 1024],
}
map_type!(TakenPorts, 8320, 2, [full, taken]);

impl TakenPorts {
    pub const NONE: Self = Self {
        full: [0; 16],
        taken: [0; 1024],
    };

    /// `port`: host order.
    pub const fn take(&mut self, port: u16) {
        let place = port_pick::place(port) as usize;
        let word = place / 64;
        self.taken[word] |= 1 << (place % 64);
        if self.taken[word] == u64::MAX {
            self.full[word / 64] |= 1 << (word % 64);
        }
    }

    pub fn count(&self) -> u32 {
        self.taken.iter().map(|word| word.count_ones()).sum()
    }
}

/// Entries of `RESERVED_PORTS`.
pub const PORT_TABLES: u32 = 4;

/// Index of a protocol in `RESERVED_PORTS`; the last one is of those without ports.
#[inline(always)]
pub const fn port_table(proto: u8) -> u32 {
    match host_port_word(proto, 0) {
        Some((word, _)) => word / 1024,
        None => PORT_TABLES - 1,
    }
}

const PROTO_ICMP: u8 = 1;
const PROTO_ICMPV6: u8 = 58;

/// Whether a protocol's flows are told apart by one id that both directions have (RFC 792, RFC 4443 §4).
#[inline(always)]
pub const fn has_one_id(proto: u8) -> bool {
    matches!(proto, PROTO_ICMP | PROTO_ICMPV6)
}

/// Whether a protocol's flows are told apart by their addresses alone: GRE, ESP, IPIP, and all that is not known here.
#[inline(always)]
pub const fn is_portless(proto: u8) -> bool {
    !has_one_id(proto) && !matches!(proto, 6 | 17 | 132 | 136)
}

impl Tuple {
    /// The tuple of packets that answer.
    #[inline(always)]
    pub const fn reversed(&self) -> Self {
        Self {
            src: self.dst,
            dst: self.src,
            src_port: self.dst_port,
            dst_port: self.src_port,
            proto: self.proto,
            pad: [0; 3],
        }
    }

    /// The tuple of packets that answer once the source has become `addr`:`port`.
    pub fn reply_to(&self, addr: Addr, port: [u8; 2]) -> Self {
        self.reversed().to(addr, port)
    }

    /// The same packets with another destination.
    pub fn to(&self, addr: Addr, port: [u8; 2]) -> Self {
        let mut to = Self { dst: addr, ..*self };
        to.set_dst_port(port);
        to
    }

    /// What stands for all that the client sends from its port and that leaves as `nat`: to an end that no packet has,
    /// by which the record of the mapping is found.
    pub const fn mapping(&self, nat: &Addr) -> Self {
        Self {
            dst: nat.any_remote(),
            dst_port: [0; 2],
            ..*self
        }
    }

    /// Of an alias's key: what it has in common with those of all other ports towards the same remote end.
    pub const fn crowd(&self) -> Self {
        Self {
            src_port: if has_one_id(self.proto) {
                [0; 2]
            } else {
                self.src_port
            },
            dst_port: [0; 2],
            ..*self
        }
    }

    /// Whether the source is the higher end.
    #[inline(always)]
    pub fn is_from_high(&self) -> bool {
        let (src, dst) = (halves(&self.src), halves(&self.dst));
        if src.0 != dst.0 {
            return src.0 > dst.0;
        }
        if src.1 != dst.1 {
            return src.1 > dst.1;
        }
        u16::from_be_bytes(self.src_port) > u16::from_be_bytes(self.dst_port)
    }

    /// The key of the record, and whether the source is its higher end.
    pub fn key(&self) -> (ConnectionKey, bool) {
        let mut key = ConnectionKey {
            low: self.src,
            high: self.dst,
            low_port: self.src_port,
            high_port: self.dst_port,
            proto: self.proto,
            pad: [0; 3],
        };
        let from_high = self.write_key(&mut key);
        (key, from_high)
    }
}

/// In place, for programs, to whom a copy on the stack is dear. What is written to must have been zeros
/// at first, as the memory of a map is: padding is left as it is.
impl Tuple {
    /// [`Self::key`].
    #[inline(always)]
    pub fn write_key(&self, key: &mut ConnectionKey) -> bool {
        let from_high = self.is_from_high();
        key.proto = self.proto;
        if from_high {
            key.low = self.dst.by_words();
            key.high = self.src.by_words();
            key.low_port = self.dst_port;
            key.high_port = self.src_port;
        } else {
            key.low = self.src.by_words();
            key.high = self.dst.by_words();
            key.low_port = self.src_port;
            key.high_port = self.dst_port;
        }
        from_high
    }

    /// [`Self::reversed`].
    #[inline(always)]
    pub fn write_reversed(&self, to: &mut Self) {
        to.src = self.dst.by_words();
        to.dst = self.src.by_words();
        to.src_port = self.dst_port;
        to.dst_port = self.src_port;
        to.proto = self.proto;
    }

    /// [`Self::reply_to`].
    #[inline(always)]
    pub fn write_reply_to(&self, addr: &Addr, port: [u8; 2], to: &mut Self) {
        self.write_reversed(to);
        to.dst = addr.by_words();
        to.set_dst_port(port);
    }

    /// Gives the destination another port.
    #[inline(always)]
    pub fn set_dst_port(&mut self, port: [u8; 2]) {
        self.dst_port = port;
        if has_one_id(self.proto) {
            self.src_port = port;
        }
    }
}

/// Both halves as numbers: their order is that of the bytes.
#[inline(always)]
pub(crate) fn halves(addr: &Addr) -> (u64, u64) {
    // By words, which the programs read at once; they know no more of an address's alignment.
    let word = |at: usize| {
        let a = &addr.0;
        u64::from(u32::from_be_bytes([a[at], a[at + 1], a[at + 2], a[at + 3]]))
    };
    (word(0) << 32 | word(4), word(8) << 32 | word(12))
}

impl ConnectionKey {
    /// What one end sends to the other.
    #[inline(always)]
    pub const fn sent_by(&self, high: bool) -> Tuple {
        let (src, dst, src_port, dst_port) = match high {
            false => (self.low, self.high, self.low_port, self.high_port),
            true => (self.high, self.low, self.high_port, self.low_port),
        };
        Tuple {
            src,
            dst,
            src_port,
            dst_port,
            proto: self.proto,
            pad: [0; 3],
        }
    }
}

impl Connection {
    /// All zeros, of which whoever writes one says what is not.
    pub const NONE: Self = Self {
        last_seen_ns: 0,
        began_ns: 0,
        nat: Addr::UNSPECIFIED,
        frontend: Addr::UNSPECIFIED,
        nat_port: [0; 2],
        frontend_port: [0; 2],
        states: [0; 2],
        flags: 0,
        payer: 0,
        endpoint: 0,
        endpoint_generation: 0,
        policy_epochs: [0; 2],
        seen_ticks: 0,
        verdicts: [0; 2],
        pad: [0; 6],
        receive_windows: [0; 2],
        reserved: [0; 4],
    };

    #[inline(always)]
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether the client is the higher end.
    #[inline(always)]
    pub const fn client_is_high(&self) -> bool {
        self.has(FLAG_CLIENT_IS_HIGH)
    }

    /// What the client sends, by the record's key.
    #[inline(always)]
    pub const fn from_client(&self, key: &ConnectionKey) -> Tuple {
        key.sent_by(self.client_is_high())
    }

    /// The key of the alias by which answers come, if its packets are masqueraded.
    #[inline(always)]
    pub fn alias(&self, key: &ConnectionKey) -> Option<Tuple> {
        if !self.has(FLAG_MASQUERADED) {
            return None;
        }
        Some(self.from_client(key).reply_to(self.nat, self.nat_port))
    }

    /// The key of the alias by which the client's packets go, if it sends to a Service.
    #[inline(always)]
    pub fn service_alias(&self, key: &ConnectionKey) -> Option<Tuple> {
        if !self.has(FLAG_SERVICE) {
            return None;
        }
        Some(self.from_client(key).to(self.frontend, self.frontend_port))
    }

    /// What the client and what the server sent.
    #[inline(always)]
    pub const fn client_and_server(&self) -> (u8, u8) {
        match self.client_is_high() {
            false => (self.states[0], self.states[1]),
            true => (self.states[1], self.states[0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tuple(src: [u8; 4], dst: [u8; 4], ports: ([u8; 2], [u8; 2]), proto: u8) -> Tuple {
        let echo = has_one_id(proto);
        Tuple {
            src: Addr::v4(src),
            dst: Addr::v4(dst),
            src_port: ports.0,
            dst_port: if echo { ports.0 } else { ports.1 },
            proto,
            pad: [0; 3],
        }
    }

    proptest! {
        #[test]
        fn both_directions_have_one_key(
            src: [u8; 4], dst: [u8; 4], ports: ([u8; 2], [u8; 2]), proto: u8,
        ) {
            let sent = tuple(src, dst, ports, proto);
            let (key, from_high) = sent.key();
            let (of_reply, reply_from_high) = sent.reversed().key();
            prop_assert_eq!(key, of_reply);
            prop_assert_eq!(key.sent_by(from_high), sent);
            prop_assert_eq!(key.sent_by(reply_from_high), sent.reversed());
            let mut written = ConnectionKey { proto: 0, ..of_reply };
            prop_assert_eq!((sent.write_key(&mut written), written), (from_high, key));
            let numbers = |addr: Addr, port| (addr.0, u16::from_be_bytes(port));
            prop_assert!(numbers(key.low, key.low_port) <= numbers(key.high, key.high_port));
        }

        #[test]
        fn an_alias_leads_to_its_record(
            src: [u8; 4], dst: [u8; 4], node: [u8; 4],
            ports: ([u8; 2], [u8; 2]), given: [u8; 2], proto: u8,
        ) {
            let sent = tuple(src, dst, ports, proto);
            let alias = sent.reply_to(Addr::v4(node), given);
            prop_assert_eq!((alias.src, alias.dst, alias.dst_port), (sent.dst, Addr::v4(node), given));
            prop_assert_eq!(alias.to(sent.src, sent.src_port), sent.reversed());
            let mut written = Tuple { src_port: [7; 2], dst_port: [7; 2], ..sent };
            sent.write_reply_to(&Addr::v4(node), given, &mut written);
            prop_assert_eq!(written, alias);
        }

        #[test]
        fn a_mapping_has_an_end_that_no_packet_has(
            src: [u8; 4], nat: [u8; 4], other: [u8; 4], v6: [u8; 15], ports: ([u8; 2], [u8; 2]),
        ) {
            let sent = tuple(src, other, ports, 17);
            let of = |nat| sent.mapping(&nat).reply_to(nat, [0xf0, 0]);
            let four = of(Addr::v4(nat));
            // What comes to an IPv4 address comes from one.
            prop_assert!(four.src.as_v4().is_none() && four.dst.as_v4().is_some());
            prop_assert_eq!(four == of(Addr::v4(other)), nat == other);
            let mut unicast = [0x20; 16];
            unicast[1..].copy_from_slice(&v6);
            let six = of(Addr::v6(unicast));
            prop_assert_eq!(six.src.0[0], 0xff);
            // The client is the lower end, which the programs rely on.
            prop_assert!(!sent.mapping(&Addr::v4(nat)).is_from_high());
            let sent = Tuple { src: Addr::v6(unicast), ..sent };
            prop_assert!(!sent.mapping(&Addr::v6(unicast)).is_from_high());
        }

        #[test]
        fn each_port_has_a_bit_of_its_own(a: u16, b: u16, proto in prop_oneof![Just(6u8), Just(17), Just(132)]) {
            let (word, bit) = host_port_word(proto, a).unwrap();
            prop_assert!(word < HOST_PORT_WORDS && bit.count_ones() == 1);
            prop_assert_eq!(host_port_word(proto, b) == Some((word, bit)), a == b);
        }
    }
}
