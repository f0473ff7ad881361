//! What is not masqueraded, as a file says it that is followed live ([`super::followed_file`]).
//!
//! A file that is not there says nothing, and neither does an empty one: then the settings hold. One that is
//! broken changes nothing: what it said last stays, over a restart of the agent, too, and the problem is
//! published beside it. For that its last good content is kept in the state directory.

use super::{
    followed_file::{FollowedFile, POLL, read},
    masquerade_parse::{MAX_LEN, Parsed, parse},
};
use crate::{
    chain::Chain,
    plan::masquerade::Overrides,
    state_file::{read_up_to, remove, replace, sweep},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
};
use tracing::{info, warn};

/// However soon a file wants its changes to be seen.
const SHORTEST: Duration = Duration::from_millis(100);

/// The latest that is known of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// What it says; what it said last, if there is a problem.
    pub overrides: Arc<Overrides>,
    /// Where that is from; none if there is no file.
    pub from: Option<PathBuf>,
    /// What is wrong with the file, while it lasts.
    pub problem: Option<String>,
}

/// None until the file was looked for.
pub type Updates = watch::Receiver<Option<Said>>;

/// Follows the file until the last receiver is gone. `kept` is where its last good content is kept.
pub fn spawn(path: PathBuf, kept: PathBuf) -> (Updates, JoinHandle<()>) {
    let (sender, updates) = watch::channel(None);
    (updates, tokio::spawn(follow(path, kept, sender)))
}

async fn follow(path: PathBuf, kept: PathBuf, sender: watch::Sender<Option<Said>>) {
    let mut file = FollowedFile::new(path.clone());
    loop {
        tokio::select! {
            () = sender.closed() => return,
            () = file.changed() => {}
        }
        let (path, kept, is_first) = (path.clone(), kept.clone(), sender.borrow().is_none());
        let looked = spawn_blocking(move || {
            if is_first {
                sweep(&kept);
            }
            let found = look(&path, &kept);
            let before = (found.is_err() && is_first).then(|| read_kept(&kept));
            (found, before.flatten())
        });
        let (found, before) = match looked.await {
            Ok(looked) => looked,
            Err(error) => (Err(error.to_string()), None),
        };
        file.again(found.is_err());
        if let Some((parsed, _)) = found.as_ref().ok().or(before.as_ref()) {
            let interval = parsed.resync_interval.unwrap_or(POLL);
            file.look_every(interval.clamp(SHORTEST, POLL));
        }
        publish(file.path(), &sender, found, before);
    }
}

/// What was read, and whether there is a file.
type Found = (Parsed, bool);

fn look(path: &Path, kept: &Path) -> Result<Found, String> {
    let bytes = match read(path, MAX_LEN) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            note(remove(kept).map_err(|error| Chain(&error).to_string()));
            return Ok((Parsed::default(), false));
        }
        Err(error) => return Err(error.to_string()),
    };
    let parsed = parse(&bytes).map_err(|error| error.to_string())?;
    note(replace(kept, &bytes).map_err(|error| Chain(&error).to_string()));
    Ok((parsed, true))
}

/// That it cannot be kept is no reason not to use it.
fn note(outcome: Result<(), String>) {
    if let Err(why) = outcome {
        warn!("cannot keep what is not masqueraded for the next start: {why}");
    }
}

fn read_kept(kept: &Path) -> Option<Found> {
    let parsed = match read_up_to(kept, MAX_LEN as u64) {
        Ok(bytes) => parse(&bytes).map_err(|error| error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => Err(error.to_string()),
    };
    let warn = |why| warn!("ignoring what is kept in {}: {why}", kept.display());
    parsed.map_err(warn).ok().map(|parsed| (parsed, true))
}

fn publish(
    path: &Path,
    sender: &watch::Sender<Option<Said>>,
    found: Result<Found, String>,
    before: Option<Found>,
) {
    let said = |(parsed, is_there): Found| Said {
        overrides: Arc::new(parsed.overrides),
        from: is_there.then(|| path.to_owned()),
        problem: None,
    };
    sender.send_if_modified(|latest| {
        let next = match found {
            Ok(found) => said(found),
            Err(why) => {
                let last = latest.clone().or(before.map(said)).unwrap_or_default();
                let stays = match last.from {
                    Some(_) => "what it said before stays in use",
                    None => "the settings are in use without it",
                };
                let problem = Some(format!("{}: {why}; {stays}", path.display()));
                Said { problem, ..last }
            }
        };
        if latest.as_ref() == Some(&next) {
            return false;
        }
        if next.problem.is_none() && (next.from.is_some() || latest.is_some()) {
            let says = if next.from.is_some() { "read" } else { "gone" };
            info!("what is not masqueraded: {says} {}", path.display());
        }
        *latest = Some(next);
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink, sync::Barrier, thread};
    use tempfile::TempDir;

    struct Followed {
        dir: TempDir,
        updates: Updates,
    }

    impl Followed {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let updates = Self::start(&dir);
            Self { dir, updates }
        }

        fn start(dir: &TempDir) -> Updates {
            fs::create_dir_all(dir.path().join("state")).unwrap();
            spawn(dir.path().join("masq"), dir.path().join("state/kept")).0
        }

        /// As a new agent finds it.
        fn restart(&mut self) {
            self.updates = Self::start(&self.dir);
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn write(&self, text: &str) {
            fs::write(self.path("new"), text).unwrap();
            fs::rename(self.path("new"), self.path("masq")).unwrap();
        }

        async fn wait(&mut self, what: &str, until: impl Fn(&Said) -> bool) -> Said {
            let found = async {
                let said = self
                    .updates
                    .wait_for(|said| said.as_ref().is_some_and(&until));
                said.await.unwrap().clone().unwrap()
            };
            let found = tokio::time::timeout(Duration::from_secs(30), found).await;
            found.unwrap_or_else(|_| panic!("{what}: still {:?}", self.updates.borrow()))
        }
    }

    fn list(cidr: &str) -> String {
        format!("nonMasqueradeCIDRs: [{cidr}]\n")
    }

    fn says(cidr: &str) -> impl Fn(&Said) -> bool {
        let cidrs = vec![cidr.parse().unwrap()];
        move |said| {
            said.problem.is_none() && said.overrides.non_masquerade_cidrs.as_ref() == Some(&cidrs)
        }
    }

    fn says_nothing(said: &Said) -> bool {
        said.problem.is_none() && *said.overrides == Overrides::default()
    }

    fn is_wrong(said: &Said) -> bool {
        said.problem.is_some()
    }

    #[tokio::test]
    async fn a_missing_or_empty_file_says_nothing_and_a_bad_one_changes_nothing() {
        let mut file = Followed::new();
        assert_eq!(file.wait("missing", says_nothing).await.from, None);
        file.write(&list("10.0.0.0/8"));
        let said = file.wait("there", says("10.0.0.0/8")).await;
        assert_eq!(said.from, Some(file.path("masq")));

        file.write("masqLinkLocal: true\nnonMasqueradeCIDRs: [10.0.0.1/8]");
        let said = file.wait("bad", is_wrong).await;
        assert!(
            says("10.0.0.0/8")(&Said {
                problem: None,
                ..said.clone()
            }),
            "{said:?}"
        );
        let problem = said.problem.unwrap();
        for part in [
            "masq: line 2: ",
            "`10.0.0.1/8`",
            "did you mean 10.0.0.0/8",
            "before stays in use",
        ] {
            assert!(problem.contains(part), "{problem}");
        }
        file.write(&list("172.16.0.0/12"));
        file.wait("good again", says("172.16.0.0/12")).await;
        file.write("# nothing\n");
        file.wait("empty", says_nothing).await;
        file.write(&list("172.16.0.0/12"));
        file.wait("there again", says("172.16.0.0/12")).await;
        fs::remove_file(file.path("masq")).unwrap();
        let said = file.wait("gone", says_nothing).await;
        assert_eq!(said.from, None);
    }

    #[tokio::test]
    async fn what_was_good_last_outlives_the_agent_while_the_file_is_bad() {
        let mut file = Followed::new();
        file.write("masqLinkLocal: [");
        let said = file.wait("bad from the beginning", is_wrong).await;
        assert_eq!(*said.overrides, Overrides::default());
        assert!(said.problem.unwrap().contains("without it"));

        file.write(&list("10.0.0.0/8"));
        file.wait("good", says("10.0.0.0/8")).await;
        file.write("masqLinkLocal: [");
        file.wait("bad", is_wrong).await;
        file.restart();
        let said = file.wait("bad when it starts", is_wrong).await;
        assert!(
            says("10.0.0.0/8")(&Said {
                problem: None,
                ..said.clone()
            }),
            "{said:?}"
        );
        // Not what a file said that is gone.
        fs::remove_file(file.path("masq")).unwrap();
        file.wait("gone", says_nothing).await;
        file.write("masqLinkLocal: [");
        file.restart();
        let said = file.wait("bad and nothing before", is_wrong).await;
        assert_eq!(*said.overrides, Overrides::default());

        // Half of what was kept, as no kill leaves it, is ignored.
        fs::write(file.path("state/kept"), "nonMasq").unwrap();
        file.restart();
        file.wait("bad and nothing kept", is_wrong).await;
    }

    #[tokio::test]
    async fn what_is_no_file_is_a_problem_and_is_not_waited_for() {
        let mut file = Followed::new();
        file.wait("missing", says_nothing).await;
        fs::create_dir(file.path("masq")).unwrap();
        let said = file.wait("a directory", is_wrong).await;
        assert!(said.problem.unwrap().contains("not a regular file"));
        fs::remove_dir(file.path("masq")).unwrap();
        file.wait("nothing", says_nothing).await;
        nix::unistd::mkfifo(&file.path("masq"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        file.wait("a FIFO", is_wrong).await;
        fs::remove_file(file.path("masq")).unwrap();
        fs::write(file.path("masq"), vec![b'#'; MAX_LEN + 1]).unwrap();
        let long = |said: &Said| {
            said.problem
                .as_ref()
                .is_some_and(|why| why.contains("longer"))
        };
        file.wait("too long", long).await;
    }

    /// As the kubelet changes what it has mounted: `..data` is swung to another directory, and the old
    /// one removed.
    #[tokio::test]
    async fn a_config_map_is_followed_however_fast_it_changes() {
        let mut file = Followed::new();
        symlink("..data/masq", file.path("masq")).unwrap();
        let swing = |dir: &Path, n: u8| {
            let version = dir.join(format!("..{n}"));
            fs::create_dir(&version).unwrap();
            fs::write(version.join("masq"), list(&format!("10.{n}.0.0/16"))).unwrap();
            symlink(format!("..{n}"), dir.join("..data_tmp")).unwrap();
            fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
            let before = dir.join(format!("..{}", n.wrapping_sub(1)));
            match fs::remove_dir_all(before) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.unwrap(),
            }
        };
        swing(file.dir.path(), 1);
        file.wait("first", says("10.1.0.0/16")).await;
        let start = Arc::new(Barrier::new(2));
        let (dir, begin) = (file.dir.path().to_owned(), start.clone());
        let swinger = thread::spawn(move || {
            begin.wait();
            (2..=21).for_each(|n| swing(&dir, n));
        });
        start.wait();
        file.wait("last", says("10.21.0.0/16")).await;
        swinger.join().unwrap();
        // All the while each was whole.
        assert!(file.updates.borrow().as_ref().unwrap().problem.is_none());
    }

    #[tokio::test]
    async fn a_file_written_in_place_twenty_times_is_read_as_it_is_at_last() {
        let mut file = Followed::new();
        for n in 0..20 {
            fs::write(file.path("masq"), list(&format!("10.{n}.0.0/16"))).unwrap();
        }
        file.wait("last", says("10.19.0.0/16")).await;
    }

    #[tokio::test]
    async fn the_task_ends_with_its_last_receiver() {
        let dir = tempfile::tempdir().unwrap();
        let (updates, task) = spawn(dir.path().join("masq"), dir.path().join("kept"));
        drop(updates);
        task.await.unwrap();
    }
}
