use super::{super::parse::Common, *};
use crate::plan::services::{
    Protocol, Service,
    facts::{Condition, Exclusion},
};
use proptest::{collection::vec, prelude::*};

fn parsed(object: &Value) -> Result<Service, String> {
    let object: ApiService = serde_json::from_value(object.clone()).unwrap();
    super::super::parse::service(&object, &mut Common::default())
}

fn parsed_slice(object: &Value) -> Result<Slice, String> {
    let object: ApiSlice = serde_json::from_value(object.clone()).unwrap();
    super::super::parse::slice(&object, &mut Common::default())
}

fn with(change: impl FnOnce(&mut Value)) -> Value {
    let mut object = api_service("a", "10.96.0.1");
    change(&mut object["spec"]);
    object
}

#[test]
fn all_that_a_service_may_have() {
    let mut object = with(|spec| {
        spec["type"] = "LoadBalancer".into();
        spec["clusterIPs"] = json!(["10.96.0.1", "fd00:96::1"]);
        spec["ports"] = json!([
            {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053},
            {"name": "sctp", "protocol": "SCTP", "port": 9},
            {"name": "tcp", "port": 65535},
        ]);
        spec["sessionAffinity"] = "ClientIP".into();
        spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 60}});
        spec["externalIPs"] = json!(["192.0.2.001", "::ffff:192.0.2.2", "2001:db8::1"]);
        spec["externalTrafficPolicy"] = "Local".into();
        spec["internalTrafficPolicy"] = "Local".into();
        spec["healthCheckNodePort"] = 32000.into();
        spec["loadBalancerSourceRanges"] = json!([" 203.0.113.7/24 ", "2001:db8::/32"]);
    });
    object["status"]["loadBalancer"]["ingress"] = json!([
        {"ip": "198.51.100.1"}, {"ip": "198.51.100.2", "ipMode": "VIP"},
        {"ip": "198.51.100.3", "ipMode": "Proxy"}, {"hostname": "lb.example.net"},
    ]);
    let service = parsed(&object).unwrap();
    assert_eq!(service.excluded, None);
    assert_eq!(service.cluster_v4, "10.96.0.1".parse().ok());
    assert_eq!(service.cluster_v6, "fd00:96::1".parse().ok());
    let ports: Vec<_> = service
        .ports
        .iter()
        .map(|port| (&*port.name, port.protocol, port.port, port.node_port))
        .collect();
    let expected = [
        ("dns", Protocol::Udp, 53, 30053),
        ("sctp", Protocol::Sctp, 9, 0),
        ("tcp", Protocol::Tcp, 65535, 0),
    ];
    assert_eq!(ports, expected);
    assert_eq!(service.affinity_seconds, 60);
    assert!(service.internal_local && service.external_local);
    let external = service.external.unwrap();
    let texts = |ips: &[std::net::IpAddr]| ips.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        texts(&external.ips),
        ["192.0.2.1", "192.0.2.2", "2001:db8::1"]
    );
    assert_eq!(
        texts(&external.load_balancer),
        ["198.51.100.1", "198.51.100.2"]
    );
    let ranges: Vec<_> = external
        .source_ranges
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(ranges, ["203.0.113.0/24", "2001:db8::/32"]);
    assert_eq!(external.health_check_node_port, 32000);
}

#[test]
fn little_is_enough_and_policies_are_of_those_that_can_have_them() {
    let minimal = json!({
        "metadata": {"name": "a", "namespace": "b", "labels": null},
        "spec": {"clusterIP": "10.96.0.1", "ports": null, "externalIPs": null, "externalTrafficPolicy": "Local",
            "sessionAffinity": "ClientIP", "healthCheckNodePort": 7},
    });
    let service = parsed(&minimal).unwrap();
    assert_eq!(service.affinity_seconds, 10_800);
    assert!(!service.external_local, "nothing comes from outside");
    assert_eq!(service.external, None);
    // Health is asked for by load balancers.
    let node_port = with(|spec| {
        spec["type"] = "NodePort".into();
        spec["externalTrafficPolicy"] = "Local".into();
        spec["healthCheckNodePort"] = 7.into();
    });
    let service = parsed(&node_port).unwrap();
    assert!(service.external_local && service.external.is_none());
}

#[test]
fn what_is_not_this_proxys() {
    let headless = with(|spec| {
        spec["clusterIP"] = "None".into();
        spec["clusterIPs"] = json!(["None"]);
    });
    let none_yet = with(|spec| {
        spec["clusterIP"] = "".into();
        spec["clusterIPs"] = Value::Null;
    });
    let external_name = with(|spec| {
        spec["type"] = "ExternalName".into();
        spec["externalName"] = "example.net".into();
    });
    let mut other_proxy = with(|_| {});
    other_proxy["metadata"]["labels"]["service.kubernetes.io/service-proxy-name"] = "".into();
    for (object, why) in [
        (headless, Exclusion::Headless),
        (none_yet, Exclusion::Headless),
        (external_name, Exclusion::ExternalName),
        (other_proxy, Exclusion::OtherProxy),
    ] {
        let service = parsed(&object).unwrap();
        assert_eq!(service.excluded, Some(why), "{object}");
        // Nobody else's address is anybody's business.
        let is_others = why == Exclusion::OtherProxy;
        assert_eq!(service.cluster_v4.is_some(), is_others, "{object}");
        assert!(service.ports.is_empty());
    }
}

#[test]
fn a_value_that_nobody_could_use_is_named() {
    let cases: [(&str, Value, &str); 13] = [
        (
            "clusterIPs",
            json!(["10.96.0"]),
            "`10.96.0` is not an IP address",
        ),
        (
            "clusterIPs",
            json!(["10.96.0.1", "10.96.0.2"]),
            "second one",
        ),
        ("clusterIPs", json!(["0.0.0.0"]), "on every machine"),
        ("externalIPs", json!(["127.0.0.1"]), "on every machine"),
        ("externalIPs", json!(["fe80::1"]), "on every machine"),
        ("externalIPs", json!(["224.0.0.1"]), "on every machine"),
        ("externalIPs", json!(["1..2.3"]), "not an IP address"),
        (
            "loadBalancerSourceRanges",
            json!(["10.0.0.1"]),
            "not a prefix",
        ),
        ("ports", json!([{"port": 65536}]), "spec.ports.port 65536"),
        (
            "ports",
            json!([{"name": "x"}]),
            "spec.ports.port is missing",
        ),
        (
            "ports",
            json!([{"port": 1, "nodePort": -1}]),
            "spec.ports.nodePort -1",
        ),
        ("ports", json!([{"port": 1, "protocol": "ICMP"}]), "`ICMP`"),
        (
            "ports",
            json!([{"port": 1}, {"port": 2}]),
            "two are called ``",
        ),
    ];
    for (field, value, why) in cases {
        let fault = parsed(&with(|spec| spec[field] = value)).unwrap_err();
        assert!(
            fault.contains(why) && fault.contains(field),
            "{field}: {fault}"
        );
    }
    for seconds in [0, -1, 86_401, i64::MAX] {
        let fault = parsed(&with(|spec| {
            spec["sessionAffinity"] = "ClientIP".into();
            spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": seconds}});
        }));
        assert!(fault.unwrap_err().contains("timeoutSeconds"), "{seconds}");
    }
}

#[test]
fn endpoints_are_by_their_first_address_and_what_is_not_said_is_as_documented() {
    let mut object = api_slice("a", "a-1", &[]);
    object["endpoints"] = json!([
        {"addresses": ["10.0.0.1", "10.0.0.2"]},
        {"addresses": [], "conditions": {}},
        {"addresses": null},
        {"addresses": ["10.0.0.3"], "conditions": {"ready": null, "serving": false, "terminating": true}},
        {"addresses": ["10.0.0.4"], "conditions": null, "hints": null},
        {"addresses": ["10.0.0.5"], "conditions": {"ready": false}, "nodeName": "n1",
         "hints": {"forZones": [{"name": "b"}, {"name": "a"}, {"name": "b"}], "forNodes": null}},
    ]);
    object["ports"] = json!([
        {"port": 8080}, {"name": "nothing", "port": null}, {"name": "zero", "port": 0}, {"name": "dns", "protocol": "UDP", "port": 53},
    ]);
    let slice = parsed_slice(&object).unwrap();
    let all: Vec<_> = slice
        .endpoints
        .iter()
        .map(|endpoint| {
            let is = |condition| endpoint.condition.is(condition);
            let text = endpoint.address.to_string();
            (
                text,
                is(Condition::READY),
                is(Condition::SERVING),
                is(Condition::TERMINATING),
            )
        })
        .collect();
    let expected = [
        ("10.0.0.1", true, true, false),
        ("10.0.0.3", true, false, true),
        ("10.0.0.4", true, true, false),
        ("10.0.0.5", false, true, false),
    ];
    assert_eq!(all, expected.map(|(a, r, s, t)| (a.to_owned(), r, s, t)));
    let place = &slice.endpoints[3].place;
    assert_eq!(&*place.node, "n1");
    assert_eq!(*place.for_zones, [Box::from("a"), Box::from("b")]);
    let ports: Vec<_> = slice
        .ports
        .iter()
        .map(|port| (&*port.name, port.port))
        .collect();
    assert_eq!(ports, [("", 8080), ("dns", 53)]);
}

#[test]
fn a_slice_is_of_one_family_and_names_are_no_addresses() {
    let mut object = api_slice("a", "a-1", &["10.0.0.1"]);
    object["addressType"] = "IPv6".into();
    assert!(parsed_slice(&object).unwrap_err().contains("10.0.0.1"));
    object["addressType"] = "FQDN".into();
    assert_eq!(parsed_slice(&object).unwrap(), Slice::default());
    object["addressType"] = "IPv4".into();
    object["endpoints"] = Value::Null;
    object["ports"] = Value::Null;
    assert_eq!(parsed_slice(&object).unwrap(), Slice::default());
    for address in ["", "0.0.0.0", "127.0.0.1", "169.254.169.254", "x"] {
        let object = api_slice("a", "a-1", &[address]);
        assert!(
            parsed_slice(&object)
                .unwrap_err()
                .contains("endpoints.addresses"),
            "{address}"
        );
    }
}

/// Any JSON, in which the fields that are looked at are likely.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0i64..70_000).prop_map(Value::from),
        "\\PC{0,20}".prop_map(Value::from),
        prop_oneof![
            Just("None"),
            Just("10.0.0.1"),
            Just("fd00::1"),
            Just("TCP"),
            Just("Local"),
            Just("ClientIP"),
            Just("LoadBalancer"),
            Just("10.0.0.0/8"),
            Just("IPv4"),
            Just("IPv6"),
        ]
        .prop_map(Value::from),
    ];
    let key = prop_oneof![
        Just("kind"),
        Just("items"),
        Just("metadata"),
        Just("name"),
        Just("namespace"),
        Just("labels"),
        Just("spec"),
        Just("status"),
        Just("loadBalancer"),
        Just("ingress"),
        Just("ip"),
        Just("clusterIP"),
        Just("clusterIPs"),
        Just("ports"),
        Just("port"),
        Just("protocol"),
        Just("externalIPs"),
        Just("endpoints"),
        Just("addresses"),
        Just("conditions"),
        Just("ready"),
        Just("hints"),
        Just("forZones"),
        Just("addressType"),
        Just("kubernetes.io/service-name"),
    ];
    leaf.prop_recursive(5, 60, 6, move |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            vec((key.clone(), inner), 0..6).prop_map(|fields| {
                fields
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value))
                    .collect()
            }),
        ]
    })
}

proptest! {
    #[test]
    fn garbage_never_panics(value in any_json(), text in "\\PC{0,200}", change in any_json(), at in any::<proptest::sample::Index>()) {
        let store = Store::default();
        let _ = super::super::file::parse(text.as_bytes(), &mut Common::default());
        let mut service = api_service("a", "10.96.0.1");
        let mut slice = api_slice("a", "a-1", &["10.0.0.1"]);
        for object in [&mut service, &mut slice] {
            let fields: Vec<String> = object.as_object().unwrap().keys().cloned().collect();
            object[at.get(&fields)] = change.clone();
        }
        let stream = format!("{value}\n---\n{service}\n---\n{slice}\n---\n{}", api_service("b", "10.96.0.2"));
        if let Ok(super::super::file::Read { all: objects, .. }) = super::super::file::parse(stream.as_bytes(), &mut Common::default()) {
            store.replace(objects);
            prop_assert!(store.get(&name("b")).is_some(), "others stand");
        }
        let _ = serde_json::from_value::<ApiService>(value.clone()).map(|object| store.put_service(&object));
        let _ = serde_json::from_value::<ApiSlice>(value).map(|object| store.put_slice(&object, true));
    }
}
