//! Which way packets take, by what the nodes are and may do, and what they say of it.

use super::*;
use std::{mem::replace, thread::sleep, time::Duration};

#[test]
fn neither_device_sees_what_goes_past() {
    let world = World::new([&[], &[]]);
    let counts = world.counts_of(|| {
        assert_eq!(world.carried(|| exchange(&world)), [[0, 0]; 2]);
    });
    for (node, counts) in world.lab.nodes().iter().zip(counts) {
        assert!(goes_direct(node), "{:?}", other(node));
        assert!(is_both_ways(counts.direct), "{counts:?}");
        assert_eq!(counts.kernel, NOTHING);
        let status = shown(node, "status");
        let mode = status
            .lines()
            .find(|line| line.starts_with("Mode overlay:"));
        assert!(mode.unwrap().ends_with(" direct"), "{status}");
    }
}

#[test]
fn nodes_of_both_kinds_reach_each_other() {
    let world = World::new([&[], &[KERNEL]]);
    let [one, two] = world.counts_of(|| {
        let [[received, sent], [of_kernel, by_kernel]] = world.carried(|| exchange(&world));
        assert_eq!([received, sent], [0, 0]);
        assert!(of_kernel > 0 && by_kernel > 0, "{of_kernel} {by_kernel}");
    });
    assert!(goes_direct(world.lab.node(1)));
    assert!(is_both_ways(one.direct) && one.kernel == NOTHING, "{one:?}");
    assert_eq!(why(world.lab.node(2)), "the setting dataPath is kernel");
    assert!(is_both_ways(two.kernel) && two.direct == NOTHING, "{two:?}");
}

/// What is to be encrypted passes IPsec's policies in the stack alone. This one lets all pass.
#[test]
fn a_node_with_policies_of_ipsec_sends_by_the_stack() {
    let world = World::on(
        |lab| {
            let policy = "xfrm policy add dst 198.51.100.0/24 dir out action allow";
            let policy: Vec<&str> = ["ip"].into_iter().chain(policy.split(' ')).collect();
            lab.node(1).command(&policy).unwrap();
        },
        [&[], &[]],
    );
    let [one, two] = world.counts_of(|| {
        let [[received, sent], [there, back]] = world.carried(|| exchange(&world));
        assert!(received > 0 && sent > 0, "{received} {sent}");
        assert_eq!([there, back], [0, 0]);
    });
    let n1 = world.lab.node(1);
    assert!(why(n1).starts_with("IPsec has policies"), "{}", why(n1));
    let status = shown(n1, "status");
    assert!(status.contains("kernel: IPsec has policies"), "{status}");
    assert!(is_both_ways(one.kernel) && one.direct == NOTHING, "{one:?}");
    assert!(goes_direct(world.lab.node(2)));
    assert!(is_both_ways(two.direct) && two.kernel == NOTHING, "{two:?}");
}

/// Rules that meet no packet between pods.
const NOT_BETWEEN_PODS: &str =
    "table inet elsewhere { chain forward { type filter hook forward priority -10
    ip daddr 169.254.20.10 drop
    ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 counter
}; }";
const BETWEEN_PODS: &str = "table inet theirs { chain forward { type filter hook forward priority 0
    tcp dport 4444 drop
}; }";

#[test]
fn beside_kube_proxy_packets_go_past_the_stack_unless_others_have_rules_between_pods() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.start_agent().unwrap();
    }
    let is_said = |node: &Node, mode: &str| shown(node, "status").contains(&format!(" {mode}\n"));
    for node in lab.nodes() {
        node.wait_ready().unwrap();
        eventually("the way to be direct", || goes_direct(node));
        assert!(is_said(node, "direct, beside kube-proxy"));
    }
    let n1 = lab.node(1);
    n1.command(&["nft", NOT_BETWEEN_PODS]).unwrap();
    n1.command(&["nft", BETWEEN_PODS]).unwrap();
    eventually("the way to be the kernel's", || !goes_direct(n1));
    assert_eq!(why(n1), "rules in chain inet theirs forward");
    assert!(is_said(n1, "kernel: rules in chain inet theirs forward"));
    assert!(goes_direct(lab.node(2)));
    n1.command(&["nft", "delete table inet theirs"]).unwrap();
    eventually("the way to be direct", || goes_direct(n1));
}

/// Whether it is one is tried (`agent/tests/datapath/tunnel_hooks`): here the agent is told.
#[test]
fn a_kernel_without_tunnels_for_programs_is_named() {
    let world = World::new([&[], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    n1.kill_agent().unwrap();
    n1.start_agent_refused("tunnels", &FLAGS).unwrap();
    n1.wait_ready().unwrap();
    let old = "this node's Linux is older than 5.13";
    assert_eq!(why(n1), old);
    let status = shown(n1, "status");
    assert!(status.contains(&format!("kernel: {old}\n")), "{status}");
    assert!(goes_direct(n2), "{:?}", other(n2));
    // What the other one sends so is taken so.
    let [received, _] = world
        .counts_of(|| exchange(&world))
        .map(|counts| counts.direct.received);
    assert!(received > 0);
    n1.kill_agent().unwrap();
    start(n1, &[]);
    n1.wait_ready().unwrap();
    eventually("the way to be direct", || goes_direct(n1));
}

/// A route of one node to the other changes, and an agent goes and comes.
#[test]
fn what_is_said_of_a_way_follows_it() {
    let world = World::new([&[], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    let to = n2.addresses()[0];
    let change = |what: &str| {
        let route = format!("ip route {what}");
        n1.command(&route.split(' ').collect::<Vec<_>>()).unwrap();
    };
    let hops = format!("nexthop via {ROUTER} nexthop via 172.30.0.13");
    change(&format!("add {to}/32 {hops}"));
    eventually("a second next hop", || !goes_direct(n1));
    assert!(why(n1).contains("several next hops"), "{}", why(n1));
    let nodes = shown(n1, "nodes");
    assert!(nodes.contains("  kernel: the route to it"), "{nodes}");
    assert!(shown(n1, "status").contains("direct but to 1 node\n"));
    assert!(goes_direct(n2));
    change(&format!("del {to}/32"));
    eventually("one next hop", || goes_direct(n1));

    change(&format!("add unreachable {to}/32"));
    eventually("a route to nowhere", || !goes_direct(n1));
    assert!(why(n1).contains("EHOSTUNREACH"), "{}", why(n1));
    change(&format!("del unreachable {to}/32"));
    eventually("a way", || goes_direct(n1));

    // Tunnels begin at this node's address, which rules may send another way than others.
    change(&format!("add {to}/32 table 77 {hops}"));
    let from = n1.addresses()[0];
    let rule = |what: &str| {
        let rule = format!("ip rule {what} from {from} lookup 77");
        n1.command(&rule.split(' ').collect::<Vec<_>>()).unwrap();
    };
    rule("add");
    eventually("a rule", || !goes_direct(n1));
    assert!(why(n1).contains("several next hops"), "{}", why(n1));
    rule("del");
    eventually("no rule", || goes_direct(n1));

    exchange(&world);
    let mut before = other(n1).packets.unwrap();
    // What ends the connections comes after their answers.
    eventually("the last packets", || {
        sleep(Duration::from_millis(200));
        let last = replace(&mut before, other(n1).packets.unwrap());
        last == before
    });
    assert!(is_both_ways(before.direct), "{before:?}");
    n1.kill_agent().unwrap();
    start(n1, &[KERNEL]);
    n1.wait_ready().unwrap();
    let after = other(n1).packets.unwrap();
    assert_eq!(after.direct, before.direct);
    exchange(&world);
    let after = other(n1).packets.unwrap();
    assert_eq!(after.direct, before.direct);
    assert!(after.kernel.sent > before.kernel.sent, "{after:?}");
}
