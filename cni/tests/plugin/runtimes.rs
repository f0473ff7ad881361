//! What runtimes hand to a plugin, as it was captured from them: with `00-sinabro.conflist` as the agent writes it, a pod with two
//! host ports and an annotation, by a plugin that wrote down what it got.
//!
//! - containerd 1.6 and 2: go-cni 1.1.6 and 1.1.13, asked as containerd's CRI service does;
//! - CRI-O: ocicni 0.4.3, likewise;
//! - Multus 4.2.3 with this network as its default, called with what containerd hands to it.

use crate::node::{Node, Pod};
use serde_json::{Map, Value, json};
use sinabro_common::api::{Request, TcpAcceleration};

const CAPTURED: [(&str, &str); 4] = [
    (
        "containerd 1.6",
        include_str!("runtimes/containerd-1.6.json"),
    ),
    ("containerd 2", include_str!("runtimes/containerd-2.json")),
    ("CRI-O", include_str!("runtimes/cri-o.json")),
    // It passes no annotations on.
    ("Multus", include_str!("runtimes/multus.json")),
];

#[test]
fn a_pod_is_understood_as_each_runtime_says_it() {
    let node = Node::new();
    for (runtime, captured) in CAPTURED {
        let captured: Value = serde_json::from_str(captured).unwrap();
        let pod = Pod::new();
        let call = |verb: &str| {
            let Value::Object(said) = &captured[verb] else {
                panic!("{runtime}: no {verb}");
            };
            let mut stdin: Map<String, Value> = said["stdin"].as_object().unwrap().clone();
            // A node of its own.
            stdin.insert("stateDir".into(), json!(node.state_dir()));
            let mut call = node.call(verb, &pod);
            for (name, value) in said["env"].as_object().unwrap() {
                call = call.var(name, value.as_str().unwrap());
            }
            call.input(Value::Object(stdin).to_string().as_bytes())
        };
        call("ADD").run().result();
        let state = node.agent().state();
        let add = state.calls.iter().rev().find_map(|call| match call {
            Request::Allocate {
                owner,
                pod,
                host_ports,
                acceleration,
                ..
            } => Some((owner, pod, host_ports, acceleration)),
            _ => None,
        });
        let (owner, said, ports, acceleration) = add.unwrap();
        assert!(owner.container_id.starts_with("9f1c6b0d3c6f"), "{runtime}");
        assert_eq!(
            (
                said.namespace.as_str(),
                said.name.as_str(),
                said.uid.as_str()
            ),
            ("shop", "web-0", "0b9a7f3e-6d3c-4a53-9a55-2f6a1f7c8d21"),
            "{runtime}"
        );
        let ports = ports.iter().flatten().map(ToString::to_string);
        assert_eq!(
            ports.collect::<Vec<_>>(),
            ["tcp/30080", "udp/30053"],
            "{runtime}"
        );
        let wish = (runtime != "Multus").then_some(TcpAcceleration::Enabled);
        assert_eq!(*acceleration, wish, "{runtime}");
        drop(state);
        call("DEL").run().silent();
        let gone = |call: &Request| matches!(call, Request::Release { .. });
        assert!(
            node.agent().state().calls.last().is_some_and(gone),
            "{runtime}"
        );
    }
}
