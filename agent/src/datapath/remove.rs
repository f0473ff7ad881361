//! Takes the data path out of the kernel: filters by their name, everything else by its pin.
//! A program link ends with its pin, and takes the program off the interface or the cgroup.

use super::{
    DatapathError, apart,
    attach::{self, Hook},
    maps::shape,
    object,
};
use sinabro_common::names;
use std::{fs, io, path::Path};

/// Takes away whatever there is, in the network namespace of the calling thread and below
/// `bpf_dir`. What others pinned there stays, and so do the directories then. An empty clsact
/// qdisc stays: it may be somebody else's, and does nothing.
pub fn remove(bpf_dir: &Path) -> Removed {
    let mut removed = Removed::default();
    match attach::detach_filters() {
        Ok(filters) => removed.done.extend(filters),
        Err(error) => removed.problems.push(error),
    }
    let links = bpf_dir.join(names::BPF_LINKS_DIR);
    for name in entries(&links, &mut removed) {
        if Hook::of_pin(&name).is_some()
            || name == attach::sock::PIN
            || attach::service_sock::is_pin(&name)
        {
            let path = links.join(name);
            removed.pin(&path, object::remove_link(&path));
        }
    }
    // Left by a self-test, or by who verified the programs, if that was killed.
    for directory in [names::BPF_SELF_TEST_DIR, names::BPF_VERIFY_DIR] {
        if let Err(error) = apart::remove(&bpf_dir.join(directory)) {
            removed.problems.push(error);
        }
    }
    for name in entries(bpf_dir, &mut removed) {
        let path = bpf_dir.join(&name);
        if shape::generation_of(&name).is_some() {
            // Maps of any version: nobody else's.
            for map in entries(&path, &mut removed) {
                let map = path.join(map);
                removed.pin(&map, object::remove_pin(&map));
            }
            removed.directory(&path);
        } else if shape::is_map(name.strip_suffix(object::NEXT).unwrap_or(&name)) {
            removed.pin(&path, object::remove_pin(&path));
        }
    }
    for dir in [&links, bpf_dir] {
        removed.directory(dir);
    }
    removed
}

/// What is gone, in words, and what could not be taken away.
#[derive(Debug, Default)]
pub struct Removed {
    pub done: Vec<String>,
    pub problems: Vec<DatapathError>,
}

impl Removed {
    fn pin(&mut self, path: &Path, result: Result<(), DatapathError>) {
        match result {
            Ok(()) => self.done.push(format!("pin {}", path.display())),
            Err(error) => self.problems.push(error),
        }
    }

    fn directory(&mut self, path: &Path) {
        match fs::remove_dir(path) {
            Ok(()) => self.done.push(format!("directory {}", path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => self.problems.push(DatapathError::File {
                what: "removing directory",
                path: path.to_owned(),
                source,
            }),
        }
    }
}

/// The names in a directory; none if it is not there.
fn entries(dir: &Path, removed: &mut Removed) -> Vec<String> {
    match attach::list(dir) {
        Ok(names) => names,
        Err(DatapathError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Vec::new()
        }
        Err(error) => {
            removed.problems.push(error);
            Vec::new()
        }
    }
}
