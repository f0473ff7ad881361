//! Versions of what calls our plugin, and of the plugins beside it.

use super::{Part, files, text};
use crate::{config::Places, install::versions::Asker, own_node};
use anyhow::Context as _;
use serde_json::Value;
use std::{collections::BTreeSet, path::Path, time::Instant};

pub fn parts(places: &Places) -> Vec<(String, Part)> {
    vec![
        ("kubernetes/node-info.json".into(), node_info(places)),
        ("cni/versions.txt".into(), Ok(versions(places))),
    ]
}

/// Of kubelet, containerd or CRI-O, as the kubelet reports them.
fn node_info(places: &Places) -> Part {
    let info = own_node::info(places).context("cannot read this node's versions")?;
    Ok(serde_json::to_vec_pretty(&info)?)
}

/// What each plugin of the configurations answers to VERSION.
fn versions(places: &Places) -> Vec<u8> {
    let (mut asker, now) = (Asker::default(), Instant::now());
    let answer = |name: String| match asker.ask(now, &places.cni_bin_dir, &name) {
        Ok(known) => format!("{name}: {}", known.join(", ")),
        Err(error) => format!("{name}: {error}"),
    };
    text(plugins(&places.cni_conf_dir).into_iter().map(answer))
}

/// Types of the plugins that are named by any configuration.
fn plugins(conf_dir: &Path) -> BTreeSet<String> {
    let configurations = files::configurations(conf_dir).into_iter();
    let mut names = BTreeSet::new();
    for content in configurations.filter_map(|(_, content)| content.ok()) {
        let list: Value = serde_json::from_slice(&content).unwrap_or_default();
        let chained = list["plugins"].as_array().into_iter().flatten();
        let types = [&list].into_iter().chain(chained);
        names.extend(types.filter_map(|plugin| Some(plugin["type"].as_str()?.to_owned())));
    }
    names
}
