//! Two nodes whose addresses are on a VLAN, a bond or WireGuard. Pods reach each other and the outside by these as by a cable, and
//! by the way that is said of them.

use super::ways::{Expected, Way};
use crate::report::Report;
use anyhow::{Context as _, Result, ensure};
use sinabro_guest::BIN_DIR;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Underlay,
    checks::{Check, Scene, service},
    cni::IFNAME,
    lab::UNDERLAY_MTU,
    node::SERVICES_FLAGS,
    traffic::{
        device, packet,
        path::Path,
        snmp,
        stream::Stream,
        tally::{Kind, Tally},
        unbroken::{Pace, Traffic},
    },
    underlay,
    wait::wait_for,
};
use sinabro_netlink::link;
use std::{fs, time::Duration};

const UNDERLAYS: [(&str, Underlay); 5] = [
    ("vlan", Underlay::Vlan),
    ("bond", Underlay::Bond),
    ("vlan_on_bond", Underlay::VlanOnBond),
    ("lacp", Underlay::Lacp),
    ("wireguard", Underlay::Wireguard),
];
/// Those of the demo that packets on the uplink have a part in.
const CHECKS: [&str; 11] = [
    "across_nodes_ipv4",
    "across_nodes_ipv6",
    "full_mtu",
    "pod_to_node",
    "node_to_pod",
    "large_transfer",
    "masquerade",
    "replies_only",
    "service_from_pod",
    "service_from_outside",
    "forged_tunnel",
];
const NOT_ETHERNET: &str = "kernel: the uplink is not Ethernet";
/// As many streams, whose tunnels differ in the outer source port, take both legs of a bond that has both in use: one in 2^15 runs
/// has them all on one.
const STREAMS: usize = 16;
/// Before a leg of a bond fails, and after it.
const PHASE: Duration = Duration::from_secs(2);

pub fn run(report: &mut Report) -> Result<()> {
    for (name, underlay) in UNDERLAYS {
        if let Err(error) = on(underlay, name, report) {
            report.check(name, Err(error))?;
        }
    }
    Ok(())
}

fn on(underlay: Underlay, name: &str, report: &mut Report) -> Result<()> {
    let of = |what: &str| format!("{name}::{what}");
    report.doing(&of("starting two nodes"))?;
    let lab = Lab::over(underlay, Binaries::at(BIN_DIR)?, 2, Lifetime::Process)?;
    if underlay == Underlay::Lacp {
        lab.nodes().iter().try_for_each(is_aggregated)?;
    }
    service::start(&lab)?;
    let scene = Scene::new(lab)?;
    report.check(&of("uplink"), is_known(&scene))?;
    for name in CHECKS {
        report.doing(&of(name))?;
        let check = Check::by_name(name).with_context(|| format!("no check {name}"))?;
        report.check(&of(name), check.run(&scene))?;
    }
    report.doing(&of("ways"))?;
    report.check(&of("overlay"), tunnels(underlay)?.holds(&scene))?;
    report.check(&of("out"), out(&scene))?;
    if underlay == Underlay::Lacp {
        report.check(&of("legs"), takes_both_legs(&scene))?;
    }
    if underlay.is_bond() {
        report.doing(&of("a leg fails"))?;
        report.check(&of("failover"), fails_over(&scene))?;
    }
    report.doing(&of("without a tunnel"))?;
    report.check(&of("native"), native(&scene))?;
    report.doing(&of("by IPv6"))?;
    report.check(&of("by_ipv6"), by_ipv6(&scene))
}

fn is_known(scene: &Scene) -> Result<String> {
    let link = scene.lab().underlay().link();
    for node in scene.lab().nodes() {
        let uplink = node.status()?.uplink;
        ensure!(uplink == link, "{}: {uplink}", node.name());
    }
    Ok(link.into())
}

fn tunnels(underlay: Underlay) -> Result<Expected<'static>> {
    match underlay.is_ethernet() {
        true => Expected::by_kernel(),
        false => Ok(Expected {
            mode: NOT_ETHERNET,
            sent: Way::Kernel,
            received: |_| Way::Kernel,
        }),
    }
}

/// What pods send out of the cluster goes past the node's stack, or by it where nothing goes past it; in super-packets, which
/// whatever is below the device has to cut.
fn out(scene: &Scene) -> Result<String> {
    let (underlay, node) = (scene.lab().underlay(), scene.node(1));
    let expected = match underlay.is_ethernet() {
        true => "direct",
        false => NOT_ETHERNET,
    };
    let status = node.status()?;
    let mode = status
        .modes
        .get("forwarding")
        .context("no mode forwarding")?;
    ensure!(mode == expected, "{mode}");
    let (pod, outside) = (scene.pod(1, 1).place(), scene.lab().outside().place());
    // Of a device without MAC addresses nothing is captured.
    let (place, link) = match underlay.is_ethernet() {
        true => (node.place(), underlay.link()),
        false => (pod, IFNAME),
    };
    let link = packet::interface(place, link)?;
    for address in scene.lab().outside_addresses()? {
        let path = Path::new("out", pod, outside, address);
        let large = Tally::start(place, link, Kind::LargerThan(UNDERLAY_MTU as usize))?;
        let before = snmp::forwarded(node.place())?;
        Stream::open(&path)?.carry(1 << 20, 128 << 10)?;
        let by_stack = snmp::forwarded(node.place())? - before;
        ensure!(
            (by_stack == 0) == underlay.is_ethernet(),
            "to {address}: {by_stack} packets by the stack"
        );
        ensure!(large.count()? > 0, "to {address}: no super-packet");
    }
    Ok(expected.into())
}

/// Whether the other end has both cables as one.
fn is_aggregated(node: &Node) -> Result<()> {
    let path = format!("/proc/thread-self/net/bonding/{}", Underlay::Lacp.link());
    wait_for("LACP to put both cables together", || {
        let text = node.place().run(|| Ok(fs::read_to_string(&path)?))?;
        let both = |line: &str| line.trim() == "Number of ports: 2";
        Ok(text.lines().any(both).then_some(()))
    })
}

fn takes_both_legs(scene: &Scene) -> Result<String> {
    let (near, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let before = sent_by_legs(scene.node(1))?;
    for address in far.addresses() {
        let path = Path::new("there", near.place(), far.place(), address);
        for _ in 0..STREAMS / 2 {
            Stream::open(&path)?.carry(1 << 20, 128 << 10)?;
        }
    }
    let after = sent_by_legs(scene.node(1))?;
    let sent = [0, 1].map(|leg| after[leg] - before[leg]);
    ensure!(
        sent.iter().all(|bytes| *bytes > 1 << 20),
        "bytes by each leg: {sent:?}"
    );
    Ok(format!("bytes by each leg: {sent:?}"))
}

/// Bytes that each leg of a node's bond has sent.
fn sent_by_legs(node: &Node) -> Result<[u64; 2]> {
    let sent = |leg| device::counts(node.place(), leg).map(|counts| counts.sent.bytes);
    Ok([sent("eth0")?, sent("eth1")?])
}

/// Each leg of the first node fails once while pods talk, and comes back before the other one fails: without an agent.
fn fails_over(scene: &Scene) -> Result<String> {
    let outside = scene.lab().outside().place();
    let (near, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let [v4, _] = scene.lab().outside_addresses()?;
    let paths = [
        Path::new("there", near.place(), far.place(), far.v4()),
        Path::new("back", far.place(), near.place(), near.v6()),
        Path::new("out", near.place(), outside, v4),
    ];
    let pace = Pace {
        pause: Duration::from_millis(20),
        clients: 1,
    };
    let traffic = Traffic::start(&paths, pace)?;
    traffic.watch(PHASE);
    let (router, node) = (scene.lab().router().place(), scene.node(1));
    for leg in [0, 1] {
        let port = router.index(&underlay::port(node.name(), leg))?;
        if leg == 1 {
            traffic.event("the agent is killed")?;
            node.kill_agent()?;
        }
        traffic.event(&format!("leg {leg} fails"))?;
        router.conn()?.execute(link::set_down(port))?;
        traffic.watch(PHASE);
        traffic.must_flow(&format!("without leg {leg}"))?;
        router.conn()?.execute(link::set_up(port))?;
        traffic.watch(PHASE);
        traffic.must_flow(&format!("with leg {leg} again"))?;
    }
    let (told, watched) = traffic.finish_disturbed()?;
    node.start_agent_with(&SERVICES_FLAGS)?;
    has_mode(node, tunnels(scene.lab().underlay())?.mode)?;
    Ok(format!("{told}; {}", watched.table().join("; ")))
}

/// Nodes that take what has no tunnel are sent it by links that have a header for it, and tunnels by others.
fn native(scene: &Scene) -> Result<String> {
    let underlay = scene.lab().underlay();
    let expected = match underlay.is_ethernet() {
        true => Expected {
            mode: "direct",
            sent: Way::Native,
            received: |_| Way::Native,
        },
        false => tunnels(underlay)?,
    };
    start_again(scene, &["--routing=native"], expected.mode, |node| {
        let mut entry = node.entry();
        entry.native = true;
        node.set_entry(entry);
    })?;
    expected.holds(scene)
}

/// The same tunnels between nodes that know each other by IPv6 first.
fn by_ipv6(scene: &Scene) -> Result<String> {
    let expected = tunnels(scene.lab().underlay())?;
    start_again(scene, &[], expected.mode, |node| {
        node.lead_with_ipv6();
        let mut entry = node.entry();
        entry.native = false;
        entry.zero_checksum = true;
        node.set_entry(entry);
    })?;
    // A node that sends by the kernel does not say when it takes directly what comes: once the other has answered.
    let holds = || Ok(expected.holds(scene).ok());
    wait_for("packets to be taken directly", holds).or_else(|_| expected.holds(scene))
}

/// With other entries in the list of nodes, and other flags.
fn start_again(scene: &Scene, flags: &[&str], mode: &str, change: impl Fn(&Node)) -> Result<()> {
    let nodes = scene.lab().nodes();
    nodes.iter().for_each(change);
    scene.lab().publish()?;
    let flags = [&SERVICES_FLAGS[..], flags].concat();
    for node in nodes {
        node.stop_agent()?;
        node.start_agent_with(&flags)?;
    }
    nodes.iter().try_for_each(|node| has_mode(node, mode))
}

/// Once ways are looked up, and over IPv6 the other has answered.
fn has_mode(node: &Node, mode: &str) -> Result<()> {
    node.wait_ready()?;
    wait_for(&format!("mode overlay to be {mode}"), || {
        let status = node.status()?;
        let overlay = status.modes.get("overlay");
        Ok(overlay.is_some_and(|overlay| overlay == mode).then_some(()))
    })
}
