//! What the running kernel lacks.

use anyhow::{Result, bail};
use sinabro_netlink::Conn;
use std::path::Path;

/// The two numbers that its release begins with.
///
/// # Errors
/// If it begins otherwise.
pub fn version() -> Result<(u32, u32)> {
    let release = nix::sys::utsname::uname()?;
    let release = release.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => bail!("no version in {release}"),
    }
}

/// Whether programs put packets into tunnels (Linux 5.13), as docs/overlay.md has it.
pub fn wraps() -> Result<bool> {
    Ok(version()? >= (5, 13))
}

/// Whether they take packets out of tunnels of the other IP version (Linux 6.3).
pub fn unwraps_others() -> Result<bool> {
    Ok(version()? >= (6, 3))
}

/// Why nothing can be accelerated on this kernel, by what it lacks: not by whether it works, so
/// that a test never passes because what it looks at is broken.
pub fn unaccelerated() -> Option<&'static str> {
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Some("the kernel does not describe its types");
    }
    let cookie = Conn::new().and_then(|conn| conn.netns_cookie());
    match cookie {
        Ok(None) => Some("the kernel does not number network namespaces"),
        // Whatever fails there is the test's to find.
        Ok(Some(_)) | Err(_) => None,
    }
}
