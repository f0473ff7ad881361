//! Files that appear whole: who reads one finds the old content or the new one, never a part.
//!
//! The content is written to a temporary file of the same directory, which then takes the name.
//! A temporary file is called `.NAME.tmp-RANDOM`, so that
//! - writers of the same file do not meet, not even those of two PID namespaces;
//! - no container runtime takes it for a plugin or for a configuration: these are found by name
//!   or by what the name ends in;
//! - what a killed writer leaves is known by its name ([`is_temporary`]), and is removed by whoever
//!   reads the directory or by the next writer's [`AtomicFile::sweep`].
//!
//! A sweep may take the file of a live writer: that one notices, since its name is gone, and
//! writes again.

use crate::fail_point;
use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions, Permissions},
    hash::{BuildHasher as _, RandomState},
    io::{self, Write as _},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

/// How often a writer begins again whose temporary file was swept. Sweeps are minutes apart.
const ATTEMPTS: u32 = 100;

/// A file to be written in one step.
#[derive(Clone, Copy, Debug)]
pub struct AtomicFile<'a> {
    path: &'a Path,
    mode: u32,
    durable: bool,
}

impl<'a> AtomicFile<'a> {
    /// For root alone, and not synced: a file that does not outlive the kernel must survive its
    /// writer only.
    pub fn new(path: &'a Path) -> Self {
        Self {
            path,
            mode: 0o600,
            durable: false,
        }
    }

    /// The permissions that it gets, whatever the umask says.
    #[must_use]
    pub fn mode(self, mode: u32) -> Self {
        Self { mode, ..self }
    }

    /// Outlives a crash of the machine: file and directory are synced.
    #[must_use]
    pub fn durable(self) -> Self {
        Self {
            durable: true,
            ..self
        }
    }

    /// Writes the file in place of any of this name. Who has the old one open keeps it.
    ///
    /// # Errors
    /// If it cannot be written; then the old one is still there.
    pub fn replace(self, content: &[u8]) -> io::Result<()> {
        self.write(content, |temporary| fs::rename(temporary, self.path))
    }

    /// Writes a new file; of several writers one succeeds.
    ///
    /// # Errors
    /// `AlreadyExists` if there is one of this name, whatever it is; or if it cannot be written.
    pub fn create(self, content: &[u8]) -> io::Result<()> {
        self.write(content, |temporary| {
            // link(2) does not replace. The second name is of no further use.
            fs::hard_link(temporary, self.path)?;
            ignore_not_found(fs::remove_file(temporary))
        })
    }

    /// Removes the temporary files of this file, also those of earlier releases.
    ///
    /// # Errors
    /// If the directory cannot be listed, or one cannot be removed. A missing directory is no
    /// error.
    pub fn sweep(self) -> io::Result<()> {
        let name = self.path.file_name().unwrap_or_default().as_bytes();
        let of_this = |temporary: &[u8]| {
            let rest = temporary.strip_prefix(b".").unwrap_or(temporary);
            rest.strip_prefix(name)
                .is_some_and(|rest| rest == b".tmp" || rest.starts_with(b".tmp-"))
        };
        let entries = match fs::read_dir(self.directory()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            if of_this(entry.file_name().as_bytes()) {
                ignore_not_found(fs::remove_file(entry.path()))?;
            }
        }
        Ok(())
    }

    fn write(self, content: &[u8], place: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
        let mut attempt = 1;
        loop {
            let temporary = self.temporary();
            let placed = self.write_temporary(&temporary, content).and_then(|()| {
                fail_point::temporary_file(self.path);
                place(&temporary)
            });
            match placed {
                Ok(()) => break,
                Err(error) => {
                    // In a full file system it would keep what little there is.
                    let swept = fs::remove_file(&temporary)
                        .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
                    let again = match error.kind() {
                        io::ErrorKind::NotFound => swept && self.directory().is_dir(),
                        _ => false,
                    };
                    if !again || attempt == ATTEMPTS {
                        return Err(error);
                    }
                    attempt += 1;
                }
            }
        }
        match self.durable {
            true => File::open(self.directory())?.sync_all(),
            false => Ok(()),
        }
    }

    fn write_temporary(self, path: &Path, content: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(self.mode)
            .open(path)?;
        file.write_all(content)?;
        // The mode above is less the umask.
        file.set_permissions(Permissions::from_mode(self.mode))?;
        match self.durable {
            true => file.sync_all(),
            false => Ok(()),
        }
    }

    fn temporary(self) -> PathBuf {
        let random = RandomState::new().hash_one(std::process::id());
        let mut name = OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(format!(".tmp-{random:016x}"));
        self.path.with_file_name(name)
    }

    fn directory(self) -> &'a Path {
        match self.path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => Path::new("/"),
        }
    }
}

/// Whether a file of a directory of ours is one that a writer has not finished, of this release
/// or of an earlier one (which also wrote `.NAME`, `.tmp-…` and `NAME.tmp-PID`).
pub fn is_temporary(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.starts_with(b".") || name.windows(5).any(|part| part == b".tmp-")
}

fn ignore_not_found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests;
