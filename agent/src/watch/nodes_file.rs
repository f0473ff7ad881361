//! Facts from a nodes file, followed live.
//!
//! The directory is watched with inotify, so a file that is written in place, renamed over or
//! deleted and made again is noticed alike, also where the path is a symbolic link that is swung
//! to another file. A file being written is read when its writer closes it, not before: a list
//! cut in half would otherwise pass for one with fewer nodes. A slow poll covers what inotify
//! cannot see (network file systems, a directory made again).
//!
//! A file that is broken or gone changes nothing: the last good facts stay, the problem is
//! published beside them and logged once.

use super::{Snapshot, Source, nodes_parse};
use crate::{
    dir_watch::{Change, DirWatch},
    plan::Facts,
};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, sleep},
};
use tracing::{info, warn};

/// How often the file is looked at without being asked.
const POLL: Duration = Duration::from_secs(2);
/// Several changes in a row are one: a deletion followed by a creation is not a loss.
const DEBOUNCE: Duration = Duration::from_millis(30);
/// How long a file must rest where nobody said that it is complete.
const REST: Duration = Duration::from_millis(300);

/// Follows the file until the last receiver is gone. It need not exist yet.
pub fn spawn(path: PathBuf) -> Source {
    let (sender, updates) = watch::channel(Snapshot::default());
    let from = format!("nodes file {}", path.display());
    let task = tokio::spawn(follow(path, sender));
    Source {
        from,
        updates,
        task,
    }
}

/// What distinguishes one state of the file from the next; none while there is no file.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

fn stamp(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    let (dev, ino, len) = (meta.dev(), meta.ino(), meta.len());
    Some((dev, ino, len, meta.mtime(), meta.mtime_nsec()))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sign {
    /// The file itself was closed after writing, renamed or deleted: it is complete.
    Complete,
    /// Something happened, or the poll came round.
    Perhaps,
}

async fn follow(path: PathBuf, sender: watch::Sender<Snapshot>) {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let watcher = DirWatch::new(directory);
    let ours = |change: &Change| change.complete && change.name.as_deref() == path.file_name();
    let mut poll = interval(POLL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Before the first read, so that no change falls between the two.
    watcher.renew();
    let mut read = stamp(&path);
    let mut failed = publish(&path, &sender).await;
    loop {
        let sign = tokio::select! {
            () = sender.closed() => return,
            changes = watcher.next() => match changes.iter().any(ours) {
                true => Sign::Complete,
                false => Sign::Perhaps,
            },
            _ = poll.tick() => {
                watcher.renew();
                Sign::Perhaps
            }
        };
        match sign {
            Sign::Complete => {
                sleep(DEBOUNCE).await;
                watcher.drain();
            }
            Sign::Perhaps => {
                let before = stamp(&path);
                if before == read && !failed {
                    continue;
                }
                sleep(REST).await;
                if stamp(&path) != before {
                    continue;
                }
            }
        }
        read = stamp(&path);
        failed = publish(&path, &sender).await;
    }
}

/// Reads the file and publishes what is new; whether there is a problem.
async fn publish(path: &Path, sender: &watch::Sender<Snapshot>) -> bool {
    let outcome = match tokio::fs::read(path).await {
        Ok(bytes) => parse(&bytes),
        Err(error) => Err(error.to_string()),
    };
    let (facts, problem) = match outcome {
        Ok(facts) => (Some(facts), None),
        Err(reason) => (None, Some(reason)),
    };
    sender.send_if_modified(|snapshot| {
        let kept = if snapshot.facts.is_some() {
            "; the last good list stays in use"
        } else {
            ""
        };
        let problem = problem.map(|p| format!("nodes file {}: {p}{kept}", path.display()));
        let new_facts = facts.filter(|f| snapshot.facts.as_deref() != Some(f));
        if new_facts.is_none() && problem == snapshot.problem {
            return false;
        }
        match (&problem, &new_facts) {
            (Some(problem), _) => warn!("{problem}"),
            (None, Some(facts)) => {
                info!(
                    nodes = facts.nodes.len(),
                    "read nodes file {}",
                    path.display()
                );
            }
            (None, None) => info!("nodes file {} is good again", path.display()),
        }
        snapshot.stale_since = problem
            .as_ref()
            .map(|_| snapshot.stale_since.unwrap_or_else(SystemTime::now));
        snapshot.problem = problem;
        if let Some(facts) = new_facts {
            snapshot.facts = Some(Arc::new(facts));
        }
        true
    });
    sender.borrow().problem.is_some()
}

fn parse(bytes: &[u8]) -> Result<Facts, String> {
    nodes_parse::parse(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn list(names: &[&str]) -> String {
        let entry = |n: &&str| format!("- {{name: {n}, addresses: [], podCIDRs: []}}\n");
        if names.is_empty() {
            return "[]".into();
        }
        names.iter().map(entry).collect()
    }

    async fn wait(source: &mut Source, what: &str, until: impl Fn(&Snapshot) -> bool) -> Snapshot {
        let found = async { source.updates.wait_for(|s| until(s)).await.unwrap().clone() };
        let found = tokio::time::timeout(Duration::from_secs(20), found).await;
        found.unwrap_or_else(|_| panic!("{what}: still {:?}", source.updates.borrow()))
    }

    fn has(names: &[&str]) -> impl Fn(&Snapshot) -> bool {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        move |s| {
            let known = s.facts.as_ref().map(|f| f.nodes.keys().cloned().collect());
            s.problem.is_none() && known == Some(names.clone())
        }
    }

    #[tokio::test]
    async fn every_way_of_changing_the_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nodes.yaml");
        let mut source = spawn(path.clone());
        wait(&mut source, "missing", |s| {
            s.problem.as_ref().is_some_and(|p| p.contains("nodes.yaml"))
        })
        .await;

        fs::write(&path, list(&["a"])).unwrap();
        wait(&mut source, "created", has(&["a"])).await;

        fs::write(&path, list(&["a", "b"])).unwrap();
        wait(&mut source, "written in place", has(&["a", "b"])).await;

        fs::write(dir.path().join("new"), list(&["c"])).unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        wait(&mut source, "renamed over", has(&["c"])).await;

        fs::remove_file(&path).unwrap();
        let gone = wait(&mut source, "deleted", |s| s.problem.is_some()).await;
        assert_eq!(
            gone.facts.unwrap().nodes.len(),
            1,
            "the last good list stays"
        );
        fs::write(&path, list(&["d"])).unwrap();
        wait(&mut source, "made again", has(&["d"])).await;

        fs::write(&path, "- name: [").unwrap();
        let broken = wait(&mut source, "broken", |s| s.problem.is_some()).await;
        assert!(
            broken
                .problem
                .unwrap()
                .contains("last good list stays in use")
        );
        assert!(broken.facts.unwrap().nodes.contains_key("d"));
        fs::write(&path, list(&["d"])).unwrap();
        wait(&mut source, "good again", has(&["d"])).await;
    }

    #[tokio::test]
    async fn a_symbolic_link_that_swings_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nodes.yaml");
        for version in ["v1", "v2"] {
            fs::create_dir(dir.path().join(version)).unwrap();
            fs::write(
                dir.path().join(version).join("nodes.yaml"),
                list(&[version]),
            )
            .unwrap();
        }
        // As Kubernetes mounts a ConfigMap: nodes.yaml → ..data/nodes.yaml, ..data → v1.
        std::os::unix::fs::symlink("v1", dir.path().join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/nodes.yaml", &path).unwrap();
        let mut source = spawn(path);
        wait(&mut source, "first", has(&["v1"])).await;
        std::os::unix::fs::symlink("v2", dir.path().join("tmp")).unwrap();
        fs::rename(dir.path().join("tmp"), dir.path().join("..data")).unwrap();
        wait(&mut source, "swung", has(&["v2"])).await;
    }

    #[tokio::test]
    async fn a_list_being_written_is_read_when_it_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nodes.yaml");
        fs::write(&path, list(&["a", "b"])).unwrap();
        let mut source = spawn(path.clone());
        wait(&mut source, "first", has(&["a", "b"])).await;

        let mut file = fs::File::create(&path).unwrap();
        file.write_all(list(&["a"]).as_bytes()).unwrap();
        file.flush().unwrap();
        tokio::time::sleep(DEBOUNCE * 4).await;
        file.write_all(list(&["b", "c"]).as_bytes()).unwrap();
        drop(file);
        // The first change to be seen is the whole one.
        source.updates.changed().await.unwrap();
        assert!(has(&["a", "b", "c"])(&source.updates.borrow()));
    }

    #[tokio::test]
    async fn the_directory_may_come_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("later/nodes.yaml");
        let mut source = spawn(path.clone());
        wait(&mut source, "missing", |s| s.problem.is_some()).await;
        fs::create_dir(dir.path().join("later")).unwrap();
        fs::write(&path, list(&["a"])).unwrap();
        wait(&mut source, "there", has(&["a"])).await;
    }

    #[tokio::test]
    async fn the_task_ends_with_its_last_receiver() {
        let dir = tempfile::tempdir().unwrap();
        let Source { updates, task, .. } = spawn(dir.path().join("nodes.yaml"));
        drop(updates);
        task.await.unwrap();
    }
}
