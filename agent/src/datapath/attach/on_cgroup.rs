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
    /// What runs there by a pinned link.
    pinned: Vec<Pinned>,
}

struct Pinned {
    name: &'static str,
    hook: sys::AttachType,
    program: OwnedFd,
    link: PathBuf,
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
                pinned: Vec::new(),
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
        &mut self,
        program: BorrowedFd<'_>,
        name: &'static str,
        hook: sys::AttachType,
        pin: Option<&Path>,
    ) -> Result<Option<OwnedFd>, DatapathError> {
        let attach = |error: io::Error| self.error(name)(error.into());
        let Some(path) = pin else {
            return self.link(program, hook).map(Some).map_err(attach);
        };
        match self.link_at(path) {
            Some(link) => sys::link_update(link.as_fd(), program).map_err(attach)?,
            None => self.pin(program, name, hook, path)?,
        }
        let program = program.try_clone_to_owned().map_err(attach)?;
        self.pinned.push(Pinned {
            name,
            hook,
            program,
            link: path.to_owned(),
        });
        Ok(None)
    }

    /// Puts back what somebody has taken off, and says what that was.
    ///
    /// # Errors
    /// If the kernel refuses, or the link cannot be pinned.
    pub fn mend(&self) -> Result<Vec<&'static str>, DatapathError> {
        let mut mended = Vec::new();
        for pinned in &self.pinned {
            if self.link_at(&pinned.link).is_none() {
                self.pin(
                    pinned.program.as_fd(),
                    pinned.name,
                    pinned.hook,
                    &pinned.link,
                )?;
                mended.push(pinned.name);
            }
        }
        Ok(mended)
    }

    /// The pinned link, if it is one that leads here.
    fn link_at(&self, path: &Path) -> Option<OwnedFd> {
        let link = sys::obj_get(path).ok()?;
        let is_link = sys::kind(link.as_fd()).is_ok_and(|kind| kind == sys::Kind::Link);
        let is_here =
            || sys::link_info(link.as_fd()).is_ok_and(|info| info.cgroup_id() == self.inode);
        (is_link && is_here()).then_some(link)
    }

    fn link(&self, program: BorrowedFd<'_>, hook: sys::AttachType) -> io::Result<OwnedFd> {
        sys::link_create(program, self.directory.as_raw_fd() as u32, hook)
    }

    fn pin(
        &self,
        program: BorrowedFd<'_>,
        name: &'static str,
        hook: sys::AttachType,
        path: &Path,
    ) -> Result<(), DatapathError> {
        object::remove_link(path)?;
        let link = self.link(program, hook);
        let link = link.map_err(|error| self.error(name)(error.into()))?;
        sys::obj_pin(link.as_fd(), path).map_err(|source| DatapathError::File {
            what: "pinning link",
            path: path.to_owned(),
            source,
        })
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
