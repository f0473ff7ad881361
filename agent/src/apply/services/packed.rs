//! What is published of a Service as it is kept: in one piece of memory, forty bytes of most, of which [`Applied`] makes three
//! with a quarter of a kilobyte. There may be tens of thousands, and a change is about one of them.
//!
//! Numbers are written by seven bits, the lowest first, and the highest bit says whether more follow (LEB128): most are
//! small. What can be told from something else, as nearly always, is not written.

use super::{Applied, AppliedPort, Family, roles::ROLES};
use crate::plan::services::Protocol;
use sinabro_common::abi::{
    Addr,
    service::{Frontend, FrontendKey},
};

/// What is published of a Service.
#[derive(Clone, Debug)]
pub struct Packed(Box<[u8]>);

/// Of a [`Family`]: it is there, and some of its endpoints drain.
const IS_THERE: u8 = 1 << 0;
const DRAINS: u8 = 1 << 1;

/// Of a frontend: its address has four bytes.
const IS_IPV4: u8 = 1 << 0;
/// It is an address by itself, and nothing of it is but zero.
const IS_ADDRESS: u8 = 1 << 1;
/// It leads clients inside and outside to one set.
const HAS_ONE_SET: u8 = 1 << 2;
/// It has neither affinity nor flags.
const IS_PLAIN: u8 = 1 << 3;

const NOTHING: Frontend = Frontend {
    inside: 0,
    outside: 0,
    service: 0,
    affinity_seconds: 0,
    flags: 0,
};

impl Packed {
    /// As it was packed.
    pub fn open(&self) -> Applied {
        let mut from = Reader(&self.0);
        let ports: Vec<_> = (0..from.number()).map(|_| from.port()).collect();
        let mut frontends = Vec::new();
        while !from.0.is_empty() {
            frontends.push(from.frontend(&ports));
        }
        Applied { ports, frontends }
    }
}

impl From<&Applied> for Packed {
    fn from(applied: &Applied) -> Self {
        let Applied { ports, frontends } = applied;
        let mut to = Writer(Vec::with_capacity(128));
        to.number(ports.len() as u32);
        ports.iter().for_each(|port| to.port(port));
        for (key, frontend) in frontends {
            to.frontend(ports, key, frontend);
        }
        // A copy, not what is left of a longer piece.
        Self(to.0.as_slice().into())
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn number(&mut self, mut number: u32) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn port(&mut self, port: &AppliedPort) {
        self.number(port.name.len() as u32);
        self.bytes(port.name.as_bytes());
        self.bytes(&[port.protocol.number()]);
        self.number(port.number);
        for family in &port.families {
            let Some(Family { roles, draining }) = family else {
                self.bytes(&[0]);
                continue;
            };
            let drains = if draining.is_empty() { 0 } else { DRAINS };
            self.bytes(&[IS_THERE | drains]);
            roles.iter().for_each(|set| self.number(*set));
            if !draining.is_empty() {
                self.number(draining.len() as u32);
                draining.iter().for_each(|id| self.number(*id));
            }
        }
    }

    fn frontend(&mut self, ports: &[AppliedPort], key: &FrontendKey, frontend: &Frontend) {
        let v4 = key.addr.as_v4();
        let is_address = *key == FrontendKey::address(key.addr) && *frontend == NOTHING;
        let has_one_set = frontend.inside == frontend.outside;
        let is_plain = frontend.affinity_seconds == 0 && frontend.flags == 0;
        let flags = [
            (v4.is_some(), IS_IPV4),
            (is_address, IS_ADDRESS),
            (has_one_set, HAS_ONE_SET),
            (is_plain, IS_PLAIN),
        ];
        let flags = flags.iter().filter(|(is, _)| *is);
        self.bytes(&[flags.fold(0, |all, (_, flag)| all | flag)]);
        match &v4 {
            Some(v4) => self.bytes(v4),
            None => self.bytes(&key.addr.0),
        }
        if is_address {
            return;
        }
        self.bytes(&key.port);
        self.bytes(&[key.proto, key.pad]);
        // After a restart it may be a number that no port has.
        let port = ports
            .iter()
            .position(|port| port.number == frontend.service);
        match port {
            Some(port) => self.number(port as u32 + 1),
            None => {
                self.number(0);
                self.number(frontend.service);
            }
        }
        self.number(frontend.inside);
        if !has_one_set {
            self.number(frontend.outside);
        }
        if !is_plain {
            self.number(frontend.affinity_seconds);
            self.number(frontend.flags);
        }
    }
}

/// Of what a [`Writer`] wrote, in the same order.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (bytes, rest) = self.0.split_first_chunk().expect("as much was written");
        self.0 = rest;
        *bytes
    }

    fn byte(&mut self) -> u8 {
        let [byte] = self.bytes();
        byte
    }

    fn number(&mut self) -> u32 {
        let (mut number, mut shift) = (0, 0);
        loop {
            let byte = self.byte();
            number |= u32::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return number;
            }
            shift += 7;
        }
    }

    fn port(&mut self) -> AppliedPort {
        let len = self.number() as usize;
        let (name, rest) = self.0.split_at(len);
        self.0 = rest;
        AppliedPort {
            name: str::from_utf8(name).expect("a string was written").into(),
            protocol: match self.byte() {
                6 => Protocol::Tcp,
                17 => Protocol::Udp,
                _ => Protocol::Sctp,
            },
            number: self.number(),
            families: std::array::from_fn(|_| self.family()),
        }
    }

    fn family(&mut self) -> Option<Family> {
        let flags = self.byte();
        if flags & IS_THERE == 0 {
            return None;
        }
        let roles: [u32; ROLES] = std::array::from_fn(|_| self.number());
        let draining = if flags & DRAINS == 0 {
            0
        } else {
            self.number()
        };
        Some(Family {
            roles,
            draining: (0..draining).map(|_| self.number()).collect(),
        })
    }

    fn frontend(&mut self, ports: &[AppliedPort]) -> (FrontendKey, Frontend) {
        let flags = self.byte();
        let addr = match flags & IS_IPV4 {
            0 => Addr::v6(self.bytes()),
            _ => Addr::v4(self.bytes()),
        };
        if flags & IS_ADDRESS != 0 {
            return (FrontendKey::address(addr), NOTHING);
        }
        let port = self.bytes();
        let [proto, pad] = self.bytes();
        let service = match self.number() {
            0 => self.number(),
            port => ports[port as usize - 1].number,
        };
        let inside = self.number();
        let outside = match flags & HAS_ONE_SET {
            0 => self.number(),
            _ => inside,
        };
        let [affinity_seconds, flags] = match flags & IS_PLAIN {
            0 => std::array::from_fn(|_| self.number()),
            _ => [0; 2],
        };
        let key = FrontendKey {
            addr,
            port,
            proto,
            pad,
        };
        let frontend = Frontend {
            inside,
            outside,
            service,
            affinity_seconds,
            flags,
        };
        (key, frontend)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    fn number() -> impl Strategy<Value = u32> {
        prop_oneof![Just(0), 0..4u32, 120..140u32, any::<u32>(), Just(u32::MAX)]
    }

    fn family() -> impl Strategy<Value = Option<Family>> {
        let family = ([number(), number(), number()], vec(number(), 0..4));
        let family = family.prop_map(|(roles, draining)| Family {
            roles,
            draining: draining.into(),
        });
        proptest::option::of(family)
    }

    fn port() -> impl Strategy<Value = AppliedPort> {
        let name = prop_oneof!["[a-zé-]{0,15}", "[a-z]{127,130}"];
        let protocols = vec![Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
        let protocol = proptest::sample::select(protocols);
        let port = (name, protocol, number(), [family(), family()]);
        port.prop_map(|(name, protocol, number, families)| AppliedPort {
            name: name.into(),
            protocol,
            number,
            families,
        })
    }

    fn key() -> impl Strategy<Value = FrontendKey> {
        let addr = prop_oneof![
            any::<[u8; 4]>().prop_map(Addr::v4),
            any::<[u8; 16]>().prop_map(Addr::v6),
        ];
        let proto = proptest::sample::select(vec![0, 6, 17, 132, 255]);
        let port = prop_oneof![Just([0; 2]), any::<[u8; 2]>()];
        (addr, port, proto).prop_map(|(addr, port, proto)| FrontendKey {
            addr,
            port,
            proto,
            pad: 0,
        })
    }

    fn frontend() -> impl Strategy<Value = Frontend> {
        let numbers = [number(), number(), number(), number(), number()];
        let any =
            numbers.prop_map(
                |[inside, outside, service, affinity_seconds, flags]| Frontend {
                    inside,
                    outside,
                    service,
                    affinity_seconds,
                    flags,
                },
            );
        let of_one_set = number().prop_map(|set| Frontend {
            inside: set,
            outside: set,
            ..NOTHING
        });
        prop_oneof![Just(NOTHING), of_one_set, any]
    }

    proptest! {
        #[test]
        fn what_is_opened_is_what_was_packed(
            ports in vec(port(), 0..4),
            mut frontends in vec((key(), frontend()), 0..6),
            of_ports in vec(any::<usize>(), 6),
        ) {
            // Every other one is of a port.
            if !ports.is_empty() {
                for (at, (_, frontend)) in frontends.iter_mut().enumerate().step_by(2) {
                    frontend.service = ports[of_ports[at] % ports.len()].number;
                }
            }
            let applied = Applied { ports, frontends };
            prop_assert_eq!(Packed::from(&applied).open(), applied);
        }
    }

    /// An allocation of at most forty bytes takes 48 with glibc. An agent among 50,000 Services has as many of them.
    #[test]
    fn most_take_no_more_than_forty_bytes() {
        let addr = Addr::v4([10, 96, 200, 77]);
        let (set, number) = (200_000, 0xfedc_ba98);
        let port = AppliedPort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            number,
            families: [
                Some(Family {
                    roles: [set, 0, 0],
                    draining: Box::default(),
                }),
                None,
            ],
        };
        let frontend = Frontend {
            inside: set,
            outside: set,
            service: number,
            ..NOTHING
        };
        let key = FrontendKey {
            port: [0, 80],
            proto: 6,
            ..FrontendKey::address(addr)
        };
        let packed = Packed::from(&Applied {
            ports: vec![port],
            frontends: vec![(FrontendKey::address(addr), NOTHING), (key, frontend)],
        });
        assert!(packed.0.len() <= 40, "{}", packed.0.len());
        assert!(size_of::<Packed>() <= 16);
    }
}
