//! Why the data path could not do something.

use std::{io, path::PathBuf};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatapathError {
    /// The agent was built on a machine without bpf-linker or rust-src.
    #[error("built without eBPF programs: run `cargo xtask setup` and build again")]
    NotBuilt,

    #[error("{} is not on a bpffs: mount one with `sinabroctl prepare` as root", path.display())]
    NotBpffs { path: PathBuf },

    #[error("{what} {} failed", path.display())]
    File {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    /// What ran before keeps running.
    #[error("the kernel refused the program `{program}`, the end of its log:\n{log}\n")]
    Refused {
        program: String,
        /// The end of the verifier's log.
        log: String,
        source: Box<aya::programs::ProgramError>,
    },

    #[error("loading the eBPF object `{object}` failed")]
    Object {
        object: &'static str,
        source: Box<aya::EbpfError>,
    },

    /// The object lacks what the agent expects: they were built from different sources.
    #[error("the eBPF object has no {what} `{name}`")]
    Missing {
        what: &'static str,
        name: &'static str,
    },

    /// The acceleration looks into the kernel's structures, and only where it knows where.
    #[error("where this kernel keeps its sockets' fields is not known")]
    KernelTypes(#[source] super::btf::BtfError),

    #[error("there is no cgroup that has the sockets of all pods")]
    Cgroup(#[source] super::cgroup::CgroupError),

    /// This kernel lacks something that was asked for.
    #[error("this kernel lacks {0}")]
    Unsupported(&'static str),

    #[error("attaching the program `{program}` to {target} failed")]
    Attach {
        program: &'static str,
        target: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    #[error("{what} the map `{map}` failed")]
    Map {
        map: &'static str,
        what: &'static str,
        source: Box<aya::maps::MapError>,
    },

    /// As with [`Self::Missing`].
    #[error("opening the log of the eBPF programs failed")]
    Log { source: Box<aya_log::Error> },

    #[error("a probe of the kernel failed")]
    Probe(#[source] io::Error),
}
