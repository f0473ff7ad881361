//! The very first packets: none is lost once ADD has returned, however busy the node is.
//!
//! Every socket is open before ADD begins, and every datagram is sent once: a receiver waits, a
//! sender never tries again.

use crate::{
    node::{HOST_V4, HOST_V6, Node, Pod},
    traffic::socket,
};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
};

const PODS: usize = 50;

/// A socket at each end, for each family.
fn ends(node: &Node, pod: &Pod) -> [[UdpSocket; 2]; 2] {
    let any = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let mut own = [HOST_V4, HOST_V6].into_iter().zip(any);
    std::array::from_fn(|_| {
        let (host, any) = own.next().unwrap();
        [
            socket(&node.place, host.parse().unwrap()),
            socket(&pod.place, any),
        ]
    })
}

/// Adds the pod and sends at once. Returns what did not arrive.
fn add_and_send(node: &Node, pod: &Pod, pod_first: bool, start: &Barrier) -> Vec<String> {
    let ends = ends(node, pod);
    start.wait();
    let result = node.call("ADD", pod).run().result();
    let ips = result["ips"].as_array().unwrap();
    let mut lost = Vec::new();
    let mut sent = Vec::new();
    for side in [pod_first, !pod_first] {
        for (ip, [host, inner]) in ips.iter().zip(&ends) {
            let cidr = ip["address"].as_str().unwrap();
            let address: IpAddr = cidr.split('/').next().unwrap().parse().unwrap();
            let (what, outcome, receiver) = if side {
                let outcome = inner.send_to(b"up", host.local_addr().unwrap());
                (format!("from {address}"), outcome, host)
            } else {
                let port = inner.local_addr().unwrap().port();
                let outcome = host.send_to(b"down", (address, port));
                (format!("to {address}"), outcome, inner)
            };
            match outcome {
                Ok(_) => sent.push((what, receiver)),
                Err(error) => lost.push(format!("{what}: {error}")),
            }
        }
    }
    for (what, receiver) in sent {
        if let Err(error) = receiver.recv_from(&mut [0; 8]) {
            lost.push(format!("{what}: {error}"));
        }
    }
    lost
}

/// Adds many pods at once while `busy` threads use the processors.
fn lost_of_many(v4_only: bool, busy: usize) -> Vec<String> {
    let node = Node::new();
    node.agent().state().v4_only = v4_only;
    let pods: Vec<_> = (0..PODS).map(|_| Pod::new()).collect();
    let (start, done) = (Barrier::new(PODS), AtomicBool::new(false));
    let (node, start, done) = (&node, &start, &done);
    std::thread::scope(|scope| {
        for _ in 0..busy {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let adds: Vec<_> = pods
            .iter()
            .enumerate()
            .map(|(i, pod)| scope.spawn(move || add_and_send(node, pod, i % 2 == 0, start)))
            .collect();
        let lost = adds.into_iter().map(std::thread::ScopedJoinHandle::join);
        let lost: Vec<_> = lost.collect();
        done.store(true, Ordering::Relaxed);
        lost.into_iter().flat_map(Result::unwrap).collect()
    })
}

#[test]
fn all_arrive_with_both_families() {
    assert_eq!(lost_of_many(false, 0), [""; 0]);
}

#[test]
fn all_arrive_with_ipv4_only() {
    assert_eq!(lost_of_many(true, 0), [""; 0]);
}

#[test]
fn all_arrive_while_the_processors_are_busy() {
    for v4_only in [false, true] {
        assert_eq!(lost_of_many(v4_only, 2), [""; 0]);
    }
}
