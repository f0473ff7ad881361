//! The capability `portMappings` (CNI conventions, "Well-known Capabilities"): ports of the node that
//! another plugin, such as portmap, has lead to the pod. Nothing is made of them here; the agent keeps
//! masqueraded connections off them.

use serde_json::{Map, Value};
use sinabro_common::api::{HostPort, MAX_HOST_PORTS};
use std::collections::BTreeSet;

const CAPABILITY: &str = "portMappings";

/// Each once, if the runtime tells this plugin of them: it says nothing of a pod without any. The plugin that they are for refuses what
/// makes no sense, so that is passed over and told here.
pub fn of(
    conf: &Map<String, Value>,
    runtime: Option<&Map<String, Value>>,
) -> Result<Option<Vec<HostPort>>, String> {
    let mappings = match runtime.and_then(|runtime| runtime.get(CAPABILITY)) {
        None | Some(Value::Null) => return Ok(is_told(conf).then(Vec::new)),
        Some(Value::Array(mappings)) => mappings,
        Some(_) => {
            return Err("runtimeConfig.portMappings is not a list: it is passed over".into());
        }
    };
    let mut ports = BTreeSet::new();
    for (at, mapping) in mappings.iter().enumerate() {
        match host_port(mapping) {
            Ok(port) => ports.extend(port),
            Err(why) => {
                return Err(format!(
                    "runtimeConfig.portMappings[{at}] {why}: the ports of this pod's node are not kept free"
                ));
            }
        }
    }
    if ports.len() > MAX_HOST_PORTS {
        return Err(format!(
            "{} ports of the node lead to this pod, more than {MAX_HOST_PORTS}: they are not kept free",
            ports.len()
        ));
    }
    Ok(Some(ports.into_iter().collect()))
}

/// Whether the configuration has the capability. libcni hands that key on; nothing is known where a runtime does not.
fn is_told(conf: &Map<String, Value>) -> bool {
    let capabilities = conf.get("capabilities");
    capabilities.and_then(|all| all.get(CAPABILITY)) == Some(&Value::Bool(true))
}

/// None if the mapping has no port of the node.
fn host_port(mapping: &Value) -> Result<Option<HostPort>, &'static str> {
    let Value::Object(mapping) = mapping else {
        return Err("is not an object");
    };
    let port = match field(mapping, "hostPort") {
        None | Some(Value::Null) => 0,
        Some(port) => port.as_u64().ok_or("has a hostPort that is no port")?,
    };
    if port == 0 {
        return Ok(None);
    }
    let protocol = match field(mapping, "protocol") {
        None | Some(Value::Null) => "tcp",
        Some(Value::String(text)) if text.is_empty() => "tcp",
        Some(Value::String(text)) => text,
        Some(_) => return Err("has a protocol that is not a text"),
    };
    Ok(Some(HostPort {
        protocol: protocol.parse().map_err(|_| "has an unknown protocol")?,
        port: u16::try_from(port).map_err(|_| "has a hostPort that is no port")?,
    }))
}

/// A field as Go's encoding/json finds it, by which portmap reads: in whatever case. CRI-O writes `hostPort`, as the conventions have
/// it, containerd `HostPort`, the name in its source.
fn field<'a>(mapping: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    let in_other_case = || {
        mapping
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
    };
    mapping
        .get(name)
        .or_else(|| in_other_case().map(|(_, value)| value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{conf::tests::parse, env::Args};
    use proptest::prelude::*;
    use serde_json::json;

    fn ports(mappings: Value) -> (Option<Vec<String>>, Vec<String>) {
        of_keys(json!({"runtimeConfig": {"portMappings": mappings}}))
    }

    fn of_keys(keys: Value) -> (Option<Vec<String>>, Vec<String>) {
        let wishes = parse(keys).unwrap().wishes(&Args::default()).unwrap();
        let texts = |ports: Vec<HostPort>| ports.iter().map(ToString::to_string).collect();
        (wishes.host_ports.map(texts), wishes.warnings)
    }

    #[test]
    fn every_port_is_known_once_as_runtimes_write_them() {
        let mappings = json!([
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""},
            {"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": "192.0.2.1"},
            {"hostPort": 53, "containerPort": 53, "protocol": "UDP"},
            {"hostPort": 99, "containerPort": 99, "protocol": "sctp"},
            {"hostPort": 7, "containerPort": 7},
            {"hostPort": 0, "containerPort": 80, "protocol": "tcp"},
            {"containerPort": 80},
        ]);
        let (known, warnings) = ports(mappings);
        let all = ["tcp/7", "tcp/8080", "udp/53", "sctp/99"].map(String::from);
        assert_eq!(known, Some(all.into()));
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!(ports(json!([])), (Some(vec![]), vec![]));
    }

    /// As containerd (1.6 to 2.2) hands it over: go-cni's structure has no names for JSON.
    #[test]
    fn fields_are_found_in_whatever_case() {
        let of_containerd = json!([
            {"HostPort": 30053, "ContainerPort": 53, "Protocol": "udp", "HostIP": ""},
            {"HostPort": 30080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": "192.0.2.1"},
            {"HostPort": 0, "ContainerPort": 81, "Protocol": "tcp", "HostIP": ""},
        ]);
        let all = ["tcp/30080", "udp/30053"].map(String::from);
        assert_eq!(ports(of_containerd), (Some(all.into()), vec![]));
        // The exact name comes first.
        let both = json!([{"HOSTPORT": 1, "hostPort": 2}]);
        assert_eq!(ports(both).0, Some(vec!["tcp/2".into()]));
        let (none, warnings) = ports(json!([{"HostPort": "80"}]));
        assert!(none.is_none() && warnings.len() == 1, "{warnings:?}");
    }

    /// A pod without ports is told apart from one of which the runtime says nothing.
    #[test]
    fn none_are_known_where_the_runtime_would_tell() {
        let with = |capabilities: Value| of_keys(json!({"capabilities": capabilities}));
        assert_eq!(with(json!({"portMappings": true})), (Some(vec![]), vec![]));
        let null = json!({"capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": null}});
        assert_eq!(of_keys(null), (Some(vec![]), vec![]));
        for untold in [
            json!({"portMappings": false}),
            json!({"ips": true}),
            json!({}),
            json!(7),
            Value::Null,
        ] {
            assert_eq!(with(untold.clone()), (None, vec![]), "{untold}");
        }
        assert_eq!(ports(Value::Null), (None, vec![]));
    }

    #[test]
    fn what_makes_no_sense_is_told_and_stops_no_pod() {
        let many: Vec<Value> = (1..=5000).map(|port| json!({"hostPort": port})).collect();
        for mappings in [
            json!("8080"),
            json!({"hostPort": 80}),
            json!([7]),
            json!([{"hostPort": "80"}]),
            json!([{"hostPort": 65536}]),
            json!([{"hostPort": -1}]),
            json!([{"hostPort": 80, "protocol": "icmp"}]),
            json!([{"hostPort": 80, "protocol": 6}]),
            json!(many),
        ] {
            let (known, warnings) = ports(mappings.clone());
            assert_eq!((known, warnings.len()), (None, 1), "{mappings}");
        }
    }

    proptest! {
        #[test]
        fn odd_mappings_never_panic(text in "\\PC{0,20}", key in "(hostPort|protocol|x)", number: i64) {
            for value in [json!(text), json!([text]), json!([{&*key: text}]), json!([{&*key: number}])] {
                let _ = ports(value);
            }
        }
    }
}
