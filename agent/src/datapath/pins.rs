//! What is pinned, for people: read without an agent, changed by nobody.

use super::{
    DatapathError, attach,
    maps::shape::{self, Shape},
    sys::{self, MapInfo},
};
use sinabro_common::names;
use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

/// A line for each pin below a directory; what cannot be read says why in its line.
///
/// # Errors
/// If the directory cannot be listed.
pub fn describe(bpf_dir: &Path) -> Result<Vec<String>, DatapathError> {
    let mut lines = Vec::new();
    for name in attach::list(bpf_dir)? {
        let path = bpf_dir.join(&name);
        if name == names::BPF_LINKS_DIR || shape::generation_of(&name).is_some() {
            for within in attach::list(&path)? {
                lines.push(line(&format!("{name}/{within}"), &path.join(within)));
            }
        } else {
            lines.push(line(&name, &path));
        }
    }
    lines.sort();
    Ok(lines)
}

fn line(name: &str, path: &Path) -> String {
    match object(path) {
        Ok(text) => format!("{name}: {text}"),
        Err(error) => format!("{name}: cannot be read: {error}"),
    }
}

fn object(path: &Path) -> io::Result<String> {
    let fd = sys::obj_get(path)?;
    Ok(match sys::kind(fd.as_fd())? {
        sys::Kind::Map => {
            let info = sys::map_info(fd.as_fd())?;
            let used = match used(fd.as_fd(), &info) {
                Ok(count) => format!("{count} used"),
                Err(error) => format!("entries cannot be counted: {error}"),
            };
            format!("{}, {used}", Shape::of("", &info))
        }
        sys::Kind::Link => {
            let info = sys::link_info(fd.as_fd())?;
            format!(
                "link, program {}, interface {}",
                info.prog_id,
                info.ifindex()
            )
        }
        other => format!("{other:?}"),
    })
}

/// How many keys a map has. Arrays have all of theirs.
fn used(map: BorrowedFd<'_>, info: &MapInfo) -> io::Result<u64> {
    let mut key = vec![0; info.key_size as usize];
    let mut next = key.clone();
    let mut count = 0;
    let mut from = None;
    while sys::next_key(map, from, &mut next)? {
        count += 1;
        // Keys that come and go meanwhile make the walk begin again.
        if count > 2 * u64::from(info.max_entries) {
            return Err(io::Error::other("the map changes too fast"));
        }
        key.copy_from_slice(&next);
        from = Some(&key[..]);
    }
    Ok(count)
}
