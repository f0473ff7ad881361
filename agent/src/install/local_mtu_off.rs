//! A second configuration, by which pods have one MTU for everything: for runtimes whose pods have a TCP stack of their own.
//!
//! Nobody tells the plugin which runtime a pod has, but a runtime may have networks of its own: containerd since 1.6, by the key
//! `cni_conf_dir` of its handler, and it makes that directory when it starts. So there is nothing to set: where the directory is
//! there, the agent keeps the first configuration in it, with the plugins that others chained, but for `localMTU: off` and the
//! name. The directory itself is never removed: containerd (2.1 to 2.4 at least) ends its whole service of the CRI if one goes that it watches.

use super::{CONFLIST_MODE, InstallError, Target, conflist, file::Found};
use sinabro_common::names;
use std::{
    path::{Path, PathBuf},
    time::Instant,
};

/// The file, in a directory of networks.
pub fn path(conf_dir: &Path) -> PathBuf {
    conf_dir
        .join(names::CNI_LOCAL_MTU_OFF)
        .join(names::CNI_CONFLIST)
}

pub struct LocalMtuOff {
    target: Target,
}

impl LocalMtuOff {
    pub fn new(conf_dir: &Path) -> Self {
        Self {
            target: Target::new(path(conf_dir)),
        }
    }

    /// Makes it what the first is now.
    pub fn follow(&mut self, first: &Path, now: Instant) -> Result<(), InstallError> {
        if !self.target.path.parent().is_some_and(Path::is_dir) {
            return Ok(());
        }
        let found = Found::read(first);
        let Some(list) = found.list() else {
            // Changed since it was put in place, and put back soon.
            return Ok(());
        };
        let mut text = serde_json::to_vec_pretty(&conflist::with_local_mtu_off(list))?;
        text.push(b'\n');
        self.target.keep(&text, CONFLIST_MODE, now)
    }
}
