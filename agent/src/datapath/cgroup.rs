//! Which cgroup programs on sockets attach to: one that has the sockets of all pods below it.
//!
//! That is the root of the node's cgroup v2 hierarchy. On most machines it is mounted on
//! /sys/fs/cgroup; where version 1 is in use beside it, somewhere below. A process in a cgroup
//! namespace, such as a container's, finds there a mount that looks like a root, but is the
//! process's own part: nothing of a pod is below it. What tells them apart is the file
//! `cgroup.type`, which every cgroup has but the root (Documentation/admin-guide/cgroup-v2.rst,
//! "Core Interface Files").
//!
//! A directory that is named in the settings is taken as it is: where a container plays the part of
//! a node (kind), its pods are in its own part.

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

mod limit;

pub use limit::memory_limit;

/// Of the calling thread, which may have mounts of its own.
const MOUNTS: &str = "/proc/thread-self/mountinfo";

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("cannot read {MOUNTS}")]
    Mounts(#[source] io::Error),
    #[error("no cgroup v2 is mounted: mount one, or name its directory by --cgroup-dir")]
    None,
    #[error(
        "the cgroup v2 on {} is a container's part of the node's, without its pods: mount the node's /sys/fs/cgroup into the container and name it by --cgroup-dir",
        .0.display()
    )]
    Part(PathBuf),
    #[error("cannot look into the cgroup directory {}", path.display())]
    Look { path: PathBuf, source: io::Error },
    #[error(
        "{} is not a cgroup v2 directory, nor is a cgroup v2 mounted below it: see --cgroup-dir",
        .0.display()
    )]
    NotBelow(PathBuf),
}

/// The cgroup of all pods: in the directory named, or found among the mounts.
pub fn find(dir: Option<&Path>) -> Result<PathBuf, CgroupError> {
    match dir {
        Some(dir) => below(dir),
        None => root(),
    }
}

/// The directory itself, or the first cgroup v2 that is mounted below it.
fn below(dir: &Path) -> Result<PathBuf, CgroupError> {
    // Mounts are listed without symbolic links.
    let real = fs::canonicalize(dir).map_err(|source| CgroupError::Look {
        path: dir.to_owned(),
        source,
    })?;
    if is_cgroup2(&real) {
        return Ok(real);
    }
    mounts()?
        .into_iter()
        .find(|mount| mount.starts_with(&real) && is_cgroup2(mount))
        .ok_or_else(|| CgroupError::NotBelow(dir.to_owned()))
}

fn root() -> Result<PathBuf, CgroupError> {
    let mut mounts = mounts()?;
    mounts.retain(|mount| is_cgroup2(mount));
    match mounts.iter().find(|mount| is_root(mount)) {
        Some(root) => Ok(root.clone()),
        None => Err(match mounts.into_iter().next() {
            Some(part) => CgroupError::Part(part),
            None => CgroupError::None,
        }),
    }
}

/// Also not if something else is mounted over it.
fn is_cgroup2(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

fn is_root(cgroup: &Path) -> bool {
    matches!(cgroup.join("cgroup.type").try_exists(), Ok(false))
}

fn mounts() -> Result<Vec<PathBuf>, CgroupError> {
    let text = fs::read(MOUNTS).map_err(CgroupError::Mounts)?;
    Ok(parse(&text))
}

/// Where cgroup v2 is mounted.
fn parse(mountinfo: &[u8]) -> Vec<PathBuf> {
    mounts_of(mountinfo)
        .filter(|mount| mount.kind == b"cgroup2")
        .map(|mount| unescape(mount.point))
        .collect()
}

/// What a line of mountinfo says, as it is written there.
struct Mount<'a> {
    /// The directory of the file system that is mounted,
    root: &'a [u8],
    /// and where.
    point: &'a [u8],
    /// The file system's type, and its options.
    kind: &'a [u8],
    options: &'a [u8],
}

/// The lines of mountinfo (proc_pid_mountinfo(5)) that are complete.
fn mounts_of(mountinfo: &[u8]) -> impl Iterator<Item = Mount<'_>> {
    let lines = mountinfo.split(|&byte| byte == b'\n');
    lines.filter_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        let (root, point) = (fields.nth(3)?, fields.next()?);
        // Optional fields end with a lone hyphen, before the file system's type.
        fields.find(|field| *field == b"-")?;
        Some(Mount {
            root,
            point,
            kind: fields.next()?,
            options: fields.next_back().unwrap_or_default(),
        })
    })
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;

    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        if byte == b'\\'
            && let Some((digits, after)) = tail.split_at_checked(3)
            && digits.iter().all(|digit| matches!(digit, b'0'..=b'7'))
        {
            let value = digits
                .iter()
                .fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
            // Three digits reach 511; the kernel writes none above 255.
            bytes.push(value as u8);
            rest = after;
        } else {
            bytes.push(byte);
            rest = tail;
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests;
