//! `sinabroctl pause`: does nothing, for a DaemonSet whose pods have done their work and must stay.
//!
//! The image holds no other program that could. As process 1 of a container it must take the
//! signal itself: the kernel gives that process no default action (pid_namespaces(7)).

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::SignalFd,
};
use std::{io, process, thread};

/// Returns when asked to end.
pub fn pause() -> nix::Result<()> {
    asked_to_end()?.read_signal().map(drop)
}

/// Ends the process, and ends it well, when asked to; to be called before there are other threads. What is
/// being printed is printed.
pub fn end_when_asked() -> nix::Result<()> {
    let asked = asked_to_end()?;
    thread::spawn(move || {
        let _ = asked.read_signal();
        let _stdout = io::stdout().lock();
        process::exit(0);
    });
    Ok(())
}

/// What becomes readable when this process is asked to end.
fn asked_to_end() -> nix::Result<SignalFd> {
    let mut end = SigSet::empty();
    end.add(Signal::SIGTERM);
    end.add(Signal::SIGINT);
    end.thread_block()?;
    SignalFd::new(&end)
}
