//! Two nodes in namespaces, and what must hold between them: the demo's checks, and agents that
//! restart, are killed and go.

use super::ways::Expected;
use crate::report::Report;
use anyhow::{Context as _, Result, ensure};
use sinabro_battery::{self as battery, Between, Class};
use sinabro_common::api::{TcpAcceleration, Verdict};
use sinabro_guest::{BIN_DIR, Environment, Message};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Machine, Node, Pod,
    checks::{self, CHECKS, Check, Scene, service},
    lab::UNDERLAY_MTU,
    node::SERVICES_FLAGS,
    traffic::{
        PATIENCE, bursts, icmp, packet,
        path::Path,
        sctp, snmp,
        stream::Stream,
        tally::{Kind, Tally},
        tcp,
    },
};

/// Most of the time rows wait.
const ROWS_AT_ONCE: usize = 16;

pub fn run(report: &mut Report, environment: &Environment) -> Result<()> {
    report.doing("starting two nodes")?;
    let lab = Lab::new(Binaries::at(BIN_DIR)?, 2, Lifetime::Process)?;
    service::start(&lab)?;
    let scene = Scene::new(lab)?;
    for check in CHECKS {
        report.doing(check.title)?;
        report.check(check.name, check.run(&scene))?;
    }
    let sent = checks::large() >> 20;
    let title = Check::by_name("large_transfer").map_or("", |check| check.title);
    report.say(&Message::LeftOut(format!("{title}: {sent} MB here")))?;
    report.doing("restarting agents")?;
    report.check("agent_restart", restart(&scene, Node::stop_agent))?;
    report.doing("killing agents")?;
    report.check("agent_kill", restart(&scene, Node::kill_agent))?;
    report.doing("looking at what applications see of accelerated TCP")?;
    report.check("tcp_rows", tcp_rows(&scene))?;
    report.doing("looking at the way between the nodes")?;
    report.check("overlay", Expected::by_kernel()?.holds(&scene))?;
    report.check("bursts", bursts_to_the_outside(&scene))?;
    if environment.sctp {
        report.check("sctp_between_nodes", sctp_between_nodes(&scene))?;
    }
    report.check("super_packets", super_packets(&scene))
}

/// Many datagrams of one call go past the node's stack: the kernel says of what a packet's segments are, by the order in which it
/// refuses to make room in it (`stage/deliver`).
fn bursts_to_the_outside(scene: &Scene) -> Result<String> {
    let (node, pod) = (scene.node(1), scene.pod(1, 1).place());
    let status = node.status()?;
    let mode = status.modes.get("forwarding");
    ensure!(mode.is_some_and(|mode| mode == "direct"), "{mode:?}");
    let outside = scene.lab().outside().place();
    for address in scene.lab().outside_addresses()? {
        // By this the stack knows its neighbour.
        icmp::ping(pod, address, PATIENCE)?;
        let before = snmp::forwarded(node.place())?;
        bursts::seen(pod, outside, address)?;
        let handed = snmp::forwarded(node.place())? - before;
        ensure!(handed == 0, "to {address}: {handed} packets by the stack");
    }
    Ok("past the stack, v4 and v6".into())
}

fn sctp_between_nodes(scene: &Scene) -> Result<String> {
    let (near, far) = (scene.pod(1, 1), scene.pod(2, 1));
    for address in far.addresses() {
        sctp::exchange(near.place(), far.place(), address)?;
    }
    Ok("associations by both families".into())
}

/// What a pod gets in a tunnel and hands on arrives, here at a virtual machine: the kernel goes by what it noted of the tunnel.
fn super_packets(scene: &Scene) -> Result<String> {
    let (near, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let machine = Machine::new(scene.node(2), far)?;
    let eth0 = packet::interface(far.place(), "eth0")?;
    let large = Kind::LargerThan(UNDERLAY_MTU as usize);
    let large = Tally::of_incoming(far.place(), eth0, large)?;
    for address in far.addresses() {
        let path = Path::new("to a machine", near.place(), machine.place(), address);
        Stream::open(&path)?.carry(1 << 20, 128 << 10)?;
    }
    let large = large.count()?;
    ensure!(large > 0, "no super-packet");
    Ok(format!("{large}"))
}

/// Agents end, traffic goes on, pods can be added to those that come after.
fn restart(scene: &Scene, end: impl Fn(&Node) -> Result<()>) -> Result<String> {
    let (near, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let flows = || -> Result<()> {
        for address in far.addresses() {
            tcp::transfer(near.place(), far.place(), address, 100_000)?;
        }
        for address in scene.pod(1, 2).addresses() {
            tcp::transfer(near.place(), scene.pod(1, 2).place(), address, 100_000)?;
        }
        Ok(())
    };
    for node in scene.lab().nodes() {
        end(node)?;
    }
    flows().context("without agents")?;
    for node in scene.lab().nodes() {
        node.start_agent_with(&SERVICES_FLAGS)?;
        node.wait_ready()?;
    }
    flows().context("with agents again")?;
    let again = Check::by_name("deletion").context("there is no check `deletion`")?;
    again.run(scene).context("with agents again")?;
    Ok("connections without agents and with new ones, pods after it".into())
}

/// Every row of what applications see of TCP, between pods that are accelerated and others. Order and
/// back-pressure may not differ, whatever else does is told.
fn tcp_rows(scene: &Scene) -> Result<String> {
    let node = scene.node(1);
    let fast = ["rows-a", "rows-b"].map(|id| node.add_pod_wishing(id, TcpAcceleration::Enabled));
    let [client, server] = fast;
    let (client, server) = (client?, server?);
    let status = node.status()?;
    let looked = match status.tcp_self_test {
        Some(found) if found.verdict == Verdict::Accelerate => {
            compared([scene.pod(1, 1), scene.pod(1, 2)], [&client, &server])
        }
        Some(found) => Ok(format!("refused: {}", found.reason)),
        // A pod's sockets are not known on this kernel, so that none could be accelerated.
        None => {
            let mode = status.modes.get("tcpAcceleration").cloned();
            let mode = mode.unwrap_or_default();
            let is_on = mode.starts_with("on");
            ensure!(!is_on, "nothing was tried, and yet: {mode}");
            Ok(mode)
        }
    };
    node.delete_pod(&client)?;
    node.delete_pod(&server)?;
    looked
}

fn compared(plain: [&Pod; 2], fast: [&Pod; 2]) -> Result<String> {
    let [plain, fast] = [plain, fast].map(|[client, server]| {
        let [client_net, server_net] = [client, server].map(|pod| pod.place().net().clone());
        Between::new(client_net, server_net, server.v4()).patient(PATIENCE)
    });
    let rows: Vec<_> = battery::rows().filter(|row| row.quick).collect();
    let outcomes = battery::compare(&rows, &plain, &fast, ROWS_AT_ONCE)?;
    let differ: Vec<_> = outcomes
        .iter()
        .filter(|outcome| !outcome.passed())
        .collect();
    let grave = differ
        .iter()
        .find(|outcome| outcome.row.class != Class::Behaviour);
    ensure!(grave.is_none(), "{grave:?}");
    let names: Vec<_> = differ.iter().map(|outcome| outcome.row.id).collect();
    Ok(format!("{} rows, differ: {}", rows.len(), names.join(", ")))
}
