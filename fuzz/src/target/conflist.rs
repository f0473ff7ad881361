//! The network configuration on a node, as the installers of other plugins may have left it.

use crate::is_planted;
use serde_json::{Map, Value};
use sinabro_agent::install::{
    conflist::{Ours, PORTMAP, list, serves, types},
    versions::Versions,
};
use sinabro_common::names;
use std::path::Path;

pub fn run(bytes: &[u8]) -> bool {
    let found = serde_json::from_slice::<Map<String, Value>>(bytes).ok();
    let state_dir = Path::new(names::STATE_DIR);
    for has_portmap in [false, true] {
        let ours = Ours::new(state_dir, &state_dir.join(names::SOCKET), has_portmap);
        join(&ours, found.as_ref());
    }
    // A plugin of a name that no installer has.
    let types = found.iter().flat_map(plugins).filter_map(type_of);
    { types }.any(is_planted)
}

fn join(ours: &Ours, found: Option<&Map<String, Value>>) {
    let versions = Versions::plain();
    let joined = list(found, ours.plugins(found), &versions);

    // It leads to our plugin, which is there once, and a runtime can take it.
    assert!(serves(&joined, ours));
    assert_eq!(joined["name"], names::CNI_NETWORK);
    let chained = plugins(&joined);
    let own = |plugin: &&Value| type_of(plugin) == Some(names::CNI_PLUGIN);
    assert_eq!(chained.iter().filter(own).count(), 1);
    assert!(chained.iter().all(|plugin| type_of(plugin).is_some()));
    assert!(types(chained).contains(&names::CNI_PLUGIN));

    // What others put there is there, in its order, unchanged.
    let theirs = |plugins: &[Value]| -> Vec<Value> {
        let plugins = plugins.iter();
        let of_others = plugins.filter(|plugin| {
            type_of(plugin).is_some_and(|kind| kind != names::CNI_PLUGIN && kind != PORTMAP)
        });
        of_others.cloned().collect()
    };
    assert_eq!(theirs(chained), theirs(found.map_or(&[], plugins)));
    for (key, value) in found.into_iter().flatten() {
        if !["cniVersion", "cniVersions", "name", "plugins"].contains(&key.as_str()) {
            assert_eq!(joined.get(key), Some(value));
        }
    }

    // What was joined is left alone.
    let text = serde_json::to_vec(&joined).expect("a list is written");
    let read: Map<String, Value> = serde_json::from_slice(&text).expect("and is read");
    assert_eq!(
        list(Some(&read), ours.plugins(Some(&read)), &versions),
        read
    );
}

fn plugins(list: &Map<String, Value>) -> &[Value] {
    let plugins = list.get("plugins").and_then(Value::as_array);
    plugins.map_or(&[], Vec::as_slice)
}

fn type_of(plugin: &Value) -> Option<&str> {
    plugin["type"].as_str().filter(|name| !name.is_empty())
}
