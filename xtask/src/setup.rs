//! `cargo xtask setup`: brings what is missing, says what it does, does nothing twice.
//!
//! Every other command calls [`ensure`] for just what that command needs.

use crate::{
    arch::Arch,
    cluster::{self, Variant},
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
    #[arg(long, conflicts_with = "cluster")]
    build_only: bool,
    /// Also Kubernetes' programs, which `cluster` and `e2e` would build: ten minutes the first time
    #[arg(long)]
    cluster: bool,
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
    /// Makes the firewalls of others in tests.
    Nft,
    /// Makes the rules of kube-proxy and flannel in benchmarks.
    Iptables,
    /// Fills and empties netfilter's table of connections in benchmarks.
    Conntrack,
    /// A C++ compiler, which builds libFuzzer.
    CppCompiler,
    /// The plugins that ours is compared with.
    ReferencePlugins,
    /// What people try a network with, in tests. Those that need it leave it out where it cannot be had.
    Tools,
    /// An HTTP server and a load for it.
    HttpTools,
    /// What starts the containers of a cluster's nodes.
    Runc,
    /// What nodes of a cluster run besides, and what its test images are made of.
    ClusterTools,
    /// Boots other kernels, and what unpacks their packages.
    Qemu,
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
    Need::Nft,
    Need::Iptables,
    Need::ReferencePlugins,
    Need::Tools,
];
pub const FUZZ: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::CppCompiler,
];
pub const BENCH: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::ReferencePlugins,
];
pub const BENCH_POD: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::ReferencePlugins,
    Need::Iptables,
    Need::HttpTools,
];
pub const BENCH_NAT: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::ReferencePlugins,
    Need::Iptables,
    Need::Nft,
    Need::Conntrack,
    Need::HttpTools,
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
    Need::Runc,
    Need::ClusterTools,
];
pub const VM: &[Need] = &[Need::RustSrc, Need::BpfLinker, Need::StaticLibc, Need::Qemu];
const QEMU: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("dpkg", "dpkg"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("strip", "binutils"),
    ("busybox", "busybox-static"),
    ("ip", "iproute2"),
];
/// Programs of a cluster's nodes and test images, and Debian's packages of them.
const CLUSTER_TOOLS: [(&str, &str); 24] = [
    ("nft", "nftables"),
    ("iptables", "iptables"),
    ("conntrack", "conntrack"),
    ("ip", "iproute2"),
    ("ss", "iproute2"),
    ("nsenter", "util-linux"),
    ("unshare", "util-linux"),
    ("mount", "mount"),
    ("sysctl", "procps"),
    ("busybox", "busybox-static"),
    ("dash", "dash"),
    ("bash", "bash"),
    ("curl", "curl"),
    ("wget", "wget"),
    ("getent", "libc-bin"),
    ("dig", "bind9-dnsutils"),
    ("nslookup", "bind9-dnsutils"),
    ("ethtool", "ethtool"),
    ("iperf", "iperf"),
    ("iperf3", "iperf3"),
    ("nc", "netcat-openbsd"),
    ("ping", "iputils-ping"),
    ("socat", "socat"),
    ("tcpdump", "tcpdump"),
];
const ALL: &[Need] = &[
    Need::RustSrc,
    Need::BpfLinker,
    Need::StaticLibc,
    Need::CppCompiler,
    Need::Iperf3,
    Need::Nft,
    Need::Iptables,
    Need::Conntrack,
    Need::ReferencePlugins,
    Need::Tools,
    Need::HttpTools,
    Need::Runc,
    Need::Qemu,
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
    if options.cluster {
        cluster::build(Variant::default())?;
    }
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
    install_packages(missing.iter().flat_map(|need| need.files()).collect())?;
    for need in &missing {
        match need {
            Need::RustSrc => install_rust_src(&rustc)?,
            Need::BpfLinker => install_bpf_linker()?,
            Need::RustStd(arch) => install_rust_std(*arch)?,
            Need::HttpTools => unpack_nginx()?,
            Need::ReferencePlugins => {
                debian::unpack("containernetworking-plugins", &unpacked("plugins"))?;
            }
            Need::Runc => debian::unpack("runc", &unpacked("runc"))?,
            Need::Tools => unpack_tools(),
            Need::StaticLibc
            | Need::CppCompiler
            | Need::Iperf3
            | Need::Nft
            | Need::Iptables
            | Need::Conntrack
            | Need::Qemu
            | Need::ClusterTools
            | Need::CrossCompiler(_) => {}
        }
    }
    for need in missing {
        if !need.is_optional() && need.find(&rustc).is_none() {
            bail!("{} is still missing after its installation", need.name());
        }
    }
    Ok(())
}

impl Need {
    /// Whether what needs it does without where it cannot be had, and says so.
    fn is_optional(self) -> bool {
        self == Self::Tools
    }

    fn name(self) -> &'static str {
        match self {
            Self::RustSrc => "rust-src",
            Self::BpfLinker => "bpf-linker",
            Self::StaticLibc => "static libc",
            Self::CppCompiler => "C++ compiler",
            Self::Iperf3 => "iperf3",
            Self::Nft => "nft",
            Self::Iptables => "iptables",
            Self::Conntrack => "conntrack",
            Self::ReferencePlugins => "ptp, host-local",
            Self::Tools => "network tools",
            Self::HttpTools => "wrk, nginx",
            Self::Runc => "runc",
            Self::Qemu => "qemu",
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
                let (linker, version) = bpf_linker()?;
                return suits(&version).then(|| format!("{} ({version})", linker.display()));
            }
            Self::StaticLibc => static_libc("cc")?,
            Self::CrossCompiler(arch) => static_libc(arch.cross_compiler())?,
            Self::RustStd(arch) => {
                let lib = rustc.sysroot.join("lib/rustlib").join(arch.rust_target());
                lib.join("lib").canonicalize().ok()?
            }
            Self::CppCompiler => which("c++")?,
            Self::Iperf3 => which("iperf3")?,
            Self::Nft => which("nft")?,
            Self::Iptables => which("iptables-restore")?,
            Self::Conntrack => which("conntrack")?,
            Self::ReferencePlugins => reference_plugins()?,
            Self::HttpTools => {
                let (wrk, nginx) = (which("wrk")?, nginx()?);
                return Some(format!("{}, {}", wrk.display(), nginx.display()));
            }
            Self::Tools => tools()?,
            Self::Runc => runc()?,
            Self::Qemu => {
                let qemu = which("qemu-system-x86_64")?;
                let all = QEMU.iter().all(|(program, _)| which(program).is_some());
                return all.then(|| qemu.display().to_string());
            }
            Self::ClusterTools => {
                let mut programs = CLUSTER_TOOLS.iter();
                let all = programs.all(|(program, _)| which(program).is_some());
                return all.then(|| format!("{} programs", CLUSTER_TOOLS.len()));
            }
        };
        Some(found.display().to_string())
    }

    /// What of it is missing and is somebody's package.
    fn files(self) -> Vec<File> {
        let all: &[(&'static str, &'static str)] = match self {
            // These are brought by other ways, or unpacked beside what is installed.
            Self::RustSrc
            | Self::BpfLinker
            | Self::RustStd(_)
            | Self::ReferencePlugins
            | Self::Tools
            | Self::Runc => &[],
            Self::StaticLibc => &[("cc", "gcc"), ("libc.a", "libc6-dev")],
            Self::CppCompiler => &[("c++", "g++")],
            Self::Iperf3 => &[("iperf3", "iperf3")],
            Self::Nft => &[("nft", "nftables")],
            Self::Iptables => &[("iptables-restore", "iptables")],
            Self::Conntrack => &[("conntrack", "conntrack")],
            Self::HttpTools => &[("wrk", "wrk")],
            Self::Qemu => &QEMU,
            Self::ClusterTools => &CLUSTER_TOOLS,
            Self::CrossCompiler(Arch::Amd64) => &[
                ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu"),
                ("its libc.a", "libc6-dev-amd64-cross"),
            ],
            Self::CrossCompiler(Arch::Arm64) => &[
                ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
                ("its libc.a", "libc6-dev-arm64-cross"),
            ],
        };
        missing(all)
    }
}

/// A file that is missing, and the Debian package that has it.
#[derive(Clone, Copy)]
struct File {
    name: &'static str,
    package: &'static str,
}

fn missing(all: &[(&'static str, &'static str)]) -> Vec<File> {
    let files = all.iter().map(|(name, package)| File { name, package });
    files.filter(|file| which(file.name).is_none()).collect()
}

impl File {
    /// For those who have another distribution.
    fn describe(self) -> String {
        let fedora = match self.name {
            "libc.a" => ", Fedora: glibc-static",
            "c++" => ", Fedora: gcc-c++",
            "qemu-system-x86_64" => ", Fedora: qemu-system-x86-core",
            "busybox" => ", Fedora: busybox",
            _ => "",
        };
        format!("{} (Debian: {}{fedora})", self.name, self.package)
    }
}

/// By the distribution's packages, only those of what is missing.
fn install_packages(files: Vec<File>) -> Result<()> {
    if files.is_empty() {
        return Ok(());
    }
    if which("apt-get").is_none() {
        let names: Vec<String> = files.into_iter().map(File::describe).collect();
        bail!(
            "please install, by what your distribution calls these packages: {}",
            names.join(", ")
        );
    }
    let mut packages: Vec<&str> = files.into_iter().map(|file| file.package).collect();
    packages.sort_unstable();
    packages.dedup();
    debian::install(&packages)
}

/// Every package that set-up may install.
#[cfg(test)]
pub fn all_debian_packages() -> Vec<&'static str> {
    let tools = CLUSTER_TOOLS.iter().chain(&QEMU);
    let tools = tools.map(|(_, package)| *package);
    let mut all: Vec<&str> = tools
        .chain(["gcc", "g++", "libc6-dev", "iperf3", "wrk"])
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Where packages are unpacked that are not installed.
fn unpacked(name: &str) -> PathBuf {
    workspace::target().join("setup").join(name)
}

/// The machine's own runc, else the one that was unpacked.
pub fn runc() -> Option<PathBuf> {
    which("runc").or_else(|| {
        ["usr/sbin/runc", "usr/bin/runc"]
            .map(|path| unpacked("runc").join(path))
            .into_iter()
            .find(|path| path.is_file())
    })
}

/// bpf-linker and its version, as in `0.10.3`.
fn bpf_linker() -> Option<(PathBuf, String)> {
    let linker = which("bpf-linker")?;
    let text = output(Command::new(&linker).arg("--version")).ok()?;
    let version = text.split_whitespace().last()?.to_owned();
    Some((linker, version))
}

/// Whether a version of bpf-linker is of the series that the programs are built and tested with.
fn suits(version: &str) -> bool {
    let series = |version: &str| {
        let mut parts = version.splitn(3, '.').map(str::to_owned);
        (parts.next(), parts.next())
    };
    series(version) == series(BPF_LINKER)
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
        .chain([unpacked("plugins").join("usr/lib/cni")])
        .find(|dir| dir.join("ptp").is_file() && dir.join("host-local").is_file())
}

/// The machine's own nginx, else the one that [`unpack_nginx`] unpacked.
pub fn nginx() -> Option<PathBuf> {
    which("nginx").or_else(|| {
        let path = unpacked("nginx").join("usr/sbin/nginx");
        path.is_file().then_some(path)
    })
}

/// Unpacks nginx without installing it: the package would have it started with the machine. The
/// libraries it wants come with wrk and with every Debian system.
fn unpack_nginx() -> Result<()> {
    if nginx().is_some() {
        return Ok(());
    }
    // The program has moved between these packages.
    for package in ["nginx", "nginx-light", "nginx-core"] {
        debian::unpack(package, &unpacked("nginx"))?;
        if nginx().is_some() {
            return Ok(());
        }
    }
    bail!("none of Debian's packages of nginx has the program: please install it")
}

/// Packages of [`Need::Tools`], and of each a program that it has.
const TOOLS: [(&str, &str); 2] = [
    ("busybox-static", "busybox"),
    ("traceroute", "traceroute.db"),
];

/// Where they are, if all are there.
pub fn tools() -> Option<PathBuf> {
    let dir = unpacked("tools");
    let has = |name: &str| {
        let mut dirs = ["usr/bin", "bin"].into_iter();
        dirs.any(|bin| dir.join(bin).join(name).is_file())
    };
    TOOLS.iter().all(|(_, program)| has(program)).then_some(dir)
}

/// Tests do without what is missing, and say so.
fn unpack_tools() {
    for (package, _) in TOOLS {
        if let Err(error) = debian::unpack(package, &unpacked("tools")) {
            ui::error(&format!(
                "tests leave out what this machine has not of busybox and traceroute: {error:#}"
            ));
        }
    }
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
    if let Some((linker, version)) = bpf_linker() {
        // Somebody wants it for something else.
        bail!(
            "{} is of version {version}; the programs are built with {BPF_LINKER}: `cargo install \
             bpf-linker@{BPF_LINKER} --locked --force` puts it in place of that",
            linker.display()
        );
    }
    println!("  installing bpf-linker {BPF_LINKER}, about a minute");
    let package = format!("bpf-linker@{BPF_LINKER}");
    show(workspace::cargo().args(["install", &package, "--locked"]))
        .context("cannot install bpf-linker")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_c_library_is_named_by_its_file_and_by_each_distributions_package() {
        let described = File {
            name: "libc.a",
            package: "libc6-dev",
        }
        .describe();
        assert_eq!(
            described,
            "libc.a (Debian: libc6-dev, Fedora: glibc-static)"
        );
    }

    #[test]
    fn only_the_packages_of_what_is_missing_are_installed() {
        let all = [("sh", "dash"), ("no-such-program", "wanted")];
        let names: Vec<&str> = missing(&all).iter().map(|file| file.package).collect();
        assert_eq!(names, ["wanted"]);
    }

    #[test]
    fn a_linker_of_another_series_does_not_suit() {
        for version in ["0.10.3", "0.10.0"] {
            assert!(suits(version), "{version}");
        }
        for version in ["0.9.15", "0.11.0", "1.10.3", "", "0", "garbage"] {
            assert!(!suits(version), "{version}");
        }
    }
}
