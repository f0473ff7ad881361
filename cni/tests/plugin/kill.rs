//! A plugin that is killed leaves nothing that a later ADD, or the agent, does not clean up.

use crate::{
    agent::Act,
    node::{Node, Pod, snapshot},
    trace,
    traffic::{addresses, flows},
};
use std::process::Stdio;

fn killed_then_added_again(node: &Node, pod: &Pod, kill: impl FnOnce(&Node)) {
    let before = (snapshot(&node.place), snapshot(&pod.place));
    kill(node);
    node.agent().state().script.clear();
    node.agent().settle();
    if node.agent().state().endpoints.is_empty() {
        assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
    } else {
        // Killed after the last step: the attachment is whole.
        node.call("DEL", pod).run().silent();
    }
    let result = node.call("ADD", pod).run().result();
    let [v4, v6] = addresses(&result);
    flows(node, pod, [&v4, &v6]);
    node.call("DEL", pod).run().silent();
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
}

#[test]
fn at_each_exchange_with_the_agent() {
    let (node, pod) = (Node::new(), Pod::new());
    for call in ["allocate", "activate"] {
        for act in [Act::Kill, Act::AnswerAndKill] {
            killed_then_added_again(&node, &pod, |node| {
                node.agent().script(call, act);
                let mut child = node.call("ADD", &pod).spawn(Stdio::null());
                child.wait().unwrap();
            });
        }
    }
}

#[test]
fn before_each_system_call() {
    let (node, pod) = (Node::new(), Pod::new());
    let (mut before, mut killed) = (0, true);
    while killed {
        killed_then_added_again(&node, &pod, |node| {
            killed = trace::kill_before(&node.call("ADD", &pod).traced(), before);
        });
        before += 1;
    }
    // One that ends early, or whose calls are not seen, makes fewer.
    assert!(before > 30, "only {before} system calls");
}

#[test]
fn and_its_link_if_the_agent_dies_too() {
    let (node, pod) = (Node::new(), Pod::new());
    let before = (snapshot(&node.place), snapshot(&pod.place));
    node.agent().state().deletes_links = false;
    node.agent().script("activate", Act::Kill);
    node.call("ADD", &pod).spawn(Stdio::null()).wait().unwrap();
    assert!(
        node.conn().link_by_name(&pod.link()).is_ok(),
        "killed too early"
    );
    node.agent().state().script.clear();
    let result = node.call("ADD", &pod).run().result();
    let [v4, v6] = addresses(&result);
    flows(&node, &pod, [&v4, &v6]);
    node.call("DEL", &pod).run().silent();
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
}
