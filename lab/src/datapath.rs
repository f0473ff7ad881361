//! The maps of a node's data path.

use crate::node::Node;
use anyhow::{Context as _, Result};
use aya::maps::{Array, Map, MapData, MapError};
use sinabro_common::{
    abi::config::{FLAG_REDIRECT_PEER, NodeConfig},
    names,
};

/// A map of the node's data path.
pub(crate) fn map<T: TryFrom<Map, Error = MapError>>(node: &Node, name: &str) -> Result<T> {
    let open = || -> Result<_> {
        let path = node.namespace().path(names::BPF_DIR).join(name);
        Ok(Map::from_map_data(MapData::from_pin(path)?)?.try_into()?)
    };
    open().with_context(|| format!("cannot open map {name} of {}", node.name()))
}

/// Has packets between pods of the node go through its stack, as where the kernel refuses to redirect
/// them. For comparisons: the agent says otherwise again with the next change of its node.
pub fn deliver_by_stack(node: &Node) -> Result<()> {
    let mut map: Array<MapData, NodeConfig> = map(node, "CONFIG")?;
    let mut config = map.get(&0, 0)?;
    config.flags &= !FLAG_REDIRECT_PEER;
    Ok(map.set(0, config, 0)?)
}
