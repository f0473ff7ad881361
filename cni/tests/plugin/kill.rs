//! A plugin that is killed leaves nothing that a later ADD, or the agent, does not clean up.

use crate::{
    agent::Act,
    node::{Node, Pod, snapshot},
    traffic::{addresses, flows},
};
use std::{os::unix::process::ExitStatusExt as _, process::Stdio, time::Instant};

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
fn at_any_moment() {
    let (node, pod) = (Node::new(), Pod::new());
    let start = Instant::now();
    node.call("ADD", &pod).run().result();
    let usual = start.elapsed();
    node.call("DEL", &pod).run().silent();
    // One that has ended by itself is not hit, nor one that had not begun.
    let (mut hits, mut inside) = (0, 0);
    for step in 0.. {
        killed_then_added_again(&node, &pod, |node| {
            let links = node.conn().links().unwrap().len();
            let mut child = node.call("ADD", &pod).spawn(Stdio::null());
            std::thread::sleep(usual * (step % 20) / 20);
            child.kill().unwrap();
            let killed = child.wait().unwrap().signal() == Some(9);
            hits += u32::from(killed);
            let agent = node.agent().state();
            let begun = !agent.endpoints.is_empty() || node.conn().links().unwrap().len() > links;
            inside += u32::from(killed && begun);
        });
        if hits >= 40 && inside > 0 {
            return;
        }
        assert!(
            step < 1000,
            "only {hits} kills hit, {inside} after a first step"
        );
    }
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
