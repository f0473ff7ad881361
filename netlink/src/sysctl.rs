//! Settings below /proc/sys, by path component.
//!
//! `net.ipv4.conf.eth0.100.forwarding` is ambiguous once a link is called `eth0.100`; so names
//! are given in components: `["net", "ipv4", "conf", "eth0.100", "forwarding"]`.
//!
//! Those below `net` belong to the network namespace of the calling thread (the kernel looks at
//! the opener): use [`crate::NetNs::run`] for another one's.

use crate::{Error, Result};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

const ROOT: &str = "/proc/sys";

/// Reads a setting, without white space around it.
pub fn read(name: &[&str]) -> Result<String> {
    let path = path(name)?;
    let value = fs::read_to_string(path)
        .map_err(|error| Error::system(format!("read sysctl {}", name.join("/")), &error))?;
    Ok(value.trim().to_string())
}

/// Writes a setting.
pub fn write(name: &[&str], value: &str) -> Result<()> {
    let path = path(name)?;
    // Neither created nor truncated: it is there, or the kernel does not know it.
    OpenOptions::new()
        .write(true)
        .open(path)
        // One write: the kernel takes each for a value of its own.
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|error| Error::system(format!("set sysctl {} to {value}", name.join("/")), &error))
}

/// Writes a setting unless it has the value already; says whether it wrote. Works so on a
/// read-only /proc/sys that is as it should be.
pub fn ensure(name: &[&str], value: &str) -> Result<bool> {
    if read(name)? == value {
        return Ok(false);
    }
    write(name, value)?;
    Ok(true)
}

fn path(name: &[&str]) -> Result<PathBuf> {
    let wrong = |reason| {
        Err(Error::Sysctl {
            name: name.join("/"),
            reason,
        })
    };
    if name.is_empty() {
        return wrong("is empty");
    }
    for component in name {
        if component.is_empty() {
            return wrong("has an empty component");
        }
        if matches!(*component, "." | "..") || component.contains(['/', '\0']) {
            return wrong("has a component that leaves its directory");
        }
    }
    Ok(std::iter::once(ROOT).chain(name.iter().copied()).collect())
}
