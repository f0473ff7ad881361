//! What TCP in a pod takes from an application and cannot send yet.
//!
//! A connection's send buffer grows by its segment size: twenty segments from the start, each rounded up to a
//! power of two (tcp_sndbuf_expand), which is 2.6 MB with segments of 64 KB. Full it is only before a
//! reader that does not keep up, who gains nothing by it, and the node's memory pays. What the other end's
//! window and the way let be under way is not limited by this.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt as _,
};

const PATH: &str = "/proc/sys/net/ipv4/tcp_notsent_lowat";
/// What it is in a new namespace: no limit.
const UNLIMITED: u32 = u32::MAX;
/// With it, readers that do not keep up cost no more than with small segments and no limit.
const MOST: u32 = 512 << 10;

/// The setting of one network namespace, for both families.
pub struct Unsent(File);

impl Unsent {
    /// That of the calling thread's network namespace, and of that for good: which one a file of
    /// /proc/sys/net is of is decided as it is opened (proc_sys_lookup).
    ///
    /// # Errors
    /// If it cannot be opened for writing.
    pub fn open() -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).open(PATH).map(Self)
    }

    /// Sets a limit where nobody did.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub fn limit(&self) -> io::Result<()> {
        let mut text = [0; 16];
        let len = self.0.read_at(&mut text, 0)?;
        if text[..len].trim_ascii() == UNLIMITED.to_string().as_bytes() {
            self.0.write_all_at(MOST.to_string().as_bytes(), 0)?;
        }
        Ok(())
    }
}
