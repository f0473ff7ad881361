//! One agent per state directory, and none while the directory is being taken away: whoever
//! holds the lock. The kernel lets go of it with the process, however that ends.

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
    #[error(transparent)]
    File(#[from] FileError),
}

/// Makes the state directory and takes its lock.
///
/// # Errors
/// If another process has it.
pub fn lock(dir: &Path) -> Result<Flock<File>, LockError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(FileError::new("make state directory", dir))?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
        .map_err(FileError::new("close to others state directory", dir))?;
    lock_existing(dir)
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
        // Deleted between opening and locking: it keeps nobody out.
        let named = fs::metadata(&path).map(|meta| meta.ino()).ok();
        let inode = lock.metadata().map(|meta| meta.ino()).ok();
        if named.is_none() || named != inode {
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
