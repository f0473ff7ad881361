//! `cargo xtask setup`: brings what is missing, says what it does, does nothing twice.
//!
//! Every other command calls [`ensure`] for just what that command needs.

use crate::{
    arch::Arch,
    debian, ui,
    workspace::{self, Rustc, output, run as show, which},
};
use anyhow::{Context as _, Result, bail};
use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Newer ones need an LLVM of the system; this one uses the compiler's own.
const BPF_LINKER: &str = "0.10.3";

#[derive(clap::Args)]
pub struct Options {
    /// Only what a build needs, not what tests and benchmarks need besides
    #[arg(long)]
    build_only: bool,
}

/// Something that may be missing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The standard library's sources: the BPF target has no compiled one.
    RustSrc,
    BpfLinker,
    /// A C compiler, which links, and a C library for static binaries.
    StaticLibc,
    Iperf3,
    /// The plugins that ours is compared with.
    ReferencePlugins,
    /// An HTTP server and a load for it.
    HttpTools,
    /// What nodes of a cluster run besides Kubernetes itself, and what its test images are made of.
    ClusterTools,
    /// The compiled standard library of another architecture.
    RustStd(Arch),
    /// A C compiler and a C library for another architecture.
    CrossCompiler(Arch),
}

pub const BUILD: &[Need] = &[Need::RustSrc, Need::BpfLinker, Need::StaticLibc];
pub const TEST: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::Iperf3,
];
pub const BENCH: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::ReferencePlugins,
];
pub const BENCH_TCP: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::HttpTools,
];
pub const CLUSTER: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::ReferencePlugins,
    Need::ClusterTools,
];
/// Programs of a cluster's nodes and test images.
const CLUSTER_TOOLS: [&str; 24] = [
    "containerd",
    "runc",
    "nft",
    "iptables",
    "conntrack",
    "ip",
    "nsenter",
    "unshare",
    "mount",
    "sysctl",
    "busybox",
    "dash",
    "bash",
    "curl",
    "wget",
    "getent",
    "dig",
    "ethtool",
    "iperf",
    "iperf3",
    "nc",
    "ping",
    "socat",
    "tcpdump",
];
/// Debian's packages of them.
const CLUSTER_PACKAGES: &[&str] = &[
    "containerd",
    "runc",
    "nftables",
    "iptables",
    "conntrack",
    "iproute2",
    "util-linux",
    "mount",
    "procps",
    "busybox-static",
    "dash",
    "bash",
    "curl",
    "wget",
    "libc-bin",
    "bind9-dnsutils",
    "ethtool",
    "iperf",
    "iperf3",
    "netcat-openbsd",
    "iputils-ping",
    "socat",
    "tcpdump",
];
const ALL: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::Iperf3,
    Need::ReferencePlugins,
    Need::HttpTools,
    Need::ClusterTools,
];

pub fn run(options: &Options) -> Result<ExitCode> {
    let needs = if options.build_only { BUILD } else { ALL };
    let rustc = Rustc::find()?;
    for need in needs {
        if let Some(place) = need.find(&rustc) {
            println!("  {:<16} {place}", need.name());
        }
    }
    ensure(needs)?;
    println!("  everything is there");
    Ok(ExitCode::SUCCESS)
}

/// Brings what of `needs` is missing.
pub fn ensure(needs: &[Need]) -> Result<()> {
    let rustc = Rustc::find()?;
    let missing: Vec<Need> = needs
        .iter()
        .copied()
        .filter(|need| need.find(&rustc).is_none())
        .collect();
    let packages: Vec<&str> = missing
        .iter()
        .flat_map(|need| need.debian_packages())
        .copied()
        .collect();
    if !packages.is_empty() {
        debian::install(&packages)?;
    }
    for need in &missing {
        match need {
            Need::RustSrc => install_rust_src(&rustc)?,
            Need::BpfLinker => install_bpf_linker()?,
            Need::RustStd(arch) => install_rust_std(*arch)?,
            Need::HttpTools => install_nginx()?,
            Need::StaticLibc
            | Need::Iperf3
            | Need::ReferencePlugins
            | Need::ClusterTools
            | Need::CrossCompiler(_) => {}
        }
    }
    for need in missing {
        if need.find(&rustc).is_none() {
            bail!("{} is still missing after its installation", need.name());
        }
    }
    Ok(())
}

impl Need {
    fn name(self) -> &'static str {
        match self {
            Self::RustSrc => "rust-src",
            Self::BpfLinker => "bpf-linker",
            Self::StaticLibc => "static libc",
            Self::Iperf3 => "iperf3",
            Self::ReferencePlugins => "ptp, host-local",
            Self::HttpTools => "wrk, nginx",
            Self::ClusterTools => "cluster tools",
            Self::RustStd(_) => "foreign rust-std",
            Self::CrossCompiler(_) => "cross compiler",
        }
    }

    /// Where it is, for people; none if it is missing.
    fn find(self, rustc: &Rustc) -> Option<String> {
        let found: PathBuf = match self {
            Self::RustSrc => {
                let library = library(rustc);
                // The lock file is the last thing that is copied: without it the copy stopped
                // in the middle.
                library.join("Cargo.lock").is_file().then_some(library)?
            }
            Self::BpfLinker => {
                let linker = which("bpf-linker")?;
                let version = output(Command::new(&linker).arg("--version")).ok()?;
                return Some(format!("{} ({version})", linker.display()));
            }
            Self::StaticLibc => static_libc("cc")?,
            Self::CrossCompiler(arch) => static_libc(arch.cross_compiler())?,
            Self::RustStd(arch) => {
                let lib = rustc.sysroot.join("lib/rustlib").join(arch.rust_target());
                lib.join("lib").canonicalize().ok()?
            }
            Self::Iperf3 => which("iperf3")?,
            Self::ReferencePlugins => reference_plugins()?,
            Self::HttpTools => {
                let (wrk, nginx) = (which("wrk")?, nginx()?);
                return Some(format!("{}, {}", wrk.display(), nginx.display()));
            }
            Self::ClusterTools => {
                let found: Option<Vec<PathBuf>> =
                    CLUSTER_TOOLS.iter().map(|tool| which(tool)).collect();
                return Some(format!("{} programs", found?.len()));
            }
        };
        Some(found.display().to_string())
    }

    fn debian_packages(self) -> &'static [&'static str] {
        match self {
            Self::RustSrc | Self::BpfLinker | Self::RustStd(_) => &[],
            Self::StaticLibc => &["build-essential"],
            Self::Iperf3 => &["iperf3"],
            Self::ReferencePlugins => &["containernetworking-plugins"],
            Self::HttpTools => &["wrk"],
            Self::ClusterTools => CLUSTER_PACKAGES,
            Self::CrossCompiler(Arch::Amd64) => &["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"],
            Self::CrossCompiler(Arch::Arm64) => &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
        }
    }
}

/// The C library that this compiler links static programs with.
fn static_libc(compiler: &str) -> Option<PathBuf> {
    let compiler = which(compiler)?;
    // Prints the bare name if it has none.
    let path = output(Command::new(compiler).arg("-print-file-name=libc.a")).ok()?;
    PathBuf::from(path).canonicalize().ok()
}

/// Directory with the plugins `ptp` and `host-local`.
pub fn reference_plugins() -> Option<PathBuf> {
    ["/usr/lib/cni", "/usr/libexec/cni", "/opt/cni/bin"]
        .map(PathBuf::from)
        .into_iter()
        .find(|dir| dir.join("ptp").is_file() && dir.join("host-local").is_file())
}

/// The machine's own nginx, else the one that [`install_nginx`] unpacked.
pub fn nginx() -> Option<PathBuf> {
    which("nginx").or_else(|| {
        let unpacked = workspace::target().join("setup/nginx/usr/sbin/nginx");
        unpacked.is_file().then_some(unpacked)
    })
}

/// Unpacks nginx without installing it: the package would have it started with the machine. The
/// libraries it wants come with wrk and with every Debian system.
fn install_nginx() -> Result<()> {
    if nginx().is_some() {
        return Ok(());
    }
    // The program has moved between these packages.
    for package in ["nginx", "nginx-light", "nginx-core"] {
        debian::unpack(package, &workspace::target().join("setup/nginx"))?;
        if nginx().is_some() {
            return Ok(());
        }
    }
    bail!("none of Debian's packages of nginx has the program: please install it")
}

fn library(rustc: &Rustc) -> PathBuf {
    rustc.sysroot.join("lib/rustlib/src/rust/library")
}

/// rustup's component, else Debian's package of exactly the same version.
fn install_rust_src(rustc: &Rustc) -> Result<()> {
    let step = ui::step(format!("installing rust-src {} by rustup", rustc.version));
    let by_rustup = which("rustup")
        .context("there is no rustup")
        .and_then(|rustup| {
            output(
                Command::new(rustup)
                    .args(["component", "add", "rust-src"])
                    .current_dir(workspace::root())
                    // Give up soon where its servers cannot be reached.
                    .env("RUSTUP_MAX_RETRIES", "1"),
            )
        });
    match by_rustup {
        Ok(_) => {
            step.done_in_time();
            return Ok(());
        }
        Err(error) => step.done(&format!("  rust-src by rustup: {error:#}")),
    }
    let step = ui::step(format!(
        "installing rust-src {} by Debian's package",
        rustc.version
    ));
    let copied = debian::rust_src(&rustc.version).and_then(|source| {
        let parent = library(rustc);
        copy(&source, &parent).with_context(|| format!("cannot write {}", parent.display()))
    });
    match copied {
        Ok(()) => step.done_in_time(),
        Err(error) => {
            step.done(&format!("  rust-src by Debian's package: {error:#}"));
            bail!(
                "rust-src {} is missing and cannot be installed: with rustup run `rustup component \
                 add rust-src`, else put the standard library's sources into {}",
                rustc.version,
                library(rustc).display()
            );
        }
    }
    Ok(())
}

/// Copies a directory; Cargo.lock last, as the sign that all is there.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    let mut command = Command::new("cp");
    command
        .arg("-r")
        .args(["--no-target-directory"])
        .arg(from)
        .arg(to);
    let lock = to.join("Cargo.lock");
    output(&mut command)?;
    if !lock.is_file() {
        bail!("{} has no Cargo.lock", from.display());
    }
    Ok(())
}

/// A compiled standard library fits only the compiler that made it: rustup's is the only one that
/// fits rustup's compiler.
fn install_rust_std(arch: Arch) -> Result<()> {
    let triple = arch.rust_target();
    let step = ui::step(format!("installing rust-std for {triple} by rustup"));
    let added = which("rustup")
        .context("there is no rustup")
        .and_then(|rustup| {
            output(
                Command::new(rustup)
                    .args(["target", "add", triple])
                    .current_dir(workspace::root()),
            )
        });
    match added {
        Ok(_) => {
            step.done_in_time();
            Ok(())
        }
        Err(error) => {
            step.clear();
            Err(error).with_context(|| {
                format!("Rust's standard library for {triple} is missing: `rustup target add {triple}` brings it")
            })
        }
    }
}

fn install_bpf_linker() -> Result<()> {
    println!("  installing bpf-linker {BPF_LINKER}, about a minute");
    let package = format!("bpf-linker@{BPF_LINKER}");
    show(workspace::cargo().args(["install", &package, "--locked"]))
        .context("cannot install bpf-linker")
}
