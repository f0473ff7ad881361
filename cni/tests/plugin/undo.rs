//! An ADD that fails at any of its steps leaves the kernel as it was.

use crate::{
    agent::Act,
    node::{Node, Pod, disable_ipv6, snapshot},
};
use sinabro_common::api::ErrorCode;

/// Runs an ADD that `sabotage` makes fail, and compares before and after. The agent deletes no
/// link here: the plugin has to.
fn leaves_nothing(code: u64, part: &str, sabotage: impl FnOnce(&Node)) {
    let (node, pod) = (Node::new(), Pod::new());
    node.agent().state().deletes_links = false;
    sabotage(&node);
    let before = (snapshot(&node.place), snapshot(&pod.place));
    node.call("ADD", &pod).run().fails_with(code, part);
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
    if code == 104 {
        // Given back before the runtime hears of it, not by the connection's end alone.
        assert_eq!(node.agent().calls(), ["allocate", "release"]);
    }
    node.agent().settle();
    assert!(node.agent().state().endpoints.is_empty());

    // Nor does it stand in the way of the next one.
    node.agent().state().script.clear();
    node.agent().state().addresses = None;
    node.agent().state().mtu = 1400;
    node.call("ADD", &pod).run().result();
}

#[test]
fn when_the_agent_allocates_nothing() {
    for (act, code, part) in [
        (Act::Die, 11, "agent.sock"),
        (Act::DieMidway, 11, "agent.sock"),
        (Act::Garble, 6, "one release"),
        (Act::Mistake, 6, "not an attachment"),
        (Act::Refuse(ErrorCode::RangeFull), 101, "sinabroctl ipam"),
        (
            Act::Refuse(ErrorCode::AddressUnavailable),
            102,
            "sinabroctl ipam",
        ),
        (Act::Refuse(ErrorCode::Internal), 100, "scripted refusal"),
    ] {
        leaves_nothing(code, part, |node| node.agent().script("allocate", act));
    }
}

#[test]
fn when_the_agent_allocates_what_cannot_be() {
    leaves_nothing(6, "no addresses", |node| {
        node.agent().state().addresses = Some(Vec::new());
    });
}

#[test]
fn when_the_pair_cannot_be_made() {
    // Below the 68 bytes that IPv4 needs at least.
    leaves_nothing(104, "cannot be made", |node| node.agent().state().mtu = 20);
}

#[test]
fn when_the_pods_side_cannot_be_set_up() {
    // The kernel takes the IPv4 address, but no group address for IPv6.
    leaves_nothing(104, "eth0 in the pod", |node| {
        let addresses = ["10.77.0.9", "ff02::99"].map(|a| a.parse().unwrap());
        node.agent().state().addresses = Some(addresses.into());
    });
}

#[test]
fn when_the_hosts_side_cannot_be_set_up() {
    let (node, pod) = (Node::new(), Pod::new());
    node.agent().state().deletes_links = false;
    disable_ipv6(&node.place);
    let before = (snapshot(&node.place), snapshot(&pod.place));
    let call = node.call("ADD", &pod).read_only_sysctls();
    call.run().fails_with(104, &pod.link());
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
    node.call("ADD", &pod).run().result();
}

#[test]
fn when_the_agent_does_not_activate() {
    for (act, code, part) in [
        (Act::Die, 11, "agent.sock"),
        (Act::DieMidway, 11, "agent.sock"),
        (Act::Garble, 6, "one release"),
        (Act::Refuse(ErrorCode::Internal), 100, "scripted refusal"),
        (Act::Refuse(ErrorCode::NotReady), 11, "scripted refusal"),
    ] {
        let (node, pod) = (Node::new(), Pod::new());
        node.agent().state().deletes_links = false;
        node.agent().script("activate", act);
        let before = (snapshot(&node.place), snapshot(&pod.place));
        node.call("ADD", &pod).run().fails_with(code, part);
        assert_eq!(
            (snapshot(&node.place), snapshot(&pod.place)),
            before,
            "{act:?}"
        );
    }
}
