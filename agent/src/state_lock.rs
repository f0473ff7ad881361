//! One agent per state directory and per directory of pins, and none while they are being taken
//! away: whoever holds the locks. The kernel lets go of them with the process, however that ends.
//!
//! The pins have a lock of their own because the state directory alone does not tell whether an
//! agent runs: it may have another one, or somebody may have deleted it.

use crate::state_file::FileError;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use sinabro_common::names;
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{
        DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
    },
    path::{Path, PathBuf},
};

#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error(
        "an agent (process {pid}) uses state directory {}, stop it or set --state-dir",
        dir.display()
    )]
    Held { pid: String, dir: PathBuf },
    #[error("an agent uses {}, stop it or set --bpf-dir", .0.display())]
    PinsHeld(PathBuf),
    #[error(transparent)]
    File(#[from] FileError),
}

/// Makes the state directory and takes its lock.
///
/// # Errors
/// If another process has it.
pub fn lock(dir: &Path) -> Result<Flock<File>, LockError> {
    make(dir)?;
    lock_existing(dir)
}

/// Makes the state directory, which is root's alone.
///
/// # Errors
/// If that fails.
pub fn make(dir: &Path) -> Result<(), FileError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(FileError::new("make state directory", dir))?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
        .map_err(FileError::new("close to others state directory", dir))
}

/// Takes the lock of a state directory that is there.
///
/// # Errors
/// If another process has it.
pub fn lock_existing(dir: &Path) -> Result<Flock<File>, LockError> {
    let path = dir.join(names::LOCK_FILE);
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(FileError::new("open", &path))?;
        let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                return Err(LockError::Held {
                    pid: pid.trim().to_owned(),
                    dir: dir.to_owned(),
                });
            }
            Err((_, errno)) => {
                return Err(FileError::new("lock", &path)(errno.into()).into());
            }
        };
        if !is_named(&lock, &path) {
            continue;
        }
        // For people: the lock is what counts.
        let write = |lock: &mut File| -> io::Result<()> {
            lock.set_len(0)?;
            writeln!(lock, "{}", std::process::id())
        };
        write(&mut lock).map_err(FileError::new("write", &path))?;
        return Ok(lock);
    }
}

/// Takes the lock of a directory of pins that is there: on the directory itself, for a bpffs has
/// no files to write to.
///
/// # Errors
/// If another process has it.
pub fn lock_pins(dir: &Path) -> Result<Flock<File>, LockError> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(dir)
            .map_err(FileError::new("open", dir))?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => return Err(LockError::PinsHeld(dir.to_owned())),
            Err((_, errno)) => return Err(FileError::new("lock", dir)(errno.into()).into()),
        };
        if is_named(&lock, dir) {
            return Ok(lock);
        }
    }
}

/// Whether the file still has this name: deleted between opening and locking, it keeps nobody
/// out.
fn is_named(file: &File, path: &Path) -> bool {
    let named = fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    let inode = file.metadata().map(|meta| (meta.dev(), meta.ino()));
    matches!((named, inode), (Ok(named), Ok(inode)) if named == inode)
}
