//! A file, and when to read it again.
//!
//! The directory is watched with inotify, so a file that is written in place, renamed over or
//! deleted and made again is noticed alike, also where the path is a symbolic link that is swung
//! to another file, as a mounted ConfigMap does it. A file being written is read when its writer closes it,
//! not before: half of a list would otherwise pass for a shorter one. A slow poll covers what inotify
//! cannot see (network file systems, a directory made again).

use crate::dir_watch::{Change, DirWatch};
use std::{
    fs,
    io::{self, Read as _},
    os::unix::fs::{MetadataExt, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};

/// How often the file is looked at without being asked.
pub const POLL: Duration = Duration::from_secs(2);
/// Several changes in a row are one: a deletion followed by a creation is not a loss.
pub const DEBOUNCE: Duration = Duration::from_millis(30);
/// How long a file must rest where nobody said that it is complete.
const REST: Duration = Duration::from_millis(300);

/// What distinguishes one state of the file from the next; none while there is no file.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

pub struct FollowedFile {
    path: PathBuf,
    watcher: DirWatch,
    poll: Interval,
    /// As it was read last, once that was.
    seen: Option<Stamp>,
    again: bool,
}

impl FollowedFile {
    /// To be called inside the runtime. Neither the file nor its directory need be there.
    pub fn new(path: PathBuf) -> Self {
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        Self {
            watcher: DirWatch::new(directory),
            poll: every(POLL),
            path,
            seen: None,
            again: false,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has [`Self::changed`] return at the next look although nothing changed.
    pub fn again(&mut self, again: bool) {
        self.again = again;
    }

    /// How often the file is looked at from now on.
    pub fn look_every(&mut self, period: Duration) {
        if self.poll.period() != period {
            self.poll = every(period);
        }
    }

    /// Waits until the file is to be read: the first time at once.
    pub async fn changed(&mut self) {
        let Some(seen) = self.seen else {
            // Before the first read, so that no change falls between the two.
            self.watcher.renew();
            self.seen = Some(stamp(&self.path));
            return;
        };
        loop {
            let is_complete = tokio::select! {
                changes = self.watcher.next() => changes.iter().any(|change| self.completes(change)),
                _ = self.poll.tick() => {
                    self.watcher.renew();
                    false
                }
            };
            if is_complete {
                sleep(DEBOUNCE).await;
                self.watcher.drain();
            }
            let now = stamp(&self.path);
            if !is_complete && now == seen && !self.again {
                continue;
            }
            // Something may be about to take the place of what is gone.
            if !is_complete || now.is_none() {
                sleep(REST).await;
                if stamp(&self.path) != now {
                    continue;
                }
            }
            self.seen = Some(now);
            return;
        }
    }

    /// Whether the file itself was closed after writing, renamed or deleted.
    fn completes(&self, change: &Change) -> bool {
        change.complete && change.name.as_deref() == self.path.file_name()
    }
}

fn every(period: Duration) -> Interval {
    let mut poll = interval(period);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    poll
}

fn stamp(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    let (dev, ino, len) = (meta.dev(), meta.ino(), meta.len());
    Some((dev, ino, len, meta.mtime(), meta.mtime_nsec()))
}

/// Reads a regular file that is not longer than `max`. A FIFO does not block.
///
/// # Errors
/// Of the system; [`io::ErrorKind::FileTooLarge`], and [`io::ErrorKind::InvalidInput`] if it is no file.
pub fn read(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
        return Err(error);
    }
    let mut bytes = Vec::new();
    file.take(max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > max {
        let text = format!("it is longer than {max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}
