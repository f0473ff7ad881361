//! Facts from a nodes file, followed live ([`super::followed_file`]).
//!
//! A file that is broken or gone changes nothing: the last good facts stay, the problem is
//! published beside them and logged once.

use super::{
    Snapshot, Source,
    followed_file::{FollowedFile, read},
    nodes_parse::{self, MAX_LEN},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};
use tokio::{sync::watch, task::spawn_blocking};
use tracing::{info, warn};

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

async fn follow(path: PathBuf, sender: watch::Sender<Snapshot>) {
    let mut file = FollowedFile::new(path);
    loop {
        tokio::select! {
            () = sender.closed() => return,
            () = file.changed() => {}
        }
        let failed = publish(file.path(), &sender).await;
        file.again(failed);
    }
}

/// Reads the file and publishes what is new; whether there is a problem.
async fn publish(path: &Path, sender: &watch::Sender<Snapshot>) -> bool {
    let from = path.to_owned();
    let outcome = spawn_blocking(move || {
        let bytes = read(&from, MAX_LEN).map_err(|error| error.to_string())?;
        nodes_parse::parse(&bytes).map_err(|error| error.to_string())
    });
    let outcome = outcome.await.map_err(|error| error.to_string()).flatten();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::followed_file::DEBOUNCE;
    use std::{fs, io::Write, time::Duration};

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
