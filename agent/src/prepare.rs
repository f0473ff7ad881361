//! What a node's kernel has to allow before its pods can have a network: packets are forwarded,
//! router advertisements are taken all the same, and there is a bpffs for pins.
//!
//! And whether it can accelerate TCP between pods has to be known.
//!
//! This is all that takes more than the agent's three capabilities. `sinabroctl prepare` does it
//! as root and ends; the agent then finds everything as it should be, and writes nothing, so
//! that a read-only /proc/sys does not stop it. Where it is allowed to, it does the same itself.
//! Preparing again changes nothing.

use crate::{
    acceleration::{choice::Mode, self_test},
    chain::Chain,
    cluster_api::kubelet,
    config::Places,
    install::{InstallError, plugin},
    state_file::FileError,
};
use ipnet::IpNet;
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use sinabro_common::{api::Verdict, names};
use sinabro_netlink::{Conn, Family, ResultExt, distrust, route::RouteFilter, sysctl};
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

const FORWARD_V4: [&str; 3] = ["net", "ipv4", "ip_forward"];
const FORWARD_V6: [&str; 5] = ["net", "ipv6", "conf", "all", "forwarding"];
const SAY_MAC_V4: [&str; 5] = ["net", "ipv4", "conf", "all", "arp_notify"];
const SAY_MAC_V6: [&str; 5] = ["net", "ipv6", "conf", "all", "ndisc_notify"];
const PING_GROUPS: [&str; 3] = ["net", "ipv4", "ping_group_range"];
/// As the kernel has it where nobody set it: no group (ping_group_range in icmp(7)).
const NO_GROUP: [&str; 2] = ["1", "0"];
/// The group that the agent runs as, and no other.
const AGENTS_GROUP: &str = "0 0";
/// Of routes learnt from router advertisements (linux/rtnetlink.h).
const RTPROT_RA: u8 = 9;

#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("{name} must be {value}, run `sinabroctl prepare` as root or set it by hand")]
    Sysctl {
        name: String,
        value: &'static str,
        source: sinabro_netlink::Error,
    },
    #[error("cannot mount a bpffs on {}", path.display())]
    Mount { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Netlink(#[from] sinabro_netlink::Error),
}

/// What was done, in words, and what will not work.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Prepared {
    pub changes: Vec<String>,
    pub warnings: Vec<String>,
}

impl Prepared {
    /// Adds what another step did.
    pub fn add(&mut self, other: Self) {
        self.changes.extend(other.changes);
        self.warnings.extend(other.warnings);
    }
}

/// Leaves the agent a report of whether this kernel can accelerate TCP. That it cannot be had is no
/// reason to serve no pods.
pub fn self_test(places: &Places) -> Prepared {
    let mut prepared = Prepared::default();
    if places.tcp_acceleration == Mode::Off {
        return prepared;
    }
    let cgroup = places.cgroup_dir.as_deref();
    let found = self_test::prepare(&places.state_dir, &places.bpf_dir, cgroup);
    if found.kept {
        return prepared;
    }
    let problem = found.problem;
    prepared
        .warnings
        .extend(problem.map(|error| Chain(&error).to_string()));
    let reason = found.report.reason;
    match found.report.verdict {
        Verdict::Refused => {
            let text = format!("no tcp acceleration: {reason}");
            prepared.warnings.push(text);
        }
        Verdict::Accelerate => {
            let text = format!("tested the tcp acceleration: {reason}");
            prepared.changes.push(text);
        }
    }
    prepared
}

/// Installs the plugin, if one is to be installed, for an agent that may only read its directory.
///
/// # Errors
/// If it cannot be installed and there is none of ours; with another one, pods can be added.
pub fn plugin(places: &Places) -> Result<Prepared, InstallError> {
    let mut prepared = Prepared::default();
    let Some(source) = &places.cni_source else {
        return Ok(prepared);
    };
    let path = places.cni_bin_dir.join(names::CNI_PLUGIN);
    match plugin::install(source, &places.cni_bin_dir) {
        Ok(true) => prepared
            .changes
            .push(format!("installed {}", path.display())),
        Ok(false) => {}
        Err(error) if plugin::is_there(&path) => {
            let text = Chain(&error).to_string();
            prepared.warnings.push(text);
        }
        Err(error) => return Err(error),
    }
    Ok(prepared)
}

/// Leaves the agent the API server that the kubelet asks, by its kubeconfig below the root of the node's file system.
///
/// # Errors
/// If it cannot be written into the state directory.
pub fn api_server(places: &Places, root: &Path) -> Result<Prepared, FileError> {
    let found = kubelet::look(root);
    let path = places.state_dir.join(names::KUBELETS_SERVER_FILE);
    let mut prepared = Prepared::default();
    if kubelet::keep(&found, &path)?
        && let (Some(server), Some(file)) = (&found.server, &found.file)
    {
        let text = format!("the API server is {server}, by {file}");
        prepared.changes.push(text);
    }
    prepared.warnings.extend(found.problems);
    Ok(prepared)
}

/// The families of which packets have to be forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Families {
    pub v4: bool,
    pub v6: bool,
}

impl Families {
    pub const BOTH: Self = Self { v4: true, v6: true };

    pub fn of(cidrs: &[IpNet]) -> Self {
        Self {
            v4: cidrs.iter().any(|cidr| cidr.addr().is_ipv4()),
            v6: cidrs.iter().any(|cidr| cidr.addr().is_ipv6()),
        }
    }

    /// For an agent that does not know its node yet: what was prepared, if anything was.
    pub fn prepared_or_both() -> Self {
        let (v4, v6) = (
            Self {
                v4: true,
                v6: false,
            },
            Self {
                v4: false,
                v6: true,
            },
        );
        match is_forwarding(v4) || is_forwarding(v6) {
            true => Self {
                v4: false,
                v6: false,
            },
            false => Self::BOTH,
        }
    }
}

/// Makes the kernel forward packets of these families. `uplinks` are those that are known already.
///
/// # Errors
/// If forwarding is off and cannot be turned on.
pub fn forwarding(uplinks: &[String], families: Families) -> Result<Prepared, PrepareError> {
    let mut prepared = Prepared::default();
    if families.v4 {
        prepared.changes.extend(ensure(&FORWARD_V4, "1")?);
    }
    if !families.v6 {
        return Ok(prepared);
    }
    // Before forwarding goes on: the routes learnt so far would go.
    for link in ra_links(uplinks)? {
        match accept_ra(&link) {
            Ok(change) => prepared.changes.extend(change),
            Err(error) => prepared.warnings.push(Chain(&error).to_string()),
        }
    }
    match ensure(&FORWARD_V6, "1") {
        // A kernel without IPv6.
        Err(PrepareError::Sysctl { source, .. }) if source.is_not_found() => prepared
            .warnings
            .push("the kernel has no IPv6, pods get IPv4 only".into()),
        other => prepared.changes.extend(other?),
    }
    Ok(prepared)
}

/// Whether it does, as far as it can be read.
pub fn is_forwarding(families: Families) -> bool {
    let on = |name: &[&str]| sysctl::read(name).is_ok_and(|value| value == "1");
    (!families.v4 || on(&FORWARD_V4)) && (!families.v6 || on(&FORWARD_V6))
}

/// Keeps the node from listening to routers behind links of pods that an agent before these
/// settings made, or that somebody changed.
///
/// # Errors
/// If the links cannot be listed.
pub fn pod_links() -> Result<Prepared, PrepareError> {
    let mut prepared = Prepared::default();
    for link in Conn::new()?.links()? {
        if !names::is_pod_link(&link.name) && link.name != names::VXLAN_LINK {
            continue;
        }
        match distrust::repair(&link.name) {
            Ok(changes) => prepared
                .changes
                .extend(changes.iter().map(|name| format!("set {name} to 0"))),
            Err(error) => prepared.warnings.push(Chain(&error).to_string()),
        }
    }
    Ok(prepared)
}

/// The links on which router advertisements count: uplinks, as far as that can be known without
/// the list of nodes. Not simply all links: on one that leads to containers, advertisements
/// could come from them.
fn ra_links(uplinks: &[String]) -> Result<BTreeSet<String>, PrepareError> {
    let mut conn = Conn::new()?;
    let learnt = conn.routes(&RouteFilter {
        family: Some(Family::V6),
        protocol: Some(RTPROT_RA),
        ..RouteFilter::default()
    })?;
    let mut indexes: Vec<_> = learnt.iter().filter_map(|route| route.oif).collect();
    for family in [Family::V4, Family::V6] {
        indexes.extend(conn.default_route(family)?.and_then(|route| route.oif));
    }
    let mut names: BTreeSet<_> = uplinks.iter().cloned().collect();
    for index in indexes {
        let link = conn.link_by_index(index).ignore_not_found()?;
        names.extend(link.map(|link| link.name));
    }
    Ok(names)
}

/// Raises an uplink's accept_ra from 1, its default, to 2; other values are somebody's decision.
/// With forwarding on, the kernel takes router advertisements only where it is 2, and drops the
/// default routes it learnt otherwise (Documentation/networking/ip-sysctl.rst).
pub fn accept_ra(link: &str) -> Result<Option<String>, PrepareError> {
    let name = ["net", "ipv6", "conf", link, "accept_ra"];
    match sysctl::read(&name) {
        Ok(value) if value == "1" => ensure(&name, "2"),
        Ok(_) => Ok(None),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Has links say another MAC address as soon as they have it. What pods send to another node without a tunnel has no address of
/// this one's, so that its questions for neighbours do not say it by IPv6: others would send to the old one for as long as they believe in it.
pub fn announcements() -> Prepared {
    let mut prepared = Prepared::default();
    for name in [SAY_MAC_V4, SAY_MAC_V6] {
        match ensure(&name, "1") {
            Ok(change) => prepared.changes.extend(change),
            // A kernel without IPv6.
            Err(PrepareError::Sysctl { source, .. }) if source.is_not_found() => {}
            Err(error) => prepared.warnings.push(Chain(&error).to_string()),
        }
    }
    prepared
}

/// Lets the agent's group have ping sockets, which [`crate::probe`] asks peers with. A range that
/// somebody chose stays as it is.
pub fn ping_sockets() -> Prepared {
    let mut prepared = Prepared::default();
    let is_closed = |range: String| range.split_whitespace().eq(NO_GROUP);
    if !sysctl::read(&PING_GROUPS).is_ok_and(is_closed) {
        return prepared;
    }
    match sysctl::write(&PING_GROUPS, AGENTS_GROUP) {
        Ok(()) => {
            let name = PING_GROUPS.join(".");
            let change = format!("set {name} to {AGENTS_GROUP}");
            prepared.changes.push(change);
        }
        Err(error) => prepared.warnings.push(Chain(&error).to_string()),
    }
    prepared
}

fn ensure(name: &[&str], value: &'static str) -> Result<Option<String>, PrepareError> {
    let text = name.join(".");
    match sysctl::ensure(name, value) {
        Ok(true) => Ok(Some(format!("set {text} to {value}"))),
        Ok(false) => Ok(None),
        Err(source) => Err(PrepareError::Sysctl {
            name: text,
            value,
            source,
        }),
    }
}

/// Mounts a bpffs on the directory that `bpf_dir` is in, unless there is one.
///
/// # Errors
/// If that fails.
pub fn bpffs(bpf_dir: &Path) -> Result<Prepared, PrepareError> {
    let mut prepared = Prepared::default();
    let path = bpf_dir.parent().unwrap_or(bpf_dir);
    let failed = |source| PrepareError::Mount {
        path: path.to_owned(),
        source,
    };
    fs::create_dir_all(path).map_err(failed)?;
    let found = statfs(path).map_err(|errno| failed(errno.into()))?;
    if found.filesystem_type() != BPF_FS_MAGIC {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        // As systemd mounts it.
        mount(Some("bpf"), path, Some("bpf"), flags, Some("mode=0700"))
            .map_err(|errno| failed(errno.into()))?;
        let change = format!("mounted a bpffs on {}", path.display());
        prepared.changes.push(change);
    }
    Ok(prepared)
}
