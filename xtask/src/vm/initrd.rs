//! The machine's file system: an archive that the kernel unpacks into memory (cpio's format "newc",
//! Documentation/driver-api/early-userspace/buffer-format.rst). Archives may follow one another.

use anyhow::{Context as _, Result};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CONSOLE: u32 = 0o020_600;

#[derive(Clone, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    made: BTreeSet<PathBuf>,
    inode: u32,
}

impl Archive {
    /// With a console: process 1 is started with it, before anything is mounted.
    pub fn new() -> Self {
        let mut archive = Self::default();
        archive.directories(Path::new("/dev/console"));
        archive.entry(Path::new("/dev/console"), CONSOLE, (5, 1), &[]);
        archive
    }

    pub fn file(&mut self, path: &str, content: &[u8]) {
        let path = Path::new(path);
        self.directories(path);
        self.entry(path, PROGRAM, (0, 0), content);
    }

    /// A program and the libraries that it is linked with, at the places where it looks for them.
    pub fn program(&mut self, path: &str, content: &[u8], libraries: &[PathBuf]) -> Result<()> {
        self.file(path, content);
        for library in libraries {
            if !self.made.contains(library) {
                let content = fs::read(library)
                    .with_context(|| format!("cannot read {}", library.display()))?;
                self.directories(library);
                self.entry(library, PROGRAM, (0, 0), &content);
            }
        }
        Ok(())
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.entry(Path::new("TRAILER!!!"), 0, (0, 0), &[]);
        self.bytes
    }

    fn directories(&mut self, path: &Path) {
        let mut above: Vec<_> = path.ancestors().skip(1).collect();
        above.reverse();
        for dir in above {
            if dir.parent().is_some() && !self.made.contains(dir) {
                self.entry(dir, DIRECTORY, (0, 0), &[]);
            }
        }
    }

    fn entry(&mut self, path: &Path, mode: u32, device: (u32, u32), content: &[u8]) {
        self.made.insert(path.to_owned());
        self.inode += 1;
        let name = path.strip_prefix("/").unwrap_or(path);
        let name = name.as_os_str().as_encoded_bytes();
        let fields = [
            self.inode,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name);
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{output, which};
    use std::process::{Command, Stdio};

    #[test]
    fn busybox_unpacks_it() {
        let Some(busybox) = which("busybox") else {
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Archive::default();
        archive.file("/a/b/odd length", b"12345");
        archive.file("/a/c", b"");
        let mut second = Archive::default();
        second.file("/job.json", b"{}");
        let bytes = [archive.finish(), second.finish()];
        for (number, bytes) in bytes.iter().enumerate() {
            let path = dir.path().join(number.to_string());
            fs::write(&path, bytes).unwrap();
            let mut cpio = Command::new(&busybox);
            cpio.args(["cpio", "-i"]).current_dir(&dir);
            output(cpio.stdin(Stdio::from(fs::File::open(&path).unwrap()))).unwrap();
        }
        assert_eq!(
            fs::read(dir.path().join("a/b/odd length")).unwrap(),
            b"12345"
        );
        assert_eq!(fs::read(dir.path().join("a/c")).unwrap(), b"");
        assert_eq!(fs::read(dir.path().join("job.json")).unwrap(), b"{}");
    }
}
