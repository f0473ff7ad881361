//! What is installed on the node: whether it is in place, and how it is put there.

use crate::state_file::{self, FileError};
use serde_json::{Map, Value};
use sinabro_common::atomic_file::AtomicFile;
use std::{
    fs::{self, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
    time::{Duration, SystemTime},
};

/// Longest configuration read.
const MAX_CONFLIST: u64 = 1 << 20;
/// How long after its last change a file that makes no sense may still be written.
const WRITING: Duration = Duration::from_secs(2);

/// What is in a network configuration's file.
#[derive(Debug, PartialEq)]
pub enum Found {
    Nothing,
    List(Map<String, Value>),
    /// No JSON object: half a file, or no configuration at all.
    Garbage {
        fresh: bool,
    },
}

impl Found {
    pub fn read(path: &Path) -> Self {
        let text = match state_file::read_up_to(path, MAX_CONFLIST) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::Nothing,
            // A link or a directory, which nobody is writing.
            Err(_) => return Self::Garbage { fresh: false },
        };
        serde_json::from_slice(&text).map_or_else(
            |_| Self::Garbage {
                fresh: is_fresh(path),
            },
            Self::List,
        )
    }

    pub fn list(&self) -> Option<&Map<String, Value>> {
        match self {
            Self::List(list) => Some(list),
            Self::Nothing | Self::Garbage { .. } => None,
        }
    }

    /// Installers of others write the file in place: what is half of it now may be whole soon.
    pub fn is_being_written(&self) -> bool {
        matches!(self, Self::Garbage { fresh: true })
    }
}

/// Changed just now. A time of change in the future is of a clock that was set.
fn is_fresh(path: &Path) -> bool {
    let changed = fs::metadata(path).and_then(|meta| meta.modified());
    let age = changed.map(|changed| SystemTime::now().duration_since(changed));
    matches!(age, Ok(Ok(age)) if age < WRITING)
}

/// Gives a file its mode, if it has another.
pub fn set_mode(path: &Path, mode: u32) -> Result<(), FileError> {
    let set = || {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
            .open(path)?;
        if file.metadata()?.permissions().mode() & 0o7777 == mode {
            return Ok(());
        }
        file.set_permissions(fs::Permissions::from_mode(mode))
    };
    set().map_err(FileError::new("set the mode of", path))
}

/// Whether the file has this content and mode, and is no link to one that has.
pub fn is_in_place(path: &Path, content: &[u8], mode: u32) -> bool {
    let same = || -> io::Result<bool> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
            .open(path)?;
        let meta = file.metadata()?;
        let right_mode = meta.permissions().mode() & 0o7777 == mode;
        if !meta.is_file() || !right_mode || meta.len() != content.len() as u64 {
            return Ok(false);
        }
        let mut found = Vec::with_capacity(content.len());
        file.read_to_end(&mut found)?;
        Ok(found == content)
    };
    // What cannot be read is put in place again, and fails there with its reason.
    same().unwrap_or(false)
}

/// Puts a file in place so that it outlives a crash of the machine. Who executes the old one goes
/// on doing so. The directory is made if it is missing.
pub fn put(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)
        .map_err(FileError::new("make directory", dir))?;
    let file = AtomicFile::new(path).mode(mode).durable();
    file.replace(content).map_err(FileError::new("write", path))
}

/// Removes what an interrupted [`put`] left.
pub fn clear(path: &Path) -> io::Result<()> {
    AtomicFile::new(path).sweep()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_in_place_with_its_content_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/plugin");
        assert!(!is_in_place(&path, b"new", 0o755));
        put(&path, b"new", 0o755).unwrap();
        assert!(is_in_place(&path, b"new", 0o755));
        assert!(!is_in_place(&path, b"other", 0o755));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(!is_in_place(&path, b"new", 0o755));
        let link = dir.path().join("a/b/link");
        std::os::unix::fs::symlink("plugin", &link).unwrap();
        assert!(!is_in_place(&link, b"new", 0o644));
        assert_eq!(fs::read_dir(dir.path().join("a/b")).unwrap().count(), 2);
    }
}
