//! The cluster's programs, compiled from Kubernetes' own Go modules.
//!
//! Done once per version of `xtask/cluster`: a stamp beside the programs holds a digest of what
//! they were made from. Go's caches keep a second build short.

use super::layout;
use crate::{
    debian, setup, ui,
    workspace::{output, which},
};
use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// As in components/go.mod and proxied/go.mod.
pub const KUBERNETES: &str = "1.34.4";

/// Names under which the one program of the components is called.
const COMPONENTS: [&str; 7] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
];

/// containerd's own programs: the daemon, what holds a pod's processes, the command line.
pub const CONTAINERD: [&str; 3] = ["containerd", "containerd-shim-runc-v2", "ctr"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Containerd {
    /// The oldest that many still run: it knows no STATUS.
    #[value(name = "1.6")]
    V1_6,
    #[value(name = "2")]
    V2,
}

impl Containerd {
    /// Its directory.
    fn name(self) -> &'static str {
        match self {
            Self::V1_6 => "containerd-1.6",
            Self::V2 => "containerd-2",
        }
    }

    /// Brings what is missing: 2 from its Go module, 1.6 as Debian's package, unpacked. Built as a
    /// module that another requires, 1.6 gets newer libraries than its own go.mod pins, and panics on
    /// the first error that a shim answers.
    fn ensure(self) -> Result<()> {
        match self {
            Self::V2 => {
                CONTAINERD_2.ensure()?;
                PLUGINS.ensure()
            }
            Self::V1_6 => {
                let program = self.program(CONTAINERD[0])?;
                if !program.is_file() {
                    debian::unpack("containerd", &layout::binaries()?.join(self.name()))?;
                }
                let version = output(Command::new(&program).arg("--version"))?;
                ensure!(
                    version.contains(" 1.6."),
                    "this distribution's containerd is another: {version}"
                );
                Ok(())
            }
        }
    }

    /// Path of one of [`CONTAINERD`].
    pub fn program(self, name: &str) -> Result<PathBuf> {
        let directory = layout::binaries()?.join(self.name());
        Ok(match self {
            Self::V1_6 => directory.join("usr/bin").join(name),
            Self::V2 => directory.join(name),
        })
    }

    /// Directory of the reference plugins that nodes with this version have: of the age of the
    /// version. Debian's know no more than CNI 1.0.0, which keeps a whole list of plugins from STATUS;
    /// with the newest ones containerd 2 asks for it.
    pub fn plugins(self) -> Result<PathBuf> {
        match self {
            Self::V1_6 => setup::reference_plugins()
                .context("there are no reference plugins: run `cargo xtask setup`"),
            Self::V2 => path(PLUGINS.name),
        }
    }
}

struct Program {
    name: &'static str,
    /// Module, below xtask/cluster.
    module: &'static str,
    /// Several are built into a directory of the program's name.
    packages: &'static [&'static str],
    /// A test binary.
    test: bool,
    about: &'static str,
}

impl Program {
    fn ensure(&self) -> Result<()> {
        let directory = layout::binaries()?;
        let stamp = directory.join(format!("{}.stamp", self.name));
        let key = key(&layout::sources().join(self.module), self)?;
        let built = directory.join(self.name);
        if built.exists() && fs::read_to_string(&stamp).is_ok_and(|found| found == key) {
            return Ok(());
        }
        let step = ui::step(format!("building {} ({})", self.name, self.about));
        build(self, &built)?;
        fs::write(&stamp, key)?;
        step.done_in_time();
        Ok(())
    }
}

const CONTAINERD_2: Program = Program {
    name: "containerd-2",
    module: "containerd-2",
    packages: &[
        "github.com/containerd/containerd/v2/cmd/containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "github.com/containerd/containerd/v2/cmd/ctr",
    ],
    test: false,
    about: "about two minutes the first time",
};

/// containernetworking/plugins.
const PLUGINS: Program = Program {
    name: "plugins",
    module: "plugins",
    packages: &[
        "github.com/containernetworking/plugins/plugins/main/loopback",
        "github.com/containernetworking/plugins/plugins/meta/portmap",
    ],
    test: false,
    about: "the reference CNI plugins",
};

const fn program(
    name: &'static str,
    module: &'static str,
    packages: &'static [&'static str],
    about: &'static str,
) -> Program {
    Program {
        name,
        module,
        packages,
        test: false,
        about,
    }
}

/// Asks kube-proxy's code what a Service leads to.
const PROXIED: Program = program(
    "proxied",
    "proxied",
    &["."],
    "kube-proxy's decisions, under a minute",
);

/// Renders the chart.
const HELM: Program = program(
    "helm",
    "helm",
    &["helm.sh/helm/v4/cmd/helm"],
    "about three minutes without Kubernetes, else some seconds",
);

const PROGRAMS: [Program; 8] = [
    program(
        "kubernetes",
        "components",
        &["."],
        "etcd and Kubernetes, about 7 minutes the first time",
    ),
    program(
        "agnhost",
        "components",
        &["k8s.io/kubernetes/test/images/agnhost"],
        "the test image's program",
    ),
    program(
        "boom-server",
        "components",
        &["k8s.io/kubernetes/test/images/regression-issue-74839"],
        "a server whose segments are out of order",
    ),
    program(
        "ginkgo",
        "components",
        &["github.com/onsi/ginkgo/v2/ginkgo"],
        "the test runner",
    ),
    program(
        "coredns",
        "coredns",
        &["."],
        "about a minute the first time",
    ),
    program("pause", "pause", &["."], "a pod's first process"),
    PROXIED,
    Program {
        name: "e2e.test",
        module: "components",
        packages: &["k8s.io/kubernetes/test/e2e"],
        test: true,
        about: "Kubernetes' end-to-end tests, about 3 minutes the first time",
    },
];

/// A component's path.
pub fn path(name: &str) -> Result<PathBuf> {
    Ok(layout::binaries()?.join(name))
}

/// Builds what is missing or made from other sources.
pub fn ensure(containerd: Containerd) -> Result<()> {
    ensure_kubernetes()?;
    PROGRAMS.iter().try_for_each(Program::ensure)?;
    containerd.ensure()
}

/// The same of the one program that asks kube-proxy's code. Returns its path.
pub fn ensure_proxied() -> Result<PathBuf> {
    ensure_one(&PROXIED)
}

/// The same of Helm.
pub fn ensure_helm() -> Result<PathBuf> {
    ensure_one(&HELM)
}

fn ensure_one(program: &Program) -> Result<PathBuf> {
    make_directory()?;
    program.ensure()?;
    path(program.name)
}

fn make_directory() -> Result<PathBuf> {
    let directory = layout::binaries()?;
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    Ok(directory)
}

/// The same, but for [`COMPONENTS`] alone.
pub fn ensure_kubernetes() -> Result<()> {
    let directory = make_directory()?;
    PROGRAMS[0].ensure()?;
    for name in COMPONENTS {
        let link = directory.join(name);
        if fs::read_link(&link).is_err() {
            std::os::unix::fs::symlink("kubernetes", &link)
                .with_context(|| format!("cannot make {}", link.display()))?;
        }
    }
    Ok(())
}

/// Go's compiler is told not to describe what it makes to debuggers: a linker's `-s -w` drops that only after it was
/// made. With the same flags for all programs what several of them have in common is compiled once.
fn go_command(subcommand: &[&str], linker_flags: &str) -> Result<Command> {
    let mut command = Command::new(go()?);
    command
        .args(subcommand)
        .args(["-gcflags=all=-dwarf=false", "-ldflags"])
        .arg(format!("-s -w {linker_flags}"))
        // A sixth less work for a quarter more memory: its collector runs less often.
        .env("GOGC", "400")
        // Static: the same program runs in images without a C library.
        .env("CGO_ENABLED", "0")
        .stdin(Stdio::null());
    Ok(command)
}

pub fn go() -> Result<PathBuf> {
    which("go")
        .or_else(|| Some(PathBuf::from("/usr/local/go/bin/go")).filter(|path| path.is_file()))
        .context("there is no go: install Go 1.21 or newer, see https://go.dev/doc/install")
}

fn build(program: &Program, to: &Path) -> Result<()> {
    // Not `with_extension`: a name may end in a version.
    let mut temporary = to.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    if program.packages.len() > 1 {
        fs::create_dir_all(&temporary)
            .with_context(|| format!("cannot make {}", temporary.display()))?;
    }
    let subcommand: &[&str] = match program.test {
        // Kubernetes has vetted its tests; to vet them reads all that they depend on once more.
        true => &["test", "-c", "-vet=off"],
        false => &["build"],
    };
    // Kubernetes tells its version from these.
    let version = "k8s.io/component-base/version";
    let (major, minor) = KUBERNETES.split_once('.').unwrap_or(("1", "0"));
    let minor = minor.split('.').next().unwrap_or(minor);
    let flags = format!(
        "-X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor} \
         -X {version}.gitTreeState=clean -X {version}.buildDate=1970-01-01T00:00:00Z"
    );
    let output = go_command(subcommand, &flags)?
        .args(["-mod=mod", "-buildvcs=false", "-o"])
        .arg(&temporary)
        .args(program.packages)
        .current_dir(layout::sources().join(program.module))
        .output()
        .context("cannot start go")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("cannot build {}: {}", program.name, said.trim());
    }
    if to.is_dir() {
        fs::remove_dir_all(to).with_context(|| format!("cannot remove {}", to.display()))?;
    }
    fs::rename(&temporary, to).with_context(|| format!("cannot write {}", to.display()))
}

/// Digest of a module's own files and of how a program is built from it.
fn key(module: &Path, program: &Program) -> Result<String> {
    let mut hash = Sha256::new();
    let mut files: Vec<PathBuf> = fs::read_dir(module)
        .with_context(|| format!("cannot read {}", module.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.sort();
    ensure!(!files.is_empty(), "{} is empty", module.display());
    for file in files {
        hash.update(file.file_name().unwrap_or_default().as_encoded_bytes());
        hash.update(fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?);
    }
    for package in program.packages {
        hash.update(package);
    }
    hash.update(KUBERNETES);
    Ok(hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// What a go.mod says of modules' versions, in the one of its blocks that begins so.
    fn versions(module: &str, block: &str) -> BTreeMap<String, String> {
        let text = fs::read_to_string(layout::sources().join(module).join("go.mod")).unwrap();
        let begin = format!("\n{block} (\n");
        let blocks = text.split(&begin).skip(1);
        let lines = blocks.flat_map(|block| block.lines().take_while(|line| *line != ")"));
        let words = lines.map(|line| line.split_whitespace().filter(|word| *word != "=>"));
        let pair = |mut words: Vec<&str>| {
            words.retain(|word| !["//", "indirect"].contains(word));
            (words[0].to_owned(), words[words.len() - 1].to_owned())
        };
        words.map(|words| pair(words.collect())).collect()
    }

    /// Else Go compiles it again for each: two hundred seconds of a processor for Helm, a hundred for CoreDNS.
    #[test]
    fn what_others_have_in_common_with_kubernetes_has_its_versions() {
        let mut kubernetes = versions("components", "require");
        // Of Kubernetes' own modules those that are taken from beside it.
        kubernetes.extend(versions("components", "replace"));
        for module in ["coredns", "helm"] {
            let replaced = versions(module, "replace");
            assert!(replaced.contains_key("golang.org/x/net"), "{replaced:?}");
            for (name, version) in versions(module, "require") {
                let version = replaced.get(&name).unwrap_or(&version);
                if name.starts_with("k8s.io/") || replaced.contains_key(&name) {
                    let own = kubernetes.get(&name);
                    assert!(
                        own.is_none_or(|own| own == version),
                        "{module}: {name} {version}, {own:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_changed_source_changes_the_key() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("main.go"), "package main").unwrap();
        let before = key(dir.path(), &PROGRAMS[0]).unwrap();
        assert_eq!(before, key(dir.path(), &PROGRAMS[0]).unwrap());
        assert_ne!(before, key(dir.path(), &PROGRAMS[1]).unwrap());
        fs::write(dir.path().join("main.go"), "package main\n").unwrap();
        assert_ne!(before, key(dir.path(), &PROGRAMS[0]).unwrap());
    }

    #[test]
    fn the_version_told_is_that_of_the_module() {
        for module in ["components", "proxied"] {
            let path = layout::sources().join(module).join("go.mod");
            let module = fs::read_to_string(path).unwrap();
            assert!(module.contains(&format!("k8s.io/kubernetes v{KUBERNETES}\n")));
        }
    }
}
