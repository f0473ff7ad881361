//! The data path on the running kernel: every program by BPF_PROG_TEST_RUN, then real traffic.
//!
//! Needs root; each test makes and leaves namespaces of its own.
#![allow(clippy::unwrap_used)]

mod acceleration;
mod battery;
mod big_tcp;
mod drop_events;
mod forward;
mod kit;
mod logs;
mod nat_property;
mod packet;
mod pod_hooks;
mod restart;
mod run;
mod service_sockets;
mod services;
mod traffic;
mod tunnel_hooks;
mod uplink_hooks;
mod verify;

use sinabro_agent::datapath::{Datapath, DatapathConfig};
use std::{env, process::Command};

#[test]
fn the_kernel_accepts_every_program() {
    kit::fresh(|| {
        let cgroup = acceleration::Cgroup::enter();
        let datapath = Datapath::load(&DatapathConfig {
            acceleration: true,
            service_sockets: true,
            cgroup: Some(cgroup.path.clone()),
            ..kit::config()
        })
        .unwrap();
        let acceleration = &datapath.modes()["tcpAcceleration"];
        println!("acceleration: {acceleration}");
        let accelerates = kit::unaccelerated().is_none();
        assert_eq!(acceleration.starts_with("on, "), accelerates);
        for program in datapath.programs() {
            println!("{}: {:?} instructions", program.name, program.instructions);
        }
        let names: Vec<_> = datapath.programs().iter().map(|p| p.name).collect();
        let expected = [
            "pod_out",
            "pod_in",
            "uplink_out",
            "uplink_in",
            "overlay_in",
            "overlay_out",
            "pod_sockets",
            "pod_messages",
        ];
        let expected = match accelerates {
            true => &expected[..],
            false => &expected[..6],
        };
        assert_eq!(names, [expected, &verify::SERVICE_SOCKETS].concat());
    });
}

/// The suite on a kernel without acceleration: what is about it says so and is skipped, all else
/// passes.
#[test]
fn without_acceleration_the_suite_passes_and_says_what_it_skips() {
    if env::var_os(kit::WITHOUT_ACCELERATION).is_some() {
        return;
    }
    let run = |arguments: &[&str]| {
        let mut suite = Command::new(env::current_exe().unwrap());
        suite.args(arguments).env(kit::WITHOUT_ACCELERATION, "1");
        let output = suite.args(["--nocapture"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        said
    };
    let list = run(&["acceleration::", "battery::", "--list"]);
    let tests = list.lines().filter(|line| line.ends_with(": test")).count();
    let said = run(&["acceleration::", "battery::"]);
    let skipped = said.matches("skipped: no acceleration, ").count();
    assert!(
        tests > 50 && skipped >= tests,
        "{skipped} of {tests}: {said}"
    );
    // Of the rest, what loads and attaches everything.
    let said = run(&[
        "the_kernel_accepts_every_program",
        "logs::",
        "restart::",
        "traffic::",
    ]);
    assert!(said.contains("acceleration: off: "), "{said}");
}
