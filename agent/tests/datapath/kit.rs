//! A world of its own for each test: network namespace, mount namespace and bpffs, made on a
//! thread and gone with it.

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use sinabro_agent::datapath::{Datapath, DatapathConfig};
use std::{panic::resume_unwind, thread};

/// Runs a test in its own world, with loopback up.
pub fn fresh<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        // A mount of its own over the directory that every machine has for it.
        mount(
            Some("bpf"),
            "/sys/fs/bpf",
            Some("bpf"),
            MsFlags::empty(),
            none,
        )
        .unwrap();
        test()
    });
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

pub fn config() -> DatapathConfig {
    DatapathConfig::default()
}

pub fn load() -> Datapath {
    Datapath::load(&config()).unwrap()
}
