//! Objects, the store that keeps them, and the two sources.

mod file;
mod kubernetes;
mod parse;
mod size;

use super::{
    objects::{ApiService, ApiSlice, Metadata},
    store::Kind,
    *,
};
use crate::plan::services::Slice;
use serde_json::{Value, json};
use sinabro_common::names::SERVICE_BALANCING_ANNOTATION;
use tokio::time::timeout;

fn api_service(name: &str, vip: &str) -> Value {
    json!({
        "kind": "Service", "apiVersion": "v1",
        "metadata": {
            "namespace": "default", "name": name, "resourceVersion": "1",
            "labels": {"a": "b"}, "managedFields": [{"manager": "kubectl"}],
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": vip, "clusterIPs": [vip], "ipFamilies": ["IPv4"],
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "web"}],
            "selector": {"app": name}, "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
        },
        "status": {"loadBalancer": {}},
    })
}

fn api_slice(owner: &str, name: &str, addresses: &[&str]) -> Value {
    let endpoint = |address: &&str| {
        json!({
            "addresses": [address], "nodeName": "n1", "zone": "a",
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "targetRef": {"kind": "Pod", "name": "p"},
        })
    };
    let endpoints: Vec<Value> = addresses.iter().map(endpoint).collect();
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {
            "namespace": "default", "name": name, "resourceVersion": "1",
            "labels": {"kubernetes.io/service-name": owner},
        },
        "endpoints": endpoints,
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
    })
}

fn name(name: &str) -> ServiceName {
    ServiceName::new("default", name)
}

/// The last numbers of a Service's endpoints.
fn endpoints(store: &Store, of: &str) -> Option<Vec<u8>> {
    let (_, slices) = store.get(&name(of))?;
    let all = slices.iter().flat_map(|slice| slice.endpoints.iter());
    let last = |endpoint: &crate::plan::services::Endpoint| match endpoint.address {
        std::net::IpAddr::V4(ip) => ip.octets()[3],
        std::net::IpAddr::V6(ip) => ip.octets()[15],
    };
    Some(all.map(last).collect())
}

async fn next(changes: &mut Changes) -> Vec<String> {
    let next = timeout(Duration::from_secs(20), changes.next()).await;
    let next = next.expect("there should be changes");
    next.into_iter()
        .map(|service| service.name().to_owned())
        .collect()
}

async fn is_quiet(changes: &mut Changes) -> bool {
    timeout(PAUSE * 10, changes.next()).await.is_err()
}

fn put(store: &Store, object: &Value) {
    match object["kind"].as_str() {
        Some("Service") => store.put_service(&serde_json::from_value(object.clone()).unwrap()),
        _ => store.put_slice(&serde_json::from_value(object.clone()).unwrap(), true),
    }
}

fn remove(store: &Store, object: &Value) {
    let kind = match object["kind"].as_str() {
        Some("Service") => Kind::Services,
        _ => Kind::Slices,
    };
    let metadata: Metadata = serde_json::from_value(object["metadata"].clone()).unwrap();
    store.remove(kind, &metadata);
}

/// A list of one kind.
fn list(store: &Store, kind: Kind, objects: &[Value]) {
    store.begin_list(kind);
    objects.iter().for_each(|object| put(store, object));
    store.end_list(kind);
}

/// With two Services, of which the first has two slices.
fn filled() -> (Arc<Store>, Changes) {
    let store = Arc::new(Store::default());
    let changes = Changes::of(&store);
    let services = [api_service("a", "10.96.0.1"), api_service("b", "10.96.0.2")];
    list(&store, Kind::Services, &services);
    let slices = [
        api_slice("a", "a-1", &["10.0.0.1", "10.0.0.2"]),
        api_slice("a", "a-2", &["10.0.0.3"]),
    ];
    list(&store, Kind::Slices, &slices);
    (store, changes)
}

#[tokio::test]
async fn nothing_is_told_before_both_lists_are_whole() {
    let store = Arc::new(Store::default());
    let mut changes = Changes::of(&store);
    list(&store, Kind::Services, &[api_service("a", "10.96.0.1")]);
    assert!(is_quiet(&mut changes).await && !store.is_complete());
    store.begin_list(Kind::Slices);
    put(&store, &api_slice("a", "a-1", &["10.0.0.1"]));
    assert!(is_quiet(&mut changes).await, "half a list");
    store.end_list(Kind::Slices);
    assert_eq!(next(&mut changes).await, ["a"]);
    assert!(is_quiet(&mut changes).await && store.is_complete());

    // A cluster without Services is told, too, once.
    let store = Arc::new(Store::default());
    let mut changes = Changes::of(&store);
    list(&store, Kind::Slices, &[]);
    list(&store, Kind::Services, &[]);
    assert!(next(&mut changes).await.is_empty());
    assert!(is_quiet(&mut changes).await);
}

#[tokio::test]
async fn each_change_is_told_once_by_name_and_what_is_none_is_not() {
    let (store, mut changes) = filled();
    assert_eq!(next(&mut changes).await, ["a", "b"]);
    put(&store, &api_slice("b", "b-1", &["10.0.0.9"]));
    put(&store, &api_slice("a", "a-2", &["10.0.0.4"]));
    put(&store, &api_slice("a", "a-2", &["10.0.0.5"]));
    assert_eq!(next(&mut changes).await, ["a", "b"]);
    assert_eq!(endpoints(&store, "a").unwrap(), [1, 2, 5]);

    // What nobody looks at here changes nothing.
    let mut same = api_service("a", "10.96.0.1");
    same["metadata"]["labels"]["a"] = "c".into();
    same["metadata"]["resourceVersion"] = "2".into();
    put(&store, &same);
    let mut same = api_slice("a", "a-2", &["10.0.0.5"]);
    same["endpoints"][0]["zone"] = "z".into();
    put(&store, &same);
    assert!(is_quiet(&mut changes).await);

    remove(&store, &api_slice("a", "a-1", &[]));
    assert_eq!(next(&mut changes).await, ["a"]);
    assert_eq!(endpoints(&store, "a").unwrap(), [5]);
    remove(&store, &api_service("a", ""));
    assert_eq!(next(&mut changes).await, ["a"]);
    assert!(store.get(&name("a")).is_none());
    // Its last slice was kept for it.
    put(&store, &api_service("a", "10.96.0.1"));
    assert_eq!(next(&mut changes).await, ["a"]);
    assert_eq!(endpoints(&store, "a").unwrap(), [5]);
}

#[tokio::test]
async fn a_change_is_not_lost_with_who_waited_for_it() {
    let (store, mut changes) = filled();
    next(&mut changes).await;
    for n in 0..20 {
        put(&store, &api_slice("a", "a-2", &[&format!("10.0.1.{n}")]));
        let waited = timeout(PAUSE / 5 * n, changes.next()).await;
        if waited.is_err() {
            assert_eq!(next(&mut changes).await, ["a"], "{n}");
        }
    }
}

#[tokio::test]
async fn all_are_told_again_if_that_is_wanted() {
    let (store, mut changes) = filled();
    store.tell_all();
    assert_eq!(next(&mut changes).await, ["a", "b"]);
    store.tell_all();
    assert_eq!(next(&mut changes).await, ["a", "b"]);
    assert!(is_quiet(&mut changes).await);
}

#[tokio::test]
async fn a_list_removes_what_it_does_not_have_once_it_is_whole() {
    let (store, mut changes) = filled();
    next(&mut changes).await;
    // One that breaks off removes nothing.
    store.begin_list(Kind::Slices);
    put(&store, &api_slice("a", "a-2", &["10.0.0.3"]));
    store.begin_list(Kind::Services);
    put(&store, &api_service("b", "10.96.0.2"));
    assert!(is_quiet(&mut changes).await);

    list(
        &store,
        Kind::Slices,
        &[api_slice("a", "a-2", &["10.0.0.3"])],
    );
    assert_eq!(next(&mut changes).await, ["a"]);
    assert_eq!(endpoints(&store, "a").unwrap(), [3]);
    list(&store, Kind::Services, &[api_service("b", "10.96.0.2")]);
    assert_eq!(next(&mut changes).await, ["a"]);
    assert!(store.get(&name("a")).is_none() && store.get(&name("b")).is_some());
    assert_eq!(
        (store.count(Kind::Services), store.count(Kind::Slices)),
        (1, 1)
    );
}

#[tokio::test]
async fn a_slice_whose_label_names_another_service_moves() {
    let (store, mut changes) = filled();
    next(&mut changes).await;
    put(&store, &api_slice("b", "a-1", &["10.0.0.1"]));
    assert_eq!(next(&mut changes).await, ["a", "b"]);
    assert_eq!(endpoints(&store, "a").unwrap(), [3]);
    assert_eq!(endpoints(&store, "b").unwrap(), [1]);
    let mut nobodys = api_slice("b", "a-1", &["10.0.0.1"]);
    nobodys["metadata"]["labels"] = Value::Null;
    put(&store, &nobodys);
    assert_eq!(next(&mut changes).await, ["b"]);
    assert!(endpoints(&store, "b").unwrap().is_empty());
    // In another namespace the name is another slice's.
    let mut foreign = api_slice("a", "a-2", &["10.0.0.7"]);
    foreign["metadata"]["namespace"] = "other".into();
    put(&store, &foreign);
    next(&mut changes).await;
    assert_eq!(endpoints(&store, "a").unwrap(), [3]);
}

#[tokio::test]
async fn garbage_costs_the_object_that_it_is_in_and_is_named_as_long_as_it_lasts() {
    let (store, mut changes) = filled();
    next(&mut changes).await;
    let mut bad = api_service("a", "10.96.0.256");
    put(&store, &bad);
    let mut bad_slice = api_slice("a", "a-1", &["10.0.0.1"]);
    bad_slice["addressType"] = "IPv5".into();
    put(&store, &bad_slice);
    put(&store, &api_slice("a", "a-2", &["10.0.0.4"]));
    assert_eq!(next(&mut changes).await, ["a"]);
    assert_eq!(endpoints(&store, "a").unwrap(), [1, 2, 4]);
    let faults = store.faults();
    assert_eq!(
        faults["Service default/a"],
        "spec.clusterIPs: `10.96.0.256` is not an IP address"
    );
    assert!(
        faults["EndpointSlice default/a-1"].contains("IPv5"),
        "{faults:?}"
    );
    // A list that has it as it is keeps what it said, and its fault.
    list(
        &store,
        Kind::Services,
        &[bad.clone(), api_service("b", "10.96.0.2")],
    );
    assert!(is_quiet(&mut changes).await);
    assert!(store.get(&name("a")).is_some() && store.faults().contains_key("Service default/a"));
    list(&store, Kind::Slices, &[bad_slice]);
    assert_eq!(next(&mut changes).await, ["a"]);
    assert_eq!(endpoints(&store, "a").unwrap(), [1, 2]);
    bad["spec"]["clusterIPs"] = json!(["10.96.0.1"]);
    put(&store, &bad);
    list(&store, Kind::Slices, &[]);
    assert!(store.faults().is_empty(), "{:?}", store.faults());
    // One that has no name is nobody's.
    put(&store, &api_service("", "10.96.0.9"));
    put(&store, &api_service("x/y", "10.96.0.9"));
    assert_eq!(store.faults().len(), 2);
}

#[tokio::test]
async fn a_wish_for_maglev_is_heard_and_another_one_costs_nothing_but_a_word() {
    let (store, mut changes) = filled();
    next(&mut changes).await;
    let is_consistent = || store.get(&name("a")).unwrap().0.external_consistent;
    let mut service = api_service("a", "10.96.0.1");
    service["spec"]["type"] = "NodePort".into();
    for (wish, heard) in [("maglev", true), ("magleb", false), ("maglev", true)] {
        service["metadata"]["annotations"] = json!({"sinabro.io/service-balancing": wish});
        assert_eq!(SERVICE_BALANCING_ANNOTATION, "sinabro.io/service-balancing");
        put(&store, &service);
        put(&store, &service);
        assert_eq!(next(&mut changes).await, ["a"]);
        assert_eq!(is_consistent(), heard);
        let fault = store.faults().remove("Service default/a");
        assert_eq!(
            fault.is_some_and(|fault| fault.ends_with("`magleb` is not `maglev`")),
            !heard
        );
    }
    // Nobody reaches it from outside.
    service["spec"]["type"] = "ClusterIP".into();
    put(&store, &service);
    assert!(!is_consistent());
}

#[tokio::test]
async fn what_endpoints_changed_for_is_told_once_and_only_of_changes() {
    const TRIGGER: &str = "endpoints.kubernetes.io/last-change-trigger-time";
    let store = Arc::new(Store::default());
    let mut changes = Changes::of(&store);
    let put_at = |store: &Store, addresses: &[&str], time: &str| {
        let mut object = api_slice("web", "web-1", addresses);
        object["metadata"]["annotations"] = json!({TRIGGER: time, "other": "x"});
        put(store, &object);
    };
    for kind in [Kind::Services, Kind::Slices] {
        store.begin_list(kind);
    }
    put(&store, &api_service("web", "10.96.0.1"));
    put_at(&store, &["10.244.0.1"], "2099-01-01T00:00:00Z");
    for kind in [Kind::Services, Kind::Slices] {
        store.end_list(kind);
    }
    next(&mut changes).await;
    assert_eq!(store.take_triggers(), [], "that was a list");
    let late = "2099-01-01T00:00:00.5Z";
    // Nothing changes; something does; it did so long ago; nobody says when.
    put_at(&store, &["10.244.0.1"], late);
    put_at(&store, &["10.244.0.2"], late);
    put_at(&store, &["10.244.0.3"], "2001-01-01T00:00:00Z");
    put_at(&store, &["10.244.0.4"], "yesterday");
    assert_eq!(next(&mut changes).await, ["web"]);
    assert_eq!(store.take_triggers(), [late.parse().unwrap()]);
    assert_eq!(store.take_triggers(), []);
}
