//! Rules on a node's `forward` hook are met (docs/firewalls.md): while there are some, what goes past the stack goes by it again.

use super::{
    native::{NATIVE, say},
    *,
};
use sinabro_lab::traffic::bind;
use std::{net::IpAddr, thread::sleep};

/// Refuses what is for one port, and counts what it sees of another.
const RULES: &str = "table inet theirs {
    counter seen { packets 0 bytes 0; }
    chain forward { type filter hook forward priority filter;
        tcp dport 4444 reject with tcp reset; tcp dport 4445 counter name seen; }
}";
const REFUSED: u16 = 4444;
/// By when rules that come are met.
const SOON: Duration = Duration::from_secs(1);
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
fn rules_are_met(prepare: impl Fn(&Lab), flags: &[&str]) {
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
        sleep(SOON);
        assert_eq!(is_met(), [true; 4], "{}", node.name());
        assert!(seen(node) > 0, "{}", node.name());
        assert_eq!(why(node), "rules in chain inet theirs forward");
        node.command(&["nft", "delete table inet theirs"]).unwrap();
        eventually("the way to be the same again", || other(node).path == way);
        assert_eq!(is_met(), [false; 4], "{}", node.name());
    }
}

#[test]
fn a_firewall_is_met() {
    rules_are_met(|_| {}, &[]);
}

#[test]
fn a_firewall_is_met_over_ipv6() {
    rules_are_met(|lab| over_ipv6::nodes(lab, [true; 2]), &[]);
}

#[test]
fn a_firewall_is_met_without_tunnels() {
    rules_are_met(|lab| say(lab, [true; 2]), &[NATIVE]);
}
