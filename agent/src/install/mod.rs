//! Puts the CNI plugin and the network configuration on the node, and keeps them there.
//!
//! The plugin first, once the socket is bound; the configuration last, once the node knows its
//! pod ranges: with it the kubelet takes the node for one that can run pods. Both stay when the
//! agent ends, for it comes back, and an ADD meanwhile is answered with "try again later".
//!
//! - [`file`]: a file is replaced in one step and survives a crash;
//! - [`plugin`]: the plugin's file; where its directory is read-only here, `sinabroctl prepare`
//!   installs it, and it is only looked after;
//! - [`conflist`]: what of the configuration is ours, joined with what others chained;
//! - [`local_mtu_off`]: the same configuration for runtimes whose pods are to have one MTU;
//! - [`versions`]: which versions of CNI all chained plugins know;
//! - [`others`]: which configurations a runtime would take before ours;
//! - [`patience`]: what somebody changes or deletes is put back, but not for ever.
//!
//! Other configurations are left alone: one that comes before ours is reported, not removed. Nothing
//! here stops the agent; what fails is tried again and reported in the status. A problem is what keeps
//! pods from this network, and makes the node not ready; anything else is a warning.

pub mod conflist;
pub(crate) mod file;
pub mod local_mtu_off;
pub mod others;
mod patience;
pub mod plugin;
pub mod versions;

use crate::{
    chain::Chain, config::Settings, dir_watch::DirWatch, node::NodeStatus, state_file::FileError,
};
use conflist::Ours;
use file::Found;
use local_mtu_off::LocalMtuOff;
use patience::{Patience, REST, TIMES};
use sinabro_common::names;
use std::{
    hash::{DefaultHasher, Hash, Hasher as _},
    io,
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};
use versions::{Asker, Unasked, Versions};

/// How often both directories are looked at unasked.
const POLL: Duration = Duration::from_secs(30);
/// How soon again if something failed.
const RETRY: Duration = Duration::from_secs(5);
/// Several changes in a row are one.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// How soon again at a file that somebody is writing.
const UNSETTLED: Duration = Duration::from_millis(200);
/// How long somebody may go on writing it.
const SETTLED: Duration = Duration::from_secs(5);

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
    /// Plugin and configuration are in place: runtimes ask this node's agent.
    pub installed: bool,
    /// Why they are not.
    pub problems: Vec<String>,
    /// What is not as it should be although they are.
    pub warnings: Vec<Warning>,
    /// What is as it may be, and good to know.
    pub notes: Vec<String>,
}

/// With the reason of the Event that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub reason: &'static str,
    pub text: String,
}

impl InstallStatus {
    fn warn(&mut self, reason: &'static str, text: String) {
        self.warnings.push(Warning { reason, text });
    }

    fn has(&self, text: &str) -> bool {
        let mut warnings = self.warnings.iter();
        warnings.any(|warning| warning.text == text)
            || self.problems.iter().chain(&self.notes).any(|t| t == text)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("cannot read plugin {} to install it, correct --cni-source", path.display())]
    Source { path: PathBuf, source: io::Error },
    #[error("cannot list {}", dir.display())]
    List { dir: PathBuf, source: io::Error },
    #[error("cannot compose the network configuration")]
    Render(#[from] serde_json::Error),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "plugin {} is missing and can only be installed by `sinabroctl prepare`: delete this node's sinabro pod, the init container of the next one does it",
        path.display()
    )]
    NoPlugin { path: PathBuf },
    #[error(
        "{} was changed or deleted {TIMES} times within a minute and is left alone for {} minutes: find out by whom, often the installer of another network",
        path.display(),
        REST.as_secs() / 60
    )]
    Contested { path: PathBuf },
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
        let mut watched = true;
        for watch in &watches {
            watched &= watch.renew();
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
        let wait = match &status {
            None => UNSETTLED,
            Some(status) if status.problems.is_empty() => POLL,
            Some(_) => RETRY,
        };
        if let Some(status) = status {
            publish(&sender, status);
        }
        // The pass has made a directory: others may have changed it since, unseen.
        if !watched && watches.iter().all(DirWatch::renew) {
            continue;
        }
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
        for problem in new.problems.iter().filter(|text| !status.has(text)) {
            tracing::error!("{problem}");
        }
        let warnings = new.warnings.iter().map(|warning| &warning.text);
        for warning in warnings.filter(|text| !status.has(text)) {
            tracing::warn!("{warning}");
        }
        for note in new.notes.iter().filter(|text| !status.has(text)) {
            tracing::info!("{note}");
        }
        let changed = *status != new;
        *status = new;
        changed
    });
}

/// A file of ours on the node.
struct Target {
    path: PathBuf,
    /// Hash of what was in place last.
    seen: Option<u64>,
    patience: Patience,
}

impl Target {
    fn new(path: PathBuf) -> Self {
        if let Err(error) = file::clear(&path) {
            tracing::warn!(
                "cannot delete what an interrupted installation of {} left: {error}",
                path.display()
            );
        }
        Self {
            path,
            seen: None,
            patience: Patience::default(),
        }
    }

    /// Sees to it that the file is this, whoever changed it, for as long as there is patience.
    fn keep(&mut self, content: &[u8], mode: u32, now: Instant) -> Result<(), InstallError> {
        let wanted = hash(&content);
        if file::is_in_place(&self.path, content, mode) {
            self.in_place(wanted);
            return Ok(());
        }
        // Only what was there as it is wanted now can have been taken away.
        let taken = self.seen == Some(wanted);
        if taken && !self.patience.allows(now) {
            return Err(self.contested());
        }
        let put = self.put(content, mode, taken, now);
        self.seen = Some(wanted).filter(|_| put.is_ok());
        Ok(put?)
    }

    fn contested(&self) -> InstallError {
        InstallError::Contested {
            path: self.path.clone(),
        }
    }

    fn in_place(&mut self, content: u64) {
        self.patience.in_place();
        self.seen = Some(content);
    }

    /// Puts the content in place; `taken`: of somebody who took it away.
    fn put(
        &mut self,
        content: &[u8],
        mode: u32,
        taken: bool,
        now: Instant,
    ) -> Result<(), FileError> {
        file::put(&self.path, content, mode)?;
        if taken {
            self.patience.put_back(now);
            tracing::warn!("{} was changed or deleted, put back", self.path.display());
        } else {
            tracing::info!("installed {}", self.path.display());
        }
        Ok(())
    }
}

struct Installer {
    config: InstallConfig,
    plugin: Target,
    conflist: Target,
    local_mtu_off: LocalMtuOff,
    asker: Asker,
    /// Since when the configuration is not whole.
    unsettled: Option<Instant>,
}

/// The configuration cannot be judged before whoever writes it has done so.
struct Unsettled;

impl Installer {
    fn new(config: InstallConfig) -> Self {
        Self {
            plugin: Target::new(config.bin_dir.join(names::CNI_PLUGIN)),
            conflist: Target::new(config.conf_dir.join(names::CNI_CONFLIST)),
            local_mtu_off: LocalMtuOff::new(&config.conf_dir),
            asker: Asker::default(),
            unsettled: None,
            config,
        }
    }

    /// Makes both files as they should be, the second only if this node can serve. None if that is
    /// to be tried again in a moment.
    fn pass(&mut self, ready: bool, now: Instant) -> Option<InstallStatus> {
        let mut status = InstallStatus::default();
        let plugin = self.install_plugin(now, &mut status);
        let done = match plugin {
            Ok(()) if ready => self.install_conflist(now, &mut status),
            other => other.map(Ok),
        };
        match done {
            Ok(Ok(())) => status.installed = ready,
            Ok(Err(Unsettled)) => return None,
            Err(error) => status.problems.push(Chain(&error).to_string()),
        }
        if status.installed {
            let looked = self.look_before(&mut status);
            let followed = self.local_mtu_off.follow(&self.conflist.path, now);
            for error in [looked, followed].into_iter().filter_map(Result::err) {
                let reason = match error {
                    InstallError::Contested { .. } => "ConfigurationContested",
                    _ => "InstallFailed",
                };
                status.warn(reason, Chain(&error).to_string());
            }
        }
        Some(status)
    }

    fn install_plugin(
        &mut self,
        now: Instant,
        status: &mut InstallStatus,
    ) -> Result<(), InstallError> {
        let content = plugin::read(&self.config.source)?;
        let kept = self.plugin.keep(&content, plugin::MODE, now);
        let path = &self.plugin.path;
        match kept {
            Err(InstallError::File(error)) if error.is_read_only() && plugin::is_there(path) => {
                let text = format!(
                    "plugin {} is of another version than this agent: delete this node's sinabro pod, the init container of the next one installs it",
                    path.display()
                );
                status.warn("PluginOutdated", text);
                Ok(())
            }
            Err(InstallError::File(error)) if error.is_read_only() => {
                Err(InstallError::NoPlugin { path: path.clone() })
            }
            other => other,
        }
    }

    fn install_conflist(
        &mut self,
        now: Instant,
        status: &mut InstallStatus,
    ) -> Result<Result<(), Unsettled>, InstallError> {
        let path = self.conflist.path.clone();
        let found = Found::read(&path);
        if found.is_being_written() {
            let since = *self.unsettled.get_or_insert(now);
            if now.saturating_duration_since(since) < SETTLED {
                return Ok(Err(Unsettled));
            }
        }
        self.unsettled = None;
        let has_portmap = self.can_portmap(now, status);
        let (state_dir, socket) = (&self.config.state_dir, &self.config.socket);
        let ours = Ours::new(state_dir, socket, has_portmap);
        let plugins = ours.plugins(found.list());
        let versions = self.versions(now, conflist::types(&plugins), status);
        let list = conflist::list(found.list(), plugins, &versions);
        if found.list() == Some(&list) {
            file::set_mode(&path, CONFLIST_MODE)?;
            self.conflist.in_place(hash(&list));
            return Ok(Ok(()));
        }
        // Otherwise it is as it was left, and only what is wanted has changed.
        let taken = self
            .conflist
            .seen
            .is_some_and(|seen| found.list().map(hash) != Some(seen));
        if taken && !self.conflist.patience.allows(now) {
            let error = self.conflist.contested();
            // Changed it may be, but pods get our network by it.
            return match found.list() {
                Some(list) if conflist::serves(list, &ours) => {
                    status.warn("ConfigurationContested", error.to_string());
                    Ok(Ok(()))
                }
                _ => Err(error),
            };
        }
        // What somebody wrote since it was read must not be lost.
        if Found::read(&path) != found {
            return Ok(Err(Unsettled));
        }
        let mut text = serde_json::to_vec_pretty(&list)?;
        text.push(b'\n');
        self.conflist.put(&text, CONFLIST_MODE, taken, now)?;
        self.conflist.seen = Some(hash(&list));
        Ok(Ok(()))
    }

    /// Whether portmap is there and knows a version that can be offered.
    fn can_portmap(&mut self, now: Instant, status: &mut InstallStatus) -> bool {
        let dir = &self.config.bin_dir;
        match self.asker.ask(now, dir, conflist::PORTMAP) {
            Err(Unasked::Missing { .. }) => false,
            answer => {
                let can = versions::common(&[answer]).is_some();
                if !can {
                    let text = format!(
                        "plugin {} knows no version of CNI that Sinabro does: hostPorts do not work",
                        dir.join(conflist::PORTMAP).display()
                    );
                    status.warn("PluginIncompatible", text);
                }
                can
            }
        }
    }

    /// What can be offered to all plugins of the list.
    fn versions(&mut self, now: Instant, types: Vec<&str>, status: &mut InstallStatus) -> Versions {
        let chained = types.into_iter().filter(|name| *name != names::CNI_PLUGIN);
        let dir = &self.config.bin_dir;
        let known: Vec<_> = chained.map(|name| self.asker.ask(now, dir, name)).collect();
        for unasked in known.iter().filter_map(|answer| answer.as_ref().err()) {
            let text = unasked.to_string();
            match unasked {
                Unasked::Missing { .. } => status.warn("PluginMissing", text),
                Unasked::Silent { .. } => status.notes.push(text),
            }
        }
        versions::common(&known).unwrap_or_else(|| {
            let text = format!(
                "the plugins of {} know no version of CNI in common: no pod can be added",
                self.conflist.path.display()
            );
            status.warn("PluginIncompatible", text);
            Versions::plain()
        })
    }

    fn look_before(&self, status: &mut InstallStatus) -> Result<(), InstallError> {
        let dir = &self.config.conf_dir;
        let found = others::before_ours(dir).map_err(|source| InstallError::List {
            dir: dir.clone(),
            source,
        })?;
        for before in found {
            let path = before.path.display();
            let ours = names::CNI_CONFLIST;
            match before.delegates {
                true => status
                    .notes
                    .push(format!("{path} comes before {ours} and passes pods on to it")),
                false => status.warn(
                    "OtherNetworkFirst",
                    format!(
                        "{path} comes before {ours}: the runtime gives pods that network, delete the file if it is not wanted"
                    ),
                ),
            }
        }
        Ok(())
    }
}

fn hash(wanted: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    wanted.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
