//! The maps of the object `sock` that the agent writes or reads.

use super::{
    error, found, lock,
    per_cpu::put_zeros,
    queues::{QueueLimits, QueueUsage, Queues},
    raw, removed, take,
};
use crate::datapath::{DatapathError, raw_map::RawMap};
use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuHashMap},
};
use sinabro_common::abi::{
    Addr,
    acceleration::{
        AcceleratedPod, AccelerationCounters, ConnectionKey, Enrolled, ServerKey, Traffic,
    },
};
use std::{
    collections::HashSet,
    sync::{Mutex, MutexGuard},
};

const PODS: &str = "ACCELERATED_PODS";
const LOOPBACK: &str = "LOOPBACK_PODS";
const ENROLLED: &str = "ENROLLED";
const TRAFFIC: &str = "SERVER_TRAFFIC";
const COUNTERS: &str = "ACCELERATION_COUNTERS";
const EPOCH: &str = "ACCELERATION_EPOCH";

/// Which of a pod's connections may be enrolled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodAcceleration {
    /// Cookie of the pod's network namespace, never zero.
    pub netns: u64,
    /// Those with other pods of this node.
    pub pods: bool,
    /// Those over its own loopback.
    pub loopback: bool,
}

pub struct Acceleration(Mutex<Tables>);

struct Tables {
    pods: HashMap<MapData, Addr, AcceleratedPod>,
    loopback: HashMap<MapData, u64, AcceleratedPod>,
    enrolled: HashMap<MapData, ConnectionKey, Enrolled>,
    enrolled_raw: RawMap,
    traffic: HashMap<MapData, ServerKey, Traffic>,
    counters: PerCpuHashMap<MapData, u32, AccelerationCounters>,
    epoch: Array<MapData, u32>,
    queues: Queues,
}

impl Acceleration {
    pub fn take(ebpf: &mut Ebpf, limits: QueueLimits) -> Result<Self, DatapathError> {
        fn open<T: TryFrom<Map, Error = MapError>>(
            ebpf: &mut Ebpf,
            name: &'static str,
        ) -> Result<T, DatapathError> {
            take(ebpf, name)?.try_into().map_err(error(name, "opening"))
        }
        let enrolled = take(ebpf, ENROLLED)?;
        let Map::HashMap(data) = &enrolled else {
            return Err(DatapathError::Missing {
                what: "hash map",
                name: ENROLLED,
            });
        };
        let enrolled_raw = raw(data, ENROLLED)?;
        Ok(Self(Mutex::new(Tables {
            pods: open(ebpf, PODS)?,
            loopback: open(ebpf, LOOPBACK)?,
            enrolled: enrolled.try_into().map_err(error(ENROLLED, "opening"))?,
            enrolled_raw,
            traffic: open(ebpf, TRAFFIC)?,
            counters: open(ebpf, COUNTERS)?,
            epoch: open(ebpf, EPOCH)?,
            queues: Queues::take(ebpf, limits)?,
        })))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.0)
    }

    /// Makes exactly this what a pod's sockets may do. Idempotent: what is enrolled already and
    /// still may be goes on.
    pub fn set(
        &self,
        ifindex: u32,
        addresses: &[Addr],
        wanted: Option<PodAcceleration>,
    ) -> Result<(), DatapathError> {
        let mut tables = self.tables();
        let Some(wanted) = wanted else {
            return tables.remove(ifindex, addresses);
        };
        tables.start_counters(ifindex)?;
        tables.queues.open_account(ifindex)?;
        let pod = |generation| AcceleratedPod {
            netns: wanted.netns,
            ifindex,
            generation,
        };
        let same = |found: &AcceleratedPod| found.ifindex == ifindex && found.netns == wanted.netns;
        let generation = tables.epoch()?.wrapping_add(1);
        let mut changed = false;
        for &addr in addresses {
            let before = tables.pod(addr)?;
            if wanted.pods && !before.as_ref().is_some_and(same) {
                if before.is_some() {
                    tables.forget_connections(&HashSet::from([addr]))?;
                }
                tables
                    .pods
                    .insert(addr, pod(generation), 0)
                    .map_err(error(PODS, "writing to"))?;
                changed = true;
            } else if !wanted.pods && before.is_some() {
                tables.remove_pod(addr)?;
                changed = true;
            }
        }
        let before = found(tables.loopback.get(&wanted.netns, 0))
            .map_err(error(LOOPBACK, "reading from"))?;
        if wanted.loopback && !before.as_ref().is_some_and(same) {
            tables
                .loopback
                .insert(wanted.netns, pod(generation), 0)
                .map_err(error(LOOPBACK, "writing to"))?;
            changed = true;
        } else if !wanted.loopback && before.is_some() {
            tables.remove_loopback(wanted.netns)?;
            changed = true;
        }
        if changed {
            tables.raise_epoch()
        } else {
            Ok(())
        }
    }

    /// Forgets a pod: its connections go through TCP from their next message on, and nothing of
    /// them is found by who gets its address next.
    pub fn remove(&self, ifindex: u32, addresses: &[Addr]) -> Result<(), DatapathError> {
        self.tables().remove(ifindex, addresses)
    }

    /// Sends the enrolled connections of these addresses back to TCP, and so through the programs
    /// on the pods' links, from their next message on. New ones may be enrolled.
    pub fn evict(&self, addresses: &[Addr]) -> Result<(), DatapathError> {
        let mut tables = self.tables();
        let generation = tables.epoch()?.wrapping_add(1);
        let mut netns = HashSet::new();
        for &addr in addresses {
            let Some(pod) = tables.pod(addr)? else {
                continue;
            };
            netns.insert(pod.netns);
            let pod = AcceleratedPod { generation, ..pod };
            tables
                .pods
                .insert(addr, pod, 0)
                .map_err(error(PODS, "writing to"))?;
        }
        for netns in netns {
            if let Some(pod) =
                found(tables.loopback.get(&netns, 0)).map_err(error(LOOPBACK, "reading from"))?
            {
                let pod = AcceleratedPod { generation, ..pod };
                tables
                    .loopback
                    .insert(netns, pod, 0)
                    .map_err(error(LOOPBACK, "writing to"))?;
            }
        }
        // Last: who asks again must find the new generation.
        tables.raise_epoch()
    }

    /// Forgets pods at interfaces that are not kept.
    pub fn retain(&self, keep: impl Fn(u32) -> bool) -> Result<(), DatapathError> {
        let mut tables = self.tables();
        for (addr, pod) in list(&tables.pods, PODS)? {
            if !keep(pod.ifindex) {
                tables.remove(pod.ifindex, &[addr])?;
            }
        }
        for (_, pod) in list(&tables.loopback, LOOPBACK)? {
            if !keep(pod.ifindex) {
                tables.remove(pod.ifindex, &[])?;
            }
        }
        Ok(())
    }

    /// Removes the entries of sockets that ended without any program noticing. To be called
    /// before one is.
    pub fn forget_ended(&self) -> Result<(), DatapathError> {
        let mut tables = self.tables();
        let open = tables.queues.open_sockets()?;
        tables.forget(|_, enrolled| !open.contains(&enrolled.cookie))
    }

    /// Removes what is kept of sockets whose end no program saw, and gives back what their queues
    /// were charged with. Takes two calls.
    pub fn sweep(&self) -> Result<(), DatapathError> {
        let mut tables = self.tables();
        let gone = tables.queues.sweep()?;
        match gone.is_empty() {
            true => Ok(()),
            false => tables.forget(|_, enrolled| gone.contains(&enrolled.cookie)),
        }
    }

    /// What the queues of connections that a pod made cost, or those of all, by [`NODE_ACCOUNT`];
    /// none if they are not accelerated.
    pub fn queue_usage(&self, ifindex: u32) -> Result<Option<QueueUsage>, DatapathError> {
        self.tables().queues.usage(ifindex)
    }

    /// What a pod's sockets did, summed over CPUs; none if they are not accelerated.
    pub fn counters(&self, ifindex: u32) -> Result<Option<AccelerationCounters>, DatapathError> {
        self.tables().counters(ifindex)
    }

    /// What is known of the servers on this node.
    pub fn traffic(&self) -> Result<Vec<(ServerKey, Traffic)>, DatapathError> {
        list(&self.tables().traffic, TRAFFIC)
    }
}

fn list<K: aya::Pod, V: aya::Pod>(
    map: &HashMap<MapData, K, V>,
    name: &'static str,
) -> Result<Vec<(K, V)>, DatapathError> {
    map.iter()
        .collect::<Result<_, _>>()
        .map_err(error(name, "reading from"))
}

impl Tables {
    fn epoch(&self) -> Result<u32, DatapathError> {
        self.epoch.get(&0, 0).map_err(error(EPOCH, "reading from"))
    }

    fn raise_epoch(&mut self) -> Result<(), DatapathError> {
        let epoch = self.epoch()?.wrapping_add(1);
        self.epoch
            .set(0, epoch, 0)
            .map_err(error(EPOCH, "writing to"))
    }

    fn pod(&self, addr: Addr) -> Result<Option<AcceleratedPod>, DatapathError> {
        found(self.pods.get(&addr, 0)).map_err(error(PODS, "reading from"))
    }

    fn remove_pod(&mut self, addr: Addr) -> Result<(), DatapathError> {
        removed(self.pods.remove(&addr)).map_err(error(PODS, "removing from"))
    }

    fn remove_loopback(&mut self, netns: u64) -> Result<(), DatapathError> {
        removed(self.loopback.remove(&netns)).map_err(error(LOOPBACK, "removing from"))
    }

    fn remove(&mut self, ifindex: u32, addresses: &[Addr]) -> Result<(), DatapathError> {
        let mut gone = HashSet::new();
        for &addr in addresses {
            // By now it may be another pod's.
            if self.pod(addr)?.is_some_and(|pod| pod.ifindex == ifindex) {
                self.remove_pod(addr)?;
                gone.insert(addr);
            }
        }
        let loopback = list(&self.loopback, LOOPBACK)?;
        let of_pod = loopback.iter().filter(|(_, pod)| pod.ifindex == ifindex);
        let namespaces: Vec<u64> = of_pod.map(|(netns, _)| *netns).collect();
        for &netns in &namespaces {
            self.remove_loopback(netns)?;
        }
        if !gone.is_empty() || !namespaces.is_empty() {
            self.raise_epoch()?;
            self.forget_connections(&gone)?;
        }
        removed(self.counters.remove(&ifindex)).map_err(error(COUNTERS, "removing from"))?;
        self.queues.close_account(ifindex)
    }

    /// Removes the entries of these addresses' sockets: those whose end no program noticed,
    /// because the program was not attached then.
    fn forget_connections(&mut self, addresses: &HashSet<Addr>) -> Result<(), DatapathError> {
        self.forget(|key, _| addresses.contains(&key.local) || addresses.contains(&key.remote))
    }

    fn forget(
        &mut self,
        is_over: impl Fn(&ConnectionKey, &Enrolled) -> bool,
    ) -> Result<(), DatapathError> {
        let mut keys = Vec::new();
        let each = |key: ConnectionKey, enrolled: Enrolled| {
            if is_over(&key, &enrolled) {
                keys.push(key);
            }
        };
        self.enrolled_raw
            .for_each_of(each)
            .map_err(|source| error(ENROLLED, "reading from")(MapError::from(source)))?;
        for key in keys {
            removed(self.enrolled.remove(&key)).map_err(error(ENROLLED, "removing from"))?;
        }
        Ok(())
    }

    fn counters(&self, ifindex: u32) -> Result<Option<AccelerationCounters>, DatapathError> {
        let values =
            found(self.counters.get(&ifindex, 0)).map_err(error(COUNTERS, "reading from"))?;
        Ok(values.map(|values| {
            let mut sum = AccelerationCounters::default();
            for value in values.iter() {
                sum += *value;
            }
            sum
        }))
    }

    fn start_counters(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        if self.counters(ifindex)?.is_some() {
            return Ok(());
        }
        put_zeros(&mut self.counters, ifindex).map_err(error(COUNTERS, "writing to"))
    }
}
