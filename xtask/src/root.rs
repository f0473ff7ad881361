//! Root, for the parts that make namespaces, and only for those.

use anyhow::{Context as _, Result, bail};
use std::{
    env,
    io::IsTerminal as _,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
};

pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// An error in one line unless sudo is there and may work.
pub fn require_sudo(what: &str) -> Result<()> {
    if crate::workspace::which("sudo").is_none() {
        bail!("{what} needs root, and there is no sudo: run it as root");
    }
    let mut silent = Command::new("sudo");
    silent
        .args(["-n", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let allowed = silent.status().is_ok_and(|status| status.success());
    // On a terminal sudo can ask for the password.
    if !allowed && !std::io::stdin().is_terminal() {
        bail!("{what} needs root, and sudo wants a password: run it as root or on a terminal");
    }
    Ok(())
}

/// Turns this process into the same program under sudo, with these arguments. Returns only if
/// that fails.
pub fn become_root(what: &str, arguments: &[&str]) -> Result<std::convert::Infallible> {
    become_root_with(what, arguments, &[])
}

/// The same, with environment variables that sudo would take away.
pub fn become_root_with(
    what: &str,
    arguments: &[&str],
    environment: &[(&str, String)],
) -> Result<std::convert::Infallible> {
    require_sudo(what)?;
    let exe = env::current_exe().context("cannot find the path of xtask")?;
    println!(
        "  {what} needs root: sudo {} {}",
        exe.display(),
        arguments.join(" ")
    );
    let error = Command::new("sudo")
        .arg("--")
        .arg("env")
        .args(
            environment
                .iter()
                .map(|(name, value)| format!("{name}={value}")),
        )
        .arg(exe)
        .args(arguments)
        .exec();
    Err(error).context("cannot run sudo")
}

/// A file written as root through sudo belongs to the user who asked for it.
pub fn give_back(path: &Path) {
    let id = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    if let (Some(uid), Some(gid)) = (id("SUDO_UID"), id("SUDO_GID")) {
        let _ = std::os::unix::fs::chown(path, Some(uid), Some(gid));
    }
}
