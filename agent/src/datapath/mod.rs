//! The eBPF data path of this node: loads the programs, keeps their maps and links pinned, and
//! is the only place that reads or writes them.
//!
//! - [`Datapath::load`] loads and verifies every program before it touches a link. Pinned maps
//!   are used again, so a restart keeps every flow; pinned links are updated in place, so no
//!   packet passes without a program.
//! - Where this version has other maps than those that run, it takes over what is in them
//!   ([`transition`]): begun by [`Datapath::load`], done with the first [`Datapath::set_uplinks`]
//!   after [`Datapath::retain_pods`], when every program is this version's.
//! - [`Datapath::attach_pod`] and [`Datapath::set_uplinks`] are idempotent: after a restart the
//!   agent calls them again for what it restored.
//! - Every method blocks for a few system calls and may be called from any thread.
//!
//! Interface indexes are those of the network namespace of the calling thread.

mod apart;
mod attach;
pub mod beside_proxy;
mod btf;
mod carry;
pub mod cgroup;
mod connected_sockets;
mod error;
mod files;
pub mod grace;
pub mod handover;
mod last_good;
mod level;
mod log;
mod mapped;
mod maps;
mod object;
pub mod pins;
mod probe;
mod raw_map;
mod remove;
mod service_room;
mod service_sockets;
mod statistics;
mod sweep;
mod sys;
mod transition;
mod verify;

pub use apart::Apart;
pub use attach::Which as WhichAttached;
pub use error::DatapathError;
pub use files::release as release_objects;
pub use level::{Choice, Level};
pub use object::{fingerprint, make_directory};
pub use remove::{Removed, remove};
pub use service_room::ServiceRoom;
pub use verify::verify;

use crate::{chain::Chain, plan::Routing};
use attach::{Classifiers, sock};
use ipnet::IpNet;
pub use maps::{
    Connections, DirectUplink, DropEvents, Mtus, PeerPackets, PodAcceleration, PortSet, PortsOf,
    Prefix as ClientPrefix, QueueLimits, QueueUsage, Services, Translation, Tunnels, Way,
    net_of_prefix, prefixes as client_prefixes,
};
use maps::{Maps, migrations::Known};
use service_sockets::ServiceSockets;
use sinabro_common::{
    abi::{
        Addr,
        acceleration::{AccelerationCounters, ServerKey, Skip, Traffic},
        config::{FLAG_MASQUERADE_PORTLESS, NodeConfig},
        connection::{ALIASES_EACH, Limits, MAX_CONNECTIONS, is_of_pod},
        counters::PodCounters,
        drop::DropReason,
        endpoint::{Endpoint, PodLink},
        uplink::Uplink,
    },
    algo::{acceleration, lifetime},
    api::Mac,
    fail_point::fail_point,
    names,
};
use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use transition::Transition;

/// How to load the data path.
#[derive(Clone, Debug)]
pub struct DatapathConfig {
    /// Directory of pinned maps and links, on a bpffs; made if missing.
    pub bpf_dir: PathBuf,
    /// Where the cgroup v2 directory is whose sockets programs may see: itself or below; the root
    /// of the node's hierarchy if not given.
    pub cgroup: Option<PathBuf>,
    /// Attach the same-node TCP acceleration.
    pub acceleration: bool,
    /// Translate Services where sockets connect, in that cgroup.
    pub service_sockets: bool,
    pub attach: AttachMode,
    /// Connections that there is room for; [`sinabro_common::abi::connection::MAX_CONNECTIONS`] if not
    /// given.
    pub connections: Option<u32>,
    pub connection_limits: ConnectionLimits,
    /// Room for Services; hardly any if they are not ours to translate.
    pub services: ServiceRoom,
    /// What accelerated connections may cost the kernel; by the machine's memory if not given.
    pub queue_limits: Option<QueueLimits>,
    /// Where the programs that ran last are kept; nothing is kept if not given.
    pub last_good: Option<PathBuf>,
}

impl Default for DatapathConfig {
    fn default() -> Self {
        Self {
            bpf_dir: names::BPF_DIR.into(),
            cgroup: None,
            acceleration: false,
            service_sockets: false,
            attach: AttachMode::Auto,
            connections: None,
            connection_limits: ConnectionLimits::default(),
            services: ServiceRoom::default(),
            queue_limits: None,
            last_good: None,
        }
    }
}

impl DatapathConfig {
    /// Records of connections and aliases that there is room for. Without Services none has two of these.
    fn table_sizes(&self) -> (u32, u32) {
        let connections = self.connections.unwrap_or(MAX_CONNECTIONS);
        let each = match self.services == ServiceRoom::NONE {
            true => 1,
            false => ALIASES_EACH,
        };
        (connections, connections.saturating_mul(each))
    }
}

/// How many connections a pod may have, however much room there is, and how long they may be idle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub per_pod: u32,
    /// Of those, the ones that nobody has answered yet.
    pub embryonic_per_pod: u32,
    /// Seconds, by [`lifetime::Stage`].
    pub lifetimes: [u32; 16],
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            per_pod: u32::MAX,
            embryonic_per_pod: u32::MAX,
            lifetimes: lifetime::LIFETIMES,
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

/// How full the table of connections is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionUsage {
    pub connections: u64,
    /// Of those, the ones that nobody has answered,
    pub unanswered: u64,
    /// that an end has closed or reset,
    pub closing: u64,
    /// and that leave the node under its own address;
    pub masqueraded: u64,
    /// mappings, which are none,
    pub mappings: u64,
    /// and connections by another port than their client's mapping.
    pub apart: u64,
    /// Translated ports in use.
    pub aliases: u64,
    /// Connections that there is room for.
    pub capacity: u64,
    pub sweeps: u64,
    /// Time spent in them.
    pub sweeping: Duration,
}

/// A program as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramReport {
    pub name: &'static str,
    /// The kernel's number for it.
    pub id: u32,
    /// Instructions that the verifier walked through, where the kernel tells (Linux 5.16).
    pub instructions: Option<u32>,
}

/// The loaded data path.
pub struct Datapath {
    config: DatapathConfig,
    choice: Choice,
    maps: Maps,
    classifiers: Classifiers,
    /// Whether the kernel has programs put packets into tunnels.
    wraps: bool,
    acceleration: Acceleration,
    service_sockets: ServiceSockets,
    /// Links of pods attached by this process.
    attached: Mutex<HashSet<String>>,
    /// Whether `ENDPOINTS` is known to hold every pod of this node.
    complete: AtomicBool,
    /// None once it is done.
    transition: Mutex<Option<Transition>>,
    /// From sweep to sweep, and what the last one found.
    sweeps: Mutex<(sweep::Memory, sweep::Swept)>,
    /// Addresses whose pod went since the last sweep: their connections may still be there.
    departed: Mutex<HashSet<Addr>>,
    logs: Mutex<Vec<log::Reader>>,
    /// None once somebody reads them.
    drop_events: Mutex<Option<Vec<DropEvents>>>,
}

enum Acceleration {
    Off,
    On(Box<maps::Acceleration>, sock::Attached),
    Failed(DatapathError),
}

impl Datapath {
    /// Loads and verifies every program, using maps that are already pinned, then updates every
    /// pinned link in place. If the kernel refuses one: see [`Level`].
    ///
    /// Where a pinned map did not fit and was replaced by one without its content, links are left alone
    /// until [`Self::attach_pod`] and [`Self::set_uplinks`] come by, after the records are there.
    pub fn load(config: &DatapathConfig) -> Result<Self, DatapathError> {
        Self::load_knowing(config, Known::by(config))
    }

    fn load_knowing(config: &DatapathConfig, known: Known) -> Result<Self, DatapathError> {
        let (mut objects, choice) = level::choose(config, &known)?;
        let (expected, generation) = (known.maps.clone(), known.generation());
        let (mut transition, fits) = match choice.level {
            Level::None => {
                objects.leave_misfits()?;
                (None, false)
            }
            _ => {
                let (begun, fits) = Transition::begin(&mut objects, config, known)?;
                (Some(begun), fits)
            }
        };
        fail_point("carried");
        let links = config.bpf_dir.join(names::BPF_LINKS_DIR);
        let maps = Maps::take(&mut objects.pod)?;
        // Set by one that was killed.
        maps.config.carrying(false)?;
        maps.config
            .mixed(transition.as_ref().is_some_and(Transition::carries))?;
        maps.connections.set_limits(Limits {
            capacity: maps.connections.capacity(),
            per_pod: config.connection_limits.per_pod,
            embryonic_per_pod: config.connection_limits.embryonic_per_pod,
            pad: 0,
            lifetimes: config.connection_limits.lifetimes,
        })?;
        if choice.level != Level::None {
            maps.layouts.note(&config.bpf_dir, &expected)?;
            if !choice.ran {
                maps.config.runs(generation)?;
            }
            // It may be a new map, and programs may use it before anything is set.
            maps.set_reserved_ports()?;
        }
        let mut logs = vec![log::reader(&mut objects.uplink)?];
        let mut drop_events = Vec::new();
        for object in [&mut objects.pod, &mut objects.uplink, &mut objects.overlay] {
            drop_events.extend(DropEvents::take(object)?);
        }
        let wraps = choice.level == Level::None || probe::wraps(&mut objects.overlay);
        let classifiers = match choice.level {
            Level::None => Classifiers::none(links.clone()),
            _ => Classifiers::new(
                objects.pod,
                objects.uplink,
                objects.overlay,
                links.clone(),
                config.attach,
            )?,
        };
        let acceleration = match objects.sock {
            // What goes on needs no agent.
            None if choice.level == Level::None => Acceleration::Off,
            None => {
                sock::detach(&links)?;
                Acceleration::Off
            }
            Some(loaded) => {
                let attached = loaded.and_then(|mut ebpf| {
                    let reader = log::reader(&mut ebpf)?;
                    let maps = maps::Acceleration::take(
                        &mut ebpf,
                        config.queue_limits.unwrap_or_default(),
                    )?;
                    if !links.join(sock::PIN).exists() {
                        maps.forget_ended()?;
                    }
                    let attached = sock::attach(&ebpf, Some(&links), config.cgroup.as_deref())?;
                    logs.push(reader);
                    Ok((maps, attached))
                });
                match attached {
                    Ok((maps, attached)) => Acceleration::On(Box::new(maps), attached),
                    Err(error) => {
                        // Pods can do without.
                        tracing::warn!(error = %Chain(&error), "no tcp acceleration");
                        // Nobody would tell earlier programs of pods that come and go.
                        sock::detach(&links)?;
                        Acceleration::Failed(error)
                    }
                }
            }
        };
        let cgroup = config.cgroup.as_deref();
        let service_sockets = match objects.service_sock {
            Some(loaded) => ServiceSockets::start(loaded, &links, cgroup)?,
            None if choice.level == Level::None => ServiceSockets::Off,
            None => ServiceSockets::stop(&links)?,
        };
        if fits && let Some(transition) = &mut transition {
            transition.swap(&maps.config, || classifiers.swap())?;
        }
        fail_point("loaded");
        Ok(Self {
            config: config.clone(),
            choice,
            maps,
            classifiers,
            wraps,
            acceleration,
            service_sockets,
            attached: Mutex::default(),
            complete: AtomicBool::new(fits),
            transition: Mutex::new(transition),
            sweeps: Mutex::default(),
            departed: Mutex::default(),
            logs: Mutex::new(logs),
            drop_events: Mutex::new(Some(drop_events)),
        })
    }

    /// Makes a pod live: its records, its counters, its programs. Idempotent; a failure leaves
    /// nothing of a pod that was not live before.
    ///
    /// `link` is the name of the host-side interface; it names the pins. `acceleration` says which
    /// of its connections may go from socket to socket; `netns` is the cookie of its network namespace, if
    /// the kernel tells it and its sockets are to be connected to Services' endpoints.
    pub fn attach_pod(
        &self,
        ifindex: u32,
        link: &str,
        pod: &PodLink,
        endpoints: &[(Addr, Endpoint)],
        acceleration: Option<PodAcceleration>,
        netns: Option<u64>,
    ) -> Result<(), DatapathError> {
        let new = lock(&self.attached).insert(link.to_owned());
        let attach = || {
            // Records first: a program without them drops.
            self.maps.pod_links.insert(ifindex, *pod)?;
            self.maps.counters.start(ifindex)?;
            self.maps.connections.start(ifindex)?;
            self.classifiers.attach_pod(ifindex, link)?;
            self.maps.checked_links.put_pod(ifindex)?;
            self.end_flows_of_departed(endpoints.iter().map(|(addr, _)| *addr))?;
            if let Some(maps) = self.acceleration() {
                let addresses: Vec<Addr> = endpoints.iter().map(|(addr, _)| *addr).collect();
                maps.set(ifindex, &addresses, acceleration)?;
            }
            self.service_sockets.attach_pod(link, pod, netns)?;
            // Last what makes others send here.
            endpoints
                .iter()
                .try_for_each(|&(addr, endpoint)| self.maps.endpoints.insert(addr, endpoint))
        };
        attach().inspect_err(|_| {
            if new {
                let addresses: Vec<Addr> = endpoints.iter().map(|(addr, _)| *addr).collect();
                if let Err(error) = self.detach_pod(ifindex, link, &addresses) {
                    tracing::warn!(link, error = %Chain(&error), "undoing an attachment failed");
                }
            }
        })
    }

    /// Forgets a pod, whether or not its interface still exists. Idempotent.
    ///
    /// The pod's connections end with the next [`Self::sweep`], or before another pod gets
    /// its address.
    pub fn detach_pod(
        &self,
        ifindex: u32,
        link: &str,
        addresses: &[Addr],
    ) -> Result<(), DatapathError> {
        // First what makes others send there. Every step is tried, the first error is returned.
        let mut result = addresses
            .iter()
            .map(|&addr| self.maps.endpoints.remove(addr, ifindex))
            .fold(Ok(()), Result::and);
        // After that: a sweep in between would still find the address alive.
        lock(&self.departed).extend(addresses);
        if let Some(maps) = self.acceleration() {
            result = result.and(maps.remove(ifindex, addresses));
        }
        result = result.and(self.service_sockets.detach_pod(link));
        result = result.and(self.classifiers.detach_pod(link));
        result = result.and(self.maps.checked_links.remove(ifindex));
        result = result.and(self.maps.pod_links.remove(ifindex));
        result = result.and(self.maps.counters.remove(ifindex));
        result = result.and(self.maps.connections.end(ifindex));
        lock(&self.attached).remove(link);
        result
    }

    /// What comes for an address's last pod must not reach its next one.
    fn end_flows_of_departed(
        &self,
        addresses: impl Iterator<Item = Addr>,
    ) -> Result<(), DatapathError> {
        let again: HashSet<Addr> = {
            let departed = lock(&self.departed);
            addresses.filter(|addr| departed.contains(addr)).collect()
        };
        if !again.is_empty() {
            sweep::end_of(&self.maps.connections, &again)?;
            lock(&self.departed).retain(|addr| !again.contains(addr));
        }
        Ok(())
    }

    /// Removes the pins and records that earlier processes left of pods whose link is not in
    /// `live`, and returns the names of the links whose pins were removed.
    ///
    /// To be called once the pods of `live` are attached. Pods that this process attached are
    /// left alone: they end by [`Self::detach_pod`].
    pub fn retain_pods(&self, live: &HashSet<String>) -> Result<Vec<String>, DatapathError> {
        let mut keep = lock(&self.attached).clone();
        keep.extend(live.iter().cloned());
        let mut gone = Vec::new();
        for link in self.classifiers.pinned_pods()? {
            if !keep.contains(&link) && !lock(&self.attached).contains(&link) {
                self.classifiers.detach_pod(&link)?;
                gone.push(link);
            }
        }
        let indexes = || -> HashSet<u32> {
            let attached = lock(&self.attached);
            keep.iter()
                .chain(attached.iter())
                .filter_map(|link| nix::net::if_::if_nametoindex(link.as_str()).ok())
                .collect()
        };
        let kept = indexes();
        // What is not there may belong to a pod attached since.
        let is_stale = |ifindex| !kept.contains(&ifindex) && !indexes().contains(&ifindex);
        for (addr, ifindex) in self.maps.endpoints.list()? {
            if is_stale(ifindex) {
                self.maps.endpoints.remove(addr, ifindex)?;
                lock(&self.departed).insert(addr);
            }
        }
        for ifindex in self.maps.pod_links.keys()? {
            if is_stale(ifindex) {
                self.maps.checked_links.remove(ifindex)?;
                self.maps.pod_links.remove(ifindex)?;
            }
        }
        for ifindex in self.maps.counters.keys()? {
            if is_stale(ifindex) {
                self.maps.counters.remove(ifindex)?;
            }
        }
        for (payer, _) in self.maps.connections.shares()? {
            if is_of_pod(payer) && is_stale(payer) {
                self.maps.connections.end(payer)?;
            }
        }
        if let Some(maps) = self.acceleration() {
            maps.retain(|ifindex| !is_stale(ifindex))?;
        }
        self.service_sockets.retain_pods()?;
        self.complete.store(true, Ordering::Relaxed);
        Ok(gone)
    }

    /// Attaches the uplink programs to exactly these interfaces, and has them know of each what is given
    /// with its index. Idempotent.
    pub fn set_uplinks(&self, uplinks: &[(u32, Uplink)]) -> Result<(), DatapathError> {
        let indexes: Vec<u32> = uplinks.iter().map(|(index, _)| *index).collect();
        // Known before a program looks it up, and until none does any more.
        self.maps.uplinks.put(uplinks)?;
        self.attach_uplinks(&indexes)?;
        let checked = &self.maps.checked_links;
        indexes
            .iter()
            .try_for_each(|index| checked.put_uplink(*index))?;
        for gone in self.maps.uplinks.others(&indexes)? {
            checked.remove(gone)?;
            self.maps.uplinks.remove(gone)?;
        }
        Ok(())
    }

    fn attach_uplinks(&self, ifindexes: &[u32]) -> Result<(), DatapathError> {
        let mut transition = lock(&self.transition);
        let Some(under_way) = &mut *transition else {
            return self.classifiers.set_uplinks(ifindexes);
        };
        fail_point("pods-swapped");
        under_way.swap(&self.maps.config, || {
            self.classifiers.set_uplinks(ifindexes).map(|()| true)
        })?;
        if self.complete.load(Ordering::Relaxed) {
            fail_point("carried-all");
            if let Some(done) = transition.take() {
                self.maps.config.mixed(false)?;
                done.finish(&self.config.bpf_dir, &self.maps.layouts)?;
            }
        }
        Ok(())
    }

    /// Ports that no new masqueraded connection gets: of each exactly those that were set last. Connections that
    /// have one keep it.
    pub fn set_host_ports(&self, of: PortsOf, ports: PortSet) -> Result<(), DatapathError> {
        self.maps.host_ports.set(of, ports)?;
        self.maps.set_reserved_ports()
    }

    /// To be called before this process ends: until the next one, what goes past the stack goes by it.
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn leave(&self) -> Result<(), DatapathError> {
        // Nothing follows the routes any more,
        self.maps.next_hops.set(&BTreeMap::new())?;
        // nor others' rules.
        self.set_forwarding(false)
    }

    /// Sets this node's settings. Flows masqueraded as another address than the new one end at the next
    /// [`Self::sweep`].
    pub fn set_node_config(&self, config: NodeConfig) -> Result<(), DatapathError> {
        if !self.is_set_up() {
            return Ok(());
        }
        self.maps.config.set(config)?;
        self.maps.set_reserved_ports()
    }

    /// Whether programs run, or ran and go on. By their settings the next agent knows it, so without programs none are written.
    fn is_set_up(&self) -> bool {
        self.choice.level != Level::None || self.choice.ran
    }

    /// What becomes from now on of what is sent to Services, by what is published. It stays so, however often
    /// [`Self::set_node_config`] is called and whatever agent comes next, until it is set otherwise.
    pub fn set_services(&self, translation: impl Into<Translation>) -> Result<(), DatapathError> {
        match self.is_set_up() {
            true => self.maps.config.services(translation.into()),
            false => Ok(()),
        }
    }

    /// Whether what pods send out of the cluster, and what answers it, goes past the stack while Services are translated here
    /// and by nobody else. It stays so as [`Self::set_services`] does, until this agent ends.
    pub fn set_forwarding(&self, is_direct: bool) -> Result<(), DatapathError> {
        match self.is_set_up() {
            true => self.maps.config.forwarding(is_direct),
            false => Ok(()),
        }
    }

    /// What the ways out of the node carry: pods announce no larger segments there.
    pub fn set_mtus(&self, mtus: Mtus) -> Result<(), DatapathError> {
        self.maps.mtus.set(mtus)
    }

    /// Which programs run, and why no others.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Why there is no acceleration although it was wanted, in a line; none if there is, or it was not.
    pub fn acceleration_refused(&self) -> Option<String> {
        match &self.acceleration {
            Acceleration::Failed(error) => Some(level::in_a_line(error)),
            Acceleration::Off | Acceleration::On(..) => None,
        }
    }

    /// Keeps this version's programs for when the kernel refuses the next one's, or the next kernel
    /// these. To be called once they run on every pod.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn keep_programs(&self, path: &Path) -> Result<(), DatapathError> {
        if self.choice.level != Level::Current {
            return Ok(());
        }
        let kept = last_good::keep(path, &files::ObjectFiles::current()?);
        kept.map_err(|source| DatapathError::File {
            what: "keeping the programs in",
            path: path.to_owned(),
            source,
        })
    }

    /// Makes these the destinations that keep the pod's own source address. Flows that are
    /// masqueraded already stay so until they end.
    pub fn set_non_masquerade(&self, prefixes: &[IpNet]) -> Result<(), DatapathError> {
        self.maps.non_masquerade.set(prefixes)
    }

    /// Whose tunnels are taken, and for whom: exactly these from now on. What goes to and comes from each other
    /// node is counted.
    pub fn set_tunnels(&self, tunnels: &Tunnels<'_>) -> Result<(), DatapathError> {
        self.maps.nodes.set(tunnels)?;
        self.maps.peers.set(&tunnels.peers())
    }

    /// What went between this node and each other one, by tunnel address, summed over CPUs; by
    /// [`Addr::UNSPECIFIED`] that of nodes that are gone.
    pub fn peer_packets(&self) -> Result<BTreeMap<Addr, PeerPackets>, DatapathError> {
        self.maps.peers.all()
    }

    /// The uplink by which packets may leave past the stack.
    pub fn direct_uplink(&self) -> Result<DirectUplink, DatapathError> {
        self.maps.uplinks.direct()
    }

    /// Whether packets can be put into tunnels past the stack on this kernel.
    pub fn wraps(&self) -> bool {
        self.wraps
    }

    /// The way to another node as it was set last.
    pub fn next_hop(&self, tunnel: Addr) -> Option<Way> {
        self.maps.next_hops.get(tunnel)
    }

    /// What requests are marked with that are to get to another node without a tunnel or not at all; none before
    /// [`Self::set_tunnels`].
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn mark_of_requests(&self) -> Result<Option<u32>, DatapathError> {
        self.maps.nodes.mark_of_requests()
    }

    /// To which nodes packets of pods go past the stack, and how: exactly these from now on, by tunnel address. To be
    /// called after [`Self::set_uplinks`] and [`Self::set_tunnels`]: uplinks drop what they do not know to be so.
    pub fn set_next_hops(&self, next_hops: &BTreeMap<Addr, Way>) -> Result<(), DatapathError> {
        self.maps.next_hops.set(next_hops)
    }

    /// What the programs that run can do of what is wanted: those of an earlier version know of nothing but tunnels.
    pub fn routing(&self, wanted: Routing) -> Routing {
        match self.are_of_this_version() {
            true => wanted,
            false => Routing::Tunnel,
        }
    }

    /// Whether the programs that run put packets into tunnels over IPv6: those of an earlier version may know of none but over IPv4.
    pub fn wraps_in_ipv6(&self) -> bool {
        self.are_of_this_version()
    }

    fn are_of_this_version(&self) -> bool {
        matches!(self.choice.level, Level::Current | Level::Reduced)
    }

    /// Whether packets of other nodes' pods are taken without a tunnel, with the VXLAN device, by index and MAC address. To be
    /// called after [`Self::set_tunnels`], which says of whom, and before [`Self::set_next_hops`]: what goes and comes so is
    /// counted from now on.
    pub fn set_native(&self, device: Option<(u32, Mac)>) -> Result<(), DatapathError> {
        self.maps.peers.set_native(device.is_some())?;
        // What does not depend on it came with Linux 5.12, and what this asks about with 5.13.
        self.maps.config.ingress_mtu(!self.wraps)?;
        self.maps.native.set(device)
    }

    /// Attaches to the VXLAN device, which asks for the uplinks' stamp from then on. Idempotent.
    /// After [`Self::set_uplinks`] and [`Self::set_tunnels`], with which stamping begins; the
    /// first time it waits until all that has no stamp has arrived.
    pub fn attach_overlay(&self, ifindex: u32) -> Result<(), DatapathError> {
        self.classifiers.attach_overlay(ifindex)?;
        self.maps.checked_links.put_overlay(ifindex)?;
        self.maps.config.ask_for_stamps()
    }

    /// Whether a filter of that name on an interface is one of ours.
    pub fn is_our_filter(name: &str) -> bool {
        Classifiers::is_ours(name)
    }

    /// Puts programs back that somebody else has taken off interfaces or the cgroup, and returns which, with the name of
    /// where that was.
    pub fn mend_attached(
        &self,
        which: &WhichAttached,
    ) -> Result<Vec<(String, &'static str)>, DatapathError> {
        let mut mended = self.classifiers.mend(which)?;
        if matches!(which, WhichAttached::Interfaces(_)) {
            return Ok(mended);
        }
        let acceleration = match &self.acceleration {
            Acceleration::On(_, attached) => Some(&attached.cgroup),
            Acceleration::Off | Acceleration::Failed(_) => None,
        };
        for cgroup in acceleration
            .into_iter()
            .chain(self.service_sockets.cgroup())
        {
            let place = format!("the cgroup {}", cgroup.path.display());
            let programs = cgroup.mend()?.into_iter();
            mended.extend(programs.map(|program| (place.clone(), program)));
        }
        Ok(mended)
    }

    /// Counters of the pod at a host-side interface, summed over CPUs; none if it is not attached.
    pub fn pod_counters(&self, ifindex: u32) -> Result<Option<PodCounters>, DatapathError> {
        self.maps.counters.get(ifindex)
    }

    fn acceleration(&self) -> Option<&maps::Acceleration> {
        match &self.acceleration {
            Acceleration::On(maps, _) => Some(maps),
            Acceleration::Off | Acceleration::Failed(_) => None,
        }
    }

    /// Sends the accelerated connections of these addresses back to TCP, where the programs on
    /// pods' links see them, from their next message on. For whoever decides what pods may do:
    /// decide first, then call this. Connections made after it may be accelerated again.
    pub fn evict_accelerated(&self, addresses: &[Addr]) -> Result<(), DatapathError> {
        self.acceleration()
            .map_or(Ok(()), |maps| maps.evict(addresses))
    }

    /// What the accelerated sockets of the pod at a host-side interface did, summed over CPUs;
    /// none if they are not.
    pub fn acceleration_counters(
        &self,
        ifindex: u32,
    ) -> Result<Option<AccelerationCounters>, DatapathError> {
        self.acceleration()
            .map_or(Ok(None), |maps| maps.counters(ifindex))
    }

    /// What the queues of accelerated connections that a pod made cost the kernel, and may; those of
    /// all by [`NODE_ACCOUNT`](sinabro_common::abi::acceleration::NODE_ACCOUNT). None if they are
    /// not accelerated.
    pub fn queue_usage(&self, ifindex: u32) -> Result<Option<QueueUsage>, DatapathError> {
        self.acceleration()
            .map_or(Ok(None), |maps| maps.queue_usage(ifindex))
    }

    /// Removes what is kept of accelerated connections whose end no program saw. To be called now
    /// and then.
    pub fn sweep_accelerated(&self) -> Result<(), DatapathError> {
        self.acceleration()
            .map_or(Ok(()), maps::Acceleration::sweep)
    }

    /// What is known of the servers that accelerated pods connect to, and why new connections to
    /// each would not be enrolled, if so.
    pub fn acceleration_servers(
        &self,
    ) -> Result<Vec<(ServerKey, Traffic, Option<Skip>)>, DatapathError> {
        let Some(maps) = self.acceleration() else {
            return Ok(Vec::new());
        };
        let now = monotonic_ns();
        let judged = maps.traffic()?.into_iter();
        Ok(judged
            .map(|(key, traffic)| (key, traffic, acceleration::judge(&traffic, now)))
            .collect())
    }

    /// Packets dropped so far, for every reason.
    pub fn drops(&self) -> Result<Vec<(DropReason, u64)>, DatapathError> {
        self.maps.drops.get()
    }

    /// Where the programs tell of packets that they drop; none but the first to ask gets it.
    pub fn take_drop_events(&self) -> Vec<DropEvents> {
        lock(&self.drop_events).take().unwrap_or_default()
    }

    /// The table of connections, to be looked at by people.
    pub fn connections(&self) -> &Connections {
        &self.maps.connections
    }

    /// What Services lead to.
    pub fn services(&self) -> &Services {
        &self.maps.services
    }

    /// Connections at the last [`Self::sweep`].
    pub fn connection_usage(&self) -> ConnectionUsage {
        let (memory, swept) = &*lock(&self.sweeps);
        ConnectionUsage {
            connections: swept.connections,
            unanswered: swept.unanswered,
            closing: swept.closing,
            masqueraded: swept.masqueraded,
            mappings: swept.mappings,
            apart: swept.apart,
            aliases: memory.aliases,
            capacity: u64::from(self.maps.connections.capacity()),
            sweeps: memory.sweeps,
            sweeping: memory.spent,
        }
    }

    /// Removes connections that are over at `now_ns` ([`monotonic_ns`]) or belong to no pod of this node any
    /// more, and returns how many.
    pub fn sweep(&self, now_ns: u64) -> Result<u64, DatapathError> {
        let sources = self.maps.uplinks.sources()?;
        let rules = sweep::Rules {
            now_ns,
            port_bitmaps: &self.maps.port_bitmaps,
            limits: self.maps.connections.limits()?,
            sources: (!sources.is_empty()).then_some(&sources),
            endpoints: self
                .complete
                .load(Ordering::Relaxed)
                .then_some(&self.maps.endpoints),
            portless: self.maps.config.get()?.flags & FLAG_MASQUERADE_PORTLESS != 0,
            netfilter: beside_proxy::Timeouts::read(),
        };
        let departed = match rules.endpoints {
            Some(_) => std::mem::take(&mut *lock(&self.departed)),
            None => HashSet::new(),
        };
        let (memory, last) = &mut *lock(&self.sweeps);
        let swept = sweep::sweep(&self.maps.connections, &rules, memory)
            .inspect_err(|_| lock(&self.departed).extend(departed))?;
        let removed = swept.removed;
        *last = swept;
        Ok(removed)
    }

    /// Whether a [`Self::sweep`] is due before its time, to end closed connections: somebody has little room left for new ones.
    pub fn is_sweep_due(&self) -> Result<bool, DatapathError> {
        sweep::is_due(&self.maps.connections, &lock(&self.sweeps).0)
    }

    /// Passes on to `tracing` what the programs had to say since the last time. To be called now
    /// and then: what does not fit in their buffers meanwhile is lost.
    pub fn forward_logs(&self) {
        for reader in lock(&self.logs).iter_mut() {
            reader.flush();
        }
    }

    /// Whether programs on pod links are filters of a clsact qdisc.
    pub fn pods_have_filters(&self) -> bool {
        self.classifiers.pods_have_filters()
    }

    /// What the kernel allowed, for people: `attachUplinks: tcx` and so on.
    pub fn modes(&self) -> BTreeMap<String, String> {
        let yes_no = |yes| if yes { "yes" } else { "no" }.to_owned();
        let acceleration = match &self.acceleration {
            Acceleration::Off => "off".to_owned(),
            Acceleration::On(_, attached) => {
                format!("on, cgroup {}", attached.cgroup.path.display())
            }
            Acceleration::Failed(error) => format!("off: {}", Chain(error)),
        };
        let attach = self.classifiers.modes();
        let others = [
            ("programs", self.choice.to_string()),
            ("btf", yes_no(probe::has_btf())),
            ("tcpAcceleration", acceleration),
            ("serviceSockets", self.service_sockets.mode()),
        ];
        attach
            .into_iter()
            .chain(others)
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    /// The programs, as the kernel has them.
    pub fn programs(&self) -> Vec<ProgramReport> {
        let mut programs: Vec<ProgramReport> = self.classifiers.programs().collect();
        if let Acceleration::On(_, attached) = &self.acceleration {
            programs.extend(attached.programs.iter().cloned());
        }
        programs.extend(self.service_sockets.programs().cloned());
        programs
    }
}

/// What these locks guard is whole after every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The clock of `last_seen_ns` in the maps (`bpf_ktime_get_ns`, CLOCK_MONOTONIC).
pub fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    // Every Linux has this clock, and it starts at zero at boot.
    now.map_or(0, |t| {
        t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64
    })
}
