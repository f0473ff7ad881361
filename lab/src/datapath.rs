//! The maps of a node's data path.

use crate::node::Node;
use anyhow::{Context as _, Result, bail};
use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData, MapError},
};
use nix::{errno::Errno, time::ClockId};
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_REDIRECT_PEER, NodeConfig},
        connection::{
            Alias, Connection, ConnectionKey, FLAG_CLIENT_IS_HIGH, FLAG_MASQUERADED, Tuple,
            host_port_word,
        },
        layout::Layout,
    },
    algo::ct_state,
    names,
};
use std::{path::Path, time::Duration};

/// A map of the node's data path, of the first layout.
pub(crate) fn map<T: TryFrom<Map, Error = MapError>>(node: &Node, name: &str) -> Result<T> {
    open(node, Path::new(name))
}

/// A map of the node's data path, of the layout that its key and value have here.
fn hash<K: Pod + Layout, V: Pod + Layout>(
    node: &Node,
    name: &str,
) -> Result<HashMap<MapData, K, V>> {
    match K::NUMBER.max(V::NUMBER) {
        1 => map(node, name),
        number => open(node, &Path::new(&format!("v{number}")).join(name)),
    }
}

fn open<T: TryFrom<Map, Error = MapError>>(node: &Node, name: &Path) -> Result<T> {
    let open = || -> Result<_> {
        let path = node.namespace().path(names::BPF_DIR).join(name);
        Ok(Map::from_map_data(MapData::from_pin(path)?)?.try_into()?)
    };
    open().with_context(|| format!("cannot open map {} of {}", name.display(), node.name()))
}

/// Has packets between pods of the node go through its stack, as where the kernel refuses to redirect
/// them. For comparisons: the agent says otherwise again with the next change of its node.
pub fn deliver_by_stack(node: &Node) -> Result<()> {
    let mut map: Array<MapData, NodeConfig> = map(node, "CONFIG")?;
    let mut config = map.get(&0, 0)?;
    config.flags &= !FLAG_REDIRECT_PEER;
    Ok(map.set(0, config, 0)?)
}

/// Whether masqueraded connections of a node keep off a port.
pub fn keeps_off(node: &Node, proto: u8, port: u16) -> Result<bool> {
    let map: Array<MapData, u64> = map(node, "HOST_PORTS")?;
    let (word, bit) = host_port_word(proto, port).context("a protocol without ports")?;
    Ok(map.get(&word, 0)? & bit != 0)
}

/// Connections that a node's table has without any packet: for what their number costs.
pub struct Planted {
    connections: HashMap<MapData, ConnectionKey, Connection>,
    aliases: HashMap<MapData, Tuple, Alias>,
    planted: Vec<(ConnectionKey, Tuple)>,
}

impl Planted {
    /// Whether a node's programs have such a table, in this layout.
    pub fn is_possible(node: &Node) -> bool {
        hash::<ConnectionKey, Connection>(node, "CONNECTIONS").is_ok()
    }

    /// Established TCP connections that leave the node from `node_address` with the ports that they have.
    pub fn new(
        node: &Node,
        node_address: Addr,
        tuples: impl Iterator<Item = Tuple>,
    ) -> Result<Self> {
        let mut planted = Self::none(node)?;
        for tuple in tuples {
            planted.add(node_address, tuple)?;
        }
        Ok(planted)
    }

    /// The same, as many as there is room for.
    pub fn fill(
        node: &Node,
        node_address: Addr,
        tuples: impl Iterator<Item = Tuple>,
    ) -> Result<Self> {
        let mut planted = Self::none(node)?;
        for tuple in tuples {
            match planted.add(node_address, tuple) {
                Ok(()) => {}
                Err(MapError::SyscallError(error))
                    if error.io_error.raw_os_error() == Some(Errno::E2BIG as i32) =>
                {
                    return Ok(planted);
                }
                Err(error) => return Err(error.into()),
            }
        }
        bail!("{} has room for more than {}", node.name(), planted.all())
    }

    fn none(node: &Node) -> Result<Self> {
        Ok(Self {
            connections: hash(node, "CONNECTIONS")?,
            aliases: hash(node, "ALIASES")?,
            planted: Vec::new(),
        })
    }

    fn add(&mut self, node_address: Addr, tuple: Tuple) -> Result<(), MapError> {
        let now = ClockId::CLOCK_MONOTONIC.now().expect("a constant clock");
        let now = Duration::from(now).as_nanos() as u64;
        // As its packets would have said.
        let of = |first, then| ct_state::next(ct_state::next(0, TCP, first), TCP, then);
        let (client, server) = (of(SYN, ACK), of(SYN | ACK, ACK));
        let (key, client_is_high) = tuple.key();
        let connection = Connection {
            last_seen_ns: now,
            began_ns: now,
            nat: node_address,
            nat_port: tuple.src_port,
            states: match client_is_high {
                true => [server, client],
                false => [client, server],
            },
            flags: match client_is_high {
                true => FLAG_MASQUERADED | FLAG_CLIENT_IS_HIGH,
                false => FLAG_MASQUERADED,
            },
            ..Connection::NONE
        };
        let reply = tuple.reply_to(node_address, tuple.src_port);
        let alias = Alias::to(tuple.src, tuple.src_port);
        self.aliases.insert(reply, alias, 0)?;
        if let Err(error) = self.connections.insert(key, connection, 0) {
            self.aliases.remove(&reply)?;
            return Err(error);
        }
        self.planted.push((key, reply));
        Ok(())
    }

    /// How many they were.
    pub fn all(&self) -> usize {
        self.planted.len()
    }

    /// How many are still there.
    pub fn left(&self) -> usize {
        let is_there = |(key, _): &&(ConnectionKey, Tuple)| self.connections.get(key, 0).is_ok();
        self.planted.iter().filter(is_there).count()
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        for (key, reply) in &self.planted {
            // One that is gone was over.
            let _ = self.connections.remove(key);
            let _ = self.aliases.remove(reply);
        }
    }
}

const TCP: u8 = 6;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
