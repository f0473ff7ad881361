//! Why the data path could not do something.

use std::{io, path::PathBuf};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatapathError {
    /// The agent was built on a machine without bpf-linker or rust-src.
    #[error("built without eBPF programs: run `cargo xtask setup` and build again")]
    NotBuilt,

    #[error("{} is not on a bpffs: mount one with `mount -t bpf bpf /sys/fs/bpf`", path.display())]
    NotBpffs { path: PathBuf },

    #[error("{what} {} failed", path.display())]
    File {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    /// The kernel refused a program; what ran before keeps running.
    #[error("the kernel refused program `{program}`: {reason}\n{log}")]
    Refused {
        program: &'static str,
        reason: String,
        /// The end of the verifier's log.
        log: String,
    },

    #[error("loading the eBPF object `{object}` failed")]
    Object {
        object: &'static str,
        source: Box<aya::EbpfError>,
    },

    /// The object lacks what the agent expects: it was built from other sources.
    #[error("the eBPF object `{object}` has no {what} `{name}`")]
    Missing {
        object: &'static str,
        what: &'static str,
        name: &'static str,
    },

    /// This kernel lacks something without which there is no data path.
    #[error("this kernel lacks {0}")]
    Unsupported(&'static str),

    #[error("attaching program `{program}` to {target} failed")]
    Attach {
        program: &'static str,
        target: String,
        source: io::Error,
    },

    #[error("{call} on map `{map}` failed")]
    Map {
        map: &'static str,
        call: &'static str,
        source: io::Error,
    },
}
