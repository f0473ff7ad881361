//! The data path on the running kernel: every program by BPF_PROG_TEST_RUN, then real traffic.
//!
//! Needs root; each test makes and leaves namespaces of its own.
#![allow(clippy::unwrap_used)]

mod host_hooks;
mod kit;
mod nat_property;
mod packet;
mod pod_hooks;
mod restart;
mod run;
mod traffic;

#[test]
fn the_kernel_accepts_every_program() {
    kit::fresh(|| {
        let datapath = kit::load();
        assert_eq!(datapath.programs().len(), 4);
        assert_eq!(datapath.modes()["redirectPeer"], "yes");
    });
}
