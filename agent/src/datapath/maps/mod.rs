//! The pinned maps, typed: one file per file of `sinabro_common::abi`.
//!
//! aya wants a map exclusively to write to it; a lock per map serves several threads.

mod acceleration;
mod checked_links;
pub mod config;
pub mod connections;
mod counters;
mod drop_events;
mod drops;
mod endpoints;
pub mod fields;
mod flows;
mod host_ports;
pub mod layouts;
pub mod migrations;
mod mtus;
mod native;
mod netns;
mod next_hops;
mod nodes;
mod peers;
mod per_cpu;
mod places;
mod port_bitmaps;
mod prefix;
mod queues;
mod services;
pub mod shape;
mod socket_frontends;
mod uplinks;

pub use acceleration::{Acceleration, PodAcceleration};
pub use checked_links::CheckedLinks;
pub use config::{BesideProxy, Config, NonMasquerade, Translation};
pub use connections::{Connections, Owner};
pub use counters::Counters;
pub use drop_events::DropEvents;
pub use drops::Drops;
pub use endpoints::{Endpoints, PodLinks};
pub use flows::FlowEpoch;
pub use host_ports::{HostPorts, PortSet, PortsOf};
pub use layouts::Layouts;
pub use mtus::{MtuMaps, Mtus};
pub use native::Native;
pub use netns::NetNs;
pub use next_hops::{NextHops, Way};
pub use nodes::{Nodes, Tunnels};
pub use peers::{PeerPackets, Peers};
pub use port_bitmaps::PortBitmaps;
pub use prefix::{Prefix, net as net_of_prefix, prefixes};
pub use queues::{QueueLimits, QueueUsage};
pub use services::Services;
pub use socket_frontends::SocketFrontends;
pub use uplinks::{DirectUplink, Uplinks};

use super::{DatapathError, raw_map::RawMap};
use aya::{
    Ebpf,
    maps::{Map, MapData, MapError},
};
use prefix::prefix;
use std::{
    os::fd::AsFd as _,
    sync::{Mutex, MutexGuard, PoisonError},
};

pub struct Maps {
    pub config: Config,
    pub mtus: MtuMaps,
    pub non_masquerade: NonMasquerade,
    pub endpoints: Endpoints,
    pub pod_links: PodLinks,
    pub counters: Counters,
    pub drops: Drops,
    pub connections: Connections,
    pub nodes: Nodes,
    pub next_hops: NextHops,
    pub native: Native,
    pub checked_links: CheckedLinks,
    pub peers: Peers,
    pub uplinks: Uplinks,
    pub host_ports: HostPorts,
    pub port_bitmaps: PortBitmaps,
    pub services: Services,
    pub layouts: Layouts,
    pub flows: FlowEpoch,
}

impl Maps {
    /// Takes the maps out of a loaded object; each object has all of them.
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let flows = FlowEpoch::new(take(ebpf, "FLOW_EPOCHS")?)?;
        Ok(Self {
            config: Config::new(take(ebpf, "CONFIG")?)?,
            mtus: MtuMaps::new(take(ebpf, "PATH_MTU")?, take(ebpf, "UPLINK_MTU")?)?,
            non_masquerade: NonMasquerade::new(
                take(ebpf, "NON_MASQUERADE")?,
                take(ebpf, "NON_MASQUERADE_BEFORE")?,
            )?,
            endpoints: Endpoints::new(take(ebpf, "ENDPOINTS")?, flows.clone())?,
            pod_links: PodLinks::new(take(ebpf, "POD_LINKS")?)?,
            counters: Counters::new(take(ebpf, "POD_COUNTERS")?, take(ebpf, "POD_PLACES")?)?,
            drops: Drops::new(take(ebpf, "DROPS")?)?,
            connections: Connections::new(
                take(ebpf, "CONNECTIONS")?,
                take(ebpf, "ALIASES")?,
                take(ebpf, "SHARES")?,
                take(ebpf, "LIMITS")?,
                take(ebpf, "FINISHED")?,
            )?,
            next_hops: NextHops::new(
                take(ebpf, "NEXT_HOPS")?,
                take(ebpf, "NATIVE_V6")?,
                flows.clone(),
            )?,
            native: Native::new(take(ebpf, "NATIVE")?)?,
            checked_links: CheckedLinks::new(take(ebpf, "CHECKED_LINKS")?)?,
            peers: Peers::new(|name| take(ebpf, name))?,
            uplinks: Uplinks::new(take(ebpf, "UPLINKS")?)?,
            host_ports: HostPorts::new(take(ebpf, "HOST_PORTS")?)?,
            port_bitmaps: PortBitmaps::new(
                take(ebpf, "PORT_BITMAPS")?,
                take(ebpf, "RESERVED_PORTS")?,
            )?,
            services: Services::new(|name| take(ebpf, name))?,
            layouts: Layouts::new(take(ebpf, "LAYOUTS")?, take(ebpf, "LAYOUT_FIELDS")?)?,
            nodes: Nodes::new(
                take(ebpf, "NODES")?,
                take(ebpf, "POD_RANGES")?,
                take(ebpf, "OVERLAY")?,
                flows.clone(),
            )?,
            flows,
        })
    }

    /// Has searches for a port leave out what no connection gets by the settings.
    pub fn set_reserved_ports(&self) -> Result<(), DatapathError> {
        let config = self.config.get()?;
        self.port_bitmaps.set_reserved(&config, &self.host_ports)
    }
}

/// Takes a map out of a loaded object.
pub fn take(ebpf: &mut Ebpf, name: &'static str) -> Result<Map, DatapathError> {
    ebpf.take_map(name)
        .ok_or(DatapathError::Missing { what: "map", name })
}

/// The same map, to be read many entries at once.
fn raw(data: &MapData, name: &'static str) -> Result<RawMap, DatapathError> {
    let clone = data.fd().as_fd().try_clone_to_owned();
    clone
        .and_then(RawMap::new)
        .map_err(|source| error(name, "opening")(source.into()))
}

/// Locks a map. A panic elsewhere leaves a map whole: the kernel changes entries atomically.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes an error name its map.
fn error(map: &'static str, what: &'static str) -> impl Fn(MapError) -> DatapathError {
    move |source| DatapathError::Map {
        map,
        what,
        source: Box::new(source),
    }
}

/// A removed entry may already be gone.
fn removed(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error))
            if error.io_error.raw_os_error() == Some(libc::ENOENT) =>
        {
            Ok(())
        }
        Err(MapError::KeyNotFound) => Ok(()),
        other => other,
    }
}

/// An entry looked for may not be there.
fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(error),
    }
}
