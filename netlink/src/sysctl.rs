//! Settings below /proc/sys, by path component.
//!
//! `net.ipv4.conf.eth0.100.forwarding` is ambiguous once a link is called `eth0.100`; so names
//! are given in components: `["net", "ipv4", "conf", "eth0.100", "forwarding"]`.
//!
//! Those below `net` belong to the network namespace of the calling thread (the kernel looks at
//! the opener): use [`crate::NetNs::run`] for another one's.

use crate::Result;

/// Reads a setting, without the final newline.
pub fn read(name: &[&str]) -> Result<String> {
    let _ = name;
    unimplemented!()
}

/// Writes a setting.
pub fn write(name: &[&str], value: &str) -> Result<()> {
    let _ = (name, value);
    unimplemented!()
}

/// Writes a setting unless it already has the value; says whether it wrote.
pub fn ensure(name: &[&str], value: &str) -> Result<bool> {
    let _ = (name, value);
    unimplemented!()
}
