//! The cgroup that a node's pods are in, for what is attached to one.
//!
//! Threads of one process play pods of several nodes. So it is a threaded cgroup, below one that the process is in
//! (Documentation/admin-guide/cgroup-v2.rst, "Threads").

use anyhow::{Context as _, Result};
use std::{
    fs::File,
    io::{self, Write as _},
    path::Path,
    sync::Arc,
};

/// Somebody else has made it, and removes it.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: Arc<Path>,
    /// Open, so that a program can join before it begins.
    threads: Arc<File>,
}

impl Cgroup {
    pub fn open(path: &Path) -> Result<Self> {
        let threads = path.join("cgroup.threads");
        let file = File::options().write(true).open(&threads);
        Ok(Self {
            path: path.into(),
            threads: Arc::new(file.with_context(|| format!("cannot open {}", threads.display()))?),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the calling thread: sockets that it makes from here on are in it, as is what it starts. Nothing but a
    /// system call.
    pub(crate) fn join(&self) -> io::Result<()> {
        (&*self.threads).write_all(b"0")
    }
}
