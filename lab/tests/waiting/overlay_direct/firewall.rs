//! Rules on a node's `forward` hook have no part in what goes past its stack (docs/firewalls.md), and have again where that is not wanted.

use super::{
    native::{NATIVE, say},
    *,
};
use sinabro_lab::traffic::bind;
use std::net::IpAddr;

/// Refuses what is for one port, and counts what it sees of another.
const RULES: &str = "table inet theirs {
    counter seen { packets 0 bytes 0; }
    chain forward { type filter hook forward priority filter;
        tcp dport 4444 reject with tcp reset; tcp dport 4445 counter name seen; }
}";
const REFUSED: u16 = 4444;
const SEEN: u16 = 4445;

/// What the rules of a node have seen.
fn seen(node: &Node) -> u32 {
    let mut nft = std::process::Command::new("nft");
    node.place()
        .put(nft.args(["list", "counter", "inet", "theirs", "seen"]));
    let output = nft.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, packets) = text.split_once("packets ").unwrap();
    packets.split(' ').next().unwrap().parse().unwrap()
}

fn connects(from: &Pod, to: &Pod, address: IpAddr, port: u16) -> bool {
    let target = SocketAddr::new(address, port);
    let listener = to.place().run(|| bind::tcp(target)).unwrap();
    let connects = tcp::connects(from.place(), target).is_ok();
    drop(listener);
    connects
}

/// Rules of the first node, and then of the second one: what leaves by it, and what comes in there.
fn rules_are_passed_over(prepare: impl Fn(&Lab), flags: &[&str]) {
    let world = World::on(prepare, [flags; 2]);
    let [one, two] = &world.pods;
    let way = other(world.lab.node(1)).path;
    for node in world.lab.nodes() {
        let is_met = || {
            [(one, two), (two, one)]
                .into_iter()
                .flat_map(|(from, to)| to.addresses().map(|at| (from, to, at)))
                .map(|(from, to, at)| {
                    assert!(connects(from, to, at, SEEN), "{at}");
                    !connects(from, to, at, REFUSED)
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(is_met(), [false; 4]);
        node.command(&["nft", RULES]).unwrap();
        assert_eq!(is_met(), [false; 4], "{}", node.name());
        assert_eq!(seen(node), 0, "{}", node.name());
        // They do not make it another, as they do for what leaves the cluster.
        assert_eq!(other(node).path, way);

        let restart = |flags: &[&str]| {
            node.kill_agent().unwrap();
            start(node, flags);
            node.wait_ready().unwrap();
        };
        restart(&[flags, &[KERNEL]].concat());
        assert_eq!(why(node), "the setting dataPath is kernel");
        assert_eq!(is_met(), [true; 4], "{}", node.name());
        assert!(seen(node) > 0, "{}", node.name());
        restart(flags);
        eventually("the way to be the same again", || other(node).path == way);
        assert_eq!(is_met(), [false; 4], "{}", node.name());
        node.command(&["nft", "delete table inet theirs"]).unwrap();
    }
}

#[test]
fn a_firewall_sees_nothing_of_what_goes_past_the_stack() {
    rules_are_passed_over(|_| {}, &[]);
}

#[test]
fn a_firewall_sees_nothing_of_what_goes_past_the_stack_over_ipv6() {
    rules_are_passed_over(|lab| over_ipv6::nodes(lab, [true; 2]), &[]);
}

#[test]
fn a_firewall_sees_nothing_of_what_needs_no_tunnel() {
    rules_are_passed_over(|lab| say(lab, [true; 2]), &[NATIVE]);
}
