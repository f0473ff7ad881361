//! `CONFIG`, `NON_MASQUERADE` and what was in it.

use super::{Prefix, error, lock, prefixes, removed};
use crate::datapath::DatapathError;
use aya::maps::{Array, LpmTrie, Map, MapData, lpm_trie::Key};
use ipnet::IpNet;
use sinabro_common::abi::{
    Addr,
    config::{
        FLAG_BESIDE_PROXY, FLAG_BESIDE_PROXY_DRAINS, FLAG_CARRYING, FLAG_CONNTRACK_STRICT,
        FLAG_DRAINING, FLAG_FORWARD, FLAG_HANDOVER, FLAG_INGRESS_MTU, FLAG_MIXED,
        FLAG_RECORD_STACK, FLAG_SERVICES, FLAG_STAMPED, FLAG_TUNNELS, NodeConfig,
    },
};
use std::{collections::HashSet, fs, path::Path, sync::Mutex, thread, time::Duration};

const CONFIG: &str = "CONFIG";
const NON_MASQUERADE: &str = "NON_MASQUERADE";
const BEFORE: &str = "NON_MASQUERADE_BEFORE";

/// How long a packet may be on its way from an uplink to the VXLAN device: through the queues of
/// receive packet steering and of GRO, by which time the kernel says nothing of it.
const IN_FLIGHT: Duration = Duration::from_millis(20);

pub struct Config(Mutex<Array<MapData, NodeConfig>>);

/// What becomes of what is sent to Services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Translation {
    /// It is left to others.
    #[default]
    Off,
    /// It is translated, but for what others translated before.
    Handover,
    On,
    /// What is translated goes on, nothing begins.
    Draining,
}

impl From<bool> for Translation {
    fn from(is_on: bool) -> Self {
        match is_on {
            true => Self::On,
            false => Self::Off,
        }
    }
}

impl Translation {
    const FLAGS: u32 = FLAG_SERVICES | FLAG_HANDOVER | FLAG_DRAINING;

    const fn flags(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::Handover => FLAG_SERVICES | FLAG_HANDOVER,
            Self::On => FLAG_SERVICES,
            Self::Draining => FLAG_SERVICES | FLAG_DRAINING,
        }
    }

    /// What the programs were told.
    pub const fn of(config: &NodeConfig) -> Self {
        match config.flags & Self::FLAGS {
            flags if flags & FLAG_SERVICES == 0 => Self::Off,
            flags if flags & FLAG_DRAINING != 0 => Self::Draining,
            flags if flags & FLAG_HANDOVER != 0 => Self::Handover,
            _ => Self::On,
        }
    }
}

/// What is pinned, read before anything is loaded; none if there is no such map.
pub fn pinned(directory: &Path) -> Option<Result<NodeConfig, DatapathError>> {
    let path = directory.join(CONFIG);
    fs::symlink_metadata(&path).ok()?;
    let open = || {
        let data = MapData::from_pin(&path).map_err(error(CONFIG, "opening"))?;
        read(
            &Map::Array(data)
                .try_into()
                .map_err(error(CONFIG, "opening"))?,
        )
    };
    Some(open())
}

/// What becomes of packets between nodes while others translate Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BesideProxy {
    /// They go by the stack,
    Off,
    /// and their connections get a record.
    Records,
    /// They take the fast path, but for those with a record.
    On,
    /// They go by the stack again, and what it would take for invalid does not.
    Drains,
}

impl BesideProxy {
    const FLAGS: u32 = FLAG_RECORD_STACK | FLAG_BESIDE_PROXY | FLAG_BESIDE_PROXY_DRAINS;

    fn flags(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::Records => FLAG_RECORD_STACK,
            Self::On => FLAG_RECORD_STACK | FLAG_BESIDE_PROXY,
            Self::Drains => Self::FLAGS,
        }
    }

    fn of(flags: u32) -> Self {
        match flags & Self::FLAGS {
            0 => Self::Off,
            some if some & FLAG_BESIDE_PROXY == 0 => Self::Records,
            some if some & FLAG_BESIDE_PROXY_DRAINS == 0 => Self::On,
            _ => Self::Drains,
        }
    }
}

fn with_ways(before: NodeConfig, translation: Translation, beside: BesideProxy) -> NodeConfig {
    let others = before.flags & !(Translation::FLAGS | BesideProxy::FLAGS);
    NodeConfig {
        flags: others | translation.flags() | beside.flags(),
        ..before
    }
}

impl Config {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(CONFIG, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Whether stamps are asked for stays as it is while tunnels are checked, and so does what is about
    /// the programs: [`Self::runs`], [`Self::carrying`], [`Self::mixed`]; and so do [`Self::services`], [`Self::forwarding`] and
    /// [`Self::ingress_mtu`].
    pub fn set(&self, config: NodeConfig) -> Result<(), DatapathError> {
        self.change(|before| {
            let tunnels = config.flags & FLAG_TUNNELS != 0;
            let kept = FLAG_CARRYING
                | FLAG_MIXED
                | FLAG_FORWARD
                | FLAG_INGRESS_MTU
                | FLAG_CONNTRACK_STRICT
                | BesideProxy::FLAGS
                | Translation::FLAGS
                | if tunnels { FLAG_STAMPED } else { 0 };
            let flags = config.flags | before.flags & kept;
            NodeConfig { flags, ..config }.with_generation(before.generation())
        })
    }

    /// Whose programs run now.
    pub fn runs(&self, generation: u32) -> Result<(), DatapathError> {
        self.change(|before| before.with_generation(generation))
    }

    /// Whether flows are being carried from one map to another.
    pub fn carrying(&self, is: bool) -> Result<(), DatapathError> {
        self.set_flags(FLAG_CARRYING, if is { FLAG_CARRYING } else { 0 })
    }

    /// Whether programs of two layouts run.
    pub fn mixed(&self, are: bool) -> Result<(), DatapathError> {
        self.set_flags(FLAG_MIXED, if are { FLAG_MIXED } else { 0 })
    }

    /// What becomes of what is sent to Services.
    pub fn services(&self, translation: Translation) -> Result<(), DatapathError> {
        self.change(|before| with_ways(before, translation, BesideProxy::of(before.flags)))
    }

    /// Whether what leaves the cluster goes past the stack.
    pub fn forwarding(&self, is_direct: bool) -> Result<(), DatapathError> {
        self.set_flags(FLAG_FORWARD, if is_direct { FLAG_FORWARD } else { 0 })
    }

    /// Whether packets between nodes take the fast path while others translate Services.
    pub fn set_beside_proxy(&self, is: BesideProxy) -> Result<(), DatapathError> {
        self.change(|before| with_ways(before, Translation::of(&before), is))
    }

    pub fn beside_proxy(&self) -> Result<BesideProxy, DatapathError> {
        Ok(BesideProxy::of(self.get()?.flags))
    }

    /// Whether the kernel drops what a program puts into an interface that has a smaller MTU.
    pub fn ingress_mtu(&self, counts: bool) -> Result<(), DatapathError> {
        let flag = if counts { FLAG_INGRESS_MTU } else { 0 };
        self.set_flags(FLAG_INGRESS_MTU, flag)
    }

    /// Whether conntrack picks up no TCP connection in the middle.
    pub fn set_conntrack_strict(&self, is: bool) -> Result<(), DatapathError> {
        let flag = if is { FLAG_CONNTRACK_STRICT } else { 0 };
        self.set_flags(FLAG_CONNTRACK_STRICT, flag)
    }

    /// Of some flags, has these and no others be set.
    fn set_flags(&self, some: u32, these: u32) -> Result<(), DatapathError> {
        self.change(|before| NodeConfig {
            flags: before.flags & !some | these,
            ..before
        })
    }

    fn change(&self, change: impl FnOnce(NodeConfig) -> NodeConfig) -> Result<(), DatapathError> {
        let mut map = lock(&self.0);
        let before = read(&map)?;
        let after = change(before);
        match after == before {
            true => Ok(()),
            false => write(&mut map, after),
        }
    }

    /// Has the VXLAN device ask for stamps, once tunnels have been stamped for [`IN_FLIGHT`].
    pub fn ask_for_stamps(&self) -> Result<(), DatapathError> {
        if !lacks_stamps(&self.get()?) {
            return Ok(());
        }
        thread::sleep(IN_FLIGHT);
        let mut map = lock(&self.0);
        let mut config = read(&map)?;
        if lacks_stamps(&config) {
            config.flags |= FLAG_STAMPED;
            write(&mut map, config)?;
        }
        Ok(())
    }

    pub fn get(&self) -> Result<NodeConfig, DatapathError> {
        read(&lock(&self.0))
    }
}

fn lacks_stamps(config: &NodeConfig) -> bool {
    config.flags & (FLAG_TUNNELS | FLAG_STAMPED) == FLAG_TUNNELS
}

fn read(map: &Array<MapData, NodeConfig>) -> Result<NodeConfig, DatapathError> {
    map.get(&0, 0).map_err(error(CONFIG, "reading from"))
}

fn write(map: &mut Array<MapData, NodeConfig>, config: NodeConfig) -> Result<(), DatapathError> {
    map.set(0, config, 0).map_err(error(CONFIG, "writing to"))
}

/// Which destinations are not masqueraded, and which were not.
pub struct NonMasquerade {
    now: Mutex<Trie>,
    before: Mutex<Trie>,
}

type Trie = LpmTrie<MapData, Addr, u8>;

impl NonMasquerade {
    pub fn new(now: Map, before: Map) -> Result<Self, DatapathError> {
        let now = now.try_into().map_err(error(NON_MASQUERADE, "opening"))?;
        let before = before.try_into().map_err(error(BEFORE, "opening"))?;
        Ok(Self {
            now: Mutex::new(now),
            before: Mutex::new(before),
        })
    }

    /// Makes the map hold exactly these. New ones go in before old ones go out: a destination in
    /// both is found all the time. Old ones are noted before they go.
    pub fn set(&self, wanted: &[IpNet]) -> Result<(), DatapathError> {
        let wanted: HashSet<Prefix> = wanted.iter().flat_map(prefixes).collect();
        let mut now = lock(&self.now);
        let present = all(&now, NON_MASQUERADE)?;
        for prefix in wanted.difference(&present) {
            now.insert(&key(prefix), 1, 0)
                .map_err(error(NON_MASQUERADE, "writing to"))?;
        }
        for prefix in present.difference(&wanted) {
            self.note(prefix)?;
            removed(now.remove(&key(prefix))).map_err(error(NON_MASQUERADE, "removing from"))?;
        }
        Ok(())
    }

    /// Has the TCP connections to these destinations go on. What was noted longest ago is not known: if there is
    /// no room, all goes.
    fn note(&self, prefix: &Prefix) -> Result<(), DatapathError> {
        let mut before = lock(&self.before);
        if before.insert(&key(prefix), 1, 0).is_ok() {
            return Ok(());
        }
        for other in all(&before, BEFORE)? {
            removed(before.remove(&key(&other))).map_err(error(BEFORE, "removing from"))?;
        }
        let inserted = before.insert(&key(prefix), 1, 0);
        inserted.map_err(error(BEFORE, "writing to"))
    }
}

fn key((len, addr): &Prefix) -> Key<Addr> {
    Key::new(*len, Addr(*addr))
}

fn all(trie: &Trie, name: &'static str) -> Result<HashSet<Prefix>, DatapathError> {
    let keys = trie.keys();
    let keys = keys.map(|key| key.map(|key| (key.prefix_len(), key.data().0)));
    keys.collect::<Result<_, _>>()
        .map_err(error(name, "reading from"))
}
