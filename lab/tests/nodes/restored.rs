//! Each row of ARCHITECTURE.md's table of what is in the kernel: somebody destroys it under traffic, and it comes back.

use sinabro_common::names;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    checks::Scene,
    node::SERVICES_FLAGS,
    residue::bpf,
    traffic::{gaps::Meter, machine_code},
    wait::wait_within,
};
use std::{
    ffi::CString,
    fs,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Where the kernel tells of a change: less than half of the time between two looks at all.
const TOLD: Duration = Duration::from_secs(12);
/// What a command prints on a node, without the numbers of links: a device that comes back has another.
fn said(node: &Node, command: &str) -> String {
    let mut words = command.split(' ');
    let mut run = Command::new(words.next().unwrap());
    node.place().put(run.args(words));
    let output = run.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<_> = text
        .lines()
        .map(|line| match line.split_once(": ") {
            Some((number, rest)) if number.parse::<u32>().is_ok() => rest,
            _ => line,
        })
        .map(|line| line.trim().to_owned())
        .collect();
    lines.sort();
    lines.join("\n")
}

/// All that the table names, as commands and settings tell of it.
fn state(node: &Node, pod_link: &str) -> Vec<String> {
    let vxlan = names::VXLAN_LINK;
    let mut all = vec![
        format!("ip -o link show dev {vxlan}"),
        format!("ip -o link show dev {pod_link}"),
        format!("ip -o addr show dev {vxlan} scope global"),
        "ip -4 route show".into(),
        "ip -6 route show".into(),
        "ip -4 neigh show nud permanent".into(),
        "ip -6 neigh show nud permanent".into(),
        format!("bridge fdb show dev {vxlan}"),
        "sysctl net.ipv4.ip_forward net.ipv6.conf.all.forwarding".into(),
    ];
    for link in [pod_link, "eth0", vxlan] {
        all.push(format!("sysctl net.ipv4.conf.{link}.forwarding"));
        for way in ["ingress", "egress"] {
            all.push(format!("tc filter show dev {link} {way}"));
        }
    }
    all.iter().map(|command| said(node, command)).collect()
}

fn scene(attach: &str) -> Scene {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.write_services("{kind: List, items: []}\n").unwrap();
        let flags = [&[attach], &SERVICES_FLAGS[..]].concat();
        node.start_agent_with(&flags).unwrap();
        node.wait_ready().unwrap();
    }
    Scene::new(lab).unwrap()
}

/// Until all is there again, and for how long it was not.
fn comes_back(node: &Node, what: &str, within: Duration, is_back: impl Fn() -> bool) {
    let since = Instant::now();
    let back = wait_within(within, what, || Ok(is_back().then_some(())));
    back.unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", node.log()));
    println!("{what}: back after {} ms", since.elapsed().as_millis());
}

#[test]
fn whatever_somebody_destroys_comes_back_under_traffic() {
    let scene = scene("--attach=clsact");
    let node = scene.node(1);
    let pod = scene.pod(1, 1);
    let link = names::pod_link(pod.id(), "eth0");
    let (vxlan, far) = (names::VXLAN_LINK, scene.node(2).addresses());
    let before = state(node, &link);
    let range = &sinabro_lab::node::pod_cidrs(2)[0];
    let mac = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    let entry = mac(&said(node, &format!("bridge fdb show dev {vxlan}")));
    let neighbour = said(node, &format!("ip -4 neigh show nud permanent dev {vxlan}"));
    let meter = Meter::start(&scene.paths().unwrap()).unwrap();
    meter.watch(Duration::from_secs(2));
    for command in [
        format!("tc qdisc del dev {link} clsact"),
        "tc qdisc del dev eth0 clsact".into(),
        format!("tc qdisc del dev {vxlan} clsact"),
        format!("ip link del {vxlan}"),
        format!("ip link set {vxlan} down"),
        format!("ip link set {vxlan} mtu 1280"),
        format!("ip link set {vxlan} address 02:09:09:09:09:09"),
        format!("ip addr flush dev {vxlan} scope global"),
        format!("ip route del {range}"),
        format!("ip neigh del {} dev {vxlan}", mac(&neighbour)),
        format!("bridge fdb del {entry} dev {vxlan} dst {}", far[0]),
        format!("ip route del {}", pod.v4()),
        format!("ip -6 route del {}", pod.v6()),
        format!("ip neigh del {} dev {link}", pod.v4()),
        format!("ip link set {link} address 02:09:09:09:09:09"),
        format!("ip link set {link} mtu 1280"),
        format!("sysctl -w net.ipv4.conf.{link}.forwarding=0"),
        "sysctl -w net.ipv4.conf.eth0.forwarding=0".into(),
        format!("sysctl -w net.ipv4.conf.{vxlan}.forwarding=0"),
        "sysctl -w net.ipv4.ip_forward=0".into(),
        "sysctl -w net.ipv6.conf.all.forwarding=0".into(),
    ] {
        meter.event(&command).unwrap();
        node.command(&command.split(' ').collect::<Vec<_>>())
            .unwrap();
        comes_back(node, &command, TOLD, || state(node, &link) == before);
    }
    let watched = meter.finish().unwrap();
    println!("{}", watched.table().join("\n"));
    for path in scene.paths().unwrap() {
        for kind in ["UDP", "TCP"] {
            // Without programs an answer from outside is for nobody, and the node's stack resets the connection.
            if kind == "TCP" && path.name.starts_with("outside") {
                continue;
            }
            let gap = watched.gap(&format!("{kind}, {}", path.name));
            assert!(gap < TOLD, "{kind}, {}: {gap:?}", path.name);
        }
    }
}

/// bpf(2): BPF_OBJ_GET and BPF_LINK_DETACH (linux/bpf.h).
const OBJ_GET: libc::c_int = 7;
const LINK_DETACH: libc::c_int = 34;

/// A pinned link.
fn open(pin: &Path) -> anyhow::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_encoded_bytes())?;
    // The path, and no descriptor and flags.
    machine_code::bpf(OBJ_GET, &mut [path.as_ptr() as u64, 0])
}

/// Whether a pinned link leads anywhere. The kernel says so in the descriptor's fdinfo, for tcx and for cgroups.
fn is_attached(pin: &Path) -> bool {
    let said = open(pin).and_then(|link| {
        let fdinfo = format!("/proc/thread-self/fdinfo/{}", link.as_raw_fd());
        Ok(fs::read_to_string(fdinfo)?)
    });
    let leads = |line: &str| {
        let target = line
            .strip_prefix("cgroup_id:")
            .or(line.strip_prefix("ifindex:"));
        target.is_some_and(|target| target.trim() != "0")
    };
    said.is_ok_and(|said| said.lines().any(leads))
}

/// Takes a program off by its pinned link, as whoever finds the link by its number can.
fn detach(pin: &Path) -> anyhow::Result<()> {
    let link = open(pin)?;
    machine_code::call(LINK_DETACH, &mut [link.as_raw_fd()])?;
    Ok(())
}

fn pins() -> Vec<PathBuf> {
    let directory = Path::new(names::BPF_DIR).join(names::BPF_LINKS_DIR);
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Whether a pinned link is of programs that translate Services at sockets.
fn is_of_sockets(pin: &Path) -> bool {
    let name = pin.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with("service_")
}

/// The kernel tells nobody of them.
#[test]
fn links_of_programs_that_somebody_detaches_come_back() {
    let scene = scene("--attach=tcx");
    let node = scene.node(1);
    let link = names::pod_link(scene.pod(1, 1).id(), "eth0");
    let links = [link.as_str(), "eth0", names::VXLAN_LINK];
    // On each link, and by all pinned links, those on the cgroup among them.
    let counts = || {
        let on = |link: &&str| bpf::on_link(link).len();
        let count = || {
            let pins = pins();
            let of_sockets = pins.iter().filter(|pin| is_of_sockets(pin));
            let attached = pins.iter().filter(|pin| is_attached(pin));
            Ok((
                links.each_ref().map(on),
                of_sockets.count(),
                attached.count(),
            ))
        };
        node.namespace().run(count).unwrap()
    };
    let before = counts();
    let (by_link, of_sockets, attached) = before;
    assert_eq!(by_link, [2; 3]);
    assert!(of_sockets > 0 && attached >= 6 + of_sockets, "{before:?}");
    let meter = Meter::start(&scene.paths().unwrap()).unwrap();
    meter.watch(Duration::from_secs(2));
    meter.event("links of programs are detached").unwrap();
    let detached = node
        .namespace()
        .run(|| Ok(pins().iter().filter(|pin| detach(pin).is_ok()).count()));
    // The agent looks each second: it may have put some back before the last one is detached.
    assert!(detached.unwrap() >= attached);
    comes_back(node, "links of programs", TOLD, || counts() == before);
    let watched = meter.finish().unwrap();
    println!("{}", watched.table().join("\n"));
    for path in scene.paths().unwrap() {
        let gap = watched.gap(&format!("UDP, {}", path.name));
        assert!(gap < TOLD, "{}: {gap:?}", path.name);
    }
    comes_back(node, "what is said of it", TOLD, || {
        let mut said = node.status().unwrap().troubles.into_iter();
        said.any(|trouble| trouble.reason == "ProgramsRemoved")
    });
}
