//! A file that outlives a crash of the machine: it has the old content or the new one.

use crate::state_file::FileError;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
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
    // What cannot be read is put in place anew, and fails there with its reason.
    same().unwrap_or(false)
}

/// Puts a file in place: a temporary file, synced, renamed over it, the directory synced. Who
/// executes the old one goes on doing so. The directory is made if it is missing.
pub fn put(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)
        .map_err(FileError::new("make directory", dir))?;
    let temporary = temporary(path);
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        file.write_all(content)?;
        // The mode above is less the umask.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(dir)?.sync_all()
    };
    clear(path).and_then(|()| write()).map_err(|error| {
        // On a full disk it would keep what little there is.
        let _ = clear(path);
        FileError::new("write", path)(error)
    })
}

/// Takes away what an interrupted [`put`] left.
pub fn clear(path: &Path) -> io::Result<()> {
    match fs::remove_file(temporary(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A name that no runtime takes for a plugin's or a configuration's.
fn temporary(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".tmp");
    path.with_file_name(name)
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

    #[test]
    fn who_has_the_old_file_open_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugin");
        put(&path, b"old", 0o755).unwrap();
        let mut old = File::open(&path).unwrap();
        put(&path, b"new", 0o755).unwrap();
        let mut text = String::new();
        old.read_to_string(&mut text).unwrap();
        assert_eq!(
            (text.as_str(), fs::read(&path).unwrap()),
            ("old", b"new".to_vec())
        );
    }

    #[test]
    fn what_an_interrupted_one_left_is_no_hindrance() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugin");
        fs::write(temporary(&path), "half").unwrap();
        put(&path, b"new", 0o755).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::write(temporary(&path), "half").unwrap();
        clear(&path).unwrap();
        clear(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
