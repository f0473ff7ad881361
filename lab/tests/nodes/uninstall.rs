//! `sinabroctl uninstall` leaves nothing, however the agent was set and however it ended.

use aya::programs::{TcAttachType, tc::qdisc_detach_program};
use sinabro_common::names;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Pod,
    residue::{Item, Kind, Snapshot, bpf},
    wait::eventually,
};
use sinabro_netlink::route::RouteFilter;
use std::{
    fs,
    path::Path,
    process::{Command, Output},
    thread,
    time::Duration,
};

const BIN_DIR: &str = "/run/lab/cni/bin";
const CONF_DIR: &str = "/run/lab/cni/net.d";

const UNINSTALL: [&str; 5] = [
    "uninstall",
    "--cni-bin-dir",
    BIN_DIR,
    "--cni-conf-dir",
    CONF_DIR,
];

fn lab() -> Lab {
    Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap()
}

/// A node in use, with everything that an agent makes.
fn populate(node: &Node, flags: &[&str]) -> Pod {
    let source = format!("--cni-source={}", node.binaries().plugin().display());
    let flags = [&[source.as_str()], flags].concat();
    node.start_agent_with(&flags).unwrap();
    node.wait_ready().unwrap();
    node.add_pod("one").unwrap();
    node.add_pod("two").unwrap()
}

fn uninstall(node: &Node) -> Output {
    node.ctl(&UNINSTALL).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn assert_nothing_left(node: &Node) {
    let ours = node.namespace().run(Snapshot::take).unwrap().ours();
    // The rest is the machine's, and may be of others who use it now.
    let of_node = |item: &&Item| match item.kind {
        Kind::Link | Kind::Route | Kind::Table => true,
        Kind::Pin => item.name.starts_with("/sys/fs/bpf/"),
        Kind::File | Kind::Namespace => item.name.starts_with("/run/"),
        _ => false,
    };
    let left: Vec<_> = ours
        .iter()
        .filter(of_node)
        .map(ToString::to_string)
        .collect();
    assert_eq!(left, [""; 0]);
    let routes = RouteFilter {
        protocol: Some(names::ROUTE_PROTOCOL),
        ..RouteFilter::default()
    };
    assert_eq!(node.netlink().unwrap().routes(&routes).unwrap(), []);
    for dir in [BIN_DIR, CONF_DIR] {
        let dir = node.namespace().path(dir);
        assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
    }
    assert!(!node.namespace().path("/run/lab/programs").exists());
    // What a pin held goes a moment after it.
    eventually("every program to be gone", || programs(node) == 0);
    let detach = || {
        let hooks = [
            (TcAttachType::Ingress, "uplink_in"),
            (TcAttachType::Egress, "uplink_out"),
        ];
        let found = hooks.map(|(hook, name)| qdisc_detach_program("eth0", hook, name).is_ok());
        Ok(found)
    };
    assert_eq!(node.namespace().run(detach).unwrap(), [false, false]);
}

/// How many programs the uplink has by tcx.
fn programs(node: &Node) -> usize {
    let count = || Ok(bpf::on_link("eth0").len());
    node.namespace().run(count).unwrap()
}

/// Programs of the cgroup that every process of this machine is in.
fn socket_programs() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let of_cgroup2 = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        (fields[2] == "cgroup2").then(|| fields[1].to_owned())
    };
    let root = mounts.lines().find_map(of_cgroup2).unwrap();
    bpf::on_cgroup(Path::new(&root)).unwrap()
}

#[test]
fn nothing_is_left_whatever_the_agent_used() {
    let lab = lab();
    let node = lab.node(1);
    for flags in [
        &["--attach=auto"],
        &["--attach=clsact"],
        &["--attach=tcx"],
        &["--tcp-acceleration=all"],
    ] {
        populate(node, flags);
        let filters = flags == &["--attach=clsact"];
        assert_eq!(programs(node), if filters { 0 } else { 2 });
        let all = node.namespace().run(Snapshot::take).unwrap().ours();
        for (kind, name) in [
            (Kind::Program, "uplink_in"),
            (Kind::Map, "ENDPOINTS"),
            (Kind::Route, "10.244."),
        ] {
            let is = |item: &&Item| item.kind == kind && item.name.starts_with(name);
            assert!(all.iter().any(|item| is(&item)), "{kind} {name}: {all:?}");
        }
        if flags == &["--tcp-acceleration=all"] {
            let programs = socket_programs();
            assert!(
                programs.iter().any(|name| name == "pod_sockets"),
                "{programs:?}"
            );
        }
        let refused = uninstall(node);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{said}");
        let agent = format!("process {}", node.agent_pid().unwrap());
        assert!(said.contains(&agent) && said.contains("stop it"), "{said}");
        assert!(node.state("leases").exists());

        node.kill_agent().unwrap();
        let done = uninstall(node);
        assert!(done.status.success(), "{}", text(&done.stderr));
        let said = text(&done.stdout);
        for what in [
            "00-sinabro.conflist",
            "/run/lab/cni/bin/sinabro",
            "pod link snb",
            "VXLAN device",
            "pin /sys/fs/bpf/sinabro/v3/CONNECTIONS",
            "/run/lab/programs/programs.tar",
            "/run/sinabro",
        ] {
            assert!(said.contains(what), "{what}: {said}");
        }
        assert_eq!(said.contains("filter uplink_in of eth0"), filters, "{said}");
        assert!(!said.contains("failed"), "{said}");
        assert_nothing_left(node);
        let again = text(&uninstall(node).stdout);
        assert!(again.starts_with("nothing to do"), "{again}");
        for pod in ["one", "two"] {
            node.remove_sandbox(pod).unwrap();
        }
    }
}

#[test]
fn an_agent_is_noticed_whatever_its_state_directory() {
    let lab = lab();
    let node = lab.node(1);
    let pod = populate(node, &[]);
    let link = pod.owner().link();
    let state = node.namespace().path(names::STATE_DIR);
    let aside = state.with_file_name("aside");
    let refused = |flags: &[&str]| {
        let flags = [&UNINSTALL[..], flags].concat();
        let output = node.ctl(&flags).unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let why = "an agent uses /sys/fs/bpf/sinabro, stop it";
        assert!(said.contains(why), "{said}");
        let there = node.netlink().unwrap().link_by_name(&link);
        assert!(there.is_ok() && conflist_there(node));
    };
    // Set for the agent alone, so that nothing of it is where it is looked for.
    refused(&["--state-dir", "/run/other"]);
    // Deleted by somebody, the lock with it.
    fs::rename(&state, &aside).unwrap();
    refused(&[]);
    fs::rename(&aside, &state).unwrap();
    node.kill_agent().unwrap();
    assert!(uninstall(node).status.success());
    assert_nothing_left(node);
}

fn conflist_there(node: &Node) -> bool {
    let dir = Path::new(CONF_DIR).join(names::CNI_CONFLIST);
    node.namespace().path(dir).exists()
}

#[test]
fn an_uninstallation_that_was_killed_is_completed_by_the_next() {
    let lab = lab();
    let node = lab.node(1);
    populate(node, &["--attach=clsact"]);
    node.stop_agent().unwrap();
    for wait in 0..20 {
        let mut command = Command::new(node.binaries().ctl());
        command.args(UNINSTALL).env_clear();
        let start = || Ok(command.spawn()?);
        let mut child = node.namespace().run(start).unwrap();
        thread::sleep(Duration::from_millis(wait));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let done = uninstall(node);
    assert!(done.status.success(), "{}", text(&done.stdout));
    assert_nothing_left(node);
    // And the node can be used again.
    for pod in ["one", "two"] {
        node.remove_sandbox(pod).unwrap();
    }
    populate(node, &[]);
}

#[test]
fn a_directory_that_a_runtime_watches_is_emptied_and_stays() {
    let lab = lab();
    let node = lab.node(1);
    let conf = node.namespace().path(CONF_DIR);
    let dir = conf.join(names::CNI_LOCAL_MTU_OFF);
    fs::create_dir_all(&dir).unwrap();
    populate(node, &[]);
    let count = || fs::read_dir(&dir).unwrap().count();
    eventually("a configuration of one MTU", || count() == 1);
    node.stop_agent().unwrap();
    let done = uninstall(node);
    let said = text(&done.stdout);
    assert!(done.status.success(), "{said}");
    let file = format!("{}/{}", names::CNI_LOCAL_MTU_OFF, names::CNI_CONFLIST);
    assert!(said.contains(&file), "{said}");
    assert_eq!(count(), 0);
    assert_eq!(fs::read_dir(conf).unwrap().count(), 1);
}

#[test]
fn what_is_not_ours_stays() {
    let lab = lab();
    let node = lab.node(1);
    populate(node, &[]);
    node.stop_agent().unwrap();
    let plugin = node.namespace().path(Path::new(BIN_DIR).join("sinabro"));
    fs::write(&plugin, "somebody else's").unwrap();
    let conf = node.namespace().path(CONF_DIR);
    fs::write(conf.join("10-by-hand.conf"), r#"{"type": "sinabro"}"#).unwrap();
    fs::write(conf.join("20-other.conf"), r#"{"type": "other"}"#).unwrap();
    fs::write(node.state("notes"), "").unwrap();
    let done = uninstall(node);
    let said = text(&done.stdout);
    assert!(said.contains("left: /run/lab/cni/bin/sinabro"), "{said}");
    assert!(said.contains("10-by-hand.conf"), "{said}");
    assert!(!said.contains("20-other.conf"), "{said}");
    // It says that the directory stays, and why.
    assert_eq!(done.status.code(), Some(1));
    assert!(
        said.contains("failed: cannot delete /run/sinabro: Directory not empty"),
        "{said}"
    );
    assert!(plugin.exists() && node.state("notes").exists());
}
