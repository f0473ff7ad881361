//! `sinabroctl pause`: does nothing, for a DaemonSet whose pods have done their work and must stay.
//!
//! The image holds no other program that could. As process 1 of a container it must take the
//! signal itself: the kernel gives that process no default action (pid_namespaces(7)).

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::SignalFd,
};

/// Returns when asked to end.
pub fn pause() -> nix::Result<()> {
    let mut end = SigSet::empty();
    end.add(Signal::SIGTERM);
    end.add(Signal::SIGINT);
    end.thread_block()?;
    SignalFd::new(&end)?.read_signal().map(drop)
}
