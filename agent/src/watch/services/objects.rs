//! Services and EndpointSlices as the Kubernetes API shows them, reduced to what is used.
//!
//! Whatever else they have is passed over while they are read and never held. To an API server `null` is a field that is
//! not there, and a Go server writes an empty list as that: so may every field be.

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer};

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    #[serde(deserialize_with = "or_null")]
    pub namespace: String,
    #[serde(deserialize_with = "or_null")]
    pub name: String,
    #[serde(deserialize_with = "or_null")]
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
    #[serde(
        rename = "endpoints.kubernetes.io/last-change-trigger-time",
        deserialize_with = "or_null"
    )]
    trigger_time: String,
    /// [`sinabro_common::names::SERVICE_BALANCING_ANNOTATION`].
    #[serde(rename = "sinabro.io/service-balancing", deserialize_with = "or_null")]
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
    #[serde(deserialize_with = "or_null")]
    pub metadata: Metadata,
    #[serde(deserialize_with = "or_null")]
    pub spec: Spec,
    #[serde(deserialize_with = "or_null")]
    pub status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Spec {
    #[serde(deserialize_with = "or_null")]
    pub r#type: String,
    #[serde(rename = "clusterIP", deserialize_with = "or_null")]
    pub cluster_ip: String,
    #[serde(rename = "clusterIPs", deserialize_with = "or_null")]
    pub cluster_ips: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub ports: Vec<Port>,
    #[serde(rename = "externalIPs", deserialize_with = "or_null")]
    pub external_ips: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub load_balancer_source_ranges: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub external_traffic_policy: String,
    pub internal_traffic_policy: Option<String>,
    #[serde(deserialize_with = "or_null")]
    pub health_check_node_port: i64,
    #[serde(deserialize_with = "or_null")]
    pub session_affinity: String,
    pub session_affinity_config: Option<AffinityConfig>,
}

/// A ServiceCIDR: addresses that Services get (KEP-1880).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ApiRange {
    #[serde(deserialize_with = "or_null")]
    pub metadata: Metadata,
    #[serde(deserialize_with = "or_null")]
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
    #[serde(deserialize_with = "or_null")]
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
    #[serde(deserialize_with = "or_null")]
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
    #[serde(deserialize_with = "or_null")]
    pub ip: String,
    pub ip_mode: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ApiSlice {
    #[serde(deserialize_with = "or_null")]
    pub metadata: Metadata,
    #[serde(deserialize_with = "or_null")]
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

    fn with_nulls(fields: &[&str]) -> serde_json::Value {
        fields.iter().map(|field| (*field, json!(null))).collect()
    }

    fn is_read<T: serde::de::DeserializeOwned>(object: serde_json::Value) {
        let read = serde_json::from_value::<T>(object.clone());
        assert!(read.is_ok(), "{object}: {:?}", read.err());
    }

    #[test]
    fn every_field_may_be_null() {
        let metadata = with_nulls(&[
            "namespace",
            "name",
            "resourceVersion",
            "labels",
            "annotations",
        ]);
        let owners = [
            "kubernetes.io/service-name",
            "service.kubernetes.io/service-proxy-name",
        ];
        let wishes = [
            "endpoints.kubernetes.io/last-change-trigger-time",
            "sinabro.io/service-balancing",
        ];
        let named = json!({"labels": with_nulls(&owners), "annotations": with_nulls(&wishes)});
        let port = with_nulls(&["name", "protocol", "port", "nodePort", "appProtocol"]);
        let mut spec = with_nulls(&[
            "type",
            "clusterIP",
            "clusterIPs",
            "ports",
            "externalIPs",
            "loadBalancerSourceRanges",
            "externalTrafficPolicy",
            "internalTrafficPolicy",
            "healthCheckNodePort",
            "sessionAffinity",
            "sessionAffinityConfig",
        ]);
        let services = [
            with_nulls(&["metadata", "spec", "status"]),
            json!({"metadata": metadata, "spec": spec, "status": {"loadBalancer": null}}),
            json!({"metadata": named, "status": {"loadBalancer": {"ingress": null}}}),
            json!({"status": {"loadBalancer": {"ingress": [with_nulls(&["ip", "ipMode"])]}}}),
        ];
        for service in services {
            is_read::<ApiService>(service);
        }
        spec["ports"] = json!([port]);
        spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": null}});
        let service: ApiService = serde_json::from_value(json!({"spec": spec})).unwrap();
        assert_eq!(service.spec.ports.len(), 1);
        let endpoint = with_nulls(&["addresses", "conditions", "nodeName", "hints"]);
        let conditions = with_nulls(&["ready", "serving", "terminating"]);
        let hints = with_nulls(&["forZones", "forNodes"]);
        let endpoints = json!([endpoint, {"conditions": conditions, "hints": hints}]);
        for slice in [
            with_nulls(&["metadata", "addressType", "endpoints", "ports"]),
            json!({"endpoints": endpoints, "ports": [port]}),
        ] {
            is_read::<ApiSlice>(slice);
        }
        for range in [
            with_nulls(&["metadata", "spec"]),
            json!({"spec": {"cidrs": null}}),
        ] {
            is_read::<ApiRange>(range);
        }
    }

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
