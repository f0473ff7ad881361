//! From the first generation, which had the masquerade's flows in `NAT`, an entry for each direction, and in
//! `STACK_FLOWS` those that keep to the stack, to one record for each connection, and back.
//!
//! What both directions have sent was in two entries there; a flow that is carried counts as established, and its
//! next packets tell the rest.

use super::{super::shape::Shape, Expected, Migration};
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Alias, Connection, ConnectionKey, FLAG_CLIENT_IS_HIGH, FLAG_INBOUND, FLAG_MAPPING,
            FLAG_MASQUERADED, FLAG_STACK, NOBODY_SHARE, Tuple,
        },
        layout::{both, field, start},
    },
    algo::ct_state::{ACK, SEEN},
};

/// Forward entries, and those of connections that came in.
pub const RECORDS: Migration = Migration {
    map: "CONNECTIONS",
    earlier: nat,
    up: record_up,
    down: record_down,
};

/// Reverse entries.
pub const ALIASES: Migration = Migration {
    map: "ALIASES",
    earlier: nat,
    up: alias_up,
    down: alias_down,
};

pub const STACK: Migration = Migration {
    map: "CONNECTIONS",
    earlier: stack_flows,
    up: stack_up,
    down: stack_down,
};

/// Both directions' entries: twice as many as records.
const MAX_NAT_ENTRIES: u32 = 131_072;
const MAX_STACK_FLOWS: u32 = 65_536;
const HASH: u32 = 1;
const LRU_HASH: u32 = 9;

const KEY_LEN: usize = 40;
const ENTRY_LEN: usize = 32;
const KIND_FORWARD: u8 = 1;
const KIND_REVERSE: u8 = 2;
const KIND_INBOUND: u8 = 3;

fn nat(_: Expected) -> Expected {
    Expected {
        shape: Shape {
            name: "NAT",
            map_type: HASH,
            key_size: KEY_LEN as u32,
            value_size: ENTRY_LEN as u32,
            max_entries: MAX_NAT_ENTRIES,
            flags: 0,
        },
        layout: both(key_layout("NatKey"), ENTRY_LAYOUT),
        number: 1,
        fields: [&[], &[]],
    }
}

fn stack_flows(_: Expected) -> Expected {
    Expected {
        shape: Shape {
            name: "STACK_FLOWS",
            map_type: LRU_HASH,
            key_size: KEY_LEN as u32,
            value_size: 1,
            max_entries: MAX_STACK_FLOWS,
            flags: 0,
        },
        layout: both(key_layout("FlowKey"), start("u8", 1, 1)),
        number: 1,
        fields: [&[], &[]],
    }
}

const fn key_layout(name: &str) -> u64 {
    let hash = field(field(start(name, KEY_LEN, 1), "src", 0), "dst", 16);
    let hash = field(field(hash, "src_port", 32), "dst_port", 34);
    field(field(hash, "proto", 36), "pad", 37)
}

const ENTRY_LAYOUT: u64 = {
    let hash = field(start("NatEntry", ENTRY_LEN, 1), "addr", 0);
    let hash = field(field(hash, "port", 16), "kind", 18);
    let hash = field(field(hash, "state", 19), "peer_state", 20);
    field(field(hash, "pad", 21), "last_seen_ns", 24)
};

/// An entry of `NAT`.
struct Entry {
    addr: Addr,
    port: [u8; 2],
    kind: u8,
    last_seen_ns: u64,
}

impl Entry {
    fn read(value: &[u8]) -> Option<Self> {
        let value: &[u8; ENTRY_LEN] = value.try_into().ok()?;
        Some(Self {
            addr: Addr(value[..16].try_into().ok()?),
            port: [value[16], value[17]],
            kind: value[18],
            last_seen_ns: u64::from_ne_bytes(value[24..].try_into().ok()?),
        })
    }

    fn write(&self) -> Vec<u8> {
        let mut value = Vec::with_capacity(ENTRY_LEN);
        value.extend(self.addr.0);
        value.extend(self.port);
        // Both directions have been seen.
        value.extend([self.kind, 1, u8::from(self.kind == KIND_INBOUND), 0, 0, 0]);
        value.extend(self.last_seen_ns.to_ne_bytes());
        value
    }
}

fn read_tuple(key: &[u8]) -> Option<Tuple> {
    let key: &[u8; KEY_LEN] = key.try_into().ok()?;
    Some(Tuple {
        src: Addr(key[..16].try_into().ok()?),
        dst: Addr(key[16..32].try_into().ok()?),
        src_port: [key[32], key[33]],
        dst_port: [key[34], key[35]],
        proto: key[36],
        pad: [0; 3],
    })
}

fn write_tuple(tuple: &Tuple) -> Vec<u8> {
    let mut key = Vec::with_capacity(KEY_LEN);
    key.extend(tuple.src.0);
    key.extend(tuple.dst.0);
    key.extend(tuple.src_port);
    key.extend(tuple.dst_port);
    key.extend([tuple.proto, 0, 0, 0]);
    key
}

/// Bytes of a map's type, whose fields have no gaps between them.
fn bytes<T: aya::Pod>(value: &T) -> Vec<u8> {
    // SAFETY: plain old data without padding (`map_type`), read while it is borrowed.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }.to_vec()
}

fn value<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: as long as the type, which takes any bytes (`aya::Pod`).
    (bytes.len() == size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// A record of a connection of which nothing is known but that it is.
fn record(sent: &Tuple, kind: u16, nat: (Addr, [u8; 2]), last_seen_ns: u64) -> (Vec<u8>, Vec<u8>) {
    let (key, from_high) = sent.key();
    let client = if from_high { FLAG_CLIENT_IS_HIGH } else { 0 };
    let connection = Connection {
        last_seen_ns,
        nat: nat.0,
        nat_port: nat.1,
        states: [SEEN | ACK; 2],
        flags: kind | client,
        payer: NOBODY_SHARE,
        ..Connection::NONE
    };
    (bytes(&key), bytes(&connection))
}

const NONE: (Addr, [u8; 2]) = (Addr::UNSPECIFIED, [0; 2]);

fn record_up(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (tuple, entry) = (read_tuple(key)?, Entry::read(value)?);
    match entry.kind {
        KIND_FORWARD => Some(record(
            &tuple,
            FLAG_MASQUERADED,
            (entry.addr, entry.port),
            entry.last_seen_ns,
        )),
        // Keyed by what the pod answers.
        KIND_INBOUND => {
            let sent = tuple.reversed();
            Some(record(&sent, FLAG_INBOUND, NONE, entry.last_seen_ns))
        }
        _ => None,
    }
}

fn record_down(key: &[u8], bytes: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (key, connection) = (value::<ConnectionKey>(key)?, value::<Connection>(bytes)?);
    let sent = connection.from_client(&key);
    let last_seen_ns = connection.last_seen_ns;
    // Earlier versions translate IPv4 alone, and these protocols.
    let is_known = sent.src.as_v4().is_some() && matches!(sent.proto, 1 | 6 | 17);
    if !is_known || connection.has(FLAG_MAPPING) {
        return None;
    }
    if connection.has(FLAG_MASQUERADED) {
        let (addr, port) = (connection.nat, connection.nat_port);
        let kind = KIND_FORWARD;
        let entry = Entry {
            addr,
            port,
            kind,
            last_seen_ns,
        };
        return Some((write_tuple(&sent), entry.write()));
    }
    if connection.has(FLAG_INBOUND) {
        let answer = sent.reversed();
        let (addr, port) = (answer.src, answer.src_port);
        let kind = KIND_INBOUND;
        let entry = Entry {
            addr,
            port,
            kind,
            last_seen_ns,
        };
        return Some((write_tuple(&answer), entry.write()));
    }
    None
}

fn alias_up(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (tuple, entry) = (read_tuple(key)?, Entry::read(value)?);
    let alias = Alias::to(entry.addr, entry.port);
    (entry.kind == KIND_REVERSE).then(|| (bytes(&tuple), bytes(&alias)))
}

fn alias_down(key: &[u8], bytes: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (key, alias) = (value::<Tuple>(key)?, value::<Alias>(bytes)?);
    let is_known = key.src.as_v4().is_some() && matches!(key.proto, 1 | 6 | 17);
    let entry = Entry {
        addr: alias.addr,
        port: alias.port,
        kind: KIND_REVERSE,
        last_seen_ns: crate::datapath::monotonic_ns(),
    };
    is_known.then(|| (write_tuple(&key), entry.write()))
}

/// Keyed by what answers.
fn stack_up(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let tuple = read_tuple(key)?;
    let now = crate::datapath::monotonic_ns();
    (value.len() == 1).then(|| record(&tuple.reversed(), FLAG_STACK, NONE, now))
}

fn stack_down(key: &[u8], bytes: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (key, connection) = (value::<ConnectionKey>(key)?, value::<Connection>(bytes)?);
    let answer = connection.from_client(&key).reversed();
    connection
        .has(FLAG_STACK)
        .then(|| (write_tuple(&answer), vec![1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    /// What the first generation's maps were, as its agents wrote it down.
    #[test]
    fn the_layouts_are_those_of_the_first_generation() {
        let any = super::super::super::shape::expected(&Default::default())[0];
        assert_eq!(nat(any).layout, 0x201e_d88e_1f57_c784);
        assert_eq!(stack_flows(any).layout, 0xf3bd_ad85_8131_85df);
    }

    fn key(v4: [[u8; 4]; 2], ports: [[u8; 2]; 2], proto: u8) -> Vec<u8> {
        let ports = if proto == 1 { [ports[0]; 2] } else { ports };
        write_tuple(&Tuple {
            src: Addr::v4(v4[0]),
            dst: Addr::v4(v4[1]),
            src_port: ports[0],
            dst_port: ports[1],
            proto,
            pad: [0; 3],
        })
    }

    proptest! {
        #[test]
        fn a_flow_goes_up_and_comes_back(
            v4: [[u8; 4]; 2],
            ports: [[u8; 2]; 2],
            proto in prop_oneof![Just(1u8), Just(6), Just(17)],
            node: [u8; 4],
            port: [u8; 2],
            kind in KIND_FORWARD..=KIND_INBOUND,
            last_seen_ns: u64,
        ) {
            let key = key(v4, ports, proto);
            let addr = match kind {
                KIND_INBOUND => Addr::v4(v4[0]),
                _ => Addr::v4(node),
            };
            let port = if kind == KIND_INBOUND { read_tuple(&key).unwrap().src_port } else { port };
            let entry = Entry { addr, port, kind, last_seen_ns };
            let (up, down): (super::super::Convert, super::super::Convert) = match kind {
                KIND_REVERSE => (alias_up, alias_down),
                _ => (record_up, record_down),
            };
            let (up_key, up_value) = up(&key, &entry.write()).unwrap();
            let (down_key, down_value) = down(&up_key, &up_value).unwrap();
            prop_assert_eq!(down_key, key);
            let back = Entry::read(&down_value).unwrap();
            prop_assert_eq!((back.addr, back.port, back.kind), (addr, port, kind));
            if kind != KIND_REVERSE {
                prop_assert_eq!(back.last_seen_ns, last_seen_ns);
            }
        }

        #[test]
        fn a_mapping_is_nothing_that_earlier_versions_know(
            v4: [[u8; 4]; 2], ports: [[u8; 2]; 2], node: [u8; 4],
        ) {
            let nat = Addr::v4(node);
            let sent = read_tuple(&key(v4, ports, 17)).unwrap().mapping(&nat);
            let kind = FLAG_MASQUERADED | FLAG_MAPPING;
            let (up_key, up_value) = record(&sent, kind, (nat, ports[1]), 7);
            prop_assert_eq!(record_down(&up_key, &up_value), None);
            let alias = Alias::to(sent.src, sent.src_port);
            prop_assert_eq!(alias_down(&bytes(&sent.reply_to(nat, ports[1])), &bytes(&alias)), None);
        }

        #[test]
        fn a_connection_that_keeps_to_the_stack_goes_up_and_comes_back(
            v4: [[u8; 4]; 2], ports: [[u8; 2]; 2],
        ) {
            let key = key(v4, ports, 6);
            let (up_key, up_value) = stack_up(&key, &[1]).unwrap();
            prop_assert_eq!(record_down(&up_key, &up_value), None);
            prop_assert_eq!(stack_down(&up_key, &up_value), Some((key, vec![1])));
        }

        #[test]
        fn garbage_becomes_nothing(key in vec(any::<u8>(), 0..100), value in vec(any::<u8>(), 0..100)) {
            for convert in [record_up, record_down, alias_up, alias_down, stack_up, stack_down] {
                if let Some((key, value)) = convert(&key, &value) {
                    prop_assert!([KEY_LEN].contains(&key.len()));
                    prop_assert!([1, ENTRY_LEN, size_of::<Connection>(), size_of::<Alias>()].contains(&value.len()));
                }
            }
        }
    }
}
