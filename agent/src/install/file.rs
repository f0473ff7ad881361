//! What is installed on the node: whether it is in place, and how it is put there.

use crate::state_file::FileError;
use sinabro_common::atomic_file::AtomicFile;
use std::{
    fs::{self, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

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
