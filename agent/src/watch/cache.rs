//! The nodes as the Kubernetes API had them last, kept in a file of the state directory.
//!
//! An agent that starts while the API server cannot be reached serves from it. The file is a
//! nodes file, so it can also be read by people and given to `--nodes`. It is replaced as a
//! whole, at most once a second; one that cannot be read is said and ignored. What is in it is
//! never more than a beginning: the first answer of the server takes its place.

use crate::{
    chain::Chain,
    plan::{Facts, Node},
    state_file::{read_up_to, replace, sweep},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tracing::warn;

/// More than twice what 15,000 nodes need.
const MAX_LEN: u64 = 16 << 20;
/// How often it is written at most.
const PAUSE: Duration = Duration::from_secs(1);

/// Writes facts down as they come.
pub struct Cache {
    path: PathBuf,
    latest: watch::Sender<Option<Arc<Facts>>>,
}

impl Cache {
    /// Nothing is read or written yet; what a killed agent left half written is removed.
    pub fn new(path: PathBuf) -> Self {
        sweep(&path);
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

/// The content of the file.
///
/// # Errors
/// Why it cannot be used.
pub fn parse(bytes: &[u8]) -> Result<Facts, String> {
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

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::watch::nodes_parse;
    use proptest::prelude::*;
    use sinabro_lab::wait::eventually;
    use std::{fs, thread};
    use tempfile::TempDir;

    /// For the file, of which a write may be under way when a test ends: nobody waits for it, and what it puts in place
    /// behind the back of who empties the directory keeps that there.
    pub struct StateDir(TempDir);

    impl StateDir {
        pub fn made() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        pub fn path(&self) -> &Path {
            self.0.path()
        }
    }

    impl Drop for StateDir {
        fn drop(&mut self) {
            // Without a directory nothing is written.
            let gone = || match fs::remove_dir_all(self.path()) {
                Err(error) => error.kind() == io::ErrorKind::NotFound,
                Ok(()) => true,
            };
            if !thread::panicking() {
                eventually("an end of what is written", gone);
                assert!(!self.path().exists());
            }
        }
    }

    fn facts(nodes: u8) -> Facts {
        Facts::new((0..nodes).map(|n| Node {
            name: format!("n{n}"),
            addresses: vec![[192, 168, 0, n].into()],
            pod_cidrs: vec![format!("10.244.{n}.0/24").parse().unwrap()],
            registered: 7,
            ready: n % 2 == 0,
            native: n % 3 == 0,
            zero_checksum: n % 5 < 2,
        }))
    }

    async fn written(path: &Path, facts: &Facts) {
        let written = async {
            while !read(path).is_ok_and(|kept| kept.as_ref() == Some(facts)) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let written = tokio::time::timeout(Duration::from_secs(30), written);
        written.await.unwrap();
    }

    #[tokio::test]
    async fn the_latest_facts_are_kept_and_make_a_nodes_file() {
        let dir = StateDir::made();
        let path = dir.path().join("nodes.json");
        assert_eq!(load(&path).await, None);
        std::fs::write(dir.path().join(".nodes.json.tmp-0123"), "[{").unwrap();
        let cache = Cache::new(path.clone());
        for nodes in [3, 200, 7] {
            cache.keep(Arc::new(facts(nodes)));
        }
        written(&path, &facts(7)).await;
        let text = std::fs::read(&path).unwrap();
        assert_eq!(nodes_parse::parse(&text).unwrap(), facts(7));
        // What cannot be read of a Node is not kept.
        let mut more = facts(8);
        more.unreadable.insert("bad".into(), "why".into());
        cache.keep(Arc::new(more));
        written(&path, &facts(8)).await;
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_file_that_is_none_is_ignored_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nodes.json");
        let whole = serde_json::to_vec(&facts(2).nodes.values().collect::<Vec<_>>()).unwrap();
        for bytes in [
            &b""[..],
            b"{",
            b"[{\"name\":\"a\"}]",
            b"\xff",
            &whole[..whole.len() - 1],
        ] {
            std::fs::write(&path, bytes).unwrap();
            assert!(read(&path).is_err());
            assert_eq!(load(&path).await, None);
        }
        std::fs::write(&path, whole).unwrap();
        assert_eq!(load(&path).await, Some(facts(2)));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(read(&path).is_err());
    }

    proptest! {
        #[test]
        fn garbage_and_truncation_never_panic_or_invent_a_node(
            garbage in proptest::collection::vec(any::<u8>(), 0..200),
            cut in 0usize..300,
        ) {
            let _ = parse(&garbage);
            let whole = serde_json::to_vec(&facts(3).nodes.values().collect::<Vec<_>>()).unwrap();
            prop_assert!(parse(&whole[..cut.min(whole.len() - 1)]).is_err());
        }
    }
}
