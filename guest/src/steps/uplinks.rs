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
        packet,
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
use std::time::Duration;

const UNDERLAYS: [(&str, Underlay); 4] = [
    ("vlan", Underlay::Vlan),
    ("bond", Underlay::Bond),
    ("vlan_on_bond", Underlay::VlanOnBond),
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
    if underlay.is_bond() {
        report.doing(&of("a leg fails"))?;
        report.check(&of("failover"), fails_over(&scene))?;
    }
    report.doing(&of("without a tunnel"))?;
    report.check(&of("native"), native(&scene))
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

/// Each leg of the first node fails once while pods talk, and comes back before the other one fails.
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
    let router = scene.lab().router().place();
    for leg in [0, 1] {
        let port = router.index(&underlay::port(scene.node(1).name(), leg))?;
        traffic.event(&format!("leg {leg} fails"))?;
        router.conn()?.execute(link::set_down(port))?;
        traffic.watch(PHASE);
        traffic.must_flow(&format!("without leg {leg}"))?;
        router.conn()?.execute(link::set_up(port))?;
        traffic.watch(PHASE);
        traffic.must_flow(&format!("with leg {leg} again"))?;
    }
    let (told, watched) = traffic.finish_disturbed()?;
    Ok(format!("{told}; {}", watched.table().join("; ")))
}

/// Nodes that take what has no tunnel are sent it by links that have a header for it, and tunnels by others.
fn native(scene: &Scene) -> Result<String> {
    let underlay = scene.lab().underlay();
    for node in scene.lab().nodes() {
        let mut entry = node.entry();
        entry.native = true;
        node.set_entry(entry);
    }
    scene.lab().publish()?;
    let flags = [&SERVICES_FLAGS[..], &["--routing=native"]].concat();
    for node in scene.lab().nodes() {
        node.stop_agent()?;
        node.start_agent_with(&flags)?;
    }
    let expected = match underlay.is_ethernet() {
        true => Expected {
            mode: "direct",
            sent: Way::Native,
            received: |_| Way::Native,
        },
        false => tunnels(underlay)?,
    };
    for node in scene.lab().nodes() {
        node.wait_ready()?;
        is_looked_up(node)?;
    }
    expected.holds(scene)
}

fn is_looked_up(node: &Node) -> Result<()> {
    wait_for("ways to be looked up", || {
        let status = node.status()?;
        let mode = status.modes.get("overlay").context("no mode overlay")?;
        Ok((mode != "kernel: not looked up yet").then_some(()))
    })
}
