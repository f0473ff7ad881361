//! Ctrl-C: what was started is ended before the process is.
//!
//! The signals are blocked in all threads and taken by one of its own, which may do anything.

use anyhow::{Context as _, Result};
use nix::sys::signal::{SigSet, Signal};
use std::{process, thread};

/// From here on, Ctrl-C and SIGTERM call `clean_up` and end the process. To be called before
/// any other thread is started: threads inherit the mask.
pub fn on_interrupt(clean_up: impl FnOnce() + Send + 'static) -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    thread::Builder::new()
        .name("interrupt".into())
        .spawn(move || {
            if let Ok(signal) = signals.wait() {
                // The other threads see everything fail now. Whatever they have to say about it
                // waits for these locks, and the process ends before they get them.
                let _silence = (std::io::stdout().lock(), std::io::stderr().lock());
                clean_up();
                process::exit(128 + signal as i32);
            }
        })?;
    Ok(())
}
