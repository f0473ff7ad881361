//! What the agent is allowed to do: no more than deploy/sinabro.yaml gives it.
#![allow(clippy::unwrap_used)]

use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    confinement::{self, CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON},
    traffic::{PATIENCE, icmp},
};
use sinabro_netlink::sysctl;
use std::fs;

fn start(node: &Node, flags: &[&str]) {
    node.start_confined_agent(flags, &confinement::AGENT)
        .unwrap();
    node.wait_ready().unwrap();
    let pid = node.agent_pid().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().to_owned()
    };
    let three = [CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF].iter();
    let three: u64 = three.map(|number| 1 << number).sum();
    assert_eq!(field("CapEff:"), format!("{three:016x}"));
    assert_eq!(field("NoNewPrivs:"), "1");
}

/// What takes more rights, done beforehand.
fn prepare(node: &Node) {
    let set = || -> anyhow::Result<()> {
        sysctl::ensure(&["net", "ipv4", "ip_forward"], "1")?;
        sysctl::ensure(&["net", "ipv6", "conf", "all", "forwarding"], "1")?;
        sysctl::ensure(&["net", "ipv6", "conf", "eth0", "accept_ra"], "2")?;
        Ok(())
    };
    node.namespace().run(set).unwrap();
}

fn works_with(flags: &[&str]) {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        prepare(node);
        start(node, flags);
    }
    let far = lab.node(2).add_pod("far").unwrap();
    let node = lab.node(1);
    let pod = node.add_pod("pod").unwrap();
    let near = node.add_pod("near").unwrap();
    let outside = lab.outside_addresses().unwrap()[0];
    let reaches = || {
        for address in [near.v4(), near.v6(), far.v4(), far.v6(), outside] {
            icmp::ping(pod.place(), address, PATIENCE).unwrap();
        }
    };
    reaches();
    node.kill_agent().unwrap();
    start(node, flags);
    reaches();
    node.delete_pod(&near).unwrap();
    let again = node.add_pod("again").unwrap();
    icmp::ping(pod.place(), again.v4(), PATIENCE).unwrap();
    for pod in [pod, again] {
        node.delete_pod(&pod).unwrap();
    }
    let log = node.log();
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
}

#[test]
fn three_capabilities_and_read_only_file_systems_suffice() {
    works_with(&[]);
}

#[test]
fn they_suffice_for_every_way_of_attaching() {
    for flag in ["--attach=tcx", "--attach=clsact", "--tcp-fast-path=true"] {
        works_with(&[flag]);
    }
}
