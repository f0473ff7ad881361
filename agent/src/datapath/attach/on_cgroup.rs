//! Programs on the cgroup that has all sockets of the node below it, by links.

use crate::datapath::{
    DatapathError,
    cgroup::{self, CgroupError},
    object, sys,
};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

/// A cgroup, opened.
pub struct Cgroup {
    pub path: PathBuf,
    directory: File,
    inode: u64,
}

impl Cgroup {
    /// The cgroup of all pods: in the directory named, or found among the mounts.
    ///
    /// # Errors
    /// If there is none.
    pub fn open(named: Option<&Path>) -> Result<Self, DatapathError> {
        let path = cgroup::find(named).map_err(DatapathError::Cgroup)?;
        let open = || -> io::Result<(File, u64)> {
            let directory = File::open(&path)?;
            let inode = directory.metadata()?.ino();
            Ok((directory, inode))
        };
        match open() {
            Ok((directory, inode)) => Ok(Self {
                path,
                directory,
                inode,
            }),
            Err(source) => Err(DatapathError::Cgroup(CgroupError::Look { path, source })),
        }
    }

    /// Has a program run there: in the place of an earlier one where there is a pin of its link, which there is from
    /// then on; else beside whatever is there, for as long as the link that is returned is kept.
    ///
    /// # Errors
    /// If the kernel refuses, or the link cannot be pinned.
    pub fn put(
        &self,
        program: BorrowedFd<'_>,
        name: &'static str,
        hook: sys::AttachType,
        pin: Option<&Path>,
    ) -> Result<Option<OwnedFd>, DatapathError> {
        let attach = |error: io::Error| self.error(name)(error.into());
        if let Some(path) = pin
            && let Ok(link) = sys::obj_get(path)
            && sys::kind(link.as_fd()).is_ok_and(|kind| kind == sys::Kind::Link)
            && sys::link_info(link.as_fd()).is_ok_and(|info| info.cgroup_id() == self.inode)
        {
            sys::link_update(link.as_fd(), program).map_err(attach)?;
            return Ok(None);
        }
        if let Some(path) = pin {
            object::remove_link(path)?;
        }
        let target = self.directory.as_raw_fd() as u32;
        let link = sys::link_create(program, target, hook).map_err(attach)?;
        let Some(path) = pin else {
            return Ok(Some(link));
        };
        sys::obj_pin(link.as_fd(), path).map_err(|source| DatapathError::File {
            what: "pinning link",
            path: path.to_owned(),
            source,
        })?;
        Ok(None)
    }

    /// Makes an error say what could not be attached here.
    pub fn error(
        &self,
        program: &'static str,
    ) -> impl Fn(Box<dyn std::error::Error + Send + Sync>) -> DatapathError + '_ {
        move |source| DatapathError::Attach {
            program,
            target: format!("the cgroup {}", self.path.display()),
            source,
        }
    }
}
