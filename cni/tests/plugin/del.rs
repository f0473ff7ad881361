//! DEL: succeeds whatever is gone already.

use crate::{
    agent::Act,
    node::{Node, Pod, snapshot},
};
use serde_json::{Value, json};
use sinabro_common::api::{ErrorCode, Owner};
use std::fs;

fn added() -> (Node, Pod, (String, String)) {
    let (node, pod) = (Node::new(), Pod::new());
    let before = (snapshot(&node.place), snapshot(&pod.place));
    node.call("ADD", &pod).run().result();
    (node, pod, before)
}

#[test]
fn everything_goes_and_again_is_fine() {
    let (node, pod, before) = added();
    for _ in 0..3 {
        node.call("DEL", &pod).run().silent();
        assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
        assert!(node.agent().state().endpoints.is_empty());
    }
    assert!(!node.queue_file(&pod).exists());
}

#[test]
fn neither_namespace_nor_arguments_are_needed() {
    let (node, pod, before) = added();
    let call = node.call("DEL", &pod).unset("CNI_NETNS").unset("CNI_PATH");
    call.var("CNI_ARGS", "not=known")
        .conf("prevResult", json!(7))
        .conf("runtimeConfig", json!(7))
        .run()
        .silent();
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
}

#[test]
fn a_namespace_that_is_gone_does_not_matter() {
    let (node, pod, before) = added();
    let (path, id) = (pod.path(), pod.id.clone());
    let call = node.call("DEL", &pod);
    drop(pod);
    call.var("CNI_NETNS", &path).run().silent();
    assert_eq!(snapshot(&node.place), before.0);
    let state = node.agent().state();
    assert!(state.endpoints.is_empty(), "{id}");
}

#[test]
fn an_interface_that_is_gone_does_not_matter() {
    let (node, pod, before) = added();
    let inner = pod.conn().link_by_name("eth0").unwrap().index;
    pod.conn()
        .execute(sinabro_netlink::link::delete(inner))
        .unwrap();
    node.call("DEL", &pod).run().silent();
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
    assert!(node.agent().state().endpoints.is_empty());
}

#[test]
fn without_an_agent_the_delete_is_queued() {
    let (mut node, pod, before) = added();
    node.stop_agent();
    for _ in 0..2 {
        node.call("DEL", &pod).run().silent();
    }
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
    let file = node.queue_file(&pod);
    let owner: Owner = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!((&*owner.container_id, &*owner.ifname), (&*pod.id, "eth0"));
    // Nothing half written lies beside it.
    assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn an_agent_that_cannot_now_has_it_queued() {
    for act in [
        Act::Die,
        Act::DieMidway,
        Act::Garble,
        Act::Refuse(ErrorCode::NotReady),
        Act::Refuse(ErrorCode::Version),
    ] {
        let (node, pod, before) = added();
        node.agent().script("release", act);
        node.call("DEL", &pod).run().silent();
        assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
        assert!(node.queue_file(&pod).exists(), "{act:?}");
    }
}

#[test]
fn an_agent_that_fails_is_reported() {
    let (node, pod, _) = added();
    node.agent()
        .script("release", Act::Refuse(ErrorCode::Internal));
    node.call("DEL", &pod)
        .run()
        .fails_with(100, "scripted refusal");
    assert!(!node.queue_file(&pod).exists());
}

#[test]
fn a_queue_that_cannot_be_written_is_reported() {
    let (node, pod) = (Node::without_agent(), Pod::new());
    fs::write(node.dir.path().join("deletes"), "in the way").unwrap();
    let outcome = node.call("DEL", &pod).run();
    outcome.fails_with(5, "deletes");
    outcome.fails_with(5, &pod.id);
}

#[test]
fn only_the_named_attachment_goes() {
    let (node, pod, _) = added();
    let other = Pod::new();
    node.call("ADD", &other).run().result();
    let second = node.call("ADD", &pod).var("CNI_IFNAME", "net1");
    second.run().result();
    node.call("DEL", &pod).run().silent();
    assert!(
        node.conn()
            .link_by_name(&pod.link())
            .unwrap_err()
            .is_not_found()
    );
    assert!(node.conn().link_by_name(&other.link()).unwrap().carrier);
    assert!(pod.conn().link_by_name("net1").unwrap().carrier);
    let left: Vec<Value> = node
        .agent()
        .state()
        .endpoints
        .keys()
        .map(|o| json!([o.container_id, o.ifname]))
        .collect();
    assert_eq!(left.len(), 2);
    assert!(!left.contains(&json!([pod.id, "eth0"])));
}

/// The plugin is handed all annotations, and a pod that cannot be deleted is worse than one that
/// cannot start.
#[test]
fn a_pod_with_as_many_annotations_as_kubernetes_allows_comes_and_goes() {
    let (node, pod) = (Node::new(), Pod::new());
    let before = (snapshot(&node.place), snapshot(&pod.place));
    // 256 KiB (TotalAnnotationSizeLimitB), in the form in which Go writes `<` into JSON.
    let note = r"\u003c".repeat(256 << 10);
    let conf = format!(
        r#"{{"cniVersion":"1.1.0","name":"pods","type":"sinabro","stateDir":{:?},"runtimeConfig":
        {{"io.kubernetes.cri.pod-annotations":{{"example.com/note":"{note}"}}}}}}"#,
        node.dir.path()
    );
    let call = |verb| node.call(verb, &pod).input(conf.as_bytes()).run();
    call("ADD").result();
    call("DEL").silent();
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
}
