//! `cargo xtask build`: static release binaries in target/dist.

use crate::{
    arch::Arch,
    setup, ui,
    workspace::{cargo_with_ebpf, dist, run as show, target},
};
use anyhow::{Context as _, Result, bail, ensure};
use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Programs and the packages that make them.
pub const PROGRAMS: [(&str, &str); 3] = [
    ("sinabro", "sinabro-cni"),
    ("sinabro-agent", "sinabro-agent"),
    ("sinabroctl", "sinabro-agent"),
];

/// Of those that users get, one is a link: as in the image, the agent is both, by the name that it is called by.
const LINK: (&str, &str) = ("sinabroctl", "sinabro-agent");

/// The others.
fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    PROGRAMS.into_iter().filter(|(name, _)| *name != LINK.0)
}

#[derive(clap::Args)]
pub struct Options {
    /// Build for this architecture, into a directory of its own in target/dist [default: this
    /// machine's]
    #[arg(long)]
    arch: Option<Arch>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let arch = options.arch.map_or_else(Arch::host, Ok)?;
    let dir = release_for(arch)?;
    let mut rows = vec![vec!["program".to_string(), "bytes".into(), "linked".into()]];
    for (name, _) in files() {
        let path = dir.join(name);
        let size = fs::metadata(&path)?.len();
        rows.push(vec![
            path.display().to_string(),
            size.to_string(),
            "statically".into(),
        ]);
    }
    let link = dir.join(LINK.0).display().to_string();
    rows.push(vec![link, String::new(), format!("to {}", LINK.1)]);
    ui::table(&rows);
    Ok(ExitCode::SUCCESS)
}

/// Builds the programs for this machine.
pub fn release() -> Result<()> {
    release_for(Arch::host()?).map(drop)
}

/// Builds the programs, bringing what that needs, and returns where they are; cargo shows its
/// own progress and does nothing twice.
pub fn release_for(arch: Arch) -> Result<PathBuf> {
    setup::ensure(setup::BUILD)?;
    if !arch.is_host() {
        setup::ensure(&[setup::Need::RustStd(arch), setup::Need::CrossCompiler(arch)])?;
    }
    let mut command = cargo_with_ebpf();
    recipe(&mut command, arch);
    show(&mut command).context("cannot build the release binaries")?;

    let dir = match arch.is_host() {
        true => dist(),
        false => dist().join(arch.name()),
    };
    collect(&target(), arch, &dir)?;
    Ok(dir)
}

/// Static, wherever they are loaded, with their relocations packed: half a megabyte less of the agent (glibc 2.36 knows how).
const FLAGS: &str = "-C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs";

/// What has cargo build the programs that users get.
pub fn recipe(command: &mut Command, arch: Arch) {
    let triple = arch.rust_target();
    // With an explicit target these flags stay away from build scripts and macros, which
    // cannot be static.
    let variable = |name: &str| {
        let triple = triple.to_uppercase().replace('-', "_");
        format!("CARGO_TARGET_{triple}_{name}")
    };
    command
        .args(["build", "--profile", "ship", "--target", triple])
        .env(variable("RUSTFLAGS"), FLAGS)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    if !arch.is_host() {
        command.env(variable("LINKER"), arch.cross_compiler());
    }
    for (name, package) in files() {
        command.args(["--package", package, "--bin", name]);
    }
}

/// Takes what the recipe has built below `target` to a directory.
pub fn collect(target: &Path, arch: Arch, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    for (name, _) in files() {
        let built = target.join(arch.rust_target()).join("ship").join(name);
        check_static(&built, arch)?;
        install(&built, &dir.join(name))?;
    }
    link(LINK.1, &dir.join(LINK.0))
}

/// Programs as a debug build makes them, for tests; in `target/debug`.
pub fn debug() -> Result<()> {
    let mut command = cargo_with_ebpf();
    command.arg("build");
    for (name, package) in PROGRAMS {
        command.args(["--package", package, "--bin", name]);
    }
    show(&mut command).context("cannot build the programs under test")
}

/// Puts a program in place in one step: the old one may be running, and others may build, too.
fn install(from: &Path, to: &Path) -> Result<()> {
    let _turn = turn_in(to)?;
    let modified = |path: &Path| fs::metadata(path)?.modified();
    if let (Ok(source), Ok(copy)) = (modified(from), modified(to))
        && copy >= source
    {
        return Ok(());
    }
    let temporary = to.with_extension("new");
    fs::copy(from, &temporary)
        .and_then(|_| fs::rename(&temporary, to))
        .with_context(|| format!("cannot write {}", to.display()))
}

/// Waits until nobody else puts anything into the directory of a file, and keeps others from it for as long as the answer lives.
fn turn_in(file: &Path) -> Result<fs::File> {
    let dir = file.parent().context("a file without a directory")?;
    let lock = || {
        let dir = fs::File::open(dir)?;
        dir.lock()?;
        io::Result::Ok(dir)
    };
    lock().with_context(|| format!("cannot lock {}", dir.display()))
}

/// Makes a link, in the place of whatever file was there.
fn link(target: &str, at: &Path) -> Result<()> {
    let _turn = turn_in(at)?;
    let temporary = at.with_extension("new");
    let made = match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => symlink(target, &temporary),
    };
    made.and_then(|()| fs::rename(&temporary, at))
        .with_context(|| format!("cannot write {}", at.display()))
}

/// A static program asks for no dynamic loader: no PT_INTERP among its program headers (elf(5)).
fn check_static(path: &Path, arch: Arch) -> Result<()> {
    const PT_INTERP: u32 = 3;
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        bytes.get(18..20) == Some(arch.elf_machine().to_le_bytes().as_slice()),
        "{} is no program for {arch}",
        path.display()
    );
    let headers = program_header_types(&bytes)
        .with_context(|| format!("{} is not a 64-bit little-endian ELF file", path.display()))?;
    if headers.contains(&PT_INTERP) {
        bail!("{} is linked dynamically", path.display());
    }
    ensure!(
        !headers.is_empty(),
        "{} has no program headers",
        path.display()
    );
    Ok(())
}

/// `p_type` of each program header.
fn program_header_types(elf: &[u8]) -> Option<Vec<u32>> {
    let at = |offset: usize, len: usize| elf.get(offset..offset.checked_add(len)?);
    let u16_at = |offset| Some(u16::from_le_bytes(at(offset, 2)?.try_into().ok()?));
    if at(0, 6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let offset = usize::try_from(u64::from_le_bytes(at(32, 8)?.try_into().ok()?)).ok()?;
    let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
    (0..count)
        .map(|number| {
            let start = offset.checked_add(number.checked_mul(size)?)?;
            Some(u32::from_le_bytes(at(start, 4)?.try_into().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_and_one_for_another_machine_are_refused() {
        // Tests themselves are linked dynamically.
        let path = std::env::current_exe().unwrap();
        let host = Arch::host().unwrap();
        let refused = |arch| check_static(&path, arch).unwrap_err().to_string();
        assert!(refused(host).ends_with("is linked dynamically"));
        let other = [Arch::Amd64, Arch::Arm64].into_iter().find(|a| *a != host);
        assert!(refused(other.unwrap()).contains("is no program for"));
        assert!(program_header_types(b"\x7fELF\x02\x01 cut short").is_none());
        assert!(program_header_types(b"#!/bin/sh").is_none());
    }

    #[test]
    fn several_put_a_program_in_place_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("built"), dir.path().join("program"));
        let program = vec![1; 1 << 20];
        fs::write(&from, &program).unwrap();
        for _ in 0..20 {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| install(&from, &to).unwrap());
                }
            });
            assert!(fs::read(&to).unwrap() == program);
            fs::remove_file(&to).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_takes_the_place_of_a_program() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join(LINK.0);
        fs::write(dir.path().join(LINK.1), "both").unwrap();
        fs::write(&at, "built before there was a link").unwrap();
        // Left by one that was killed in the middle.
        fs::write(at.with_extension("new"), "half").unwrap();
        for _ in 0..2 {
            link(LINK.1, &at).unwrap();
            assert_eq!(fs::read_to_string(&at).unwrap(), "both");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert!(PROGRAMS.contains(&LINK));
    }
}
