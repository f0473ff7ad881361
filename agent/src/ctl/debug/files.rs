//! Directories and files; of others' network configurations no secrets.

use super::{Part, text};
use anyhow::Context as _;
use serde_json::Value;
use sinabro_common::names;
use std::{
    fs::{self, File, OpenOptions},
    io::Read as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// Longest content taken.
const MAX: u64 = 1 << 20;
/// Most entries listed, and most files taken, of one directory.
const MANY: usize = 10_000;

/// What keys of configurations mean something that is nobody's business. Better one too many.
const SECRET: [&str; 5] = ["token", "password", "secret", "key", "auth"];

/// A file's content, cut where it is too long.
pub fn content(path: &Path) -> Part {
    let read = || -> std::io::Result<Vec<u8>> {
        let file: File = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        let mut content = Vec::new();
        file.take(MAX).read_to_end(&mut content)?;
        Ok(content)
    };
    read().with_context(|| format!("cannot read {}", path.display()))
}

/// All entries below a directory: mode, owner, size, time of change.
pub fn list(dir: &Path) -> Part {
    let line = |path: PathBuf| match fs::symlink_metadata(&path) {
        Ok(meta) => format!(
            "{:o} {}:{} {} {} {}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.len(),
            meta.mtime(),
            path.display()
        ),
        Err(error) => format!("{}: {error}", path.display()),
    };
    let found = walk(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    Ok(text(found.into_iter().map(line)))
}

/// Leases, records, queued deletes and the cached nodes.
pub fn state(dir: &Path) -> Vec<(String, Part)> {
    let is_file = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file());
    let files = walk(dir).unwrap_or_default().into_iter().filter(is_file);
    let part = |path: PathBuf| {
        let below = path.strip_prefix(dir).unwrap_or(&path);
        (format!("state/{}", below.display()), content(&path))
    };
    files.map(part).collect()
}

/// Network configurations; what else lies there (a kubeconfig of another's) is only listed.
pub fn configurations(dir: &Path) -> Vec<(String, Part)> {
    let found = walk(dir).unwrap_or_default().into_iter();
    let is_configuration = |path: &PathBuf| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("conf" | "conflist" | "json"))
    };
    let part = |path: PathBuf| {
        let below = path.strip_prefix(dir).unwrap_or(&path);
        let content = match path.file_name() == Some(names::CNI_CONFLIST.as_ref()) {
            true => content(&path),
            false => without_secrets(&path),
        };
        (format!("cni/{}", below.display()), content)
    };
    found.filter(is_configuration).map(part).collect()
}

fn without_secrets(path: &Path) -> Part {
    let mut value: Value = serde_json::from_slice(&content(path)?).context("not JSON")?;
    hide(&mut value);
    Ok(serde_json::to_vec_pretty(&value)?)
}

fn hide(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = name.to_ascii_lowercase();
                match SECRET.iter().any(|secret| name.contains(secret)) {
                    true => *value = Value::from("(hidden)"),
                    false => hide(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(hide),
        _ => {}
    }
}

/// All paths below a directory, links not followed.
fn walk(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut directories = vec![dir.to_owned()];
    while let Some(dir) = directories.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            if found.len() >= MANY {
                return Ok(found);
            }
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_could_be_a_secret_is_hidden_wherever_it_is() {
        let mut value = json!({
            "name": "other",
            "plugins": [{"type": "x", "policy": {"k8s_auth_token": "abc", "type": "k8s"}}],
            "etcdKeyFile": ["abc"],
        });
        hide(&mut value);
        let text = value.to_string();
        assert!(!text.contains("abc") && text.contains("k8s"), "{text}");
        assert_eq!(value["plugins"][0]["policy"]["type"], "k8s");
    }
}
