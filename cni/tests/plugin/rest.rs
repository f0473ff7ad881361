//! GC, STATUS, VERSION, and input that makes no sense to any verb.

use crate::{
    agent::{Act, status},
    node::{Node, Pod, snapshot},
};
use proptest::prelude::*;
use serde_json::{Value, json};
use sinabro_common::{
    api::{Adds, Condition, ErrorCode, Request},
    names,
};
use std::path::PathBuf;

#[test]
fn gc_passes_on_what_is_valid() {
    let node = Node::new();
    let valid = json!([
        {"containerID": "c1", "ifname": "eth0"},
        {"containerID": "c2", "ifname": "net1", "more": 1},
    ]);
    let call = node.bare("GC").conf("cni.dev/valid-attachments", valid);
    call.run().silent();
    let calls = node.agent().state().calls.clone();
    let [Request::Gc { network, valid }] = &calls[..] else {
        panic!("{calls:?}");
    };
    assert_eq!(network, "pods");
    let keys: Vec<_> = valid.iter().map(ToString::to_string).collect();
    assert_eq!(keys, ["c1/eth0", "c2/net1"]);
}

#[test]
fn gc_without_a_list_removes_nothing() {
    let node = Node::new();
    node.bare("GC")
        .run()
        .fails_with(7, "cni.dev/valid-attachments");
    let call = node.bare("GC").conf("cni.dev/valid-attachments", json!([]));
    call.unset("CNI_PATH").run().fails_with(4, "CNI_PATH");
    let call = node
        .bare("GC")
        .conf("cni.dev/valid-attachments", json!([7]));
    call.run().fails_with(7, "cni.dev/valid-attachments");
    assert!(node.agent().calls().is_empty());
}

#[test]
fn gc_says_when_it_could_not() {
    let mut node = Node::new();
    let gc = |node: &Node| {
        node.bare("GC")
            .conf("cni.dev/valid-attachments", json!([]))
            .run()
    };
    node.agent().script("gc", Act::Refuse(ErrorCode::Internal));
    gc(&node).fails_with(100, "scripted refusal");
    node.agent().script("gc", Act::Die);
    gc(&node).fails_with(11, "agent.sock");
    node.stop_agent();
    gc(&node).fails_with(11, "agent.sock");
}

fn says(node: &Node, adds: Adds) {
    node.agent().state().status.adds = Some(adds);
}

fn last_possible(node: &Node) -> PathBuf {
    node.state_dir().join(names::LAST_POSSIBLE_FILE)
}

#[test]
fn status_says_whether_an_add_can_work() {
    let mut node = Node::new();
    let why = || "no addresses left".to_owned();
    for (adds, code) in [
        (Adds::NotYet(why()), 50),
        (Adds::Impossible(why()), 50),
        (Adds::Isolated(why()), 51),
    ] {
        says(&node, adds);
        let outcome = node.bare("STATUS").run();
        outcome.fails_with(code, "node a");
        assert!(outcome.stdout.contains("no addresses left"));
    }
    // Other things may be wrong.
    says(&node, Adds::Possible);
    node.agent().state().status.ready = false;
    node.bare("STATUS").unset("CNI_PATH").run().silent();
    std::fs::remove_file(last_possible(&node)).unwrap();

    node.agent().script("status", Act::Die);
    node.bare("STATUS").run().fails_with(50, "agent.sock");
    node.agent().script("status", Act::Mistake);
    node.bare("STATUS").run().fails_with(50, "not a status");
    node.stop_agent();
    node.bare("STATUS").run().fails_with(50, "agent.sock");
}

#[test]
fn status_of_an_agent_of_an_earlier_release_is_its_readiness() {
    let node = Node::new();
    let mut report = status();
    report.adds = None;
    report.ready = false;
    report.conditions = vec![Condition {
        name: "facts".into(),
        ok: false,
        detail: "not known yet".into(),
    }];
    node.agent().state().status = report;
    node.bare("STATUS").run().fails_with(50, "node a");
    node.agent().state().status.ready = true;
    node.bare("STATUS").run().silent();
}

#[test]
fn status_passes_while_an_agent_is_away_that_was_well() {
    let mut node = Node::new();
    let file = last_possible(&node);
    let seconds = || -> u64 {
        let text = std::fs::read_to_string(&file).unwrap();
        text.trim().parse().unwrap()
    };
    node.bare("STATUS").run().silent();
    let first = seconds();
    let why = || "still starting".to_owned();
    says(&node, Adds::NotYet(why()));
    node.bare("STATUS").run().silent();
    // What is certain is said at once.
    says(&node, Adds::Impossible(why()));
    node.bare("STATUS").run().fails_with(50, "node a");
    says(&node, Adds::Isolated(why()));
    node.bare("STATUS").run().fails_with(51, "node a");
    node.agent().script("status", Act::Die);
    node.bare("STATUS").run().silent();
    node.agent()
        .script("status", Act::Refuse(ErrorCode::NotReady));
    node.bare("STATUS").run().silent();
    node.agent().script("status", Act::Mistake);
    node.bare("STATUS").run().fails_with(50, "not a status");
    assert_eq!(seconds(), first, "only who is well renews it");
    node.stop_agent();
    node.bare("STATUS").run().silent();

    // One that does not come back; and what is no time of this boot.
    for then in [
        format!("{:020}\n", first.saturating_sub(120)),
        format!("{:020}\n", first + 1_000_000),
        "18446744073709551616\n".into(),
        "soon\n".into(),
        String::new(),
    ] {
        std::fs::write(&file, &then).unwrap();
        node.bare("STATUS").run().fails_with(50, "agent.sock");
    }
}

#[test]
fn version_needs_nothing() {
    let node = Node::without_agent();
    let ask = |input: &str| {
        let call = node.bare("VERSION").unset("CNI_PATH");
        call.input(input.as_bytes()).run().result()
    };
    let all = json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]);
    for (input, echo) in [
        (r#"{"cniVersion":"1.0.0"}"#, "1.0.0"),
        (r#"{"cniVersion":"0.2.0"}"#, "0.2.0"),
        ("", "1.1.0"),
        ("no JSON", "1.1.0"),
    ] {
        assert_eq!(
            ask(input),
            json!({"cniVersion": echo, "supportedVersions": all})
        );
    }
}

#[test]
fn gc_and_status_came_with_1_1() {
    let node = Node::new();
    for verb in ["GC", "STATUS"] {
        for version in ["0.3.1", "0.4.0", "1.0.0"] {
            let call = node.bare(verb).version(version);
            let call = call.conf("cni.dev/valid-attachments", json!([]));
            call.run().fails_with(1, verb);
        }
    }
    assert!(node.agent().calls().is_empty());
}

#[test]
fn a_bad_environment_is_named_and_nothing_is_touched() {
    let (node, pod) = (Node::new(), Pod::new());
    let before = (snapshot(&node.place), snapshot(&pod.place));
    for verb in ["ADD", "DEL", "CHECK"] {
        for (name, value) in [
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "../../etc"),
            ("CNI_IFNAME", ""),
            ("CNI_IFNAME", "a/b"),
            ("CNI_IFNAME", "longer-than-15-bytes"),
            ("CNI_NETNS", "relative"),
        ] {
            let call = node.call(verb, &pod).var(name, value);
            call.run().fails_with(4, name);
        }
    }
    for verb in ["ADD", "CHECK"] {
        node.call(verb, &pod)
            .unset("CNI_NETNS")
            .run()
            .fails_with(4, "CNI_NETNS");
    }
    let call = node.call("ADD", &pod).var("CNI_ARGS", "K8S_POD_NAME");
    call.run().fails_with(4, "CNI_ARGS");
    node.call("add", &pod).run().fails_with(4, "CNI_COMMAND");
    let call = node.call("ADD", &pod).unset("CNI_COMMAND");
    call.run().fails_with(4, "CNI_COMMAND");
    assert!(node.agent().calls().is_empty());
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
}

#[test]
fn bad_input_is_named_for_every_verb() {
    let (node, pod) = (Node::new(), Pod::new());
    let whole = json!({"cniVersion": "1.1.0", "name": "pods", "type": "sinabro"}).to_string();
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
        let run = |input: &[u8]| node.call(verb, &pod).input(input).run();
        for len in [0, 1, 10, whole.len() / 2, whole.len() - 1] {
            run(&whole.as_bytes()[..len]).fails_with(6, "JSON");
        }
        run(b"\xff\xfe\x00").fails_with(6, "JSON");
        run("[".repeat(100_000).as_bytes()).fails_with(6, "JSON");
        run(&vec![b' '; 5 << 20]).fails_with(5, "longer");
        run(br#"{"name":"pods","type":"sinabro"}"#).fails_with(1, "0.1.0");
        run(br#"{"cniVersion":"9.9.9","name":"pods","type":"sinabro"}"#).fails_with(1, "9.9.9");
        run(br#"{"cniVersion":"1.1.0","type":"sinabro"}"#).fails_with(7, "name");
    }
    assert!(node.agent().calls().is_empty());
}

#[test]
fn an_error_speaks_the_version_asked_for() {
    let (node, pod) = (Node::without_agent(), Pod::new());
    let version = |call: crate::node::Call| -> Value {
        serde_json::from_str::<Value>(&call.run().stdout).unwrap()["cniVersion"].clone()
    };
    assert_eq!(version(node.call("ADD", &pod).version("0.4.0")), "0.4.0");
    assert_eq!(version(node.call("ADD", &pod).version("7.0.0")), "1.1.0");
}

proptest! {
    /// Whatever comes in, one JSON document goes out, and it is an error exactly if the exit
    /// code says so. Not DEL: it would look at the links of the namespace this runs in.
    #[test]
    fn any_input_gets_one_answer(
        verb in "ADD|CHECK|GC|STATUS|VERSION|\\PC{0,4}",
        vars in proptest::collection::vec(("CNI_(CONTAINERID|IFNAME|ARGS|PATH)", "\\PC{0,20}|c1|eth0|IP=10.0.0.1"), 0..5),
        version in "0\\.[1-4]\\.[01]|1\\.[01]\\.0|\\PC{0,6}",
        key in "prevResult|runtimeConfig|args|dns|name|type|cni.dev/valid-attachments|x",
        value in prop::sample::select(vec![
            json!(null), json!(7), json!([]), json!({}), json!("a"),
            json!({"ips": [7]}), json!({"ips": ["10.0.0.1"]}), json!({"cni": {"mac": "x"}}),
        ]),
        cut in 0usize..400,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut conf = json!({
            "cniVersion": version, "name": "pods", "type": "sinabro", "stateDir": dir.path(),
        });
        conf[key] = value;
        let mut input = conf.to_string().into_bytes();
        input.truncate(cut);
        let get = |name: &str| match name {
            "CNI_COMMAND" => Some(verb.clone().into()),
            "CNI_NETNS" => Some("/nonexistent".into()),
            _ => vars.iter().find(|(n, _)| n == name).map(|(_, value)| value.into()),
        };
        let mut output = Vec::new();
        let code = sinabro_cni::run(&get, &input[..], &mut output);
        if output.is_empty() {
            // No agent, no namespace: nothing but VERSION can succeed, and that says something.
            prop_assert_ne!(code, 0);
        }
        let json: Value = serde_json::from_slice(&output).unwrap();
        prop_assert_eq!(json.get("code").is_some(), code != 0);
        prop_assert!(json["cniVersion"].is_string());
    }
}
