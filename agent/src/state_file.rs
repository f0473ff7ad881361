//! Small files in the state directory: how they are read, and what went wrong with one.

use std::{
    fs,
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Longest file read: leases and records have less than 1000 bytes.
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
}

/// Reads a file of sensible size. A FIFO does not block, a symbolic link does not lead elsewhere.
pub(crate) fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(path)?;
    let mut text = Vec::new();
    file.take(MAX_LEN + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_LEN {
        let text = format!("it is longer than {MAX_LEN} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(text)
}
