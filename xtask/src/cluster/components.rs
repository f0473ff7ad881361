//! The cluster's programs, compiled from Kubernetes' own Go modules.
//!
//! Done once per version of `xtask/cluster`: a stamp beside the programs holds a digest of what
//! they were made from. Go's caches keep a second build short.

use super::layout;
use crate::{ui, workspace::which};
use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// As in components/go.mod.
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

struct Program {
    name: &'static str,
    /// Module, below xtask/cluster.
    module: &'static str,
    package: &'static str,
    /// A test binary.
    test: bool,
    about: &'static str,
}

const fn program(
    name: &'static str,
    module: &'static str,
    package: &'static str,
    about: &'static str,
) -> Program {
    Program {
        name,
        module,
        package,
        test: false,
        about,
    }
}

const PROGRAMS: [Program; 6] = [
    program(
        "kubernetes",
        "components",
        ".",
        "etcd and Kubernetes, about 7 minutes the first time",
    ),
    program(
        "agnhost",
        "components",
        "k8s.io/kubernetes/test/images/agnhost",
        "the test image's program",
    ),
    program(
        "ginkgo",
        "components",
        "github.com/onsi/ginkgo/v2/ginkgo",
        "the test runner",
    ),
    program("coredns", "coredns", ".", "about a minute the first time"),
    program("pause", "pause", ".", "a pod's first process"),
    Program {
        name: "e2e.test",
        module: "components",
        package: "k8s.io/kubernetes/test/e2e",
        test: true,
        about: "Kubernetes' end-to-end tests, about 3 minutes the first time",
    },
];

/// A component's path.
pub fn path(name: &str) -> Result<PathBuf> {
    Ok(layout::binaries()?.join(name))
}

/// Builds what is missing or made from other sources.
pub fn ensure() -> Result<()> {
    let directory = layout::binaries()?;
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    for program in &PROGRAMS {
        let stamp = directory.join(format!("{}.stamp", program.name));
        let key = key(&layout::sources().join(program.module), program)?;
        let built = directory.join(program.name);
        if built.is_file() && fs::read_to_string(&stamp).is_ok_and(|found| found == key) {
            continue;
        }
        let step = ui::step(format!("building {} ({})", program.name, program.about));
        build(program, &built)?;
        fs::write(&stamp, key)?;
        step.done_in_time();
    }
    for name in COMPONENTS {
        let link = directory.join(name);
        if fs::read_link(&link).is_err() {
            std::os::unix::fs::symlink("kubernetes", &link)
                .with_context(|| format!("cannot make {}", link.display()))?;
        }
    }
    Ok(())
}

pub fn go() -> Result<PathBuf> {
    which("go")
        .or_else(|| Some(PathBuf::from("/usr/local/go/bin/go")).filter(|path| path.is_file()))
        .context("there is no go: install Go 1.21 or newer, see https://go.dev/doc/install")
}

fn build(program: &Program, to: &Path) -> Result<()> {
    let temporary = to.with_extension("new");
    let mut command = Command::new(go()?);
    match program.test {
        true => command.args(["test", "-c"]),
        false => command.arg("build"),
    };
    // Kubernetes tells its version from these.
    let version = "k8s.io/component-base/version";
    let (major, minor) = KUBERNETES.split_once('.').unwrap_or(("1", "0"));
    let minor = minor.split('.').next().unwrap_or(minor);
    let flags = format!(
        "-s -w -X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor} \
         -X {version}.gitTreeState=clean -X {version}.buildDate=1970-01-01T00:00:00Z"
    );
    let output = command
        .args(["-mod=mod", "-buildvcs=false", "-ldflags", &flags, "-o"])
        .arg(&temporary)
        .arg(program.package)
        .current_dir(layout::sources().join(program.module))
        // Static: the same program runs in images without a C library.
        .env("CGO_ENABLED", "0")
        .stdin(Stdio::null())
        .output()
        .context("cannot start go")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("cannot build {}: {}", program.name, said.trim());
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
    hash.update(program.package);
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
        let module = fs::read_to_string(layout::sources().join("components/go.mod")).unwrap();
        assert!(module.contains(&format!("k8s.io/kubernetes v{KUBERNETES}\n")));
    }
}
