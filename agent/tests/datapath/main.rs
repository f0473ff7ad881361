//! The data path on the running kernel: every program by BPF_PROG_TEST_RUN, then real traffic.
//!
//! Needs root; each test makes and leaves namespaces of its own.
#![allow(clippy::unwrap_used)]

mod acceleration;
mod battery;
mod kit;
mod logs;
mod nat_property;
mod packet;
mod pod_hooks;
mod restart;
mod run;
mod traffic;
mod tunnel_hooks;
mod uplink_hooks;

use sinabro_agent::datapath::{Datapath, DatapathConfig};

#[test]
fn the_kernel_accepts_every_program() {
    kit::fresh(|| {
        let datapath = Datapath::load(&DatapathConfig {
            acceleration: true,
            ..kit::config()
        })
        .unwrap();
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
            "pod_sockets",
            "pod_messages",
        ];
        assert_eq!(names, expected);
    });
}
