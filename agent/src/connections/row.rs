//! A record of the table, in words.

use crate::endpoint::PodNames;
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Connection, ConnectionKey, FLAG_APART, FLAG_INBOUND, FLAG_MAPPED, FLAG_MAPPING,
            FLAG_MASQUERADED, FLAG_STACK, Limits, Tuple, has_one_id,
        },
    },
    algo::{
        ct_state::{FIN, SEEN},
        lifetime::{self, Stage},
    },
    api::{ConnectionReport, Mapped, PacketEnd, StateClass, protocol_name},
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const SECOND_NS: u64 = 1_000_000_000;

/// A connection that is not over.
pub struct Row {
    pub record: Connection,
    /// What the client sends, by the real ends.
    pub sent: Tuple,
    stage: Stage,
    client: u8,
    server: u8,
    idle_ns: u64,
    age_ns: u64,
    lifetime_ns: u64,
}

impl Row {
    /// None if it has been idle for longer than it may: what is over is not there.
    pub fn new(
        key: ConnectionKey,
        record: Connection,
        limits: &Limits,
        now_ns: u64,
    ) -> Option<Self> {
        let (client, server) = record.client_and_server();
        let lived = record.last_seen_ns.saturating_sub(record.began_ns);
        let stage = lifetime::stage(key.proto, client, server, lived);
        let seconds = match record.has(FLAG_MAPPING) {
            true => lifetime::of_mapping(&limits.lifetimes),
            false => *limits.lifetimes.get(stage as usize)?,
        };
        let lifetime_ns = u64::from(seconds) * SECOND_NS;
        let idle_ns = now_ns.saturating_sub(record.last_seen_ns);
        (idle_ns <= lifetime_ns).then(|| Self {
            sent: record.from_client(&key),
            stage,
            client,
            server,
            idle_ns,
            age_ns: now_ns.saturating_sub(record.began_ns),
            lifetime_ns,
            record,
        })
    }

    /// What it has to do with a mapping.
    pub fn mapping(&self) -> Option<Mapped> {
        let of = [
            (FLAG_MAPPING, Mapped::Mapping),
            (FLAG_MAPPED, Mapped::Mapped),
            (FLAG_APART, Mapped::Apart),
        ];
        let mut of = of.into_iter().filter(|(flag, _)| self.record.has(*flag));
        of.next().map(|(_, mapped)| mapped)
    }

    /// No connection, but what connections have their port from.
    pub fn is_mapping(&self) -> bool {
        self.record.has(FLAG_MAPPING)
    }

    /// A word of conntrack(8), which has none for mappings.
    pub fn state(&self) -> &'static str {
        if self.is_mapping() {
            return "MAPPING";
        }
        match self.stage {
            Stage::SynSent => "SYN_SENT",
            Stage::SynReceived => "SYN_RECV",
            Stage::Established => "ESTABLISHED",
            // By who was first, as nf_conntrack has it.
            Stage::HalfClosed if self.client & FIN != 0 => "FIN_WAIT",
            Stage::HalfClosed => "CLOSE_WAIT",
            Stage::TimeWait => "TIME_WAIT",
            Stage::Reset => "CLOSE",
            Stage::Unreplied | Stage::Echo => "UNREPLIED",
            Stage::Stream => "ASSURED",
            Stage::Replied | Stage::EchoReplied | Stage::Other => "REPLIED",
        }
    }

    pub fn class(&self) -> StateClass {
        match self.stage {
            Stage::HalfClosed | Stage::TimeWait | Stage::Reset => StateClass::Closing,
            stage if stage.is_embryonic() || self.server & SEEN == 0 => StateClass::Unanswered,
            _ => StateClass::Established,
        }
    }

    /// Whether it counts among those of its payer that nobody has answered: what somebody outside begins does not.
    pub fn is_embryonic(&self) -> bool {
        self.stage.is_embryonic() && !self.record.has(FLAG_INBOUND)
    }

    /// Address and port that the client has outside, if others than its own.
    pub fn masqueraded_as(&self) -> Option<(Addr, [u8; 2])> {
        self.record
            .has(FLAG_MASQUERADED)
            .then_some((self.record.nat, self.record.nat_port))
    }

    /// Ports of both ends and of the client outside; none where the protocol, or a mapping, has no such thing.
    pub fn ports(&self) -> [Option<u16>; 3] {
        let outside = self.masqueraded_as().map(|(_, port)| port);
        let server = (!self.is_mapping()).then_some(self.sent.dst_port);
        [Some(self.sent.src_port), server, outside].map(|port| self.port(port?))
    }

    /// None of protocols without ports; ids of echo messages tell nobody where they lead to.
    pub fn server_port(&self) -> Option<u16> {
        (!has_one_id(self.sent.proto)).then(|| self.port(self.sent.dst_port))?
    }

    fn port(&self, port: [u8; 2]) -> Option<u16> {
        let none = port == [0; 2] && self.sent.src_port == [0; 2] && self.sent.dst_port == [0; 2];
        (!none).then(|| u16::from_be_bytes(port))
    }

    pub fn report(&self, pods: &PodNames) -> ConnectionReport {
        let end = |address: Addr, port| PacketEnd {
            address: address.into(),
            port: self.port(port),
            pod: pods.at(address).map(Into::into),
        };
        let record = &self.record;
        let has_frontend = record.frontend != Addr::UNSPECIFIED;
        ConnectionReport {
            protocol: protocol_name(self.sent.proto).into_owned(),
            client: end(self.sent.src, self.sent.src_port),
            server: match (self.is_mapping(), self.sent.src.as_v4()) {
                (true, Some(_)) => anybody(Ipv4Addr::UNSPECIFIED.into()),
                (true, None) => anybody(Ipv6Addr::UNSPECIFIED.into()),
                (false, _) => end(self.sent.dst, self.sent.dst_port),
            },
            masqueraded_as: self.masqueraded_as().map(|(addr, port)| end(addr, port)),
            frontend: has_frontend.then(|| end(record.frontend, record.frontend_port)),
            state: self.state().into(),
            class: self.class(),
            payer: pods.behind(record.payer).map(Into::into),
            mapping: self.mapping(),
            through_stack: record.has(FLAG_STACK),
            age_seconds: self.age_ns / SECOND_NS,
            idle_seconds: self.idle_ns / SECOND_NS,
            expires_seconds: (self.lifetime_ns - self.idle_ns).div_ceil(SECOND_NS),
        }
    }
}

/// Whom a mapping is for.
fn anybody(address: IpAddr) -> PacketEnd {
    PacketEnd {
        address,
        port: None,
        pod: None,
    }
}
