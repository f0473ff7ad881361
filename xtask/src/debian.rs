//! Packages, on Debian and what descends from it.
//!
//! [`install`] uses the machine's own sources as root, and never removes a package; [`unpack`] takes
//! one from them without installing it. [`rust_src`] fetches a package of another suite without touching the machine's
//! configuration: it gives apt a private root whose only source is derived from the mirror that
//! the machine uses.

use crate::{
    root, ui,
    workspace::{output, run, target, which},
};
use anyhow::{Context as _, Result, bail, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The suite with a current Rust.
const RUST_SUITE: &str = "trixie-backports";
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Installs packages from the machine's own sources, unless that would remove any other.
pub fn install(packages: &[&str]) -> Result<()> {
    let names = packages.join(" ");
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
    let plan = match Plan::simulate(packages, &[]) {
        Ok(plan) => plan,
        // The lists may be old or absent: only then fetch them.
        Err(_) => {
            apt(&["update"])?;
            Plan::simulate(packages, &[]).with_context(|| format!("cannot install {names}"))?
        }
    };
    plan.removes_nothing(packages)?;
    println!("  installing {names} by apt-get");
    // --no-remove: another apt may have changed the machine since.
    let install = [
        &["install", "--no-install-recommends", "--no-remove"],
        packages,
    ]
    .concat();
    // A list may name a version that its mirror has replaced.
    if apt(&install).is_err() {
        apt(&["update"])?;
        apt(&install).with_context(|| format!("cannot install {names}"))?;
    }
    Ok(())
}

/// What apt-get would do.
struct Plan {
    removes: Vec<String>,
}

impl Plan {
    /// Asks apt-get, which changes nothing and needs no root for it.
    fn simulate(packages: &[&str], options: &[String]) -> Result<Self> {
        let mut command = Command::new("apt-get");
        command
            .args(options)
            .args(["--simulate", "-q", "-y"])
            .args(["install", "--no-install-recommends"])
            .args(packages)
            .env("LC_ALL", "C");
        Ok(Self::parse(&output(&mut command)?))
    }

    /// Each step is a line: `Inst`, `Conf`, `Remv` or `Purg`, the package, its version.
    fn parse(simulation: &str) -> Self {
        let removes = simulation.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            matches!(words.next()?, "Remv" | "Purg")
                .then(|| words.next().map(str::to_owned))
                .flatten()
        });
        Self {
            removes: removes.collect(),
        }
    }

    fn removes_nothing(&self, packages: &[&str]) -> Result<()> {
        ensure!(
            self.removes.is_empty(),
            "to install {} apt-get would remove {}: nothing was changed; install it yourself in a \
             way that suits this machine",
            packages.join(" "),
            self.removes.join(", ")
        );
        Ok(())
    }
}

/// Fetches a package from the machine's own sources and unpacks it into a directory. Needs no root.
pub fn unpack(package: &str, into: &Path) -> Result<()> {
    for tool in ["apt-get", "dpkg"] {
        which(tool).with_context(|| format!("there is no {tool}: please install {package}"))?;
    }
    let step = ui::step(format!("unpacking {package}"));
    let dir = tempfile::tempdir().context("cannot make a directory")?;
    let download = |options: &[String]| {
        let mut command = Command::new("apt-get");
        command.args(options).args(["-q", "download", package]);
        output(command.current_dir(&dir))
    };
    // As root, apt changes to a user that cannot write there.
    let as_this_user = ["-o".to_string(), "APT::Sandbox::User=".to_string()];
    if download(&as_this_user).is_err() {
        // The machine's lists may be old or absent; these are for this alone.
        let apt = PrivateApt::new(&target().join("setup/lists"), None)?;
        apt.update()?;
        download(&apt.options)?;
    }
    // dpkg makes the last directory only.
    fs::create_dir_all(into).with_context(|| format!("cannot make {}", into.display()))?;
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
    let source = format!(
        "deb [signed-by={KEYRING}] {} {RUST_SUITE} main\n",
        mirror()?
    );
    let apt = PrivateApt::new(&target().join("setup/apt"), Some(&source))?;
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

/// apt with its own lists and cache.
pub struct PrivateApt {
    dir: PathBuf,
    options: Vec<String>,
}

impl PrivateApt {
    /// With this only source, or with the machine's.
    pub fn new(dir: &Path, source: Option<&str>) -> Result<Self> {
        let write = || -> Result<()> {
            for sub in ["state/lists/partial", "cache/archives/partial", "download"] {
                fs::create_dir_all(dir.join(sub))?;
            }
            if let Some(source) = source {
                fs::write(dir.join("sources.list"), source)?;
            }
            Ok(())
        };
        write().with_context(|| format!("cannot prepare {}", dir.display()))?;
        let at = |path: &str| dir.join(path).display().to_string();
        let mut options = vec![
            ("Dir::State", at("state")),
            ("Dir::Cache", at("cache")),
            // The unprivileged user that apt would change to cannot write here.
            ("APT::Sandbox::User", String::new()),
            // Packages alone.
            ("Acquire::Languages", "none".into()),
            (
                "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled",
                "false".into(),
            ),
        ];
        if source.is_some() {
            options.push(("Dir::Etc::sourcelist", at("sources.list")));
            options.push(("Dir::Etc::sourceparts", "-".into()));
        }
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

    pub fn update(&self) -> Result<()> {
        output(self.command("apt-get").args(["-q", "update"])).map(drop)
    }

    /// Names of packages that begin so.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let listed = output(self.command("apt-cache").args(["pkgnames", prefix]))?;
        Ok(listed.lines().map(str::to_owned).collect())
    }

    /// Downloads a package, whose signature and digest apt checks, and unpacks it.
    pub fn unpack(&self, package: &str, into: &Path) -> Result<()> {
        let dir = tempfile::tempdir().context("cannot make a directory")?;
        let mut download = self.command("apt-get");
        output(download.args(["-q", "download", package]).current_dir(&dir))?;
        fs::create_dir_all(into).with_context(|| format!("cannot make {}", into.display()))?;
        for entry in fs::read_dir(&dir)? {
            output(Command::new("dpkg").arg("-x").arg(entry?.path()).arg(into))?;
        }
        Ok(())
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
pub fn mirror() -> Result<String> {
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

    /// A root directory of apt's own with these packages installed and these on offer, each with
    /// its fields besides name, version and architecture.
    struct Scratch {
        dir: tempfile::TempDir,
    }

    impl Scratch {
        fn new(installed: &[(&str, &str)], offered: &[(&str, &str)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let stanza = |name: &str, fields: &str, status: &str| {
                format!(
                    "Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: x <x@example.org>\n\
                     {status}{fields}Description: x\n\n"
                )
            };
            let status: String = installed
                .iter()
                .map(|(name, fields)| stanza(name, fields, "Status: install ok installed\n"))
                .collect();
            let packages: String = offered
                .iter()
                .map(|(name, fields)| {
                    let file = format!(
                        "Filename: ./{name}.deb\nSize: 1\nSHA256: {}\n",
                        "0".repeat(64)
                    );
                    stanza(name, fields, &file)
                })
                .collect();
            for sub in ["lists/partial", "cache/archives/partial", "archive", "etc"] {
                fs::create_dir_all(dir.path().join(sub)).unwrap();
            }
            fs::write(dir.path().join("status"), status).unwrap();
            fs::write(dir.path().join("archive/Packages"), packages).unwrap();
            let source = format!(
                "deb [trusted=yes] file:{}/archive ./\n",
                dir.path().display()
            );
            fs::write(dir.path().join("sources.list"), source).unwrap();
            let scratch = Self { dir };
            output(
                Command::new("apt-get")
                    .args(scratch.options())
                    .args(["-q", "update"]),
            )
            .unwrap();
            scratch
        }

        fn options(&self) -> Vec<String> {
            let at = |path: &str| self.dir.path().join(path).display().to_string();
            [
                ("Dir::Etc", at("etc")),
                ("Dir::Etc::sourcelist", at("sources.list")),
                ("Dir::Etc::sourceparts", "-".into()),
                ("Dir::State::lists", at("lists")),
                ("Dir::State::status", at("status")),
                ("Dir::State::extended_states", at("extended_states")),
                ("Dir::Cache", at("cache")),
                ("APT::Sandbox::User", String::new()),
                ("Debug::NoLocking", "true".into()),
            ]
            .into_iter()
            .flat_map(|(name, value)| ["-o".to_string(), format!("{name}={value}")])
            .collect()
        }

        fn plan(&self, packages: &[&str]) -> Plan {
            Plan::simulate(packages, &self.options()).unwrap()
        }
    }

    /// As the packages of Docker's own archive and of Debian's declare it.
    const DOCKER_CE: [(&str, &str); 2] = [
        ("docker-ce", "Depends: containerd.io\n"),
        (
            "containerd.io",
            "Provides: containerd, runc\nConflicts: containerd, runc\nReplaces: containerd, runc\n",
        ),
    ];
    const DEBIAN: [(&str, &str); 3] = [
        ("containerd", "Depends: runc\n"),
        ("runc", ""),
        ("docker.io", "Depends: containerd, runc\n"),
    ];

    #[test]
    fn what_would_remove_anothers_package_is_refused_and_names_it() {
        if which("apt-get").is_none() {
            return;
        }
        let scratch = Scratch::new(&DOCKER_CE, &DEBIAN);
        let plan = scratch.plan(&["containerd", "runc"]);
        let mut removes = plan.removes.clone();
        removes.sort();
        assert_eq!(removes, ["containerd.io", "docker-ce"]);
        let refused = plan
            .removes_nothing(&["containerd", "runc"])
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("would remove") && refused.contains("docker-ce"),
            "{refused}"
        );
    }

    #[test]
    fn set_up_touches_neither_docker_ce_nor_debians_docker() {
        if which("apt-get").is_none() {
            return;
        }
        let needed = crate::setup::all_debian_packages();
        let offered: Vec<(&str, &str)> = needed
            .iter()
            .map(|name| (*name, ""))
            .chain(DEBIAN)
            .collect();
        for installed in [&DOCKER_CE[..], &DEBIAN] {
            let scratch = Scratch::new(installed, &offered);
            let plan = scratch.plan(&needed);
            assert!(plan.removes.is_empty(), "{:?}", plan.removes);
        }
        for (runtime, _) in DOCKER_CE.iter().chain(&DEBIAN) {
            assert!(!needed.contains(runtime), "set-up would install {runtime}");
        }
    }
}
