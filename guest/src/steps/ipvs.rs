//! Beside kube-proxy by IPVS, as far as packets meet it: its link with Services' addresses, its port, and services of the kernel's load
//! balancer. Packets between nodes take the fast path and leave it again, and no connection notices.

use super::ways::counts;
use crate::report::Report;
use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use sinabro_guest::BIN_DIR;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    checks::Scene,
    node::{KERNEL_FLAG, SERVICES_FLAGS},
    traffic::{echoes::echoes_through, held::Held, seat::Ends},
};
use sinabro_netlink::{ipvs::Ipvs, sysctl};
use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    time::Duration,
};

/// On no machine but for IPVS' link.
const ADDRESSES: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
const LINK: &str = "kube-ipvs0";
/// Where kube-proxy is asked whether it is well.
const HEALTH: &str = "127.0.0.1:10256";
/// The first frontend's port, and its server's.
const FIRST: u16 = 1000;
const PROTOCOLS: [u8; 2] = [6, 17];
/// On each path, in each phase.
const CONNECTIONS: usize = 8;
const SIZE: usize = 512;
const TIME: Duration = Duration::from_millis(200);
/// Packets by the fast path in each phase.
const MANY: u64 = 50;

pub fn run(report: &mut Report) -> Result<()> {
    report.doing("starting two nodes")?;
    let lab = Lab::new(Binaries::at(BIN_DIR)?, 2, Lifetime::Process)?;
    let mut listeners = Vec::new();
    for node in lab.nodes() {
        listeners.push(be_kube_proxy(node)?);
        node.write_services("{kind: List, items: []}\n")?;
        start(node, &[KERNEL_FLAG])?;
    }
    for node in lab.nodes() {
        node.wait_ready()?;
    }
    let scene = Scene::new(lab)?;
    report.check("services_are_left_to_it", is_seen(&scene))?;
    let mut paths = paths(&scene)?;
    let invalid_before = invalid(&scene)?;
    let mut phase = |what: &str, begins: &dyn Fn() -> Result<()>, is_direct: bool| {
        report.doing(what)?;
        let outcome = begins().and_then(|()| holds(&scene, &mut paths, is_direct));
        report.check(what, outcome)
    };
    phase("by_the_stack", &|| Ok(()), false)?;
    phase(
        "fast_path",
        &|| restart(&scene, &[], Node::stop_agent),
        true,
    )?;
    phase(
        "agents_killed",
        &|| restart(&scene, &[], Node::kill_agent),
        true,
    )?;
    phase(
        "by_the_stack_again",
        &|| restart(&scene, &[KERNEL_FLAG], Node::stop_agent),
        false,
    )?;
    drop(paths);
    let invalid = invalid(&scene)? - invalid_before;
    let outcome = match invalid {
        0 => Ok("0 packets".into()),
        some => Err(anyhow::anyhow!("{some} packets")),
    };
    report.check("invalid_to_conntrack", outcome)
}

/// What it makes on a node that the agent looks at, and that IPVS needs. As it does, translated packets are tracked.
fn be_kube_proxy(node: &Node) -> Result<TcpListener> {
    let place = node.place();
    // A pair of links, as some kernels have no dummy ones.
    let ends = [(LINK, [2, 0, 0, 0, 8, 1]), ("ipvs-far", [2, 0, 0, 0, 8, 2])];
    place.cable(ends[0], 1500, place, ends[1])?;
    place.set_up(ends[1].0, &[])?;
    let nets = ADDRESSES.map(|address| address.parse::<IpAddr>().map(IpNet::from));
    let nets = nets.into_iter().collect::<Result<Vec<_>, _>>()?;
    place.set_up(LINK, &nets)?;
    place.run(|| {
        sysctl::write(&["net", "ipv4", "vs", "conntrack"], "1")?;
        Ok(TcpListener::bind(HEALTH)?)
    })
}

fn start(node: &Node, flags: &[&str]) -> Result<()> {
    let [_, file] = SERVICES_FLAGS;
    node.start_agent_with(&[&[file], flags].concat())
}

fn restart(scene: &Scene, flags: &[&str], end: fn(&Node) -> Result<()>) -> Result<()> {
    for node in scene.lab().nodes() {
        end(node)?;
        start(node, flags)?;
    }
    for node in scene.lab().nodes() {
        node.wait_ready()?;
        node.wait_for_mode("overlay", |mode| match flags {
            [] => mode == "direct, beside kube-proxy",
            _ => mode.starts_with("kernel: "),
        })?;
    }
    Ok(())
}

fn is_seen(scene: &Scene) -> Result<String> {
    let mut said = String::new();
    for node in scene.lab().nodes() {
        node.wait_for_mode("serviceProxy", |mode| {
            mode.starts_with("auto: off, kube-proxy serves") && mode.contains("IPVS")
        })?;
        said = node.status()?.modes["serviceProxy"].clone();
    }
    Ok(said)
}

struct Path<'a> {
    name: String,
    ends: Ends<'a>,
    port: u16,
    listener: TcpListener,
    /// Connections of all phases.
    held: Vec<Held>,
}

/// From a pod by a Service to one of the same node and to one of the other, and to the latter by its own address.
fn paths(scene: &Scene) -> Result<Vec<Path<'_>>> {
    let client = scene.pod(1, 1).place();
    let mut ipvs = Ipvs::in_netns(scene.node(1).place().net())?;
    let mut paths = Vec::new();
    let (near, far) = (scene.pod(1, 2), scene.pod(2, 1));
    for (way, server, is_translated) in [
        ("same node", near, true),
        ("across nodes", far, true),
        ("its own address", far, false),
    ] {
        for (address, frontend) in server.addresses().into_iter().zip(ADDRESSES) {
            let port = FIRST + paths.len() as u16;
            let mut ends = Ends::apart(client, server.place(), address)?;
            if is_translated {
                let frontend: IpAddr = frontend.parse()?;
                for proto in PROTOCOLS {
                    let at = SocketAddr::new(frontend, port);
                    ipvs.add(proto, at, &[SocketAddr::new(address, port)])?;
                }
                ends.frontend = Some(frontend);
            }
            paths.push(Path {
                name: format!("{way}, {address}"),
                ends,
                port,
                listener: ends.listen(port)?,
                held: Vec::new(),
            });
        }
    }
    Ok(paths)
}

/// Connections of before and new ones, and datagrams.
fn holds(scene: &Scene, paths: &mut [Path<'_>], is_direct: bool) -> Result<String> {
    let before = direct(scene)?;
    let mut exchanged = 0;
    for path in paths {
        let mut used = || -> Result<()> {
            let new = Held::open(path.ends, &path.listener, CONNECTIONS)?;
            path.held.push(new);
            for held in &mut path.held {
                held.exchange(SIZE)?;
            }
            exchanged += CONNECTIONS * path.held.len();
            let target = path
                .ends
                .target(SocketAddr::new(path.ends.address, path.port));
            echoes_through(path.ends, target, path.port, SIZE, 2, TIME)?;
            Ok(())
        };
        used().with_context(|| path.name.clone())?;
    }
    let by_fast_path = direct(scene)? - before;
    ensure!(
        (by_fast_path > MANY) == is_direct,
        "{by_fast_path} packets by the fast path"
    );
    Ok(format!(
        "{exchanged} exchanges by TCP, {by_fast_path} packets by the fast path"
    ))
}

/// Packets of both nodes that went past the stack.
fn direct(scene: &Scene) -> Result<u64> {
    let mut all = 0;
    for node in scene.lab().nodes() {
        let packets = counts(node)?.direct;
        all += packets.sent + packets.received;
    }
    Ok(all)
}

/// Packets of both nodes that conntrack could not tell the connection of: a column of each processor's line.
fn invalid(scene: &Scene) -> Result<u64> {
    let mut all = 0;
    for node in scene.lab().nodes() {
        let text = node.place().run(|| {
            Ok(fs::read_to_string(
                "/proc/thread-self/net/stat/nf_conntrack",
            )?)
        })?;
        let mut lines = text.lines().map(str::split_whitespace);
        let column = lines
            .next()
            .and_then(|mut names| names.position(|name| name == "invalid"));
        let column = column.context("conntrack counts nothing that is invalid")?;
        for mut line in lines {
            let count = line.nth(column).context("a line is too short")?;
            all += u64::from_str_radix(count, 16)?;
        }
    }
    Ok(all)
}
