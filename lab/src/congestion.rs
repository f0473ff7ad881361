//! How TCP in the lab finds out what a path takes: by CUBIC, Linux's default and so what pods have nearly everywhere.
//!
//! A new network has what the machine's first one has. Where that is BBR, as on some machines, TCP holds
//! itself back to a rate that it has found out, and figures are about that rate: between pods of one node it finds one far below
//! what the machine does, the lower the smaller segments are.

use crate::{Place, place::on_thread};
use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sched::{CloneFlags, setns},
};
use sinabro_netlink::sysctl;
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt as _,
    sync::OnceLock,
};

pub const DEFAULT: &str = "cubic";
const SETTING: [&str; 3] = ["net", "ipv4", "tcp_congestion_control"];

/// What others than the machine's first network may choose from.
const ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";

static CHOSEN: OnceLock<String> = OnceLock::new();

/// Has all networks that are made from now on use another one. To be called once, before the first is made.
pub fn choose(name: &str) -> Result<()> {
    let chosen = CHOSEN.get_or_init(|| name.into());
    anyhow::ensure!(chosen == name, "the lab uses {chosen} already");
    Ok(())
}

/// Gives a new network what was chosen.
pub(crate) fn set(place: &Place) -> Result<()> {
    let name = CHOSEN.get().map_or(DEFAULT, String::as_str);
    let write = || place.run(|| Ok(sysctl::ensure(&SETTING, name)));
    let written = || -> Result<()> {
        match write()? {
            Err(error) if error.errno() == Some(Errno::EPERM) => {
                let _allowed = Allowed::with(name)?;
                write()??;
            }
            written => drop(written?),
        }
        Ok(())
    };
    written().with_context(|| format!("TCP of {} cannot use {name}", place.name()))
}

/// One more is allowed on this machine until this is dropped. Those that use it then go on.
struct Allowed {
    list: Flock<File>,
    before: String,
}

impl Allowed {
    /// Waits for others that do the same.
    fn with(name: &str) -> Result<Self> {
        let allowed = || -> io::Result<Self> {
            let list = OpenOptions::new().read(true).write(true).open(ALLOWED)?;
            let list = Flock::lock(list, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
            let mut before = [0; 1024];
            let len = list.read_at(&mut before, 0)?;
            let before = String::from_utf8_lossy(&before[..len]).trim().to_owned();
            // The kernel takes each write for the whole list.
            list.write_all_at(format!("{before} {name}").as_bytes(), 0)?;
            Ok(Self { list, before })
        };
        // The file is the first network's alone, where this process was started.
        let in_the_first = || -> Result<Self> {
            setns(File::open("/proc/self/ns/net")?, CloneFlags::CLONE_NEWNET)?;
            Ok(allowed()?)
        };
        on_thread("allow", in_the_first).with_context(|| {
            format!(
                "it cannot be allowed by {ALLOWED} in the machine's first network: add it there"
            )
        })
    }
}

impl Drop for Allowed {
    fn drop(&mut self) {
        let _ = self.list.write_all_at(self.before.as_bytes(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the machine's first network has.
    #[test]
    fn new_networks_have_linuxs_default() {
        let place = Place::fresh("congestion").unwrap();
        let read = || Ok(sysctl::read(&SETTING)?);
        assert_eq!(place.run(read).unwrap(), DEFAULT);
        assert!(choose(DEFAULT).is_ok());
        let error = choose("reno").unwrap_err().to_string();
        assert!(error.contains(DEFAULT), "{error}");
    }
}
