//! Killed at each named point, and started again: nothing is lost, nothing leaks, and what the
//! runtime then repeats works.

use serde_json::json;
use sinabro_common::{fail_point, names};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    checks::books,
    cni::{self, Answer, IFNAME},
    traffic::{PATIENCE, icmp},
    wait::eventually,
};
use std::{fs, os::unix::process::ExitStatusExt as _, path::Path};

const CONF_DIR: &str = "/run/lab/cni/net.d";

/// Everything that comes to a fail point, as a runtime asks for it; an agent that is killed
/// meanwhile makes later steps fail.
struct Life<'a> {
    node: &'a Node,
    new: (String, Place),
    leaving: &'a Pod,
    /// Of pods that stay.
    valid: Vec<String>,
}

impl Life<'_> {
    fn run(&self) -> [Answer; 3] {
        [self.add(), self.delete(), self.collect()]
    }

    fn add(&self) -> Answer {
        self.node.cni("ADD", &self.new.0).unwrap()
    }

    fn delete(&self) -> Answer {
        self.node.cni("DEL", self.leaving.id()).unwrap()
    }

    /// GC: every pod that is not valid has to go.
    fn collect(&self) -> Answer {
        let attachment = |id| json!({"containerID": id, "ifname": IFNAME});
        let mut config = cni::config();
        config["cni.dev/valid-attachments"] = self.valid.iter().map(attachment).collect();
        self.node.cni_configured("GC", "", &config).unwrap()
    }
}

fn start(node: &Node, fail_point: Option<&str>) {
    let source = format!("--cni-source={}", node.binaries().plugin().display());
    match fail_point {
        Some(name) => node.start_agent_failing_at(name, &[&source]).unwrap(),
        None => {
            node.start_agent_with(&[&source]).unwrap();
            node.wait_ready().unwrap();
        }
    }
}

#[test]
fn killed_at_every_point_the_agent_loses_nothing_and_leaks_nothing() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    start(node, None);
    let conflist = node
        .namespace()
        .path(Path::new(CONF_DIR).join(names::CNI_CONFLIST));
    let mut live = vec![node.add_pod("steady").unwrap()];
    for (round, point) in fail_point::ALL.iter().enumerate() {
        let [leaving, stale] =
            ["leaving", "stale"].map(|what| node.add_pod(&format!("{what}-{round}")).unwrap());
        let id = format!("new-{round}");
        let sandbox = node.make_sandbox(&id).unwrap();
        let mut valid: Vec<String> = live.iter().map(|pod| pod.id().to_string()).collect();
        valid.extend([id.clone(), leaving.id().to_string()]);
        let life = Life {
            node,
            new: (id.clone(), sandbox.clone()),
            leaving: &leaving,
            valid,
        };

        node.kill_agent().unwrap();
        fs::remove_file(&conflist).unwrap();
        start(node, Some(point));
        // Ready, or killed before.
        let ready = node.wait_ready();
        let answers = life.run();
        let end = node.agent_end().unwrap_or_else(|error| {
            panic!("{point} was never reached: {error:#}\n{ready:?}\n{answers:?}")
        });
        assert_eq!(end.signal(), Some(9), "{point}: {end}\n{}", node.log());

        // What the runtime was not promised, it asks for again.
        start(node, None);
        let [added, deleted, collected] = answers;
        let added = match added.ok() {
            true => added,
            false => life.add(),
        };
        let result = added
            .success()
            .unwrap_or_else(|error| panic!("{point}: the repeated ADD: {error:#}\n{}", node.log()));
        live.push(node.pod_of(&id, &sandbox, &result).unwrap());
        if !deleted.ok() {
            life.delete().success().unwrap();
        }
        if !collected.ok() {
            life.collect().success().unwrap();
        }
        for gone in [&leaving, &stale] {
            node.remove_sandbox(gone.id()).unwrap();
        }

        if let Err(error) = books::exact(node, &live) {
            panic!("{point}: {error:#}\n{}", node.log());
        }
        for address in live.iter().flat_map(Pod::addresses) {
            icmp::ping(node.place(), address, PATIENCE).unwrap();
        }
        eventually("the configuration to be installed", || conflist.is_file());
        let dir = fs::read_dir(conflist.parent().unwrap()).unwrap();
        let left: Vec<_> = dir.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [names::CNI_CONFLIST], "{point}");
    }
}

/// A program has the name of the variable exactly if it asks for it.
#[test]
fn a_program_that_has_fail_points_can_be_told() {
    let program = fs::read(Binaries::find().unwrap().agent()).unwrap();
    let name = fail_point::VARIABLE.as_bytes();
    let has = program.windows(name.len()).any(|part| part == name);
    assert_eq!(has, cfg!(debug_assertions));
}
