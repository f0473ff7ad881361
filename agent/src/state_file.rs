//! Files in the state directory: how they are read, and what went wrong with one. How they are
//! written is [`sinabro_common::atomic_file`].

use sinabro_common::atomic_file::AtomicFile;
use std::{
    fs,
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Longest lease or record read: they have less than 1000 bytes.
const MAX_LEN: u64 = 64 * 1024;

/// A file system error with what was attempted.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", path.display())]
pub struct FileError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl FileError {
    pub(crate) fn new(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { what, path, source }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.source.kind() == io::ErrorKind::ReadOnlyFilesystem
    }
}

/// Reads a file of sensible size. A FIFO does not block, a symbolic link does not lead elsewhere.
pub(crate) fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    read_up_to(path, MAX_LEN)
}

/// As [`read_small`], with a limit of its own.
pub(crate) fn read_up_to(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read(path, max, libc::O_NOFOLLOW)
}

/// As [`read_up_to`], of a file of somebody else's, who may have a symbolic link there.
pub(crate) fn read_of_others(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read(path, max, 0)
}

fn read(path: &Path, max: u64, flags: i32) -> io::Result<Vec<u8>> {
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | flags)
        .open(path)?;
    let mut text = Vec::new();
    file.take(max + 1).read_to_end(&mut text)?;
    if text.len() as u64 > max {
        let text = format!("it is longer than {max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(text)
}

/// Replaces a file: it has the old content or the new one, never a part. Nothing is synced, the
/// state directory does not outlive the kernel.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let written = AtomicFile::new(path).replace(bytes);
    written.map_err(FileError::new("write", path))
}

/// Removes what writers that were killed left of a file. That it fails is no reason to stop.
pub(crate) fn sweep(path: &Path) {
    if let Err(error) = AtomicFile::new(path).sweep() {
        tracing::warn!(
            "cannot remove temporary files of {}: {error}",
            path.display()
        );
    }
}

/// Removes a file; a missing one is no error.
pub(crate) fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(FileError::new("remove", path)),
    }
}
