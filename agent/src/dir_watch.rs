//! Changes in a directory, by inotify.
//!
//! A directory that is not there yet, or is made again, is watched from the next
//! [`DirWatch::renew`]; on file systems that report nothing, and where the kernel has no
//! instance left, nothing is ever seen. So who watches also looks now and then unasked.

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::{
    ffi::OsString,
    future, io,
    os::fd::{AsFd, AsRawFd, RawFd},
    path::PathBuf,
};
use tokio::io::{Interest, unix::AsyncFd};

/// Something happened in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// To which entry; none if events were lost or the directory itself is concerned.
    pub name: Option<OsString>,
    /// The entry was closed after writing, renamed or deleted: it is as it will be.
    pub complete: bool,
}

pub struct DirWatch {
    directory: PathBuf,
    inotify: Option<AsyncFd<Fd>>,
}

/// [`Inotify`] as [`AsyncFd`] wants it.
struct Fd(Inotify);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl DirWatch {
    /// To be called inside the runtime. Watches nothing before [`DirWatch::renew`].
    pub fn new(directory: PathBuf) -> Self {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|inotify| {
                // SAFETY: Inotify owns its descriptor, and Fd neither closes nor replaces it
                // before AsyncFd is dropped.
                Ok(unsafe { AsyncFd::register_with_interest(Fd(inotify), Interest::READABLE)? })
            })
            .inspect_err(|error| tracing::warn!("cannot use inotify, polling instead: {error}"))
            .ok();
        Self { directory, inotify }
    }

    /// Watches the directory that is now there under its name: idempotent for the same one. Says
    /// whether there is one to watch.
    pub fn renew(&self) -> bool {
        let Some(inotify) = &self.inotify else {
            return false;
        };
        let what = AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_ONLYDIR;
        // A directory that is not there yet is found later.
        let watch = inotify.get_ref().0.add_watch(&self.directory, what);
        watch.is_ok()
    }

    /// Waits for something to happen in the directory. May return nothing.
    pub async fn next(&self) -> Vec<Change> {
        let Some(inotify) = &self.inotify else {
            return future::pending().await;
        };
        let Ok(mut ready) = inotify.readable().await else {
            return future::pending().await;
        };
        let changes = read(&inotify.get_ref().0);
        ready.clear_ready();
        changes
    }

    /// Forgets what has happened until now.
    pub fn drain(&self) {
        if let Some(inotify) = &self.inotify {
            read(&inotify.get_ref().0);
        }
    }
}

fn read(inotify: &Inotify) -> Vec<Change> {
    let complete =
        AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVE | AddWatchFlags::IN_DELETE;
    let mut changes = Vec::new();
    // Until EAGAIN: readiness is edge-triggered.
    while let Ok(events) = inotify.read_events() {
        changes.extend(events.into_iter().map(|event| Change {
            name: event.name,
            complete: event.mask.intersects(complete),
        }));
    }
    changes
}
