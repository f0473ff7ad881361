//! What the agent is allowed to do: no more than deploy/sinabro.yaml gives it.

use nix::{
    mount::{MsFlags, mount, umount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use sinabro_common::{
    api::{StatusReport, TcpAcceleration, Verdict},
    names,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Pod,
    confinement::{self, CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON},
    traffic::{PATIENCE, icmp},
};
use sinabro_netlink::sysctl;
use std::{fs, thread};

fn start(node: &Node, flags: &[&str]) {
    node.start_confined_agent(flags, &confinement::AGENT)
        .unwrap();
    is_confined(node);
}

fn is_confined(node: &Node) {
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

/// As the manifest's init container, which may do everything and ends.
fn prepare(node: &Node) -> String {
    let output = node.ctl(&["prepare"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

fn works_with(flags: &[&str]) {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        prepare(node);
        // All at once: whoever waits long for another's tunnel says so.
        node.start_confined_agent(flags, &confinement::AGENT)
            .unwrap();
    }
    for node in lab.nodes() {
        is_confined(node);
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
    for flag in ["--attach=tcx", "--attach=clsact", "--tcp-acceleration=all"] {
        works_with(&[flag]);
    }
}

#[test]
fn an_agent_that_may_not_set_what_is_wrong_names_it_and_the_remedy() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.start_confined_agent(&[], &confinement::AGENT).unwrap();
    let error = format!("{:#}", node.wait_ready().unwrap_err());
    for part in ["net.ipv4.ip_forward must be 1", "sinabroctl prepare"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    node.kill_agent().unwrap();
    prepare(node);
    // The uplink could not be known beforehand: worth a word, not the node.
    let set = || {
        Ok(sysctl::write(
            &["net", "ipv6", "conf", "eth0", "accept_ra"],
            "1",
        )?)
    };
    node.namespace().run(set).unwrap();
    start(node, &[]);
    let log = node.log();
    assert!(log.contains("conf.eth0.accept_ra must be 2"), "{log}");
}

#[test]
fn acceleration_is_tested_once_where_that_is_allowed() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    let report = || {
        let status = node.ctl(&["status", "-o", "json"]).unwrap().stdout;
        let status: StatusReport = serde_json::from_slice(&status).unwrap();
        status.tcp_self_test
    };
    prepare(node);
    let kept = node.state(names::SELF_TEST_FILE);
    fs::remove_file(&kept).unwrap();
    // Three capabilities do not suffice to make a namespace.
    start(node, &[]);
    let found = report().unwrap();
    assert_eq!((found.verdict, found.tried), (Verdict::Refused, false));
    assert!(found.reason.contains("sinabroctl prepare"), "{found:?}");
    node.kill_agent().unwrap();
    prepare(node);
    assert!(kept.exists());
    start(node, &[]);
    let found = report().unwrap();
    assert_ne!(found.verdict, Verdict::Refused, "{}", found.reason);
    node.kill_agent().unwrap();
    start(node, &["--tcp-acceleration=off"]);
    assert_eq!(report(), None);
    node.kill_agent().unwrap();
    // Where nothing is to be accelerated nothing is tested.
    fs::remove_file(&kept).unwrap();
    fs::write(node.state("off.yaml"), "tcpAcceleration: off").unwrap();
    let off = format!("{}/off.yaml", names::STATE_DIR);
    let output = node.ctl(&["prepare", "--config", &off]).unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(!kept.exists());
    // One that may do everything tests when the first pod asks.
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let silent = node.add_pod("silent").unwrap();
    assert_eq!((report(), kept.exists()), (None, false));
    let add = |id| node.add_pod_wishing(id, TcpAcceleration::Enabled).unwrap();
    let [one, other] = thread::scope(|scope| {
        let adds = ["one", "other"].map(|id| scope.spawn(move || add(id)));
        adds.map(|add| add.join().unwrap())
    });
    let accelerated = |pod: &Pod| node.endpoint(pod).unwrap().unwrap().acceleration.is_some();
    let are = || [&one, &other, &silent].map(accelerated);
    assert_eq!(
        (report().unwrap(), are()),
        (found.clone(), [true, true, false])
    );
    assert!(kept.exists());
    let tests = || node.log().matches("tried the tcp acceleration").count();
    assert_eq!(tests(), 1);
    // Nor is it run again, for these pods or another.
    node.kill_agent().unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    assert_eq!(
        (report().unwrap(), are()),
        (found.clone(), [true, true, false])
    );
    let third = add("third");
    assert!(accelerated(&third) && tests() == 1, "{}", node.log());
    // Where it failed no pod is accelerated, whatever it asks for.
    node.kill_agent().unwrap();
    let text = fs::read_to_string(&kept).unwrap();
    fs::write(&kept, text.replace("someFail", "refused")).unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let refused = report().unwrap();
    assert_eq!(
        (refused.verdict, &refused.reason),
        (Verdict::Refused, &found.reason)
    );
    let fourth = add("fourth");
    assert_eq!((are(), accelerated(&fourth)), ([false; 3], false));
    // What was found of other programs says nothing, and pods of before have these tried at once.
    node.kill_agent().unwrap();
    fs::write(
        &kept,
        text.replace("fingerprint\": \"", "fingerprint\": \"0"),
    )
    .unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    assert_eq!((report().unwrap(), are()), (found, [true, true, false]));
    assert_eq!(tests(), 2);
}

#[test]
fn preparing_mounts_a_bpffs_and_does_nothing_twice() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.namespace().run(unmount_bpffs).unwrap();
    let done = prepare(node);
    for change in [
        "mounted a bpffs on /sys/fs/bpf\n",
        "set net.ipv4.ip_forward to 1\n",
        "set net.ipv6.conf.eth0.accept_ra to 2\n",
        "set net.ipv6.conf.all.forwarding to 1\n",
    ] {
        assert!(done.contains(change), "{change}: {done}");
    }
    assert_eq!(prepare(node), "nothing to do: the node is prepared\n");
    start(node, &[]);
}

#[test]
fn what_was_prepared_is_told_also_if_not_all_could_be() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.namespace().run(unmount_bpffs).unwrap();
    let forbid = || {
        let (sysctls, none) = (Some("/proc/sys"), None::<&str>);
        let bind = MsFlags::MS_BIND;
        mount(sysctls, "/proc/sys", none, bind, none)?;
        let read_only = bind | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        Ok(mount(none, "/proc/sys", none, read_only, none)?)
    };
    node.namespace().run(forbid).unwrap();
    let output = node.ctl(&["prepare"]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (done, failed) = (text(&output.stdout), text(&output.stderr));
    assert!(
        done.starts_with("mounted a bpffs on /sys/fs/bpf\n"),
        "{done}"
    );
    assert!(failed.contains("net.ipv4.ip_forward must be 1"), "{failed}");
}

/// The lab's own, and below it the machine's if it has one.
fn unmount_bpffs() -> anyhow::Result<()> {
    while statfs("/sys/fs/bpf")?.filesystem_type() == BPF_FS_MAGIC {
        umount("/sys/fs/bpf")?;
    }
    Ok(())
}
