//! Packages, on Debian and what descends from it.
//!
//! [`install`] uses the machine's own sources as root; [`unpack`] takes a package from them without
//! installing it. [`rust_src`] fetches a package of another suite without touching the machine's
//! configuration: it gives apt a private root whose only source is derived from the mirror that
//! the machine uses.

use crate::{
    root, ui,
    workspace::{output, run, target, which},
};
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The suite with a current Rust.
const RUST_SUITE: &str = "trixie-backports";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Installs packages from the machine's own sources.
pub fn install(packages: &[&str]) -> Result<()> {
    let names = packages.join(" ");
    if which("apt-get").is_none() {
        bail!("please install what your distribution calls these Debian packages: {names}");
    }
    let apt = |arguments: &[&str]| -> Result<()> {
        let mut command = if root::is_root() {
            Command::new("env")
        } else {
            root::require_sudo(&format!("`apt-get install {names}`"))?;
            let mut command = Command::new("sudo");
            command.arg("env");
            command
        };
        // Programs are wanted, not services: invoke-rc.d(8) starts none in this runlevel.
        command.args([
            "DEBIAN_FRONTEND=noninteractive",
            "RUNLEVEL=1",
            "apt-get",
            "-q",
            "-y",
        ]);
        run(command.args(arguments))
    };
    println!("  installing {names} by apt-get");
    let install = [&["install", "--no-install-recommends"], packages].concat();
    // The lists may be old or absent: only then fetch them.
    if apt(&install).is_err() {
        apt(&["update"])?;
        apt(&install).with_context(|| format!("cannot install {names}"))?;
    }
    Ok(())
}

/// Fetches a package from the machine's own sources and unpacks it into a directory.
pub fn unpack(package: &str, into: &Path) -> Result<()> {
    for tool in ["apt-get", "dpkg"] {
        which(tool).with_context(|| format!("there is no {tool}: please install {package}"))?;
    }
    let step = ui::step(format!("unpacking {package}"));
    let dir = tempfile::tempdir().context("cannot make a directory")?;
    // As root, apt changes to a user that cannot write there.
    let mut download = Command::new("apt-get");
    download.args(["-q", "-o", "APT::Sandbox::User=", "download", package]);
    output(download.current_dir(&dir))?;
    for entry in fs::read_dir(&dir)? {
        output(Command::new("dpkg").arg("-x").arg(entry?.path()).arg(into))?;
    }
    step.done_in_time();
    Ok(())
}

/// Fetches and unpacks the package rust-src of exactly this upstream version; returns the
/// directory `library` in it.
pub fn rust_src(version: &str) -> Result<PathBuf> {
    for tool in ["apt-get", "apt-cache", "dpkg"] {
        which(tool).with_context(|| format!("there is no {tool}: not a Debian system"))?;
    }
    let apt = PrivateApt::new(&target().join("setup/apt"))?;
    apt.update()?;
    let package = apt.version("rust-src", version)?;
    let archive = apt.download("rust-src", &package)?;
    let unpacked = target().join("setup/rust-src");
    output(Command::new("dpkg").arg("-x").arg(&archive).arg(&unpacked))?;
    let library = unpacked.join(format!("usr/src/rustc-{version}/library"));
    if !library.is_dir() {
        bail!("package rust-src {package} has no {}", library.display());
    }
    Ok(library)
}

/// apt with its own sources, lists and cache.
struct PrivateApt {
    dir: PathBuf,
    options: Vec<String>,
}

impl PrivateApt {
    fn new(dir: &Path) -> Result<Self> {
        let write = || -> Result<()> {
            for sub in ["state/lists/partial", "cache/archives/partial", "download"] {
                fs::create_dir_all(dir.join(sub))?;
            }
            let source = format!(
                "deb [signed-by={KEYRING}] {} {RUST_SUITE} main\n",
                mirror()?
            );
            fs::write(dir.join("sources.list"), source)?;
            Ok(())
        };
        write().with_context(|| format!("cannot prepare {}", dir.display()))?;
        let at = |path: &str| dir.join(path).display().to_string();
        let options = [
            ("Dir::Etc::sourcelist", at("sources.list")),
            ("Dir::Etc::sourceparts", "-".into()),
            ("Dir::State", at("state")),
            ("Dir::Cache", at("cache")),
            // The unprivileged user that apt would change to cannot write here.
            ("APT::Sandbox::User", String::new()),
        ];
        Ok(Self {
            dir: dir.to_path_buf(),
            options: options
                .into_iter()
                .flat_map(|(name, value)| ["-o".to_string(), format!("{name}={value}")])
                .collect(),
        })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .args(&self.options)
            .current_dir(self.dir.join("download"));
        command
    }

    fn update(&self) -> Result<()> {
        output(self.command("apt-get").args(["-q", "update"])).map(drop)
    }

    /// The package version of an upstream version.
    fn version(&self, package: &str, upstream: &str) -> Result<String> {
        let listed = output(self.command("apt-cache").args(["madison", package]))?;
        let dfsg = format!("{upstream}+dfsg");
        listed
            .lines()
            .filter_map(|line| line.split('|').nth(1).map(str::trim))
            .find(|version| {
                version.starts_with(&dfsg) || version.starts_with(&format!("{upstream}-"))
            })
            .map(str::to_string)
            .with_context(|| format!("suite {RUST_SUITE} has no {package} {upstream}"))
    }

    fn download(&self, package: &str, version: &str) -> Result<PathBuf> {
        let spec = format!("{package}={version}");
        let mut step = ui::step("");
        step.now(format!("downloading {spec}"));
        let result = output(self.command("apt-get").args(["-q", "download", &spec]));
        match result {
            Ok(_) => step.done(&format!("  downloaded {spec}")),
            Err(error) => {
                step.clear();
                return Err(error);
            }
        }
        fs::read_dir(self.dir.join("download"))?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| {
                let name = path
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                name.starts_with(&format!("{package}_{}", version.replace(':', "%3a")))
            })
            .with_context(|| format!("apt-get downloaded no {spec}"))
    }
}

/// The Debian mirror that this machine is configured for.
fn mirror() -> Result<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .find_map(|text| mirror_in(&text))
        .context("no Debian mirror is configured in /etc/apt")
}

/// The first URI of a Debian archive in a sources file of either format (sources.list(5)).
fn mirror_in(text: &str) -> Option<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| line.starts_with("URIs:") || line.starts_with("deb "))
        .flat_map(str::split_whitespace)
        .find(|word| {
            let path = word.trim_end_matches('/');
            word.contains("://") && path.ends_with("/debian")
        })
        .map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_found_in_both_formats() {
        let deb822 = "Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: x\n";
        let one_line = "# deb http://no.example/debian x main\n\
            deb http://s.example/debian-security x main\n\
            deb [signed-by=/k.gpg] https://mirror.example/debian/ x main\n";
        assert_eq!(
            mirror_in(deb822).as_deref(),
            Some("http://mirror.example/debian")
        );
        assert_eq!(
            mirror_in(one_line).as_deref(),
            Some("https://mirror.example/debian/")
        );
        assert_eq!(mirror_in("deb http://vendor.example/apt x main"), None);
    }
}
