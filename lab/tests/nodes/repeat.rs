//! Verbs repeated and in quick succession, by many pods at once.

use sinabro_lab::{
    Lab,
    traffic::{PATIENCE, icmp},
};
use std::{sync::Barrier, thread};

const PODS: usize = 50;

/// A DEL may answer before the kernel has taken the link apart; an ADD right after it must not
/// find the old one.
#[test]
fn a_deleted_attachment_can_be_added_again_at_once() {
    let lab = Lab::for_test(1).unwrap();
    let node = lab.node(1);
    let sandboxes: Vec<_> = (0..PODS)
        .map(|number| {
            let id = format!("again-{number}");
            let place = node.make_sandbox(&id).unwrap();
            (id, place)
        })
        .collect();
    let start = Barrier::new(PODS);
    thread::scope(|scope| {
        for (id, place) in &sandboxes {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for _ in 0..3 {
                    let (answer, pod) = node.try_add(id, place).unwrap();
                    let pod = pod.unwrap_or_else(|| panic!("ADD {id}: {}", answer.json));
                    for address in pod.addresses() {
                        icmp::ping(node.place(), address, PATIENCE).unwrap();
                    }
                    node.cni("DEL", id).unwrap().success().unwrap();
                }
            });
        }
    });
}
