//! Which versions of the CNI specification all plugins of a list know.
//!
//! A runtime speaks one version with all plugins of a list: the highest that the list offers and
//! its own library knows (CNI 1.1 §1, `cniVersions`). A plugin that does not know it refuses every
//! pod. So each chained plugin is asked (verb VERSION) before a version is offered, and asked again
//! when its file changes.
//!
//! A plugin that cannot be asked, because it is not there, hangs, or is linked with libraries that
//! the agent's container lacks, counts as one of [`ASSUMED`]. It is asked again now and then: a machine that is busy, as
//! it is when it starts, may have kept it from answering.

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde::Deserialize;
use std::{
    collections::HashMap,
    io::{self, Read as _, Write as _},
    os::unix::{fs::MetadataExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// What our plugin knows, and so all that is ever offered, in their order.
const OFFERED: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// All that the configuration's own `cniVersion` may be: libraries that do not know 1.1 have no
/// `cniVersions` to choose from.
const PLAIN: usize = 3;
/// Of the reference plugins since 2021.
const ASSUMED: [&str; 3] = ["0.3.1", "0.4.0", "1.0.0"];
/// How long one may take to answer. Tests have the patience of tests: how busy the machine is, is no part of them.
const DEADLINE: Duration = match cfg!(test) {
    true => Duration::from_secs(60),
    false => Duration::from_secs(2),
};
/// How soon one that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(60);
/// How soon a program that is being written is started again.
const BUSY: Duration = Duration::from_millis(10);
const MAX_ANSWER: u64 = 64 * 1024;

/// What a list offers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Versions {
    /// For libraries that know one version a list.
    pub plain: &'static str,
    /// All of them, in order.
    pub all: Vec<&'static str>,
}

impl Versions {
    /// What is best offered if there is nothing to be known.
    pub fn plain() -> Self {
        Self {
            plain: OFFERED[PLAIN - 1],
            all: vec![OFFERED[PLAIN - 1]],
        }
    }
}

/// Why a plugin's versions are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unasked {
    #[error("there is no plugin {name} in {}: no pod can be added before it is there", dir.display())]
    Missing { name: String, dir: PathBuf },
    #[error("plugin {} cannot be asked which versions it knows ({reason}): taken for one of CNI 1.0.0", path.display())]
    Silent { path: PathBuf, reason: String },
}

/// Asks plugins, and remembers what each file answered.
#[derive(Debug)]
pub struct Asker {
    known: HashMap<PathBuf, Asked>,
    deadline: Duration,
}

impl Default for Asker {
    fn default() -> Self {
        Self {
            known: HashMap::new(),
            deadline: DEADLINE,
        }
    }
}

/// What a file answered, and when it was asked.
#[derive(Debug)]
struct Asked {
    stamp: Stamp,
    answer: Result<Vec<String>, Unasked>,
    at: Instant,
}

impl Asked {
    fn holds(&self, stamp: &Stamp, now: Instant) -> bool {
        let is_over = || now.saturating_duration_since(self.at) >= AGAIN;
        self.stamp == *stamp && (self.answer.is_ok() || !is_over())
    }
}

/// Tells a file from its successor.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Asker {
    /// The versions that a plugin knows.
    ///
    /// # Errors
    /// Why it did not say.
    pub fn ask(&mut self, now: Instant, dir: &Path, name: &str) -> Result<Vec<String>, Unasked> {
        let path = dir.join(name);
        // A name with a slash would be looked for elsewhere; runtimes refuse it.
        let meta = (!name.contains('/')).then(|| path.metadata());
        let Some(meta) = meta.and_then(Result::ok).filter(|meta| meta.is_file()) else {
            self.known.remove(&path);
            return Err(Unasked::Missing {
                name: name.to_owned(),
                dir: dir.to_owned(),
            });
        };
        let stamp = Stamp {
            inode: meta.ino(),
            size: meta.size(),
            changed: (meta.ctime(), meta.ctime_nsec()),
        };
        if let Some(asked) = self.known.get(&path)
            && asked.holds(&stamp, now)
        {
            return asked.answer.clone();
        }
        let answer = ask(&path, self.deadline).map_err(|error| Unasked::Silent {
            path: path.clone(),
            reason: error.to_string(),
        });
        let asked = Asked {
            stamp,
            answer: answer.clone(),
            at: now,
        };
        self.known.insert(path, asked);
        answer
    }
}

/// What can be offered to plugins of these versions; none if they have no version in common.
pub fn common(known: &[Result<Vec<String>, Unasked>]) -> Option<Versions> {
    let knows = |version: &str, plugin: &Result<Vec<String>, Unasked>| match plugin {
        Ok(known) => known.iter().any(|known| known == version),
        Err(_) => ASSUMED.contains(&version),
    };
    let all_know = |version: &&str| known.iter().all(|plugin| knows(version, plugin));
    let plain = OFFERED[..PLAIN].iter().copied().rev().find(all_know)?;
    let more = OFFERED[PLAIN..].iter().copied().filter(all_know);
    Some(Versions {
        plain,
        all: [plain].into_iter().chain(more).collect(),
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    supported_versions: Vec<String>,
}

fn ask(path: &Path, deadline: Duration) -> io::Result<Vec<String>> {
    let mut child = start(path, deadline)?;
    if let Some(mut input) = child.stdin.take() {
        // Less than a pipe holds. One that does not read it may answer all the same.
        let _ = input.write_all(br#"{"cniVersion":"1.0.0"}"#);
    }
    let (sender, answer) = mpsc::channel();
    let output = child.stdout.take();
    let reader = thread::Builder::new().name("plugin-version".into());
    reader.spawn(move || {
        let mut text = Vec::new();
        let output = output.map_or(Ok(0), |output| {
            output.take(MAX_ANSWER).read_to_end(&mut text)
        });
        let _ = sender.send(output.map(|_| text));
    })?;
    let answer = answer.recv_timeout(deadline);
    // Before it is waited for, while its number is certainly its own.
    if let Ok(group) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    child.wait()?;
    let text = answer.map_err(|_| {
        let text = format!("no answer in {} s", deadline.as_secs());
        io::Error::new(io::ErrorKind::TimedOut, text)
    })??;
    let answer: Answer = serde_json::from_slice(&text).map_err(|error| {
        let text = format!("not an answer to VERSION: {error}");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })?;
    Ok(answer.supported_versions)
}

fn start(path: &Path, deadline: Duration) -> io::Result<Child> {
    let deadline = Instant::now() + deadline;
    loop {
        let child = Command::new(path)
            .env_clear()
            .env("CNI_COMMAND", "VERSION")
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // What it starts ends with it.
            .process_group(0)
            .spawn();
        match child {
            // Still being written.
            Err(error)
                if error.kind() == io::ErrorKind::ExecutableFileBusy
                    && Instant::now() < deadline =>
            {
                thread::sleep(BUSY);
            }
            other => return other,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt as _};

    /// A program in place of a plugin.
    pub fn script(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let new = path.with_extension("new");
        fs::write(&new, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&new, path).unwrap();
    }

    /// A plugin that knows these versions, a JSON list.
    pub fn knowing(path: &Path, versions: &str) {
        let answer = format!(r#"{{"cniVersion":"1.0.0","supportedVersions":{versions}}}"#);
        script(
            path,
            &format!("[ \"$CNI_COMMAND\" = VERSION ] && echo '{answer}'"),
        );
    }

    fn plugin(versions: &[&str]) -> Result<Vec<String>, Unasked> {
        Ok(versions.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn only_what_all_know_is_offered() {
        let silent = Err(Unasked::Missing {
            name: "x".into(),
            dir: "/".into(),
        });
        let all = plugin(&["0.4.0", "1.0.0", "1.1.0"]);
        let plain = plugin(&["0.1.0", "0.4.0", "1.0.0"]);
        let old = plugin(&["0.3.0", "0.3.1", "0.4.0"]);
        for (chained, wanted) in [
            (vec![], Some(("1.0.0", vec!["1.0.0", "1.1.0"]))),
            (vec![all.clone()], Some(("1.0.0", vec!["1.0.0", "1.1.0"]))),
            (
                vec![all.clone(), plain.clone()],
                Some(("1.0.0", vec!["1.0.0"])),
            ),
            (vec![silent.clone()], Some(("1.0.0", vec!["1.0.0"]))),
            (
                vec![old.clone(), all.clone()],
                Some(("0.4.0", vec!["0.4.0"])),
            ),
            (vec![old, silent], Some(("0.4.0", vec!["0.4.0"]))),
            (vec![plugin(&["1.1.0"])], None),
            (vec![plugin(&["0.2.0"]), all], None),
            (vec![plugin(&[])], None),
        ] {
            let found = common(&chained).map(|found| (found.plain, found.all));
            assert_eq!(found, wanted, "{chained:?}");
        }
    }

    #[test]
    fn a_plugin_is_asked_once_and_again_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chained");
        let count = dir.path().join("count");
        let mut asker = Asker::default();
        let answering = |versions: &str| {
            let say = format!(
                "echo x >> {}; echo '{{\"supportedVersions\":{versions}}}'",
                count.display()
            );
            script(&path, &say);
        };
        answering(r#"["1.0.0"]"#);
        let now = Instant::now();
        for time in [now, now, now + AGAIN * 2] {
            assert_eq!(asker.ask(time, dir.path(), "chained"), plugin(&["1.0.0"]));
        }
        assert_eq!(fs::read(&count).unwrap(), b"x\n");
        answering(r#"["1.0.0","1.1.0"]"#);
        assert_eq!(
            asker.ask(now, dir.path(), "chained"),
            plugin(&["1.0.0", "1.1.0"])
        );
    }

    #[test]
    fn a_plugin_that_said_nothing_is_asked_again_after_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let can = dir.path().join("can");
        let say = format!(
            "[ -e {} ] && echo '{{\"supportedVersions\":[\"1.1.0\"]}}'",
            can.display()
        );
        script(&dir.path().join("chained"), &say);
        let (mut asker, now) = (Asker::default(), Instant::now());
        let mut ask = |time| asker.ask(time, dir.path(), "chained");
        assert!(matches!(ask(now), Err(Unasked::Silent { .. })));
        fs::write(&can, "").unwrap();
        // Not at every look: one that hangs takes its time.
        let before = now + AGAIN - Duration::from_nanos(1);
        assert!(matches!(ask(before), Err(Unasked::Silent { .. })));
        assert_eq!(ask(now + AGAIN), plugin(&["1.1.0"]));
    }

    #[test]
    fn a_plugin_that_says_nothing_of_use_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let now = Instant::now();
        let mut asker = Asker::default();
        let missing = asker.ask(now, dir.path(), "chained").unwrap_err();
        assert!(matches!(missing, Unasked::Missing { .. }), "{missing}");
        script(&dir.path().join("x"), "true");
        let outside = asker.ask(now, &dir.path().join("sub"), "../x").unwrap_err();
        assert!(matches!(outside, Unasked::Missing { .. }), "{outside}");
        let path = dir.path().join("chained");
        for (text, why) in [
            ("exit 1", "not an answer"),
            ("echo nonsense", "not an answer"),
            ("echo '{\"cniVersion\":\"1.0.0\"}'", "supportedVersions"),
            ("yes", "not an answer"),
            // What it leaves behind holds its output open.
            ("sleep 60 & exit 0", "no answer"),
        ] {
            script(&path, text);
            if why == "no answer" {
                asker.deadline = Duration::from_secs(1);
            }
            let silent = asker
                .ask(now, dir.path(), "chained")
                .unwrap_err()
                .to_string();
            assert!(silent.contains(why), "{text}: {silent}");
        }
        // Linked with a loader that is not there, as in the agent's container.
        fs::write(&path, "#!/nonexistent/loader\n").unwrap();
        let silent = asker
            .ask(now, dir.path(), "chained")
            .unwrap_err()
            .to_string();
        assert!(silent.contains("No such file"), "{silent}");
    }
}
