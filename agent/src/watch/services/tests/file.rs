use super::*;
use crate::watch::services::{file, parse::Common, store::Object};
use std::fs;

fn yaml(objects: &[Value]) -> String {
    let texts = objects.iter().map(ToString::to_string);
    texts.collect::<Vec<_>>().join("\n---\n")
}

fn parsed(bytes: &[u8]) -> Result<Vec<Object>, String> {
    Ok(file::parse(bytes, &mut Common::default())?.all)
}

/// JSON is read in another way than the same with something that JSON has not.
fn both(json: &str) -> [String; 2] {
    [json.to_owned(), format!("# Not JSON.\n{json}")]
}

async fn problem(source: &mut ServicesSource, is: impl Fn(Option<&str>) -> bool) -> Health {
    let health = source
        .health
        .wait_for(|health| is(health.problem.as_deref()));
    let health = timeout(Duration::from_secs(20), health).await;
    health.expect("health should be so").unwrap().clone()
}

#[tokio::test]
async fn every_change_of_the_file_is_told_by_the_services_it_is_about() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("services.yaml");
    let mut source = spawn_file(path.clone(), None);
    let missing = problem(&mut source, |problem| problem.is_some()).await;
    assert!(missing.problem.unwrap().contains("services.yaml"));
    assert!(missing.stale_since.is_some() && !source.store.is_complete());

    let [a, b] = [api_service("a", "10.96.0.1"), api_service("b", "10.96.0.2")];
    let slice = api_slice("a", "a-1", &["10.0.0.1"]);
    fs::write(&path, yaml(&[a.clone(), b.clone(), slice.clone()])).unwrap();
    assert_eq!(next(&mut source.changes).await, ["a", "b"]);
    assert_eq!(endpoints(&source.store, "a").unwrap(), [1]);
    problem(&mut source, |problem| problem.is_none()).await;

    let more = api_slice("a", "a-1", &["10.0.0.1", "10.0.0.2"]);
    fs::write(&path, yaml(&[a.clone(), b.clone(), more.clone()])).unwrap();
    assert_eq!(next(&mut source.changes).await, ["a"]);
    assert_eq!(endpoints(&source.store, "a").unwrap(), [1, 2]);

    fs::write(&path, "kind: Service\nmetadata: [").unwrap();
    let broken = problem(&mut source, |problem| problem.is_some()).await;
    assert!(broken.problem.unwrap().contains("said last stays in use"));
    fs::remove_file(&path).unwrap();
    problem(&mut source, |problem| {
        problem.is_some_and(|why| why.contains("os error 2"))
    })
    .await;
    assert!(is_quiet(&mut source.changes).await);
    assert_eq!(endpoints(&source.store, "a").unwrap(), [1, 2]);

    fs::write(&path, yaml(&[b, more])).unwrap();
    assert_eq!(next(&mut source.changes).await, ["a"]);
    assert!(source.store.get(&name("a")).is_none());
    problem(&mut source, |problem| problem.is_none()).await;

    fs::write(&path, "{kind: List, items: []}").unwrap();
    assert_eq!(next(&mut source.changes).await, ["a", "b"]);
    assert_eq!(source.store.count(Kind::Services), 0);
}

#[tokio::test]
async fn the_task_ends_when_nobody_waits_for_changes() {
    let dir = tempfile::tempdir().unwrap();
    let source = spawn_file(dir.path().join("services.yaml"), None);
    drop(source.changes);
    timeout(Duration::from_secs(20), source.task)
        .await
        .unwrap()
        .unwrap();
}

#[test]
fn all_forms_of_a_list_say_the_same() {
    let [service, slice] = [
        api_service("a", "10.96.0.1"),
        api_slice("a", "a-1", &["10.0.0.1"]),
    ];
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service, slice]}).to_string();
    let mut bare = [service.clone(), slice.clone()];
    for object in &mut bare {
        object.as_object_mut().unwrap().remove("kind");
    }
    let lists = format!(
        "{}\n---\n{}",
        json!({"kind": "ServiceList", "items": [bare[0]]}),
        json!({"kind": "EndpointSliceList", "items": [bare[1]]}),
    );
    let by_hand = "
# A comment, and nothing before the first object.
---
---
apiVersion: v1
kind: Service
metadata: {name: a}
spec:
  clusterIP: 10.96.0.1
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- addresses: [10.0.0.1]
  nodeName: n1
---
kind: ConfigMap
metadata: {name: other}
";
    let told = |text: &str| {
        let store = Store::default();
        store.replace(parsed(text.as_bytes()).unwrap());
        assert!(store.faults().is_empty(), "{:?}", store.faults());
        store.get(&name("a")).unwrap()
    };
    let one = told(&yaml(&[service, slice]));
    let [list, lists] = [list, lists].map(|text| both(&text));
    let texts = list.iter().chain(&lists).map(String::as_str);
    for text in texts.chain([by_hand]) {
        assert_eq!(told(text), one, "{text}");
    }
}

#[test]
fn an_object_of_a_wrong_form_costs_itself_and_one_that_is_there_twice_is_taken_once() {
    for form in 0..2 {
        let read = |json: &str| parsed(both(json)[form].as_bytes()).unwrap();
        let store = Store::default();
        let [a, b] = [api_service("a", "10.96.0.1"), api_service("b", "10.96.0.2")];
        let good = yaml(&[a.clone(), b.clone()]);
        store.replace(read(&good));
        let mut bad = a.clone();
        bad["spec"]["ports"][0]["port"] = "eighty".into();
        let text = yaml(&[
            bad,
            api_service("b", "10.96.0.3"),
            b,
            api_service("c", "10.96.0.4"),
        ]);
        store.replace(read(&text));
        let faults = store.faults();
        assert!(faults["Service default/a"].contains("eighty"), "{faults:?}");
        assert!(faults["Service default/b"].contains("twice"), "{faults:?}");
        let vip = |of| {
            store
                .get(&name(of))
                .unwrap()
                .0
                .cluster_v4
                .unwrap()
                .to_string()
        };
        assert_eq!(
            ["a", "b", "c"].map(vip),
            ["10.96.0.1", "10.96.0.3", "10.96.0.4"]
        );
    }
}

#[test]
fn a_text_that_says_nothing_is_not_an_empty_list() {
    let parse = parsed;
    for nothing in ["", "\n", "# nothing\n", "---\n---\n"] {
        assert!(
            parse(nothing.as_bytes()).unwrap_err().contains("empty"),
            "{nothing:?}"
        );
    }
    assert!(parse(b"\xff").unwrap_err().contains("UTF-8"));
    assert!(parse(b"kind: [").is_err());
    for empty in [
        "{kind: List, items: []}",
        "{kind: ServiceList, items: null}",
    ] {
        assert!(parse(empty.as_bytes()).unwrap().is_empty(), "{empty}");
    }
    // Thousands of documents are no attack.
    let many: Vec<_> = (0..3000)
        .map(|n| api_service(&format!("s{n}"), "10.96.0.1"))
        .collect();
    let objects = parse(yaml(&many).as_bytes()).unwrap();
    assert_eq!(objects.len(), 3000);
    assert!(
        objects
            .iter()
            .all(|object| matches!(object, Object::Service(..)))
    );
}

#[tokio::test]
async fn ranges_of_addresses_are_those_of_the_file_unless_they_are_set() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("services.yaml");
    let set: BTreeSet<ipnet::IpNet> = ["10.0.0.0/8".parse().unwrap()].into();
    let mut source = spawn_file(path.clone(), None);
    let fixed = spawn_file(path.clone(), Some(set.clone()));
    for (cidrs, wanted) in [
        (json!(["10.96.0.1/16"]), vec!["10.96.0.0/16"]),
        (
            json!(["10.96.0.0/16", "fd00::/112", "x"]),
            vec!["10.96.0.0/16", "fd00::/112"],
        ),
        (json!(null), vec![]),
    ] {
        let range =
            json!({"kind": "ServiceCIDR", "metadata": {"name": "a"}, "spec": {"cidrs": cidrs}});
        fs::write(&path, yaml(&[range])).unwrap();
        let wanted: BTreeSet<ipnet::IpNet> =
            wanted.iter().map(|text| text.parse().unwrap()).collect();
        let told = source.ranges.wait_for(|ranges| *ranges == wanted);
        timeout(Duration::from_secs(20), told)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(*fixed.ranges.borrow(), set);
    }
}
