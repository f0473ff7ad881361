//! What others do to a node is seen, named with its next step, and gone when it is cured, while
//! the node goes on serving.

use sinabro_common::{
    api::{StatusReport, Trouble},
    names,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, NodeEntry, confinement,
    node::SERVICES_FLAGS,
    traffic::icmp,
    wait::{PATIENCE, eventually, eventually_some},
};
use sinabro_netlink::sysctl;
use std::time::Duration;

fn lab(nodes: usize) -> Lab {
    Lab::new(Binaries::find().unwrap(), nodes, Lifetime::Process).unwrap()
}

fn status(node: &Node) -> StatusReport {
    node.status().unwrap()
}

fn troubles(node: &Node) -> Vec<Trouble> {
    status(node).troubles
}

/// Waits for a trouble, and returns its text. The node must be ready all the same.
fn told(node: &Node, reason: &str) -> String {
    let text = eventually_some(reason, || {
        let mut all = troubles(node).into_iter();
        all.find(|trouble| trouble.reason == reason)
            .map(|trouble| trouble.text)
    });
    assert!(status(node).ready, "{text}");
    let shown = node.ctl(&["status"]).unwrap().stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains(reason), "{shown}");
    text
}

fn over(node: &Node, reason: &str) {
    eventually(&format!("{reason} is over"), || {
        troubles(node)
            .iter()
            .all(|trouble| trouble.reason != reason)
    });
}

fn forwards(node: &Node) -> bool {
    let name = ["net", "ipv4", "ip_forward"];
    let value = node.place().run(|| Ok(sysctl::read(&name)?)).unwrap();
    value == "1"
}

fn stop_forwarding(node: &Node) {
    let name = ["net", "ipv4", "ip_forward"];
    node.place().run(|| Ok(sysctl::write(&name, "0")?)).unwrap();
}

#[test]
fn forwarding_that_is_turned_off_comes_on_again_or_is_named() {
    let lab = lab(1);
    let node = lab.node(1);
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    stop_forwarding(node);
    eventually("forwarding is on again", || forwards(node));
    node.stop_agent().unwrap();

    // As in its container, where /proc/sys cannot be written.
    node.start_confined_agent(&[], &confinement::AGENT).unwrap();
    node.wait_ready().unwrap();
    stop_forwarding(node);
    let text = told(node, "ForwardingOff");
    assert!(text.contains("sysctl -w net.ipv4.ip_forward=1"), "{text}");
    node.command(&["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        .unwrap();
    over(node, "ForwardingOff");
}

/// Also of single links, as hardening guides turn it off for those that come later (`conf.default`).
#[test]
fn links_that_are_kept_from_forwarding_forward_again() {
    let lab = lab(2);
    for node in lab.nodes() {
        let off = || {
            Ok(sysctl::write(
                &["net", "ipv4", "conf", "default", "forwarding"],
                "0",
            )?)
        };
        node.namespace().run(off).unwrap();
        node.start_agent().unwrap();
        node.wait_ready().unwrap();
    }
    let pods = [1, 2].map(|number| lab.node(number).add_pod("p").unwrap());
    let reach = |patience| -> anyhow::Result<()> {
        for (from, to) in [(0, 1), (1, 0)] {
            for to in pods[to].addresses() {
                icmp::ping(pods[from].place(), to, patience)?;
            }
        }
        let outside = lab.outside_addresses()?;
        outside
            .into_iter()
            .try_for_each(|to| icmp::ping(pods[0].place(), to, patience).map(drop))
    };
    reach(PATIENCE).unwrap();
    let node = lab.node(1);
    let link = names::pod_link(pods[0].id(), "eth0");
    for link in [link.as_str(), names::VXLAN_LINK, "eth0"] {
        let name = ["net", "ipv4", "conf", link, "forwarding"];
        let read = || node.place().run(|| Ok(sysctl::read(&name)?)).unwrap();
        node.place().run(|| Ok(sysctl::write(&name, "0")?)).unwrap();
        eventually(link, || read() == "1");
        reach(PATIENCE).unwrap();
    }
    assert!(
        troubles(node)
            .iter()
            .all(|trouble| trouble.reason != "ForwardingOff")
    );
}

/// As Docker leaves it. The rule that is named is the one that cures it.
fn a_forward_policy_of_drop_is_named(drop: &[&[&str]], named: &str, program: &str) {
    let lab = lab(2);
    for node in lab.nodes() {
        node.start_agent().unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
    }
    let pods = [1, 2].map(|number| lab.node(number).add_pod("p").unwrap());
    icmp::ping(pods[0].place(), pods[1].v4(), PATIENCE).unwrap();
    let node = lab.node(1);
    for command in drop {
        node.command(command).unwrap();
    }
    // As soon as the agent has seen it: nothing tells of what iptables-legacy does.
    eventually("the policy to be met", || {
        icmp::ping(pods[0].place(), pods[1].v4(), Duration::from_millis(300)).is_err()
    });
    let text = told(node, "FirewallDropsForwarded");
    let rules = text.split('`').nth(1).unwrap();
    assert!(rules.starts_with(&format!("{named} -I FORWARD")), "{text}");
    node.command(&["sh", "-c", &rules.replace(named, program)])
        .unwrap();
    icmp::ping(pods[0].place(), pods[1].v4(), PATIENCE).unwrap();
    over(node, "FirewallDropsForwarded");
}

#[test]
fn a_forward_policy_of_drop_is_named_with_the_rule_that_cures_it() {
    let chain = "{ type filter hook forward priority 0; policy drop; }";
    let table: &[&str] = &["nft", "add", "table", "ip", "filter"];
    let chain: &[&str] = &["nft", "add", "chain", "ip", "filter", "FORWARD", chain];
    a_forward_policy_of_drop_is_named(&[table, chain], "iptables", "iptables-nft");
}

#[test]
fn the_same_in_a_table_of_iptables_legacy() {
    let program = "iptables-legacy";
    let drop: &[&str] = &[program, "-P", "FORWARD", "DROP"];
    a_forward_policy_of_drop_is_named(&[drop], program, program);
}

/// What keeps clients from a node port where kube-proxy translates keeps none away here: in raw, mangle and on a link.
#[test]
fn rules_for_node_ports_that_no_packet_meets_are_named() {
    const RULES: &str = "table inet fence {
        chain drops { counter drop; }
        chain further { th dport { 22, 30082 } goto drops; }
        chain far { meta l4proto tcp jump further; }
        chain raw { type filter hook prerouting priority raw; tcp dport 30082 drop; }
        chain mangle { type filter hook prerouting priority mangle; iifname eth0 jump far; }
        chain link { type filter hook ingress device eth0 priority 0; udp dport 30082-30090 drop; }
        chain some { type filter hook prerouting priority -1; policy drop; th dport 30000 accept; accept; }
        chain other { type filter hook prerouting priority 0; tcp dport 22 drop; tcp dport 30082 accept; ip saddr 192.0.2.77 drop; }
        chain near { type filter hook input priority 0; tcp dport 30082 drop; }
    }";
    let lab = lab(1);
    let node = lab.node(1);
    node.write_services("{kind: List, items: []}\n").unwrap();
    node.command(&["nft", RULES]).unwrap();
    node.start_agent_with(&SERVICES_FLAGS).unwrap();
    node.wait_ready().unwrap();
    let text = told(node, "NodePortRulesBypassed");
    for chain in ["raw", "mangle", "link", "some", "other", "near"] {
        let is_named = text.contains(&format!("chain {chain} of table inet fence"));
        assert_eq!(is_named, !["other", "near"].contains(&chain), "{text}");
    }
    node.command(&["nft", "delete table inet fence"]).unwrap();
    over(node, "NodePortRulesBypassed");
}

#[test]
fn two_nodes_with_one_address_are_named_on_the_one_that_has_it() {
    let lab = lab(2);
    let node = lab.node(1);
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let stale = NodeEntry {
        name: "gone".into(),
        addresses: vec![node.addresses()[0]],
        ..lab.node(2).entry()
    };
    lab.publish_entries(&[node.entry(), stale]).unwrap();
    let text = told(node, "AddressContested");
    assert!(text.contains("kubectl delete node gone"), "{text}");
    lab.publish().unwrap();
    over(node, "AddressContested");
}

#[test]
fn a_range_that_fills_and_pods_outside_of_it_are_named() {
    let lab = lab(1);
    let node = lab.node(1);
    node.set_entry(NodeEntry {
        pod_cidrs: ["10.244.77.0/29", "fd00:77::/64"]
            .map(|cidr| cidr.parse().unwrap())
            .into(),
        ..node.entry()
    });
    lab.publish().unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let pods: Vec<_> = (0..5)
        .map(|n| node.add_pod(&format!("p{n}")).unwrap())
        .collect();
    let text = told(node, "AddressRangeNearlyFull");
    assert!(
        text.contains("5 of 5 addresses of pod range 10.244.77.0/29"),
        "{text}"
    );

    // The Node is registered again, with another range.
    node.set_entry(NodeEntry {
        pod_cidrs: sinabro_lab::node::pod_cidrs(1),
        ..node.entry()
    });
    lab.publish().unwrap();
    over(node, "AddressRangeNearlyFull");
    let text = told(node, "AddressOutsideRange");
    assert!(text.contains(&pods[0].v4().to_string()), "{text}");
    for pod in &pods {
        node.delete_pod(pod).unwrap();
    }
    over(node, "AddressOutsideRange");
}

#[test]
fn ports_that_others_have_are_no_reason_not_to_serve() {
    let lab = lab(1);
    let node = lab.node(1);
    let ports = "net.ipv4.ip_local_reserved_ports=1024-65000";
    node.command(&["sysctl", "-qw", ports]).unwrap();
    let address = "127.0.0.1:9632";
    let other = node
        .place()
        .run(|| Ok(std::net::TcpListener::bind(address)?))
        .unwrap();
    node.start_agent_with(&["--metrics-address", address])
        .unwrap();
    node.wait_ready().unwrap();
    assert!(told(node, "FewPorts").contains("ip_local_reserved_ports"));
    assert!(told(node, "MetricsAddressTaken").contains(address));
    drop(other);
    over(node, "MetricsAddressTaken");
    let none = "net.ipv4.ip_local_reserved_ports=";
    node.command(&["sysctl", "-qw", none]).unwrap();
    // Nothing tells of it: any change of the node has the agent look again.
    let address = "198.18.0.1/32";
    node.command(&["ip", "addr", "add", address, "dev", "lo"])
        .unwrap();
    over(node, "FewPorts");
}

/// The agent looks by itself every half minute: by that way alone there is time for two changes
/// until patience ends, not for eight. So it must hear of them from the kernel.
#[test]
fn an_uplink_that_is_replaced_is_followed() {
    let lab = lab(1);
    let node = lab.node(1);
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let (near, far) = (("up1", [2, 0, 0, 0, 7, 1]), ("up2", [2, 0, 0, 0, 7, 2]));
    let place = node.place();
    place.cable(near, 1500, place, far).unwrap();
    place.set_up("up2", &[]).unwrap();
    let net = format!("{}/24", node.addresses()[0]);
    let ways = ["eth0", "up1"];
    let mut followed = 0;
    eventually("eight changes of the uplink", || {
        let [now, next] = [ways[followed % 2], ways[(followed + 1) % 2]];
        // The overlay's. The other has the node's address of the other family.
        if status(node).uplink.split(',').next() != Some(now) {
            return false;
        }
        if followed < 8 {
            node.command(&["ip", "address", "del", &net, "dev", now])
                .unwrap();
            node.command(&["ip", "address", "add", &net, "dev", next])
                .unwrap();
            followed += 1;
            return false;
        }
        true
    });
}
