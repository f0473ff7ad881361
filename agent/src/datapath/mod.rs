//! The eBPF data path of this node: loads the programs, keeps their maps and links pinned, and
//! is the only place that reads or writes them.
//!
//! - [`Datapath::load`] loads and verifies every program before it touches a link. Pinned maps
//!   are used again, so a restart keeps every flow; pinned links are updated in place, so no
//!   packet passes without a program.
//! - [`Datapath::attach_pod`] and [`Datapath::set_uplinks`] are idempotent: after a restart the
//!   agent calls them again for what it restored.
//! - Every method blocks for a few system calls and may be called from any thread.
//!
//! Interface indexes are those of the network namespace of the calling thread.

mod error;

pub use error::DatapathError;

use ipnet::IpNet;
use sinabro_common::{
    abi::{
        Addr,
        config::NodeConfig,
        counters::PodCounters,
        drop::DropReason,
        endpoint::{Endpoint, PodLink},
    },
    names,
};
use std::{
    collections::{BTreeMap, HashSet},
    path::PathBuf,
};

/// How to load the data path.
#[derive(Clone, Debug)]
pub struct DatapathConfig {
    /// Directory of pinned maps and links, on a bpffs; made if missing.
    pub bpf_dir: PathBuf,
    /// cgroup v2 directory whose sockets may join the TCP fast path; the root of the cgroup v2
    /// mount if not given.
    pub cgroup: Option<PathBuf>,
    /// Attach the same-node TCP fast path.
    pub tcp_fast_path: bool,
    pub attach: AttachMode,
    /// Entries of the masquerade table, two per flow; [`sinabro_common::abi::nat::MAX_NAT_ENTRIES`]
    /// if not given.
    pub nat_entries: Option<u32>,
}

impl Default for DatapathConfig {
    fn default() -> Self {
        Self {
            bpf_dir: names::BPF_DIR.into(),
            cgroup: None,
            tcp_fast_path: false,
            attach: AttachMode::Auto,
            nat_entries: None,
        }
    }
}

/// How programs are attached to interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachMode {
    /// tcx where the kernel has it, else clsact.
    #[default]
    Auto,
    /// tcx links, Linux 6.6.
    Tcx,
    /// Filters on a clsact qdisc.
    Clsact,
}

/// How full the masquerade table is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatUsage {
    /// Flows, translated or let through.
    pub flows: u64,
    /// Flows that fit.
    pub capacity: u64,
}

/// The loaded data path.
pub struct Datapath {}

impl Datapath {
    /// Loads and verifies every program, using maps that are already pinned, then updates every
    /// pinned link in place.
    ///
    /// Where a pinned map did not fit and was replaced by an empty one, links are left alone
    /// until the `attach_` and `set_` calls have filled it again.
    pub fn load(_config: &DatapathConfig) -> Result<Self, DatapathError> {
        Ok(Self {})
    }

    /// Makes a pod live: its records, its counters, its programs. Idempotent.
    ///
    /// `link` is the name of the host-side interface; it names the pins.
    pub fn attach_pod(
        &self,
        _ifindex: u32,
        _link: &str,
        _pod: &PodLink,
        _endpoints: &[(Addr, Endpoint)],
    ) -> Result<(), DatapathError> {
        Ok(())
    }

    /// Forgets a pod, whether or not its interface still exists. Idempotent.
    pub fn detach_pod(
        &self,
        _ifindex: u32,
        _link: &str,
        _addresses: &[Addr],
    ) -> Result<(), DatapathError> {
        Ok(())
    }

    /// Removes the pins and records of every pod whose link is not in `live`, and returns the
    /// names of the links whose pins were removed.
    pub fn retain_pods(&self, _live: &HashSet<String>) -> Result<Vec<String>, DatapathError> {
        Ok(Vec::new())
    }

    /// Attaches the uplink programs to exactly these interfaces. Idempotent.
    pub fn set_uplinks(&self, _ifindexes: &[u32]) -> Result<(), DatapathError> {
        Ok(())
    }

    /// Sets this node's settings; flags that the kernel or the configuration does not allow are
    /// cleared.
    pub fn set_node_config(&self, _config: NodeConfig) -> Result<(), DatapathError> {
        Ok(())
    }

    /// Makes these the destinations that keep the pod's own source address.
    pub fn set_non_masquerade(&self, _prefixes: &[IpNet]) -> Result<(), DatapathError> {
        Ok(())
    }

    /// Counters of the pod at a host-side interface, summed over CPUs; none if it is not attached.
    pub fn pod_counters(&self, _ifindex: u32) -> Result<Option<PodCounters>, DatapathError> {
        Ok(None)
    }

    /// Packets dropped so far, for every reason.
    pub fn drops(&self) -> Result<Vec<(DropReason, u64)>, DatapathError> {
        Ok(Vec::new())
    }

    /// Masquerade flows at the last [`Self::sweep`].
    pub fn nat_usage(&self) -> NatUsage {
        NatUsage::default()
    }

    /// Removes masquerade flows that are over at `now` ([`monotonic_ns`]) or belong to no pod of
    /// this node any more, and returns how many.
    pub fn sweep(&self, _now_ns: u64) -> Result<u64, DatapathError> {
        Ok(0)
    }

    /// What the kernel allowed, for people: `attach: tcx` and so on.
    pub fn modes(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

/// The clock of `last_seen_ns` in the maps (`bpf_ktime_get_ns`, CLOCK_MONOTONIC).
pub fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    // Every Linux has this clock, and it starts at zero at boot.
    now.map_or(0, |t| {
        t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64
    })
}
