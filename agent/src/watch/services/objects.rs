//! Services and EndpointSlices as the Kubernetes API shows them, reduced to what is used.
//!
//! Whatever else they have is passed over while they are read and never held. A Go server writes an empty list as
//! `null`, so every list may be that.

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer};

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    pub namespace: String,
    pub name: String,
    pub resource_version: String,
    #[serde(deserialize_with = "or_null")]
    pub labels: Labels,
    #[serde(deserialize_with = "or_null")]
    annotations: Annotations,
}

/// Others, of which objects have many, would be most of what is in memory while they are read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Labels {
    /// Whose endpoints a slice has.
    #[serde(rename = "kubernetes.io/service-name")]
    pub owner: Option<String>,
    /// Says that a Service is for another proxy than the node's own.
    #[serde(rename = "service.kubernetes.io/service-proxy-name")]
    pub proxy: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Annotations {
    /// When the pod or Service changed for which the endpoints did.
    #[serde(rename = "endpoints.kubernetes.io/last-change-trigger-time")]
    trigger_time: String,
    /// [`sinabro_common::names::SERVICE_BALANCING_ANNOTATION`].
    #[serde(rename = "sinabro.io/service-balancing")]
    balancing: String,
}

impl Metadata {
    /// What this change of endpoints came of, if whoever made them says so.
    pub fn trigger_time(&self) -> Option<Timestamp> {
        self.annotations.trigger_time.parse().ok()
    }

    /// How a Service is to be balanced; empty if it does not say.
    pub fn balancing(&self) -> &str {
        &self.annotations.balancing
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiService {
    pub metadata: Metadata,
    pub spec: Spec,
    pub status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Spec {
    pub r#type: String,
    #[serde(rename = "clusterIP")]
    pub cluster_ip: String,
    #[serde(rename = "clusterIPs", deserialize_with = "or_null")]
    pub cluster_ips: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub ports: Vec<Port>,
    #[serde(rename = "externalIPs", deserialize_with = "or_null")]
    pub external_ips: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub load_balancer_source_ranges: Vec<String>,
    pub external_traffic_policy: String,
    pub internal_traffic_policy: Option<String>,
    pub health_check_node_port: i64,
    pub session_affinity: String,
    pub session_affinity_config: Option<AffinityConfig>,
}

/// A ServiceCIDR: addresses that Services get (KEP-1880).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiRange {
    pub metadata: Metadata,
    pub spec: RangeSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RangeSpec {
    #[serde(deserialize_with = "or_null")]
    pub cidrs: Vec<String>,
}

/// Of a Service or, without `nodePort`, of a slice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Port {
    #[serde(deserialize_with = "or_null")]
    pub name: String,
    pub protocol: Option<String>,
    pub port: Option<i64>,
    pub node_port: i64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AffinityConfig {
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIp>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientIp {
    pub timeout_seconds: Option<i64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    pub load_balancer: LoadBalancer,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct LoadBalancer {
    #[serde(deserialize_with = "or_null")]
    pub ingress: Vec<Ingress>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ingress {
    pub ip: String,
    pub ip_mode: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ApiSlice {
    pub metadata: Metadata,
    pub address_type: String,
    #[serde(deserialize_with = "or_null")]
    pub endpoints: Vec<ApiEndpoint>,
    #[serde(deserialize_with = "or_null")]
    pub ports: Vec<Port>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ApiEndpoint {
    #[serde(deserialize_with = "or_null")]
    pub addresses: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub conditions: Conditions,
    pub node_name: Option<String>,
    #[serde(deserialize_with = "or_null")]
    pub hints: Hints,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Conditions {
    pub ready: Option<bool>,
    pub serving: Option<bool>,
    pub terminating: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Hints {
    #[serde(deserialize_with = "or_null")]
    pub for_zones: Vec<Named>,
    #[serde(deserialize_with = "or_null")]
    pub for_nodes: Vec<Named>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Named {
    pub name: String,
}

fn or_null<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    parser: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(parser)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Not even looked at: what is kept of them while a list is read is many times what is kept of their object.
    #[test]
    fn labels_that_nobody_asks_for_are_passed_over() {
        let labels = json!({"a": [5], "kubernetes.io/service-name": "web", "b": null});
        let metadata = json!({"name": "web-1", "labels": labels});
        let metadata: Metadata = serde_json::from_value(metadata).unwrap();
        assert_eq!(metadata.labels.owner.as_deref(), Some("web"));
        assert_eq!(metadata.labels.proxy, None);
        assert!(size_of::<Labels>() <= 2 * size_of::<String>());
    }
}
