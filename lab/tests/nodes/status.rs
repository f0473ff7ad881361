//! What STATUS says: only that no pod can be added, and nothing of an agent that is restarted.

use sinabro_common::names;
use sinabro_lab::{Binaries, Lab, Lifetime, Node, cni::Answer, wait::eventually};
use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

/// How often a runtime is taken to ask; containerd does every five seconds.
const ASK: Duration = Duration::from_millis(100);
/// Restarts under watch.
const ROUNDS: usize = 4;

fn status(node: &Node) -> Answer {
    node.cni("STATUS", "none").unwrap()
}

#[test]
fn a_runtime_that_asks_all_the_time_sees_no_restart() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    assert_eq!(
        status(node).error_code(),
        Some(50),
        "no agent was ever there"
    );
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let (stop, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
    let away = AtomicUsize::new(0);
    let refused = thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut refused = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                let socket = node.state(names::SOCKET).exists();
                let answer = status(node);
                if !socket {
                    away.fetch_add(1, Ordering::SeqCst);
                }
                if !answer.ok() {
                    refused.push(answer.json);
                }
                asked.fetch_add(1, Ordering::SeqCst);
                thread::sleep(ASK);
            }
            refused
        });
        let asked_more = |n: usize| {
            let before = asked.load(Ordering::SeqCst);
            eventually("it is asked", || asked.load(Ordering::SeqCst) >= before + n);
        };
        asked_more(1);
        for round in 0..ROUNDS {
            match round % 2 {
                0 => node.stop_agent().unwrap(),
                _ => node.kill_agent().unwrap(),
            }
            // An image that has to be fetched.
            asked_more(3);
            node.start_agent().unwrap();
            node.wait_ready().unwrap();
            asked_more(3);
        }
        stop.store(true, Ordering::SeqCst);
        asking.join().unwrap()
    });
    assert!(away.load(Ordering::SeqCst) >= ROUNDS, "it was never away");
    assert_eq!(refused, Vec::<serde_json::Value>::new());

    // One that does not come back.
    node.kill_agent().unwrap();
    assert!(status(node).ok());
    // A time that is not of this boot.
    let never = format!("{:020}\n", u64::MAX / 2);
    fs::write(node.state(names::LAST_POSSIBLE_FILE), never).unwrap();
    assert_eq!(status(node).error_code(), Some(50));
    // One that comes, and knows no ranges: no evidence of anything.
    lab.publish_entries(&[]).unwrap();
    node.start_agent().unwrap();
    eventually("it says why", || {
        let answer = status(node);
        answer.error_code() == Some(50) && answer.json.to_string().contains("not ready")
    });
}

#[test]
fn a_full_range_is_said_until_an_address_is_free() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    let mut entry = node.entry();
    let small = ["10.244.1.0/29", "fd00:10:244:1::/64"];
    entry.pod_cidrs = small.map(|cidr| cidr.parse().unwrap()).to_vec();
    node.set_entry(entry);
    lab.publish().unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let mut pods = Vec::new();
    while status(node).ok() {
        let id = format!("pod{}", pods.len());
        pods.push(node.add_pod(&id).unwrap());
        assert!(pods.len() < 8, "eight addresses are not more");
    }
    let answer = status(node);
    assert_eq!(answer.error_code(), Some(50));
    let said = answer.json.to_string();
    assert!(said.contains("10.244.1.0/29 is full"), "{said}");
    // It says the truth: the next one gets none.
    let place = node.make_sandbox("more").unwrap();
    let (refused, _) = node.try_add("more", &place).unwrap();
    assert!(!refused.ok(), "{refused:?}");
    node.delete_pod(&pods.pop().unwrap()).unwrap();
    eventually("an address is free", || status(node).ok());
}
