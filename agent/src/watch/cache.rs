//! The nodes as the Kubernetes API had them last, kept in a file of the state directory.
//!
//! An agent that starts while the API server cannot be reached serves from it. The file is a
//! nodes file, so it can also be read by people and given to `--nodes`. It is replaced as a
//! whole, at most once a second; one that cannot be read is said and ignored. What is in it is
//! never more than a beginning: the first answer of the server takes its place.

use crate::{
    chain::Chain,
    plan::{Facts, Node},
    state_file::{read_up_to, replace},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tracing::warn;

/// More than twice what 5000 nodes need.
const MAX_LEN: u64 = 4 << 20;
/// How often it is written at most.
const PAUSE: Duration = Duration::from_secs(1);

/// Writes facts down as they come.
pub struct Cache {
    path: PathBuf,
    latest: watch::Sender<Option<Arc<Facts>>>,
}

impl Cache {
    /// Nothing is read or written yet.
    pub fn new(path: PathBuf) -> Self {
        let (latest, receiver) = watch::channel(None);
        tokio::spawn(write(path.clone(), receiver));
        Self { path, latest }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has the facts written; the latest win.
    pub fn keep(&self, facts: Arc<Facts>) {
        self.latest.send_replace(Some(facts));
    }
}

/// The facts of the file, if there are any.
pub async fn load(path: &Path) -> Option<Facts> {
    let from = path.to_owned();
    let loaded = spawn_blocking(move || read(&from)).await;
    match loaded.unwrap_or_else(|error| Err(error.to_string())) {
        Ok(facts) => facts,
        Err(why) => {
            warn!("ignoring the nodes kept in {}: {why}", path.display());
            None
        }
    }
}

fn read(path: &Path) -> Result<Option<Facts>, String> {
    match read_up_to(path, MAX_LEN) {
        Ok(bytes) => parse(&bytes).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn parse(bytes: &[u8]) -> Result<Facts, String> {
    let nodes: Vec<Node> = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    Ok(Facts::new(nodes))
}

async fn write(path: PathBuf, mut latest: watch::Receiver<Option<Arc<Facts>>>) {
    let mut failed = false;
    while latest.changed().await.is_ok() {
        let Some(facts) = latest.borrow_and_update().clone() else {
            continue;
        };
        let to = path.clone();
        let written = spawn_blocking(move || {
            let nodes: Vec<&Node> = facts.nodes.values().collect();
            let text = serde_json::to_vec(&nodes).map_err(|error| error.to_string())?;
            replace(&to, &text).map_err(|error| Chain(&error).to_string())
        });
        match written.await.map_err(|error| error.to_string()).flatten() {
            Ok(()) => failed = false,
            Err(why) if !failed => {
                failed = true;
                warn!("cannot keep the nodes for the next start: {why}");
            }
            Err(_) => {}
        }
        sleep(PAUSE).await;
    }
}
