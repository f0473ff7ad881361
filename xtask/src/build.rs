//! `cargo xtask build`: static release binaries in target/dist.

use crate::{
    setup, ui,
    workspace::{Rustc, cargo_with_ebpf, dist, run as show, target},
};
use anyhow::{Context as _, Result, bail, ensure};
use std::{fs, path::Path, process::ExitCode};

/// Programs and the packages that make them.
const PROGRAMS: [(&str, &str); 3] = [
    ("sinabro", "sinabro-cni"),
    ("sinabro-agent", "sinabro-agent"),
    ("sinabroctl", "sinabro-agent"),
];

pub fn run() -> Result<ExitCode> {
    setup::ensure(setup::BUILD)?;
    release()?;
    let mut rows = vec![vec!["program".to_string(), "bytes".into(), "linked".into()]];
    for (name, _) in PROGRAMS {
        let path = dist().join(name);
        let size = fs::metadata(&path)?.len();
        rows.push(vec![
            path.display().to_string(),
            size.to_string(),
            "statically".into(),
        ]);
    }
    ui::table(&rows);
    Ok(ExitCode::SUCCESS)
}

/// Builds the programs; cargo shows its own progress and does nothing twice.
pub fn release() -> Result<()> {
    let rustc = Rustc::find()?;
    // With an explicit target these flags stay away from build scripts and macros, which
    // cannot be static.
    let flags = format!(
        "CARGO_TARGET_{}_RUSTFLAGS",
        rustc.host.to_uppercase().replace('-', "_")
    );
    let mut command = cargo_with_ebpf();
    command
        .args(["build", "--release", "--target", &rustc.host])
        .env(flags, "-C target-feature=+crt-static")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    for (name, package) in PROGRAMS {
        command.args(["--package", package, "--bin", name]);
    }
    show(&mut command).context("cannot build the release binaries")?;

    fs::create_dir_all(dist()).with_context(|| format!("cannot make {}", dist().display()))?;
    for (name, _) in PROGRAMS {
        let built = target().join(&rustc.host).join("release").join(name);
        check_static(&built)?;
        install(&built, &dist().join(name))?;
    }
    Ok(())
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

/// Puts a program in place in one step: the old one may be running.
fn install(from: &Path, to: &Path) -> Result<()> {
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

/// A static program asks for no dynamic loader: no PT_INTERP among its program headers (elf(5)).
fn check_static(path: &Path) -> Result<()> {
    const PT_INTERP: u32 = 3;
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
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
    fn a_dynamic_program_is_told_from_a_static_one() {
        // Tests themselves are linked dynamically.
        let path = std::env::current_exe().unwrap();
        assert!(check_static(&path).is_err());
        assert!(program_header_types(b"\x7fELF\x02\x01 cut short").is_none());
        assert!(program_header_types(b"#!/bin/sh").is_none());
    }
}
