use super::*;
use crate::stand_in::{Answer, Lines, StandIn};

const SERVICES: &str = "/api/v1/services?";
const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices?";
const SELECTOR: &str = "labelSelector=%21service.kubernetes.io%2Fheadless";
/// Of what else another proxy has.
const OTHERS: &str = "%2C%21service.kubernetes.io%2Fservice-proxy-name";
const RANGES: &str = "/apis/networking.k8s.io/v1/servicecidrs?";

fn event(kind: &str, object: &Value) -> String {
    json!({"type": kind, "object": object}).to_string()
}

fn bookmark(version: u32) -> String {
    let annotations = json!({"k8s.io/initial-events-end": "true"});
    let metadata = json!({"resourceVersion": version.to_string(), "annotations": annotations});
    event(
        "BOOKMARK",
        &json!({"kind": "Any", "apiVersion": "v1", "metadata": metadata}),
    )
}

fn send(lines: &Lines, kind: &str, object: &Value) {
    lines.send(event(kind, object)).unwrap();
}

struct Test {
    server: StandIn,
    source: ServicesSource,
    services: Lines,
    slices: Lines,
}

impl Test {
    /// With both watches begun, and one Service with one endpoint listed.
    async fn new() -> Self {
        let mut server = StandIn::start().await;
        let mut source = spawn_kubernetes(server.api().await, Some(BTreeSet::new()));
        let [services, slices] = [SERVICES, SLICES].map(|part| server.watch_of(part));
        let mut asked = BTreeSet::new();
        for _ in 0..2 {
            let (request, _) = server.request().await;
            for part in ["sendInitialEvents=true", "resourceVersion=0", SELECTOR] {
                assert!(request.contains(part), "{request}");
            }
            assert_eq!(request.contains(OTHERS), request.contains(SLICES));
            asked.insert(request.split('?').next().unwrap().to_owned());
        }
        let paths = [SERVICES, SLICES].map(|path| format!("GET {}", path.trim_end_matches('?')));
        assert!(asked.iter().eq(&paths), "{asked:?}");
        send(&services, "ADDED", &api_service("a", "10.96.0.1"));
        services.send(bookmark(7)).unwrap();
        assert!(is_quiet(&mut source.changes).await);
        send(&slices, "ADDED", &api_slice("a", "a-1", &["10.0.0.1"]));
        slices.send(bookmark(8)).unwrap();
        assert_eq!(next(&mut source.changes).await, ["a"]);
        assert_eq!(endpoints(&source.store, "a").unwrap(), [1]);
        Self {
            server,
            source,
            services,
            slices,
        }
    }

    async fn problem(&mut self, there: bool) -> Health {
        let health = self
            .source
            .health
            .wait_for(|health| health.problem.is_some() == there);
        let health = timeout(Duration::from_secs(30), health).await;
        health.expect("health should be so").unwrap().clone()
    }
}

#[tokio::test]
async fn changes_of_both_kinds_are_told_by_the_services_name() {
    let mut test = Test::new().await;
    send(
        &test.slices,
        "MODIFIED",
        &api_slice("a", "a-1", &["10.0.0.1", "10.0.0.2"]),
    );
    assert_eq!(next(&mut test.source.changes).await, ["a"]);
    assert_eq!(endpoints(&test.source.store, "a").unwrap(), [1, 2]);
    send(&test.services, "ADDED", &api_service("b", "10.96.0.2"));
    assert_eq!(next(&mut test.source.changes).await, ["b"]);
    send(
        &test.slices,
        "MODIFIED",
        &api_slice("b", "a-1", &["10.0.0.1"]),
    );
    assert_eq!(next(&mut test.source.changes).await, ["a", "b"]);
    send(
        &test.slices,
        "DELETED",
        &api_slice("b", "a-1", &["10.0.0.1"]),
    );
    send(&test.services, "DELETED", &api_service("a", "10.96.0.1"));
    let mut told = next(&mut test.source.changes).await;
    if told.len() < 2 {
        told.extend(next(&mut test.source.changes).await);
    }
    told.sort();
    assert_eq!(told, ["a", "b"]);
    assert!(test.source.store.get(&name("a")).is_none());
    // What cannot be read changes nothing, by its form or by its values.
    test.services
        .send(event("MODIFIED", &json!({"metadata": 7})))
        .unwrap();
    send(&test.services, "MODIFIED", &api_service("b", "10.96"));
    assert!(is_quiet(&mut test.source.changes).await);
    assert!(test.source.store.faults().contains_key("Service default/b"));
    assert!(test.source.store.get(&name("b")).is_some());
}

#[tokio::test]
async fn what_vanished_while_nobody_watched_is_gone_after_the_next_list() {
    let mut test = Test::new().await;
    let gone: Value = serde_json::from_str(&crate::stand_in::status(410, "too old")).unwrap();
    test.services.send(event("ERROR", &gone)).unwrap();
    let services = test.server.watch_of(SERVICES);
    let (request, _) = test.server.request().await;
    assert!(
        request.contains("resourceVersion=7") && request.contains("sendInitialEvents=true"),
        "{request}"
    );
    send(&services, "ADDED", &api_service("b", "10.96.0.2"));
    assert_eq!(next(&mut test.source.changes).await, ["b"]);
    assert!(test.source.store.get(&name("a")).is_some(), "half a list");
    services.send(bookmark(20)).unwrap();
    assert_eq!(next(&mut test.source.changes).await, ["a"]);
    assert!(test.source.store.get(&name("a")).is_none());
    assert_eq!(
        test.source.health.borrow().problem,
        None,
        "what the server asks for is no loss"
    );
}

#[tokio::test]
async fn a_server_without_streamed_lists_and_one_that_goes_away() {
    let server = StandIn::start().await;
    let mut source = spawn_kubernetes(server.api().await, Some(BTreeSet::new()));
    let list = |kind: &str, object: Value| {
        json!({"kind": kind, "metadata": {"resourceVersion": "50"}, "items": [object]}).to_string()
    };
    for (part, body) in [
        (SERVICES, list("ServiceList", api_service("a", "10.96.0.1"))),
        (
            SLICES,
            list("EndpointSliceList", api_slice("a", "a-1", &["10.0.0.1"])),
        ),
    ] {
        let refused = crate::stand_in::status(422, "sendInitialEvents is forbidden");
        server.answer_to(part, Answer::Whole(422, refused));
        // One that breaks off is none.
        server.answer_to(part, Answer::Whole(200, body[..body.len() - 2].to_owned()));
        server.answer_to(part, Answer::Whole(200, body));
    }
    let [services, slices] = [SERVICES, SLICES].map(|part| server.watch_of(part));
    assert_eq!(next(&mut source.changes).await, ["a"]);
    send(&slices, "MODIFIED", &api_slice("a", "a-1", &["10.0.0.2"]));
    assert_eq!(next(&mut source.changes).await, ["a"]);
    let mut test = Test {
        server,
        source,
        services,
        slices,
    };
    test.problem(false).await;
    // Refused, broken, whole, and the watch after it, of both.
    for _ in 0..8 {
        let (request, _) = test.server.request().await;
        assert!(request.contains(SELECTOR), "{request}");
    }
    // A watch that ends sooner would be taken for one that failed.
    tokio::time::sleep(Duration::from_secs(1)).await;

    test.server.stop().await;
    let lost = test.problem(true).await;
    let problem = lost.problem.unwrap();
    assert!(
        problem.contains("the last known") && problem.contains("stay in use"),
        "{problem}"
    );
    assert!(lost.stale_since.is_some());
    assert_eq!(endpoints(&test.source.store, "a").unwrap(), [2]);
    test.server.restart().await;
    let _lines = [SERVICES, SLICES].map(|part| test.server.watch_of(part));
    assert_eq!(test.problem(false).await, Health::default());
}

#[tokio::test]
async fn the_task_ends_when_nobody_waits_for_changes() {
    let test = Test::new().await;
    drop(test.source.changes);
    timeout(Duration::from_secs(30), test.source.task)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn ranges_of_addresses_are_watched_where_the_server_has_them() {
    let mut server = StandIn::start().await;
    let ranges = server.watch_of(RANGES);
    let mut source = spawn_kubernetes(server.api().await, None);
    while !server.request().await.0.contains(RANGES) {}
    let range = |name: &str, cidrs: &[&str]| {
        let metadata = json!({"name": name, "resourceVersion": "1"});
        json!({"metadata": metadata, "spec": {"cidrs": cidrs}})
    };
    let both = ["10.96.0.0/16", "fd00:96::/112"];
    send(&ranges, "ADDED", &range("kubernetes", &both));
    ranges.send(bookmark(7)).unwrap();
    let mut told = async |wanted: &[&str]| {
        let wanted: BTreeSet<IpNet> = wanted.iter().map(|text| text.parse().unwrap()).collect();
        let told = source.ranges.wait_for(|ranges| *ranges == wanted);
        timeout(Duration::from_secs(30), told)
            .await
            .unwrap()
            .unwrap();
    };
    told(&both).await;
    // What is none costs itself alone.
    send(
        &ranges,
        "ADDED",
        &range("more", &["10.97.0.0/16", "nonsense"]),
    );
    told(&["10.96.0.0/16", "10.97.0.0/16", "fd00:96::/112"]).await;
    send(&ranges, "DELETED", &range("kubernetes", &both));
    told(&["10.97.0.0/16"]).await;
}

#[tokio::test]
async fn a_server_without_ranges_of_addresses_is_no_trouble() {
    for code in [403, 404] {
        let mut server = StandIn::start().await;
        let refused = crate::stand_in::status(code, "no such thing");
        server.answer_to(RANGES, Answer::Whole(code, refused));
        let [services, slices] = [SERVICES, SLICES].map(|part| server.watch_of(part));
        let mut source = spawn_kubernetes(server.api().await, None);
        services.send(bookmark(7)).unwrap();
        slices.send(bookmark(7)).unwrap();
        assert!(next(&mut source.changes).await.is_empty());
        for _ in 0..3 {
            server.request().await;
        }
        // Nor is it asked again soon.
        let again = timeout(Duration::from_secs(3), server.request()).await;
        assert!(again.is_err(), "{again:?}");
        assert_eq!(*source.health.borrow(), Health::default());
        assert!(source.ranges.borrow().is_empty());
    }
}
