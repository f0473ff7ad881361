//! Nodes as the Kubernetes API shows them, reduced to what is used.
//!
//! Only the fields below are taken from a Node; images, labels and whatever else it has are
//! passed over while it is read and never held. [`facts_of`] makes a node of the facts of it:
//! InternalIP addresses in their order, else ExternalIP ones; podCIDRs, else podCIDR; and what the node's agent
//! says by the annotations `names::ROUTING_ANNOTATION` and `names::TUNNELS_ANNOTATION`.

use crate::plan::{Node, Routing};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sinabro_common::names;
use std::{net::IpAddr, str::FromStr};

/// A Node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiNode {
    pub metadata: Metadata,
    pub spec: Spec,
    pub status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
    creation_timestamp: String,
    deletion_timestamp: Option<String>,
    labels: Option<Labels>,
    annotations: Option<Annotations>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Annotations {
    #[serde(rename = "sinabro.io/routing")]
    routing: Option<String>,
    #[serde(rename = "sinabro.io/tunnels")]
    tunnels: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Labels {
    #[serde(rename = "topology.kubernetes.io/zone")]
    zone: String,
}

impl Metadata {
    fn routing(&self) -> Option<&String> {
        self.annotations.as_ref()?.routing.as_ref()
    }

    fn tunnels(&self) -> Option<&String> {
        self.annotations.as_ref()?.tunnels.as_ref()
    }

    fn registered(&self) -> u64 {
        let time = self.creation_timestamp.parse::<Timestamp>().ok();
        // Before 1970 is as good as unknown.
        time.and_then(|time| time.as_second().try_into().ok())
            .unwrap_or(0)
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Spec {
    #[serde(rename = "podCIDR")]
    pod_cidr: String,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
    pub taints: Vec<Taint>,
}

/// A taint. It is written back as it was read, so every field is here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Taint {
    pub key: String,
    pub effect: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Status {
    addresses: Vec<Address>,
    conditions: Vec<Condition>,
}

impl Status {
    /// Unknown, which a node is that its kubelet is not heard of, is not ready.
    fn is_ready(&self) -> bool {
        let mut conditions = self.conditions.iter();
        conditions.any(|condition| condition.r#type == "Ready" && condition.status == "True")
    }
}

#[derive(Clone, Debug, Deserialize)]
struct Address {
    r#type: String,
    address: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Condition {
    r#type: String,
    status: String,
    #[serde(default)]
    reason: String,
}

/// What the agent announces itself on: its own Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnNode {
    pub uid: String,
    pub resource_version: String,
    pub taints: Vec<Taint>,
    /// Status and reason of the condition NetworkUnavailable, if the Node has it.
    pub network_unavailable: Option<(String, String)>,
    /// By which clients choose among a Service's endpoints; empty if the Node has none.
    pub zone: String,
    /// Its annotation `names::ROUTING_ANNOTATION`.
    pub routing: Option<String>,
    /// Its annotation `names::TUNNELS_ANNOTATION`.
    pub tunnels: Option<String>,
    /// Whether it is being deleted.
    pub is_going: bool,
}

impl From<&ApiNode> for OwnNode {
    fn from(node: &ApiNode) -> Self {
        let mut conditions = node.status.conditions.iter();
        Self {
            uid: node.metadata.uid.clone(),
            resource_version: node.metadata.resource_version.clone(),
            taints: node.spec.taints.clone(),
            network_unavailable: conditions
                .find(|condition| condition.r#type == "NetworkUnavailable")
                .map(|condition| (condition.status.clone(), condition.reason.clone())),
            zone: (node.metadata.labels.as_ref())
                .map_or_else(String::new, |labels| labels.zone.clone()),
            routing: node.metadata.routing().cloned(),
            tunnels: node.metadata.tunnels().cloned(),
            is_going: node.metadata.deletion_timestamp.is_some(),
        }
    }
}

/// A Node's part in the facts.
///
/// # Errors
/// What is wrong with one of its values.
pub fn facts_of(node: &ApiNode) -> Result<Node, String> {
    let of_type = |wanted: &'static str| {
        let addresses = node.status.addresses.iter();
        addresses.filter(move |address| address.r#type == wanted)
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for wanted in ["InternalIP", "ExternalIP"] {
        for Address { address, .. } in of_type(wanted) {
            let address = parse(address, wanted, "an IP address")?;
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if !addresses.is_empty() {
            break;
        }
    }
    let spec = &node.spec;
    let one = std::slice::from_ref(&spec.pod_cidr);
    let cidrs = match spec.pod_cidrs.is_empty() {
        true => one,
        false => &spec.pod_cidrs,
    };
    let cidrs = cidrs.iter().filter(|text| !text.is_empty());
    Ok(Node {
        name: node.metadata.name.clone(),
        addresses,
        pod_cidrs: cidrs
            .map(|text| parse(text, "podCIDR", "a prefix such as 10.244.1.0/24"))
            .collect::<Result<_, _>>()?,
        registered: node.metadata.registered(),
        ready: node.status.is_ready(),
        // A word that this version does not know is one of a way that it does not take.
        native: (node.metadata.routing())
            .is_some_and(|routing| *routing == Routing::Native.to_string()),
        zero_checksum: (node.metadata.tunnels())
            .is_some_and(|tunnels| tunnels == names::UDP6_ZERO_CHECKSUM),
    })
}

fn parse<T: FromStr>(text: &str, field: &str, what: &str) -> Result<T, String> {
    // A faulty one may be of any length.
    let shown: String = text.chars().take(64).collect();
    text.parse()
        .map_err(|_| format!("{field} `{shown}` is not {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use sinabro_common::names::{ROUTING_ANNOTATION, TUNNELS_ANNOTATION};

    fn facts(spec: Value, addresses: &[(&str, &str)]) -> Result<Node, String> {
        let address = |(kind, address): &(&str, &str)| json!({"type": kind, "address": address});
        let addresses: Vec<_> = addresses.iter().map(address).collect();
        let node = json!({
            "metadata": {"name": "n1"},
            "spec": spec,
            "status": {"addresses": addresses},
        });
        facts_of(&serde_json::from_value(node).unwrap())
    }

    fn texts<T: ToString>(items: &[T]) -> Vec<String> {
        items.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn internal_addresses_come_in_their_order_and_external_ones_only_without_them() {
        let all = [
            ("Hostname", "n1"),
            ("ExternalIP", "203.0.113.1"),
            ("InternalIP", "fd00::1"),
            ("InternalIP", "192.168.0.1"),
            ("InternalIP", "fd00::1"),
        ];
        let node = facts(json!({}), &all).unwrap();
        assert_eq!(texts(&node.addresses), ["fd00::1", "192.168.0.1"]);
        let node = facts(json!({}), &all[..2]).unwrap();
        assert_eq!(texts(&node.addresses), ["203.0.113.1"]);
        let node = facts(json!({}), &all[..1]).unwrap();
        assert!(node.addresses.is_empty() && node.pod_cidrs.is_empty());
    }

    #[test]
    fn both_ranges_are_taken_and_the_single_one_where_there_is_no_list() {
        let spec = json!({"podCIDR": "10.0.1.0/24", "podCIDRs": ["10.0.1.0/24", "fd00:1::/64"]});
        let node = facts(spec, &[]).unwrap();
        assert_eq!(texts(&node.pod_cidrs), ["10.0.1.0/24", "fd00:1::/64"]);
        let node = facts(json!({"podCIDR": "10.0.1.0/24"}), &[]).unwrap();
        assert_eq!(texts(&node.pod_cidrs), ["10.0.1.0/24"]);
    }

    #[test]
    fn the_zone_is_the_label_of_todays_name() {
        let zone = |labels: Value| {
            let node = json!({"metadata": {"name": "n1", "labels": labels}});
            OwnNode::from(&serde_json::from_value::<ApiNode>(node).unwrap()).zone
        };
        let both = json!({"topology.kubernetes.io/zone": "a", "failure-domain.beta.kubernetes.io/zone": "b"});
        assert_eq!(zone(both), "a");
        assert_eq!(zone(json!({"x": "y"})), "");
        assert_eq!(zone(Value::Null), "");
    }

    #[test]
    fn a_node_takes_what_it_says_and_a_word_of_later_versions_is_none() {
        let is_native = |annotations: Value| {
            let node = json!({"metadata": {"name": "n1", "annotations": annotations}});
            let node: ApiNode = serde_json::from_value(node).unwrap();
            (
                facts_of(&node).unwrap().native,
                OwnNode::from(&node).routing,
            )
        };
        assert_eq!(
            is_native(json!({ROUTING_ANNOTATION: "native", "x": "y"})),
            (true, Some("native".into()))
        );
        assert_eq!(
            is_native(json!({ROUTING_ANNOTATION: "Native"})),
            (false, Some("Native".into()))
        );
        for none in [Value::Null, json!({}), json!({ROUTING_ANNOTATION: null})] {
            assert_eq!(is_native(none), (false, None));
        }
    }

    #[test]
    fn tunnels_take_what_their_node_says_and_a_word_of_later_versions_is_none() {
        let takes = |annotations: Value| {
            let node = json!({"metadata": {"name": "n1", "annotations": annotations}});
            let node: ApiNode = serde_json::from_value(node).unwrap();
            let facts = facts_of(&node).unwrap();
            assert!(!facts.native, "{annotations}");
            (facts.zero_checksum, OwnNode::from(&node).tunnels)
        };
        for (said, is_taken) in [
            ("udp6-zero-checksum", true),
            ("udp6-zero-checksum,other", false),
            ("native", false),
            ("", false),
        ] {
            assert_eq!(
                takes(json!({TUNNELS_ANNOTATION: said, "x": "y"})),
                (is_taken, Some(said.into()))
            );
        }
        for none in [Value::Null, json!({}), json!({TUNNELS_ANNOTATION: null})] {
            assert_eq!(takes(none), (false, None));
        }
        assert_eq!(
            takes(json!({ROUTING_ANNOTATION: "udp6-zero-checksum"})),
            (false, None)
        );
    }

    #[test]
    fn a_node_that_is_being_deleted_says_so() {
        let is_going = |metadata: Value| {
            let node = serde_json::from_value::<ApiNode>(json!({"metadata": metadata}));
            OwnNode::from(&node.unwrap()).is_going
        };
        assert!(!is_going(json!({"name": "n1"})));
        assert!(is_going(
            json!({"name": "n1", "deletionTimestamp": "2026-11-23T10:00:00Z"})
        ));
    }

    #[test]
    fn a_value_that_cannot_be_read_is_named() {
        let why = facts(json!({"podCIDRs": ["10.0.1.0"]}), &[]).unwrap_err();
        assert_eq!(
            why,
            "podCIDR `10.0.1.0` is not a prefix such as 10.244.1.0/24"
        );
        let long = "x".repeat(10_000);
        let why = facts(json!({}), &[("InternalIP", &long)]).unwrap_err();
        assert!(
            why.starts_with("InternalIP `xxx") && why.len() < 200,
            "{why}"
        );
    }

    proptest! {
        #[test]
        fn garbage_never_panics(address in "\\PC{0,80}", cidr in "\\PC{0,80}", text in "\\PC{0,80}") {
            let _ = facts(json!({"podCIDRs": [cidr]}), &[("InternalIP", &address)]);
            let _ = serde_json::from_str::<ApiNode>(&text);
        }
    }
}
