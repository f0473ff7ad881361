//! The kernel refuses programs: of a new version on a node that runs, or after a reboot all that are
//! there. No node goes dark, and none is silent about it.
//!
//! The programs are made such that no verifier takes them (`sinabro_common::fail_point::REFUSED`).

use sinabro_common::{api::StatusReport, names};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Pod,
    checks::Scene,
    traffic::{
        tcp,
        unbroken::{Pace, Traffic},
    },
    wait::eventually,
};
use std::{fs, time::Duration};

/// Undisturbed, to be compared with.
const BEFORE: Duration = Duration::from_secs(8);

fn status(node: &Node) -> StatusReport {
    node.status().unwrap()
}

fn programs(node: &Node) -> String {
    status(node).modes["programs"].clone()
}

/// Waits for a trouble, and returns what it says; the troubles are looked for every few seconds.
fn trouble(node: &Node, reason: &str) -> String {
    let mut text = String::new();
    eventually(&format!("the trouble {reason}"), || {
        let troubles = status(node).troubles;
        let found = troubles
            .into_iter()
            .find(|trouble| trouble.reason == reason);
        found.map(|trouble| text = trouble.text).is_some()
    });
    text
}

/// Waits until the agent answers, ready or not.
fn wait_answers(node: &Node) {
    eventually("the agent to answer", || node.status().is_ok());
}

/// The agent has looked at its node, and finds that it lacks nothing but programs.
fn wait_only_programs_missing(node: &Node) {
    eventually("the node to lack its programs alone", || {
        let Ok(status) = node.status() else {
            return false;
        };
        let missing = status.conditions.iter().filter(|condition| !condition.ok);
        missing.map(|condition| &condition.name).eq(["programs"])
    });
}

fn traffic(scene: &Scene) -> Traffic {
    let pace = Pace {
        pause: Duration::from_millis(10),
        clients: 1,
    };
    let traffic = Traffic::start(&scene.paths().unwrap(), pace).unwrap();
    traffic.watch(BEFORE);
    traffic.must_flow("before").unwrap();
    traffic
}

fn reaches(from: &Pod, to: &Pod) {
    for address in to.addresses() {
        tcp::transfer(from.place(), to.place(), address, 100_000).unwrap();
    }
}

/// Where the agent keeps programs, as the test sees it.
fn kept(node: &Node) -> std::path::PathBuf {
    let directory = node.namespace().path("/run/lab/programs");
    directory.join(names::PROGRAMS_FILE)
}

fn nothing_lost(traffic: Traffic, scene: &Scene) {
    println!(
        "{}",
        traffic.finish().unwrap_or_else(|error| {
            for node in scene.lab().nodes() {
                println!("{}: {}", node.name(), node.log());
            }
            panic!("{error:?}")
        })
    );
}

#[test]
fn programs_that_a_running_node_refuses_give_way_to_those_that_ran() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let node = scene.node(1);
    assert_eq!(programs(node), "current");
    assert!(kept(node).is_file());
    let traffic = traffic(&scene);

    traffic
        .event("n1 had programs that its kernel refuses")
        .unwrap();
    node.stop_agent().unwrap();
    node.start_agent_refused("current", &[]).unwrap();
    node.wait_ready().unwrap();
    traffic.must_flow("with those that ran last").unwrap();
    let said = programs(node);
    assert!(said.starts_with("last good, of version "), "{said}");
    let text = trouble(node, "ProgramsRefused");
    assert!(text.contains("R0 !read_ok"), "{text}");
    assert!(node.cni("STATUS", "none").unwrap().ok());
    // It serves as ever, and what is kept is still what ran.
    let late = node.add_pod("late").unwrap();
    reaches(&late, scene.pod(1, 1));
    reaches(&late, scene.pod(2, 1));
    node.delete_pod(&late).unwrap();

    traffic
        .event("n1 had programs again that its kernel takes")
        .unwrap();
    node.kill_agent().unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    assert_eq!(programs(node), "current");
    assert!(
        status(node).troubles.is_empty(),
        "{:?}",
        status(node).troubles
    );
    traffic.must_flow("with its own again").unwrap();
    nothing_lost(traffic, &scene);
}

#[test]
fn where_none_are_kept_those_that_run_go_on_and_no_pod_is_added() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let node = scene.node(1);
    let traffic = traffic(&scene);
    let goes = node.add_pod("goes").unwrap();

    for (how, event) in [
        (
            "current",
            "nothing was kept on n1, and its programs were refused",
        ),
        ("current,last-good", "what was kept on n1 was refused, too"),
    ] {
        traffic.event(event).unwrap();
        node.stop_agent().unwrap();
        if how == "current" {
            fs::remove_file(kept(node)).unwrap();
        }
        node.start_agent_refused(how, &[]).unwrap();
        wait_only_programs_missing(node);
        traffic.must_flow(event).unwrap();
        assert_eq!(
            programs(node),
            "none of this version; those of before go on"
        );
        let text = trouble(node, "ProgramsMissing");
        assert!(text.contains("those of before go on"), "{text}");
        let answer = node.cni("STATUS", "none").unwrap();
        assert_eq!(answer.error_code(), Some(51), "{answer:?}");
        assert!(
            answer.json.to_string().contains("R0 !read_ok"),
            "{answer:?}"
        );
        let sandbox = node.make_sandbox("refused").unwrap();
        let (answer, pod) = node.try_add("refused", &sandbox).unwrap();
        assert!(pod.is_none(), "{answer:?}");
        assert_eq!(answer.error_code(), Some(11), "{answer:?}");
        assert!(
            answer
                .json
                .to_string()
                .contains("refused the eBPF programs"),
            "{answer:?}"
        );
        node.remove_sandbox("refused").unwrap();
        reaches(scene.pod(2, 2), &goes);
        // The next time there is something to fall back on, which is refused.
        node.stop_agent().unwrap();
        node.start_agent().unwrap();
        node.wait_ready().unwrap();
        assert!(kept(node).is_file());
    }
    node.delete_pod(&goes).unwrap();
    let late = node.add_pod("late").unwrap();
    reaches(&late, scene.pod(2, 1));
    traffic.must_flow("with its own again").unwrap();
    nothing_lost(traffic, &scene);
}

/// Nothing runs on a node that was just booted, and the file of another has what ran last.
#[test]
fn after_a_reboot_those_that_ran_last_are_used() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    let [before, after] = [lab.node(1), lab.node(2)];
    before.start_agent().unwrap();
    before.wait_ready().unwrap();
    fs::create_dir_all(kept(after).parent().unwrap()).unwrap();
    fs::copy(kept(before), kept(after)).unwrap();
    after.start_agent_refused("current", &[]).unwrap();
    after.wait_ready().unwrap();
    let said = programs(after);
    assert!(said.starts_with("last good, of version "), "{said}");
    trouble(after, "ProgramsRefused");
    let scene = Scene::new(lab).unwrap();
    reaches(scene.pod(2, 1), scene.pod(2, 2));
    reaches(scene.pod(1, 1), scene.pod(2, 1));
}

/// After a reboot nothing runs: what the kernel takes of this version is used.
#[test]
fn what_a_kernel_takes_of_the_programs_is_used() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        let flags = ["--tcp-acceleration=all"];
        node.start_agent_refused("redirect", &flags).unwrap();
        node.wait_ready().unwrap();
        let said = "reduced: without redirection and acceleration";
        assert_eq!(programs(node), said, "{}", node.log());
        assert!(trouble(node, "ProgramsReduced").contains("R0 !read_ok"));
        assert!(!kept(node).exists(), "these are not good");
    }
    let scene = Scene::new(lab).unwrap();
    reaches(scene.pod(1, 1), scene.pod(1, 2));
    reaches(scene.pod(1, 1), scene.pod(2, 1));
    for name in ["masquerade", "spoofed_address"] {
        let check = sinabro_lab::checks::Check::by_name(name).unwrap();
        check.run(&scene).unwrap();
    }
}

/// The self-test took them, and the node's own cgroup did not.
#[test]
fn a_node_does_without_acceleration() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    let flags = ["--tcp-acceleration=all"];
    node.start_agent_refused("acceleration", &flags).unwrap();
    node.wait_ready().unwrap();
    let modes = status(node).modes;
    assert_eq!(modes["programs"], "current");
    let why = &modes["tcpAcceleration"];
    assert!(
        why.starts_with("off: ") && why.contains("R0 !read_ok"),
        "{why}"
    );
    // The first pod has it tested.
    let (a, b) = (node.add_pod("a").unwrap(), node.add_pod("b").unwrap());
    assert!(trouble(node, "AccelerationRefused").contains("R0 !read_ok"));
    reaches(&a, &b);
}

#[test]
fn a_node_without_any_takes_pods_only_if_it_is_told_to() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.start_agent_refused("current", &[]).unwrap();
    wait_only_programs_missing(node);
    assert_eq!(programs(node), "none");
    assert!(trouble(node, "ProgramsMissing").contains("nothing is masqueraded"));
    assert_eq!(node.cni("STATUS", "none").unwrap().error_code(), Some(51));
    node.kill_agent().unwrap();
    // The next one, too, sees that nothing ran.
    node.start_agent_refused("current", &["--require-programs=false"])
        .unwrap();
    node.wait_ready().unwrap();
    assert_eq!(programs(node), "none");
    assert!(node.cni("STATUS", "none").unwrap().ok());
    let (a, b) = (node.add_pod("a").unwrap(), node.add_pod("b").unwrap());
    reaches(&a, &b);
    node.kill_agent().unwrap();
    // The kernel is exchanged for one that takes them: these pods have them, too, from now on.
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    assert_eq!(programs(node), "current");
    reaches(&a, &b);
    let sent = node.endpoint(&a).unwrap().unwrap();
    assert!(sent.tx_packets > 0, "its programs count");
}

#[test]
fn a_file_that_holds_no_programs_is_said_and_replaced() {
    let lab = Lab::for_test(1).unwrap();
    let node = lab.node(1);
    let good = fs::read(kept(node)).unwrap();
    for content in [&b"garbage"[..], &good[..good.len() / 2], b""] {
        node.kill_agent().unwrap();
        fs::write(kept(node), content).unwrap();
        node.start_agent_refused("current", &[]).unwrap();
        wait_answers(node);
        let text = trouble(node, "ProgramsMissing");
        assert!(
            text.contains("/run/lab/programs/programs.tar cannot be used"),
            "{text}"
        );
        node.kill_agent().unwrap();
        node.start_agent().unwrap();
        node.wait_ready().unwrap();
        assert_eq!(fs::read(kept(node)).unwrap(), good);
    }
}
