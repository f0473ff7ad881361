//! Puts the CNI plugin and the network configuration on the node, and keeps them there.
//!
//! The plugin first, once the socket is bound; the configuration last, once the node knows its
//! pod ranges: with it the kubelet takes the node for one that can run pods. Both stay when the
//! agent ends, for it comes back, and an ADD meanwhile is told to try again.
//!
//! - [`file`]: a file is replaced in one step and survives a crash;
//! - [`conflist`]: what the configuration says, and which others a runtime would take before it;
//! - [`patience`]: what somebody changes or deletes is put back, but not for ever.
//!
//! Other configurations are left alone: one that comes before ours is told, not removed. Nothing
//! here stops the agent; what fails is tried again and told in the status.

pub mod conflist;
pub(crate) mod file;
mod patience;

use crate::{
    chain::Chain, config::Settings, dir_watch::DirWatch, node::NodeStatus, state_file::FileError,
};
use patience::{Patience, REST, TIMES};
use sinabro_common::names;
use std::{
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};

/// How often both directories are looked at unasked.
const POLL: Duration = Duration::from_secs(30);
/// How soon again if something failed.
const RETRY: Duration = Duration::from_secs(5);
/// Several changes in a row are one.
const DEBOUNCE: Duration = Duration::from_millis(100);

const PLUGIN_MODE: u32 = 0o755;
/// As the CIS benchmark for Kubernetes wants it; runtimes run as root.
const CONFLIST_MODE: u32 = 0o600;

/// What to install, and where.
#[derive(Clone, Debug)]
pub struct InstallConfig {
    /// The plugin to copy.
    pub source: PathBuf,
    pub bin_dir: PathBuf,
    pub conf_dir: PathBuf,
    /// Of the agent, as the plugin has to know it.
    pub state_dir: PathBuf,
    pub socket: PathBuf,
}

impl InstallConfig {
    /// None if nothing is to be installed.
    pub fn of(settings: &Settings) -> Option<Self> {
        Some(Self {
            source: settings.cni_source.clone()?,
            bin_dir: settings.cni_bin_dir.clone(),
            conf_dir: settings.cni_conf_dir.clone(),
            state_dir: settings.state_dir.clone(),
            socket: settings.socket.clone(),
        })
    }
}

/// How the node's plugin and configuration are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstallStatus {
    /// Plugin and configuration are in place.
    pub installed: bool,
    /// Why one of them is not as it should be.
    pub problems: Vec<String>,
    /// Why pods may get another network all the same.
    pub warnings: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
enum InstallError {
    #[error("cannot read plugin {} to install it, correct --cni-source", path.display())]
    Source { path: PathBuf, source: io::Error },
    #[error("cannot list {}", dir.display())]
    List { dir: PathBuf, source: io::Error },
    #[error("cannot compose the network configuration")]
    Render(#[from] serde_json::Error),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{} was changed or deleted {TIMES} times within a minute and is left alone for {} minutes: find out by whom, often the installer of another network",
        path.display(),
        REST.as_secs() / 60
    )]
    Quarrel { path: PathBuf },
}

/// Installs, and keeps installed, until the node's status is given up.
pub fn spawn(
    config: InstallConfig,
    node: watch::Receiver<NodeStatus>,
) -> (watch::Receiver<InstallStatus>, JoinHandle<()>) {
    let (sender, status) = watch::channel(InstallStatus::default());
    (status, tokio::spawn(keep(config, node, sender)))
}

async fn keep(
    config: InstallConfig,
    mut node: watch::Receiver<NodeStatus>,
    sender: watch::Sender<InstallStatus>,
) {
    let watches = [&config.bin_dir, &config.conf_dir].map(|dir| DirWatch::new(dir.clone()));
    let mut installer = Installer::new(config);
    loop {
        // Before looking, so that no change falls between the two.
        for watch in &watches {
            watch.renew();
            watch.drain();
        }
        let ready = node.borrow_and_update().state.is_some();
        let pass = spawn_blocking(move || {
            let status = installer.pass(ready, Instant::now());
            (installer, status)
        });
        let status;
        (installer, status) = match pass.await {
            Ok(done) => done,
            // It panicked, or the runtime ends.
            Err(error) => {
                tracing::error!("the installation failed: {error}");
                return;
            }
        };
        let wait = match status.problems.is_empty() {
            true => POLL,
            false => RETRY,
        };
        publish(&sender, status);
        tokio::select! {
            _ = watches[0].next() => sleep(DEBOUNCE).await,
            _ = watches[1].next() => sleep(DEBOUNCE).await,
            changed = wait_until_known(&mut node, ready) => if changed.is_err() { return },
            () = sleep(wait) => {}
        }
    }
}

/// Waits until the node becomes known; for ever if it is.
async fn wait_until_known(
    node: &mut watch::Receiver<NodeStatus>,
    known: bool,
) -> Result<(), watch::error::RecvError> {
    node.wait_for(|node| !known && node.state.is_some())
        .await
        .map(drop)
}

fn publish(sender: &watch::Sender<InstallStatus>, new: InstallStatus) {
    sender.send_if_modified(|status| {
        let news =
            |text: &&String| !status.problems.contains(*text) && !status.warnings.contains(*text);
        for problem in new.problems.iter().filter(news) {
            tracing::error!("{problem}");
        }
        for warning in new.warnings.iter().filter(news) {
            tracing::warn!("{warning}");
        }
        let changed = *status != new;
        *status = new;
        changed
    });
}

/// A file of ours on the node.
struct Target {
    path: PathBuf,
    mode: u32,
    /// Hash of what was in place last.
    seen: Option<u64>,
    patience: Patience,
}

impl Target {
    fn new(path: PathBuf, mode: u32) -> Self {
        if let Err(error) = file::clear(&path) {
            tracing::warn!(
                "cannot delete what an interrupted installation of {} left: {error}",
                path.display()
            );
        }
        Self {
            path,
            mode,
            seen: None,
            patience: Patience::default(),
        }
    }

    fn ensure(&mut self, content: &[u8], now: Instant) -> Result<(), InstallError> {
        let mut hasher = DefaultHasher::new();
        content.hash(&mut hasher);
        let hash = hasher.finish();
        if file::is_in_place(&self.path, content, self.mode) {
            self.patience.in_place();
            self.seen = Some(hash);
            return Ok(());
        }
        // Only what was there as it is wanted now can have been taken away.
        let taken = self.seen == Some(hash);
        let path = self.path.clone();
        if taken && !self.patience.puts_back(now) {
            return Err(InstallError::Quarrel { path });
        }
        file::put(&path, content, self.mode)?;
        match taken {
            true => tracing::warn!("{} was changed or deleted, put back", path.display()),
            false => tracing::info!("installed {}", path.display()),
        }
        self.seen = Some(hash);
        Ok(())
    }
}

struct Installer {
    config: InstallConfig,
    plugin: Target,
    conflist: Target,
}

impl Installer {
    fn new(config: InstallConfig) -> Self {
        let plugin = config.bin_dir.join(names::CNI_PLUGIN);
        let conflist = config.conf_dir.join(names::CNI_CONFLIST);
        Self {
            plugin: Target::new(plugin, PLUGIN_MODE),
            conflist: Target::new(conflist, CONFLIST_MODE),
            config,
        }
    }

    /// Makes both files as they should be, the second only if this node can serve.
    fn pass(&mut self, ready: bool, now: Instant) -> InstallStatus {
        let mut status = InstallStatus::default();
        let done = self.install(ready, now);
        status.installed = ready && done.is_ok();
        if let Err(error) = done {
            status.problems.push(Chain(&error).to_string());
        }
        if status.installed {
            match self.before_ours() {
                Ok(warnings) => status.warnings = warnings,
                Err(error) => status.warnings.push(Chain(&error).to_string()),
            }
        }
        status
    }

    fn install(&mut self, ready: bool, now: Instant) -> Result<(), InstallError> {
        let source = &self.config.source;
        let plugin = fs::read(source).map_err(|error| InstallError::Source {
            path: source.clone(),
            source: error,
        })?;
        self.plugin.ensure(&plugin, now)?;
        if ready {
            let portmap = self.config.bin_dir.join(conflist::PORTMAP).exists();
            let content = conflist::render(&self.config, portmap)?;
            self.conflist.ensure(&content, now)?;
        }
        Ok(())
    }

    fn before_ours(&self) -> Result<Vec<String>, InstallError> {
        let dir = &self.config.conf_dir;
        let found = conflist::before_ours(dir).map_err(|source| InstallError::List {
            dir: dir.clone(),
            source,
        })?;
        let warning = |path: PathBuf| {
            format!(
                "{} comes before {}: the runtime gives pods that network, delete the file if it is not wanted",
                path.display(),
                names::CNI_CONFLIST
            )
        };
        Ok(found.into_iter().map(warning).collect())
    }
}

#[cfg(test)]
mod tests;
