//! Which destination ports a rule of nf_tables compares, as far as that is plain: the native expressions for a transport
//! header's second field, and iptables' extensions `tcp` and `udp`.
//!
//! Numbers are those of linux/netfilter/nf_tables.h and linux/netfilter/xt_tcpudp.h.

use crate::{
    nft::numbers,
    wire::{self, Attr, Garbage},
};
use std::ops::RangeInclusive;

/// NFT_PAYLOAD_TRANSPORT_HEADER, and where ports begin in one: source, destination.
const TRANSPORT: u32 = 2;
const DESTINATION: u32 = 2;

/// What a rule compares destination ports with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ports {
    /// Nothing.
    #[default]
    Any,
    /// One of these.
    In(Vec<RangeInclusive<u16>>),
    /// Something, such as a set.
    Some,
}

impl Ports {
    /// Whether the rule may be met by what is for one of these ports, and by what is for others not.
    #[must_use]
    pub fn may_be_in(&self, range: &RangeInclusive<u16>) -> bool {
        match self {
            Self::Any => false,
            Self::Some => true,
            Self::In(all) => all
                .iter()
                .any(|some| some.start() <= range.end() && range.start() <= some.end()),
        }
    }
}

/// What has been read of a rule's expressions.
#[derive(Default)]
pub(crate) struct Reader {
    /// The register that has the destination port.
    register: Option<u32>,
    /// Whether it has the source port before that: nft loads two fields that lie side by side at once.
    both: bool,
    /// Lowest and highest, by comparisons one after the other.
    bounds: Option<RangeInclusive<u16>>,
    unknown: bool,
}

type Parsed<T> = Result<T, Garbage>;

impl Reader {
    /// The next expression, by its name and data.
    pub(crate) fn read(&mut self, name: &str, data: &[u8]) -> Parsed<()> {
        match name {
            "payload" => {
                let [register, base, offset, length] = numbers(data, [1, 2, 3, 4])?;
                let end = offset.saturating_add(length);
                let has = base == TRANSPORT && offset <= DESTINATION && end > DESTINATION;
                match (has, offset, length) {
                    (true, DESTINATION, 2) | (true, 0, 4) => {
                        self.register = Some(register);
                        self.both = offset == 0;
                    }
                    (true, ..) => self.unknown = true,
                    _ if self.register == Some(register) => self.register = None,
                    _ => {}
                }
            }
            "cmp" => {
                let [register, operator] = numbers(data, [1, 2])?;
                if self.register == Some(register) {
                    match (operator, value(data, 3, self.both)?) {
                        (1..=5, _) if self.both => self.unknown = true,
                        (0, Some(port)) => self.within(port..=port),
                        (2, Some(port)) => self.within(0..=port.saturating_sub(1)),
                        (3, Some(port)) => self.within(0..=port),
                        (4, Some(port)) => self.within(port.saturating_add(1)..=u16::MAX),
                        (5, Some(port)) => self.within(port..=u16::MAX),
                        _ => self.unknown = true,
                    }
                }
            }
            "range" => {
                let [register, operator] = numbers(data, [1, 2])?;
                if self.register == Some(register) {
                    let value = |kind| value(data, kind, false);
                    match (operator, value(3)?, value(4)?) {
                        (0, Some(first), Some(last)) => self.within(first..=last),
                        _ => self.unknown = true,
                    }
                }
            }
            // What is made of the port is not followed.
            "lookup" | "bitwise" | "byteorder" if self.register.is_some() => self.unknown = true,
            "match" => self.read_match(data)?,
            // It may have loaded something else into the register.
            _ => self.register = None,
        }
        Ok(())
    }

    /// struct xt_tcp and struct xt_udp: source ports from and to, destination ports from and to, host order.
    fn read_match(&mut self, data: &[u8]) -> Parsed<()> {
        let (mut name, mut info) = (String::new(), &[][..]);
        for attr in wire::attrs(data) {
            let attr = attr?;
            match attr.kind {
                1 => name = attr.text(),
                3 => info = attr.value,
                _ => {}
            }
        }
        match (name.as_str(), info) {
            ("tcp" | "udp", [_, _, _, _, a, b, c, d, inverted @ ..]) => {
                let ports = u16::from_ne_bytes([*a, *b])..=u16::from_ne_bytes([*c, *d]);
                // XT_TCP_INV_DSTPT and XT_UDP_INV_DSTPT, behind TCP's option and flags.
                let at = if name == "tcp" { 3 } else { 0 };
                let is_inverted = inverted.get(at).is_some_and(|flags| flags & 2 != 0);
                match ports == (0..=u16::MAX) {
                    true => {}
                    false if is_inverted => self.unknown = true,
                    false => self.within(ports),
                }
            }
            ("multiport" | "set" | "sctp" | "dccp", _) => self.unknown = true,
            _ => {}
        }
        Ok(())
    }

    fn within(&mut self, ports: RangeInclusive<u16>) {
        let (first, last) = match &self.bounds {
            None => (0, u16::MAX),
            Some(bounds) => (*bounds.start(), *bounds.end()),
        };
        self.bounds = Some(first.max(*ports.start())..=last.min(*ports.end()));
    }

    pub(crate) fn ports(self) -> Ports {
        match (self.unknown, self.bounds) {
            (true, _) => Ports::Some,
            (false, None) => Ports::Any,
            (false, Some(bounds)) => Ports::In(vec![bounds]),
        }
    }
}

/// NFTA_DATA_VALUE of an attribute, if it is as long as a port, or as both ports: the second.
fn value(data: &[u8], kind: u16, both: bool) -> Parsed<Option<u16>> {
    for attr in wire::attrs(data) {
        let attr: Attr<'_> = attr?;
        if attr.kind != kind {
            continue;
        }
        for inner in wire::attrs(attr.value) {
            let inner = inner?;
            if inner.kind == 1 {
                let port = match (inner.value, both) {
                    (&[a, b], false) | (&[_, _, a, b], true) => Some(u16::from_be_bytes([a, b])),
                    _ => None,
                };
                return Ok(port);
            }
        }
    }
    Ok(None)
}
