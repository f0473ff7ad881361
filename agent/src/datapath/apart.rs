//! The programs of the TCP acceleration apart from the node's: maps of their own, a link that
//! ends with the process, and only the connections that they are given. For trying them out.

use super::{
    DatapathError,
    attach::{self, sock},
    maps::{self, PodAcceleration, shape},
    object,
};
use aya::Ebpf;
use sinabro_common::{abi::acceleration::AccelerationCounters, names};
use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

/// Key of the counters and the account. The maps are its own, so it is nobody else's number.
const COUNTED_AT: u32 = 1;

/// What goes through TCP for want of memory would tell nothing of this kernel.
const UNLIMITED: maps::QueueLimits = maps::QueueLimits {
    pod: u64::MAX,
    node: u64::MAX,
};

pub struct Apart {
    maps: maps::Acceleration,
    directory: PathBuf,
    _link: Option<OwnedFd>,
    _programs: Ebpf,
}

impl Apart {
    /// Loads and attaches them; `directory` is one that nobody else uses, on a bpffs.
    ///
    /// # Errors
    /// If the kernel does not take them; then, too, the directory is gone.
    pub fn load(directory: &Path, cgroup: Option<&Path>) -> Result<Self, DatapathError> {
        // Left by a process that was killed.
        remove(directory)?;
        let load = || {
            let mut ebpf = object::try_each(directory, object::SOCK_OBJECT)?.whole()?;
            let maps = maps::Acceleration::take(&mut ebpf, UNLIMITED)?;
            let attached = sock::attach(&ebpf, None, cgroup)?;
            Ok(Self {
                maps,
                directory: directory.to_owned(),
                _link: attached.link,
                _programs: ebpf,
            })
        };
        load().inspect_err(|_| drop(remove(directory)))
    }

    /// Enrols the loopback connections of a network namespace, by its cookie.
    ///
    /// # Errors
    /// If the maps cannot be written.
    pub fn accelerate_loopback(&self, netns: u64) -> Result<(), DatapathError> {
        let wanted = PodAcceleration {
            netns,
            pods: false,
            loopback: true,
        };
        self.maps.set(COUNTED_AT, &[], Some(wanted))
    }

    /// What the enrolled sockets did.
    ///
    /// # Errors
    /// If the maps cannot be read.
    pub fn counters(&self) -> Result<AccelerationCounters, DatapathError> {
        self.maps
            .counters(COUNTED_AT)
            .map(Option::unwrap_or_default)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.directory) {
            tracing::warn!("{}", crate::chain::Chain(&error));
        }
    }
}

/// Takes away the pins in a directory, and the directory; none is fine.
pub fn remove(directory: &Path) -> Result<(), DatapathError> {
    let links = directory.join(names::BPF_LINKS_DIR);
    let entries = match attach::list(directory) {
        Err(DatapathError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(());
        }
        other => other?,
    };
    // What others put there stays, and so does the directory.
    for name in entries.iter().filter(|name| shape::is_map(name)) {
        object::remove_pin(&directory.join(name))?;
    }
    for path in [&links, directory] {
        if fs::symlink_metadata(path).is_ok() {
            fs::remove_dir(path).map_err(|source| DatapathError::File {
                what: "removing directory",
                path: path.to_owned(),
                source,
            })?;
        }
    }
    Ok(())
}
