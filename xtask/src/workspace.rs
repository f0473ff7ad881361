//! Where things are, and how cargo is called.

use anyhow::{Context as _, Result, bail, ensure};
use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// The repository's root: this package's parent.
pub fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}

/// Where cargo builds.
pub fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Where the release binaries go.
pub fn dist() -> PathBuf {
    target().join("dist")
}

/// cargo, in the repository's root, with what `cargo install` installs in its path.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    if let Some(path) = path_with_cargo_bin() {
        command.env("PATH", path);
    }
    // Cargo sets these for xtask itself; they would leak into what it builds.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST") {
            command.env_remove(&name);
        }
    }
    command
}

/// cargo for a build that must contain the eBPF programs.
pub fn cargo_with_ebpf() -> Command {
    let mut command = cargo();
    command.env("SINABRO_EBPF", "required");
    command
}

/// Where `cargo install` puts programs.
pub fn cargo_bin() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")))?;
    Some(home.join("bin"))
}

fn path_with_cargo_bin() -> Option<std::ffi::OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    let bin = cargo_bin()?;
    env::join_paths(env::split_paths(&path).chain([bin])).ok()
}

/// A program's path, if it is installed. Administrators' directories are looked into, too: they
/// are not in every user's path.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = path_with_cargo_bin().unwrap_or_default();
    let more = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(more)
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}

/// What a command prints; an error if it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr
            .trim()
            .lines()
            .last()
            .unwrap_or("no message")
            .to_string();
        bail!("{name} failed ({}): {last}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Runs a command in view of the user; an error if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command
        .status()
        .with_context(|| format!("cannot run {name}"))?;
    ensure!(status.success(), "{name} failed ({status})");
    Ok(())
}

/// The compiler that rust-toolchain.toml chooses.
pub struct Rustc {
    /// As in `1.95.0`.
    pub version: String,
    pub host: String,
    pub sysroot: PathBuf,
}

impl Rustc {
    pub fn find() -> Result<Self> {
        let ask =
            |arguments: &[&str]| output(Command::new("rustc").args(arguments).current_dir(root()));
        let verbose = ask(&["-vV"])?;
        let field = |name: &str| {
            let line = verbose.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim().to_string())
                .with_context(|| format!("`rustc -vV` says no `{name}`"))
        };
        Ok(Self {
            version: field("release:")?,
            host: field("host:")?,
            sysroot: ask(&["--print", "sysroot"])?.into(),
        })
    }
}
