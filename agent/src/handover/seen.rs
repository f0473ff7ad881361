//! Whether this node has seen a kube-proxy: a file that survives reboots, so that a kube-proxy that comes up later than the agent is
//! waited for.

use crate::install::file;
use std::{fs, io, path::PathBuf};

/// Of the file, which has nothing in it.
const MODE: u32 = 0o600;

/// What is remembered from one run to the next.
pub struct Seen {
    file: PathBuf,
    is: bool,
}

impl Seen {
    /// What the file says: it is there or not. Who cannot tell waits, so an error is a yes.
    pub fn read(file: PathBuf) -> Self {
        let is = match fs::symlink_metadata(&file) {
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => {
                tracing::warn!("cannot look at {}: {error}", file.display());
                true
            }
        };
        Self { file, is }
    }

    pub fn is(&self) -> bool {
        self.is
    }

    /// Remembers it. That it cannot be written is no reason to stop: it counts for this run.
    pub fn set(&mut self, is: bool) {
        if self.is == is {
            return;
        }
        self.is = is;
        let done = match is {
            true => file::put(&self.file, b"", MODE).map_err(anyhow::Error::from),
            false => match fs::remove_file(&self.file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
                _ => Ok(()),
            },
        };
        if let Err(error) = done {
            tracing::warn!(
                "cannot keep in {} whether there is a kube-proxy: {error:#}",
                self.file.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_kept_from_one_run_to_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("new/kube-proxy-seen");
        let read = || Seen::read(file.clone());
        assert!(!read().is());
        read().set(true);
        assert!(read().is());
        // Killed in the middle, or somebody's.
        fs::write(&file, [0xff; 100]).unwrap();
        assert!(read().is());
        read().set(false);
        assert!(!read().is());
        // What cannot be told, or written.
        fs::remove_dir(directory.path().join("new")).unwrap();
        fs::write(directory.path().join("new"), "").unwrap();
        let mut seen = read();
        assert!(seen.is());
        seen.set(false);
        seen.set(true);
        assert!(seen.is());
    }
}
