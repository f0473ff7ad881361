//! Image archives, as `docker save` writes and `docker load`, `ctr images import` and
//! `kind load image-archive` read them: a tar of manifest.json, a configuration and one layer.
//!
//! Reproducible: entries sorted, times zero, everything root's. The layout is Docker's image
//! specification v1.2; the configuration is an OCI image configuration.

use anyhow::{Context as _, Result};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};
use tar::{EntryType, Header};

/// What an image is called and runs.
#[derive(Clone, Debug)]
pub struct Image {
    /// With its tag.
    pub name: String,
    /// As in GOARCH: amd64, arm64.
    pub architecture: &'static str,
    pub entrypoint: Vec<String>,
    pub command: Vec<String>,
    /// `UID:GID`; empty: root.
    pub user: String,
}

pub const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Something in an image's only layer.
#[derive(Clone, Debug)]
pub enum Entry {
    /// With its mode.
    Directory(u32),
    /// A file of this machine, with its mode there or another.
    File(PathBuf, Option<u32>),
    /// A file of these bytes.
    Bytes(Vec<u8>, u32),
    Link(PathBuf),
}

/// The layer's content, by path in the image, without a leading slash.
pub type Tree = BTreeMap<PathBuf, Entry>;

/// Adds a file or link below a path, and the directories that lead there.
pub fn put(tree: &mut Tree, path: impl AsRef<Path>, entry: Entry) {
    let path = path.as_ref();
    for parent in path
        .ancestors()
        .skip(1)
        .filter(|p| !p.as_os_str().is_empty())
    {
        tree.entry(parent.to_owned())
            .or_insert(Entry::Directory(0o755));
    }
    tree.insert(path.to_owned(), entry);
}

/// Writes the archive; a file of that name is replaced in one step.
///
/// # Errors
/// If a file of the tree cannot be read, or the archive cannot be written.
pub fn write(image: &Image, tree: &Tree, to: &Path) -> Result<()> {
    let directory = to.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let temporary =
        |extension: &str| to.with_extension(format!("{extension}.{}", std::process::id()));
    let (layer, archive) = (temporary("layer"), temporary("new"));
    let written = write_layer(tree, &layer)
        .and_then(|()| write_archive(image, &layer, &archive))
        .and_then(|()| Ok(fs::rename(&archive, to)?));
    let _ = fs::remove_file(&layer);
    if written.is_err() {
        let _ = fs::remove_file(&archive);
    }
    written.with_context(|| format!("cannot write image archive {}", to.display()))
}

fn write_layer(tree: &Tree, to: &Path) -> Result<()> {
    let mut builder = tar::Builder::new(io::BufWriter::new(fs::File::create(to)?));
    for (path, entry) in tree {
        let mut header = Header::new_gnu();
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(0);
        match entry {
            Entry::Directory(mode) => {
                header.set_entry_type(EntryType::Directory);
                header.set_mode(*mode);
                builder.append_data(&mut header, path, io::empty())?;
            }
            Entry::File(source, mode) => {
                let file = fs::File::open(source)
                    .with_context(|| format!("cannot read {}", source.display()))?;
                let meta = file.metadata()?;
                header.set_size(meta.len());
                header.set_mode(mode.unwrap_or(meta.permissions().mode() & 0o7777));
                builder.append_data(&mut header, path, file)?;
            }
            Entry::Bytes(bytes, mode) => {
                header.set_size(bytes.len() as u64);
                header.set_mode(*mode);
                builder.append_data(&mut header, path, &bytes[..])?;
            }
            Entry::Link(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_mode(0o777);
                builder.append_link(&mut header, path, target)?;
            }
        }
    }
    builder.into_inner()?.flush()?;
    Ok(())
}

fn write_archive(image: &Image, layer: &Path, to: &Path) -> Result<()> {
    let config = json!({
        "architecture": image.architecture,
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Env": [PATH],
            "Entrypoint": image.entrypoint,
            "Cmd": image.command,
            "User": image.user,
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", digest(fs::File::open(layer)?)?)]},
        "history": [{"created": "1970-01-01T00:00:00Z"}],
    })
    .to_string();
    let config_name = format!("{}.json", digest(config.as_bytes())?);
    let manifest =
        json!([{"Config": config_name, "RepoTags": [image.name], "Layers": ["layer.tar"]}]);

    let mut builder = tar::Builder::new(io::BufWriter::new(fs::File::create(to)?));
    let mut append = |name: &str, size: u64, data: &mut dyn Read| -> Result<()> {
        let mut header = Header::new_gnu();
        header.set_mtime(0);
        header.set_mode(0o644);
        header.set_size(size);
        Ok(builder.append_data(&mut header, name, data)?)
    };
    let manifest = manifest.to_string();
    append(
        "manifest.json",
        manifest.len() as u64,
        &mut manifest.as_bytes(),
    )?;
    append(&config_name, config.len() as u64, &mut config.as_bytes())?;
    append(
        "layer.tar",
        fs::metadata(layer)?.len(),
        &mut fs::File::open(layer)?,
    )?;
    builder.into_inner()?.flush()?;
    Ok(())
}

fn digest(mut data: impl Read) -> Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let len = data.read(&mut buffer)?;
        if len == 0 {
            return Ok(hash
                .finalize()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect());
        }
        hash.update(&buffer[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image {
        Image {
            name: "example/a:1".into(),
            architecture: "amd64",
            entrypoint: vec!["/usr/bin/a".into()],
            command: Vec::new(),
            user: String::new(),
        }
    }

    #[test]
    fn the_same_tree_makes_the_same_archive_whatever_the_files_times() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("a");
        let archives = [1, 2].map(|number| {
            fs::write(&source, b"program").unwrap();
            let file = fs::File::options().write(true).open(&source).unwrap();
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(number * 1_000_000);
            file.set_modified(time).unwrap();
            let mut tree = Tree::new();
            put(
                &mut tree,
                "usr/bin/a",
                Entry::File(source.clone(), Some(0o755)),
            );
            put(&mut tree, "bin", Entry::Link("usr/bin".into()));
            put(
                &mut tree,
                "etc/passwd",
                Entry::Bytes(b"root:x:0:0\n".to_vec(), 0o644),
            );
            let archive = dir.path().join(format!("{number}.tar"));
            write(&image(), &tree, &archive).unwrap();
            fs::read(archive).unwrap()
        });
        assert_eq!(archives[0], archives[1]);
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 3, "only the source and two archives");
    }

    #[test]
    fn an_archive_names_its_layer_by_the_digest_of_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("i.tar");
        let mut tree = Tree::new();
        put(
            &mut tree,
            "usr/bin/a",
            Entry::Bytes(b"program".to_vec(), 0o755),
        );
        write(&image(), &tree, &archive).unwrap();
        let mut files = BTreeMap::new();
        let mut reader = tar::Archive::new(fs::File::open(&archive).unwrap());
        for entry in reader.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.insert(name, bytes);
        }
        let manifest: serde_json::Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
        assert_eq!(manifest[0]["RepoTags"][0], "example/a:1");
        let config_name = manifest[0]["Config"].as_str().unwrap();
        let config: serde_json::Value = serde_json::from_slice(&files[config_name]).unwrap();
        let layer = &files[manifest[0]["Layers"][0].as_str().unwrap()];
        let expected = format!("sha256:{}", digest(&layer[..]).unwrap());
        assert_eq!(config["rootfs"]["diff_ids"][0], expected.as_str());
        let mut layer = tar::Archive::new(&layer[..]);
        let names: Vec<String> = layer
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        assert_eq!(
            names,
            ["usr/", "usr/bin/", "usr/bin/a"].map(|n| n.trim_end_matches('/').to_string())
        );
    }

    #[test]
    fn a_missing_file_is_named_and_leaves_no_archive() {
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("i.tar");
        let mut tree = Tree::new();
        put(&mut tree, "a", Entry::File("/no/such/file".into(), None));
        let error = write(&image(), &tree, &archive).unwrap_err();
        assert!(format!("{error:#}").contains("/no/such/file"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
