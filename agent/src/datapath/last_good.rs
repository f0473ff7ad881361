//! The programs that ran last on this node, kept in a file that survives reboots and upgrades.
//!
//! A tar archive, so that people can look into it: `version`, `layout`, the five objects, and a
//! `digest` of them all. It is replaced in one step, once other programs run on every pod.

use super::files::ObjectFiles;
use sinabro_common::{abi::layout, algo::hash::fnv1a, atomic_file::AtomicFile};
use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    path::Path,
};

/// More than a version's objects will ever be.
const MOST_BYTES: u64 = 64 << 20;

/// Why there are no programs to fall back on.
#[derive(Debug, thiserror::Error)]
#[error("the programs kept in {path} cannot be used: {why}")]
pub struct LastGoodError {
    path: String,
    why: String,
}

/// Reads them; none if there are none yet.
///
/// # Errors
/// If the file cannot be read, or is not what was written.
pub fn read(path: &Path) -> Result<Option<ObjectFiles>, LastGoodError> {
    let bytes = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unusable(path, error)),
        Ok(file) => {
            let mut bytes = Vec::new();
            file.take(MOST_BYTES)
                .read_to_end(&mut bytes)
                .map_err(|error| unusable(path, error))?;
            bytes
        }
    };
    parse(&bytes).map(Some).map_err(|why| unusable(path, why))
}

/// Keeps these, unless they are kept already.
///
/// # Errors
/// If they cannot be written; then those of before are still there.
pub fn keep(path: &Path, files: &ObjectFiles) -> io::Result<()> {
    if let Ok(Some(kept)) = read(path)
        && kept == *files
    {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let file = AtomicFile::new(path).durable();
    file.sweep()?;
    file.replace(&archive(files)?)
}

/// The file's content.
fn archive(files: &ObjectFiles) -> io::Result<Vec<u8>> {
    let layout = format!("{:016x}", files.layout);
    let digest = digest(files);
    let mut archive = tar::Builder::new(Vec::new());
    let entries: [(&str, &[u8]); 8] = [
        ("version", files.version.as_bytes()),
        ("layout", layout.as_bytes()),
        ("pod", &files.pod),
        ("uplink", &files.uplink),
        ("overlay", &files.overlay),
        ("sock", &files.sock),
        ("service_sock", &files.service_sock),
        ("digest", digest.as_bytes()),
    ];
    for (name, content) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        archive.append_data(&mut header, name, content)?;
    }
    archive.into_inner()
}

/// Reads [`archive`]'s content.
fn parse(bytes: &[u8]) -> Result<ObjectFiles, String> {
    let mut found: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut archive = tar::Archive::new(bytes);
    let entries = archive.entries().map_err(|error| error.to_string())?;
    for entry in entries {
        let mut entry = entry.map_err(|error| error.to_string())?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let mut content = Vec::new();
        entry
            .read_to_end(&mut content)
            .map_err(|error| format!("{name}: {error}"))?;
        if found.insert(name.clone(), content).is_some() {
            return Err(format!("it has {name} twice"));
        }
    }
    let mut take = |name: &str| found.remove(name).ok_or(format!("it has no {name}"));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|error| error.to_string());
    let layout = text(take("layout")?)?;
    let files = ObjectFiles {
        version: text(take("version")?)?.into(),
        layout: u64::from_str_radix(&layout, 16).map_err(|error| format!("layout: {error}"))?,
        pod: Cow::Owned(take("pod")?),
        uplink: Cow::Owned(take("uplink")?),
        overlay: Cow::Owned(take("overlay")?),
        sock: Cow::Owned(take("sock")?),
        service_sock: Cow::Owned(take("service_sock")?),
    };
    match take("digest")? == digest(&files).as_bytes() {
        true => Ok(files),
        false => Err("its digest is another: it was changed, or damaged".into()),
    }
}

/// Against damage; who can write the file can write anything.
fn digest(files: &ObjectFiles) -> String {
    let all = [
        &files.pod,
        &files.uplink,
        &files.overlay,
        &files.sock,
        &files.service_sock,
    ];
    let hash = layout::start(&files.version, all.len(), 1);
    let hash = layout::both(hash, files.layout);
    let hash = all
        .iter()
        .fold(hash, |hash, object| layout::both(hash, fnv1a(object)));
    format!("{hash:016x}")
}

fn unusable(path: &Path, why: impl ToString) -> LastGoodError {
    LastGoodError {
        path: path.display().to_string(),
        why: why.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn files() -> ObjectFiles {
        ObjectFiles {
            version: "0.1.0".into(),
            layout: 7,
            pod: vec![1; 700].into(),
            uplink: vec![2; 3].into(),
            overlay: Vec::new().into(),
            sock: vec![4; 512].into(),
            service_sock: vec![5; 9].into(),
        }
    }

    #[test]
    fn what_was_kept_is_read_and_the_next_takes_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sinabro/programs.tar");
        assert_eq!(read(&path).unwrap(), None);
        keep(&path, &files()).unwrap();
        assert_eq!(read(&path).unwrap(), Some(files()));
        let written = || fs::metadata(&path).unwrap().modified().unwrap();
        let before = written();
        keep(&path, &files()).unwrap();
        assert_eq!(written(), before, "the same is not written again");
        let next = ObjectFiles {
            version: "0.2.0".into(),
            ..files()
        };
        keep(&path, &next).unwrap();
        assert_eq!(read(&path).unwrap(), Some(next));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_there_stays_if_the_next_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("programs.tar");
        fs::create_dir(&path).unwrap();
        assert!(keep(&path, &files()).is_err());
        assert!(
            read(&path)
                .unwrap_err()
                .to_string()
                .contains("programs.tar")
        );
    }

    proptest! {
        #[test]
        fn damage_is_found_wherever_it_is(at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = archive(&files()).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            // What is not read, such as padding, may be anything.
            if let Ok(read) = parse(&bytes) {
                prop_assert_eq!(read, files());
            }
        }

        #[test]
        fn what_is_cut_off_is_an_error_unless_it_was_padding(len in any::<prop::sample::Index>()) {
            let bytes = archive(&files()).unwrap();
            if let Ok(read) = parse(&bytes[..len.index(bytes.len())]) {
                prop_assert_eq!(read, files());
            }
        }

        #[test]
        fn garbage_is_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
            prop_assert!(parse(&bytes).is_err());
        }
    }
}
