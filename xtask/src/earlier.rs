//! An earlier state of the project, built from git's history: what nodes are upgraded from and
//! taken back to, and what the present state must not be slower than.
//!
//! ```text
//! <cache>/earlier/<commit>/source      the tree of that commit
//! <cache>/earlier/<commit>/programs    the programs and image.tar, complete once they are there
//! <cache>/earlier/<commit>/build       cargo's, only while it builds
//! ```
//!
//! Built once, by the recipe of this tree: static, profile `ship`. The directory for cargo is its
//! own: cargo tells the packages of a workspace apart by their paths *below* its root, so in a
//! common one it would take this tree's crates for that commit's. What both have in common, the
//! crates of others, is compiled for this tree first and copied: almost half of the time.

use crate::{
    arch::Arch,
    build,
    cluster::layout,
    image, ui,
    workspace::{self, output, which},
};
use anyhow::{Context as _, Result, bail, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// What users run before they take the present state: the last release, which is 0.1.0.
/// Moves with every release, never with a change that only the tests would like better.
pub const RELEASED: &str = "72d168a07dbb78828d011a209938927b23a31a1c";

/// A commit's tree and programs, once [`Earlier::ensure`] has made them.
#[derive(Clone, Debug)]
pub struct Earlier {
    commit: String,
    dir: PathBuf,
}

impl Earlier {
    pub fn released() -> Result<Self> {
        Self::of(RELEASED.into())
    }

    /// By any name that git knows it by.
    pub fn named(revision: &str) -> Result<Self> {
        Self::of(commit(&workspace::root(), revision)?)
    }

    fn of(commit: String) -> Result<Self> {
        let dir = layout::cache()?.join("earlier").join(&commit);
        Ok(Self { commit, dir })
    }

    /// As people write it.
    pub fn short(&self) -> &str {
        &self.commit[..7]
    }

    /// The directory of its programs.
    pub fn programs(&self) -> PathBuf {
        self.dir.join("programs")
    }

    /// The archive of its image.
    pub fn archive(&self) -> PathBuf {
        self.programs().join("image.tar")
    }

    /// The name of its image in that archive, which differs from the present one's.
    pub fn image(&self) -> String {
        format!("{}-at-{}", image::NAME, self.short())
    }

    /// A file of its tree.
    pub fn file(&self, path: &str) -> PathBuf {
        self.source().join(path)
    }

    fn source(&self) -> PathBuf {
        self.dir.join("source")
    }

    /// Builds what is missing; whoever else builds the same is waited for.
    pub fn ensure(&self) -> Result<()> {
        if self.is_complete() {
            return Ok(());
        }
        fs::create_dir_all(&self.dir)
            .with_context(|| format!("cannot make {}", self.dir.display()))?;
        let lock = fs::File::create(self.dir.join("lock"))?;
        lock.lock().context("cannot lock an earlier state")?;
        if self.is_complete() {
            return Ok(());
        }
        extract(&workspace::root(), &self.commit, &self.source())?;
        // Whoever compares needs them, too.
        build::release()?;
        let step = ui::step(format!(
            "building the programs of commit {} to compare with, once",
            self.short()
        ));
        self.build()
            .with_context(|| format!("cannot build the programs of commit {}", self.short()))?;
        step.done_in_time();
        Ok(())
    }

    fn is_complete(&self) -> bool {
        // Renamed to this name once all of it is there.
        self.programs().is_dir()
    }

    fn build(&self) -> Result<()> {
        let arch = Arch::host()?;
        let build = self.dir.join("build");
        if !build.is_dir() {
            seed(arch, &workspace::target(), &build)?;
        }
        let mut command = self.cargo()?;
        build::recipe(&mut command, arch);
        command
            .env("CARGO_TARGET_DIR", &build)
            .env("SINABRO_EBPF", "required")
            .current_dir(self.source())
            .stdin(Stdio::null());
        let log = self.dir.join("build.log");
        let to = fs::File::create(&log)?;
        let status = command.stdout(to.try_clone()?).stderr(to).status()?;
        if !status.success() {
            let said = fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<&str> = said.lines().collect();
            let end = lines[lines.len().saturating_sub(20)..].join("\n");
            bail!(
                "cargo failed ({status}); {} ends with:\n{end}",
                log.display()
            );
        }
        let unfinished = self.dir.join("programs.new");
        remove(&unfinished)?;
        build::collect(&build, arch, &unfinished)?;
        image::write_named(
            &self.image(),
            arch,
            &unfinished,
            &unfinished.join("image.tar"),
        )?;
        fs::rename(&unfinished, self.programs())?;
        remove(&build)?;
        Ok(fs::remove_file(log)?)
    }

    /// The cargo that the tree's own rust-toolchain.toml chooses, not the one that runs this.
    fn cargo(&self) -> Result<Command> {
        let mut command = workspace::cargo();
        if let Some(rustup) = which("cargo") {
            let path = command.get_envs().find(|(name, _)| *name == "PATH");
            let path = path.and_then(|(_, value)| value.map(ToOwned::to_owned));
            command = Command::new(rustup);
            if let Some(path) = path {
                command.env("PATH", path);
            }
        }
        for name in ["RUSTUP_TOOLCHAIN", "CARGO", "CARGO_BUILD_TARGET_DIR"] {
            command.env_remove(name);
        }
        Ok(command)
    }
}

/// Copies what cargo has compiled of others' crates, with its times, by which cargo knows whether
/// it is up to date. What does not fit is compiled again.
fn seed(arch: Arch, from: &Path, to: &Path) -> Result<()> {
    let unfinished = to.with_extension("new");
    remove(&unfinished)?;
    // Programs and libraries, and the build scripts and macros that they need.
    for profile in [format!("{}/ship", arch.rust_target()), "ship".into()] {
        for part in ["deps", "build", ".fingerprint"] {
            let (from, to) = (
                from.join(&profile).join(part),
                unfinished.join(&profile).join(part),
            );
            fs::create_dir_all(&to)?;
            let mut copy = Command::new("cp");
            copy.args(["--archive", "--target-directory"]).arg(&to);
            let mut any = false;
            for entry in fs::read_dir(&from).into_iter().flatten() {
                let entry = entry?;
                if is_others(&entry.file_name().to_string_lossy()) {
                    copy.arg(entry.path());
                    any = true;
                }
            }
            if any {
                output(&mut copy)?;
            }
        }
    }
    Ok(fs::rename(unfinished, to)?)
}

/// Whether a file of cargo's is not one of the workspace's packages: names begin with the
/// package's, or with `lib` and the package's.
fn is_others(file: &str) -> bool {
    let name = file.strip_prefix("lib").unwrap_or(file);
    !["sinabro", "xtask"].iter().any(|own| name.starts_with(own))
}

/// The commit that a name means in the repository of a directory.
fn commit(root: &Path, revision: &str) -> Result<String> {
    let name = format!("{revision}^{{commit}}");
    let asked = git(root)
        .args([
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &name,
        ])
        .output()
        .context("cannot run git")?;
    if !asked.status.success() {
        bail!(absent(root, revision));
    }
    Ok(String::from_utf8(asked.stdout)?.trim().to_owned())
}

/// Why there is no such commit here, and what to do.
fn absent(root: &Path, revision: &str) -> String {
    let shallow = output(git(root).args(["rev-parse", "--is-shallow-repository"]));
    match shallow.as_deref() {
        Ok("true") => format!(
            "this clone is shallow and has no commit {revision}: `git fetch --unshallow` brings it"
        ),
        Ok(_) => format!("there is no commit {revision} here: `git fetch` may bring it"),
        Err(error) => format!(
            "commit {revision} is in git's history, which is not in {}: make a clone ({error:#})",
            root.display()
        ),
    }
}

/// Writes a commit's tree into a directory, which is there only if it is whole.
fn extract(root: &Path, name: &str, to: &Path) -> Result<()> {
    if to.is_dir() {
        return Ok(());
    }
    let name = commit(root, name)?;
    let unfinished = to.with_extension("new");
    remove(&unfinished)?;
    let mut archive = git(root)
        .args(["archive", "--format=tar", &name])
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run git")?;
    let tree = archive.stdout.take().context("git has no output")?;
    let unpacked = tar::Archive::new(tree).unpack(&unfinished);
    let status = archive.wait()?;
    ensure!(status.success(), "git archive failed ({status})");
    unpacked.with_context(|| format!("cannot write {}", unfinished.display()))?;
    Ok(fs::rename(&unfinished, to)?)
}

fn git(root: &Path) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(root).stdin(Stdio::null());
    command
}

/// Removes a directory; none is fine.
fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository of two commits, whose only file holds the commit's number.
    fn repository(dir: &Path) {
        let run = |arguments: &[&str]| {
            let mut command = git(dir);
            // Nothing of the user's: signing, hooks, another first branch.
            command
                .env("GIT_CONFIG_GLOBAL", "/dev/null")
                .args(["-c", "user.name=a", "-c", "user.email=a@example.org"])
                .args(arguments);
            output(&mut command).unwrap();
        };
        run(&["init", "--quiet"]);
        for number in ["first", "second"] {
            fs::write(dir.join("file"), number).unwrap();
            run(&["add", "file"]);
            run(&["commit", "--quiet", "-m", number]);
        }
    }

    #[test]
    fn an_earlier_tree_is_as_it_was_committed() {
        let (here, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        repository(here.path());
        fs::write(here.path().join("file"), "changed since").unwrap();
        let tree = to.path().join("source");
        // Left by one that was killed in the middle.
        fs::create_dir(to.path().join("source.new")).unwrap();
        fs::write(to.path().join("source.new/half"), "").unwrap();
        extract(here.path(), "HEAD~1", &tree).unwrap();
        assert_eq!(fs::read_to_string(tree.join("file")).unwrap(), "first");
        assert!(!tree.join("half").exists());
        // There once and for all.
        extract(here.path(), "no such commit", &tree).unwrap();
    }

    #[test]
    fn a_commit_that_is_not_here_is_said_to_be_fetched() {
        let here = tempfile::tempdir().unwrap();
        repository(here.path());
        let error = |root: &Path, name: &str| commit(root, name).unwrap_err().to_string();
        assert!(error(here.path(), RELEASED).contains("`git fetch` may bring it"));
        assert!(error(here.path(), "--all").contains("no commit --all"));
        assert!(commit(here.path(), "HEAD").unwrap().len() == 40);

        let shallow = tempfile::tempdir().unwrap();
        let from = format!("file://{}", here.path().display());
        let to = shallow.path().join("clone");
        let mut clone = Command::new("git");
        clone
            .args(["clone", "--quiet", "--depth=1", &from])
            .arg(&to);
        output(&mut clone).unwrap();
        let first = commit(here.path(), "HEAD~1").unwrap();
        assert!(error(&to, &first).contains("`git fetch --unshallow`"));
        let to = shallow.path().join("tree");
        assert!(extract(&shallow.path().join("clone"), &first, &to).is_err());
        assert!(!to.exists());

        let none = tempfile::tempdir().unwrap();
        assert!(error(none.path(), RELEASED).contains("make a clone"));
    }

    #[test]
    fn nothing_of_the_workspace_is_taken_over() {
        let names = [
            "libsinabro_common-1a.rlib",
            "sinabro-agent-2b",
            "xtask-3c",
            "sinabro_cni-4d.d",
        ];
        assert!(names.iter().all(|name| !is_others(name)));
        let names = [
            "libserde-1a.rlib",
            "libc-2b",
            "liblibc-3c.rmeta",
            "serde-4d.d",
        ];
        assert!(names.iter().all(|name| is_others(name)));
    }

    #[test]
    fn the_released_state_is_of_this_history() {
        assert_eq!(commit(&workspace::root(), RELEASED).unwrap(), RELEASED);
        let earlier = Earlier::released().unwrap();
        assert_eq!(earlier.short(), "72d168a");
        assert_ne!(earlier.image(), image::NAME);
    }
}
