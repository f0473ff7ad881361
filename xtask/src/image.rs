//! `cargo xtask image`: the image, as an archive, without Docker.
//!
//! In it are the three static programs and nothing else: no shell, no distribution, nothing to
//! keep up to date but them. Two archives of the same programs are the same, byte by byte.

use crate::{
    arch::Arch,
    archive::{self, Entry, Image, Tree},
    build, ui,
    workspace::dist,
};
use anyhow::{Context as _, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Where nodes without a registry's mirror get it; also what deploy/ names.
pub const NAME: &str = concat!("ghcr.io/wqld/sinabro:", env!("CARGO_PKG_VERSION"));
/// It is fetched by every node, also over slow lines.
pub const LIMIT: u64 = 15_000_000;

#[derive(clap::Args)]
pub struct Options {
    /// The nodes' architecture [default: this machine's]
    #[arg(long)]
    arch: Option<Arch>,

    /// Only say whether the archive there is what would be written; exit code 1 if it is not
    #[arg(long)]
    check: bool,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let arch = options.arch.map_or_else(Arch::host, Ok)?;
    if options.check {
        let programs = build::release_for(arch)?;
        return check(arch, &programs, &path(arch));
    }
    let to = write_for(arch)?;
    let megabytes = fs::metadata(&to)?.len() as f64 / 1e6;
    println!("  {NAME} for {arch}, {megabytes:.1} MB");
    println!("  {}", to.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the programs for this machine and writes the archive; returns its path.
pub fn write() -> Result<PathBuf> {
    write_for(Arch::host()?)
}

/// Where the archive for this machine is.
pub fn archive() -> Result<PathBuf> {
    Ok(path(Arch::host()?))
}

fn write_for(arch: Arch) -> Result<PathBuf> {
    let programs = build::release_for(arch)?;
    let to = path(arch);
    write_to(arch, &programs, &to)?;
    Ok(to)
}

fn path(arch: Arch) -> PathBuf {
    match arch.is_host() {
        true => dist().join("sinabro-image.tar"),
        false => dist().join(format!("sinabro-image-{arch}.tar")),
    }
}

fn write_to(arch: Arch, programs: &Path, to: &Path) -> Result<()> {
    write_named(NAME, arch, programs, to)
}

/// The image of these programs under a name.
pub fn write_named(name: &str, arch: Arch, programs: &Path, to: &Path) -> Result<()> {
    let mut tree = Tree::new();
    for file in ["sinabro", "sinabro-agent"] {
        let program = Entry::File(programs.join(file), Some(0o755));
        archive::put(&mut tree, format!("usr/bin/{file}"), program);
    }
    // The agent is both, which saves the code that they have in common.
    archive::put(
        &mut tree,
        "usr/bin/sinabroctl",
        Entry::Link("sinabro-agent".into()),
    );
    let image = Image {
        name: name.into(),
        architecture: arch.name(),
        entrypoint: vec!["/usr/bin/sinabro-agent".into()],
        command: Vec::new(),
        // Root, whose capabilities the manifest limits.
        user: String::new(),
    };
    archive::write(&image, &tree, to)?;
    let size = fs::metadata(to)?.len();
    ensure!(
        size < LIMIT,
        "{} has {size} bytes, and {LIMIT} are the limit",
        to.display()
    );
    Ok(())
}

fn check(arch: Arch, programs: &Path, archive: &Path) -> Result<ExitCode> {
    let old = fs::read(archive).with_context(|| format!("cannot read {}", archive.display()))?;
    let fresh = tempfile::tempdir()?;
    let fresh = fresh.path().join("image.tar");
    write_to(arch, programs, &fresh)?;
    if fs::read(&fresh)? == old {
        println!("  {} is up to date", archive.display());
        return Ok(ExitCode::SUCCESS);
    }
    ui::error(&format!(
        "{} is not of these sources, `cargo xtask image` writes it again",
        archive.display()
    ));
    Ok(ExitCode::FAILURE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest;
    use serde_json::Value;
    use std::{collections::BTreeSet, io::Read as _};

    fn programs(dir: &Path) -> PathBuf {
        for (name, _) in build::PROGRAMS {
            fs::write(dir.join(name), format!("{name}, as built")).unwrap();
        }
        dir.to_owned()
    }

    /// Every file of a tar, its content by its path; directories end in a slash.
    fn untar(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
        let mut files = Vec::new();
        for entry in tar::Archive::new(bytes).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut name = entry.path().unwrap().display().to_string();
            if entry.header().entry_type().is_dir() && !name.ends_with('/') {
                name.push('/');
            }
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.push((name, content));
        }
        files
    }

    #[test]
    fn two_writes_of_the_same_programs_are_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let archives = [&one, &two].map(|built| {
            let to = dir.path().join("image.tar");
            write_to(Arch::Amd64, &programs(built.path()), &to).unwrap();
            fs::read(to).unwrap()
        });
        assert!(archives[0] == archives[1]);
    }

    #[test]
    fn the_image_holds_the_programs_and_runs_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("image.tar");
        write_to(Arch::Arm64, &programs(dir.path()), &to).unwrap();
        let outer = untar(&fs::read(to).unwrap());
        let file = |name: &str| &outer.iter().find(|(path, _)| path == name).unwrap().1;
        let manifest: Value = serde_json::from_slice(file("manifest.json")).unwrap();
        assert_eq!(manifest[0]["RepoTags"][0], NAME);
        let config: Value =
            serde_json::from_slice(file(manifest[0]["Config"].as_str().unwrap())).unwrap();
        assert_eq!(config["architecture"], "arm64");
        assert_eq!(config["config"]["Entrypoint"][0], "/usr/bin/sinabro-agent");
        let layer = untar(file(manifest[0]["Layers"][0].as_str().unwrap()));
        let names: BTreeSet<&str> = layer.iter().map(|(name, _)| name.as_str()).collect();
        let expected = [
            "usr/",
            "usr/bin/",
            "usr/bin/sinabro",
            "usr/bin/sinabro-agent",
            "usr/bin/sinabroctl",
        ];
        assert_eq!(names, BTreeSet::from(expected));
        let agent = layer.iter().find(|(name, _)| name.ends_with("agent"));
        assert_eq!(agent.unwrap().1, b"sinabro-agent, as built");
    }

    #[test]
    fn an_archive_of_other_programs_is_not_up_to_date() {
        let dir = tempfile::tempdir().unwrap();
        let built = programs(dir.path());
        let to = dir.path().join("image.tar");
        write_to(Arch::Amd64, &built, &to).unwrap();
        let code = |arch| format!("{:?}", check(arch, &built, &to).unwrap());
        assert_eq!(code(Arch::Amd64), format!("{:?}", ExitCode::SUCCESS));
        assert_eq!(code(Arch::Arm64), format!("{:?}", ExitCode::FAILURE));
        fs::write(built.join("sinabro"), "built again").unwrap();
        assert_eq!(code(Arch::Amd64), format!("{:?}", ExitCode::FAILURE));
    }

    #[test]
    fn an_image_over_the_limit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let built = programs(dir.path());
        fs::write(built.join("sinabro"), vec![0; LIMIT as usize]).unwrap();
        let error = write_to(Arch::Amd64, &built, &dir.path().join("image.tar")).unwrap_err();
        assert!(error.to_string().ends_with("are the limit"));
    }

    #[test]
    fn the_dockerfile_makes_the_same_image() {
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        let dockerfile = read(manifest::deploy().join("Dockerfile"));
        let (build_stage, image) = dockerfile.split_once("FROM scratch\n").unwrap();
        let toolchain = read(crate::workspace::root().join("rust-toolchain.toml"));
        let channel = toolchain.lines().find(|line| line.starts_with("channel"));
        let version = channel.unwrap().split('"').nth(1).unwrap();
        assert!(build_stage.contains(&format!("FROM rust:{version}-")));
        assert!(build_stage.contains(NAME));
        for line in [
            "cp target/dist/sinabro target/dist/sinabro-agent /image/",
            "ln -s sinabro-agent /image/sinabroctl",
        ] {
            assert!(build_stage.contains(line), "{line}");
        }
        assert!(image.starts_with("COPY --from=build /image/ /usr/bin/\n"));
        assert!(image.contains(&format!("ENV {}\n", archive::PATH)));
        assert!(image.ends_with("ENTRYPOINT [\"/usr/bin/sinabro-agent\"]\n"));
    }
}
