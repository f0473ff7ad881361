//! The network configuration list: what of it is ours, and how it is joined with what others put
//! into the same file.
//!
//! Capabilities ask the runtime for a `runtimeConfig` of that name (CNI conventions, "Dynamic
//! plugin specific fields"). `io.kubernetes.cri.pod-annotations` is one that containerd (since 1.5,
//! cniNamespaceOpts of its CRI service) and CRI-O (since 1.29, newPodNetwork) have: an object of all
//! annotations that the kubelet gave the pod's sandbox, each a string; null, empty or missing if
//! there are none. It comes with the DEL as well. The sandbox is made once: a changed annotation
//! comes with the next. Other runtimes, and CRI-O before, pass over the capability.
//!
//! Service meshes chain themselves into the first list that they find (Istio and Linkerd append
//! an entry to `plugins`), and take it out when they go. So the file is not ours alone: ours are
//! the entries of our plugin and of portmap, the name and the versions. Everything else stays as
//! it is found, in its place.

use super::versions::Versions;
use serde_json::{Map, Value, json};
use sinabro_common::{api::LocalMtuWish, names};
use std::path::Path;

/// The plugin of hostPort, if the node has it.
pub const PORTMAP: &str = "portmap";

/// The entries that are ours.
pub struct Ours {
    sinabro: Value,
    portmap: Value,
    /// Whether portmap is to be chained.
    has_portmap: bool,
}

impl Ours {
    /// Of the agent that has its state and its socket there.
    pub fn new(state_dir: &Path, socket: &Path, has_portmap: bool) -> Self {
        let mut sinabro = json!({
            "type": names::CNI_PLUGIN,
            "capabilities": {
                "ips": true,
                "mac": true,
                // For ports to be kept free; portmap gets its own.
                "portMappings": true,
                names::ANNOTATIONS_CAPABILITY: true,
            },
        });
        if state_dir != Path::new(names::STATE_DIR) {
            sinabro["stateDir"] = json!(state_dir);
        }
        if socket != state_dir.join(names::SOCKET) {
            sinabro["socket"] = json!(socket);
        }
        let portmap = json!({
            "type": PORTMAP,
            "capabilities": {"portMappings": true},
            // Else a pod cannot reach itself by a port of its node.
            "snat": true,
        });
        Self {
            sinabro,
            portmap,
            has_portmap,
        }
    }

    /// The plugins as they should be, for those that were found: others' entries in their places,
    /// ours as they are now. What no runtime takes for a plugin goes.
    pub fn plugins(&self, found: Option<&Map<String, Value>>) -> Vec<Value> {
        let found = found.and_then(|list| list.get("plugins")?.as_array());
        let mut plugins: Vec<Value> = Vec::new();
        for plugin in found.into_iter().flatten() {
            match type_of(plugin) {
                None => {}
                Some(names::CNI_PLUGIN) if position(&plugins, names::CNI_PLUGIN).is_some() => {}
                Some(names::CNI_PLUGIN) => plugins.push(self.sinabro.clone()),
                Some(PORTMAP) if !self.has_portmap && *plugin == self.portmap => {}
                Some(_) => plugins.push(plugin.clone()),
            }
        }
        let own = position(&plugins, names::CNI_PLUGIN).unwrap_or_else(|| {
            plugins.insert(0, self.sinabro.clone());
            0
        });
        if self.has_portmap && position(&plugins, PORTMAP).is_none() {
            plugins.insert(own + 1, self.portmap.clone());
        }
        plugins
    }
}

/// The list as it should be. `cniVersions` is of CNI 1.1 (§1, "Configuration format"): an older
/// libcni passes over it and speaks `cniVersion`, a newer one speaks the highest and so, from 1.1.0
/// on, asks for STATUS and GC.
pub fn list(
    found: Option<&Map<String, Value>>,
    plugins: Vec<Value>,
    versions: &Versions,
) -> Map<String, Value> {
    let mut list = found.cloned().unwrap_or_default();
    list.insert("cniVersion".into(), json!(versions.plain));
    list.insert("cniVersions".into(), json!(versions.all));
    list.insert("name".into(), json!(names::CNI_NETWORK));
    list.insert("plugins".into(), Value::Array(plugins));
    list
}

/// The same list for pods whose links have one MTU for everything. A network of its own: a runtime's GC may name the pods alone
/// that it has added by one of the two.
pub fn with_local_mtu_off(list: &Map<String, Value>) -> Map<String, Value> {
    let mut list = list.clone();
    list.insert("name".into(), json!(names::CNI_LOCAL_MTU_OFF));
    let plugins = list.get_mut("plugins").and_then(Value::as_array_mut);
    for plugin in plugins.into_iter().flatten() {
        if type_of(plugin) == Some(names::CNI_PLUGIN) {
            plugin["localMTU"] = json!(LocalMtuWish::Off.as_str());
        }
    }
    list
}

/// The types of plugins, each once.
pub fn types(plugins: &[Value]) -> Vec<&str> {
    let mut types: Vec<_> = plugins.iter().filter_map(type_of).collect();
    types.sort_unstable();
    types.dedup();
    types
}

/// Whether pods get our network by a list that somebody else has changed: it leads to our plugin,
/// and the plugin to this agent.
pub fn serves(list: &Map<String, Value>, ours: &Ours) -> bool {
    let plugins = list.get("plugins").and_then(Value::as_array);
    let own = plugins.and_then(|plugins| plugins.get(position(plugins, names::CNI_PLUGIN)?));
    own.is_some_and(|own| {
        ["stateDir", "socket"]
            .iter()
            .all(|key| own.get(key) == ours.sinabro.get(key))
    })
}

fn type_of(plugin: &Value) -> Option<&str> {
    plugin["type"].as_str().filter(|name| !name.is_empty())
}

fn position(plugins: &[Value], name: &str) -> Option<usize> {
    plugins.iter().position(|p| type_of(p) == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Of an agent whose places are the usual ones.
    fn usual(has_portmap: bool) -> Ours {
        let state_dir = Path::new(names::STATE_DIR);
        Ours::new(state_dir, &state_dir.join(names::SOCKET), has_portmap)
    }

    fn versions() -> Versions {
        Versions {
            plain: "1.0.0",
            all: vec!["1.0.0", "1.1.0"],
        }
    }

    fn joined(ours: &Ours, found: &Value) -> Value {
        let found = found.as_object();
        Value::Object(list(found, ours.plugins(found), &versions()))
    }

    fn istio() -> Value {
        json!({"type": "istio-cni", "log_level": "info", "kubernetes": {"cni_bin_dir": "/opt/cni/bin"}})
    }

    #[test]
    fn the_list_has_what_a_runtime_needs() {
        let mut sinabro = json!({
            "type": "sinabro",
            "capabilities": {"ips": true, "mac": true, "portMappings": true},
        });
        sinabro["capabilities"][names::ANNOTATIONS_CAPABILITY] = json!(true);
        let mut list = json!({
            "cniVersion": "1.0.0",
            "cniVersions": ["1.0.0", "1.1.0"],
            "name": "sinabro",
            "plugins": [sinabro],
        });
        let alone = usual(false);
        assert_eq!(joined(&alone, &Value::Null), list);
        let portmap =
            json!({"type": "portmap", "capabilities": {"portMappings": true}, "snat": true});
        list["plugins"] = json!([sinabro, portmap]);
        let both = usual(true);
        assert_eq!(joined(&both, &Value::Null), list);
        // One is made of the other.
        assert_eq!(joined(&both, &joined(&alone, &Value::Null)), list);
        assert_eq!(joined(&alone, &list)["plugins"], json!([sinabro]));
    }

    #[test]
    fn places_are_told_only_if_they_are_not_the_usual_ones() {
        let plugin = |state_dir: &str, socket: &str| {
            Ours::new(state_dir.as_ref(), socket.as_ref(), false).plugins(None)[0].clone()
        };
        let other = plugin("/run/other", "/run/other/agent.sock");
        assert_eq!(other["stateDir"], "/run/other");
        assert_eq!(other["socket"], Value::Null);
        let elsewhere = plugin("/run/other", "/run/a.sock");
        assert_eq!(elsewhere["socket"], "/run/a.sock");
    }

    #[test]
    fn what_others_chained_stays_in_its_place() {
        let ours = usual(true);
        let [sinabro, portmap] = &ours.plugins(None)[..] else {
            panic!("two plugins");
        };
        let first = json!({"type": "first"});
        let theirs = json!({
            "cniVersion": "1.0.0",
            "cniVersions": ["1.0.0", "1.1.0"],
            "name": "sinabro",
            "disableCheck": true,
            "plugins": [first, sinabro, portmap, istio()],
        });
        assert_eq!(joined(&ours, &theirs), theirs);
        // Settings of ours that changed, and a portmap that is gone.
        let (state_dir, socket) = ("/run/other".as_ref(), "/run/other/agent.sock".as_ref());
        let changed = Ours::new(state_dir, socket, false);
        let found = joined(&changed, &theirs);
        assert_eq!(found["disableCheck"], true);
        assert_eq!(found["plugins"][0], first);
        assert_eq!(found["plugins"][1]["stateDir"], "/run/other");
        assert_eq!(found["plugins"][2], istio());
        // And back: portmap beside ours, the mesh last.
        assert_eq!(joined(&ours, &found), theirs);
        // A portmap that somebody set otherwise is theirs.
        let mut own = theirs.clone();
        own["plugins"][2]["snat"] = json!(false);
        assert_eq!(joined(&ours, &own), own);
        assert_eq!(joined(&usual(false), &own), own);
    }

    #[test]
    fn what_is_missing_comes_back_and_what_is_no_plugin_goes() {
        let ours = usual(false);
        let whole = joined(&ours, &Value::Null);
        let own = &whole["plugins"][0];
        for (plugins, wanted) in [
            (json!([istio()]), json!([own, istio()])),
            (json!([own, istio(), own]), json!([own, istio()])),
            (
                json!([7, null, {"type": ""}, istio(), {"x": 1}]),
                json!([own, istio()]),
            ),
            (json!([{"type": "sinabro"}, istio()]), json!([own, istio()])),
            (json!({"type": "sinabro"}), json!([own])),
            (Value::Null, json!([own])),
        ] {
            let found = joined(&ours, &json!({"plugins": plugins, "name": 7}));
            assert_eq!(found["plugins"], wanted, "{plugins}");
            assert_eq!(found["name"], "sinabro");
        }
    }

    #[test]
    fn a_list_serves_as_long_as_it_leads_to_this_agent() {
        let ours = usual(true);
        let serves = |list: Value| serves(list.as_object().unwrap(), &ours);
        assert!(serves(joined(&ours, &Value::Null)));
        assert!(serves(json!({"plugins": [istio(), {"type": "sinabro"}]})));
        assert!(!serves(json!({"plugins": [istio()]})));
        assert!(!serves(
            json!({"plugins": [{"type": "sinabro", "socket": "/else"}]})
        ));
        assert!(!serves(json!({"plugins": 7})));
        assert!(!serves(json!({})));
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<u8>().prop_map(Value::from),
            "(sinabro|portmap|istio-cni|)".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            let key = "(type|plugins|name|cniVersions|x)";
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map(key, inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// Mostly lists of plugins: of what is only JSON hardly anything has one.
    fn file() -> impl Strategy<Value = Value> {
        let plugin = ("(sinabro|portmap|istio-cni)", json_value());
        let plugin = plugin.prop_map(|(of, x)| json!({"type": of, "x": x}));
        let plugin = prop_oneof![3 => plugin, 1 => json_value()];
        let plugins = proptest::collection::vec(plugin, 0..6);
        let list = plugins.prop_map(|plugins| json!({"name": "x", "plugins": plugins}));
        prop_oneof![3 => list, 1 => json_value()]
    }

    proptest! {
        /// Whatever is in the file, ours is there once, others' plugins are in their order, and
        /// what was joined is not changed again.
        #[test]
        fn any_file_becomes_one_that_is_left_alone(found in file(), portmap: bool) {
            let ours = usual(portmap);
            let once = joined(&ours, &found);
            prop_assert_eq!(&joined(&ours, &once), &once);
            let others = |list: &Value| -> Vec<Value> {
                let plugins = list["plugins"].as_array().cloned().unwrap_or_default();
                let other = |p: &Value| type_of(p).is_some_and(|t| t == "istio-cni");
                plugins.into_iter().filter(other).collect()
            };
            prop_assert_eq!(others(&once), others(&found));
            let own = once["plugins"].as_array().unwrap().iter();
            prop_assert_eq!(own.filter(|p| type_of(p) == Some("sinabro")).count(), 1);
        }
    }
}
