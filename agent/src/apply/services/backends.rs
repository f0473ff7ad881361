//! Endpoints: one id for each that a port of a Service has. Two Services that share an endpoint have an id each, so a
//! connection's id says whether *its* Service still has the endpoint, and no program has to ask more than that.
//!
//! The map does not say whose an id is. After a restart the sets say it that lead to it; an endpoint that finishes its
//! connections is in none, and is [`ANYBODYS`] until all plans are known.

use super::{index::Index, room::Ids, tables::Tables};
use crate::{datapath::DatapathError, plan::services::Protocol};
use sinabro_common::abi::{
    Addr,
    service::{BACKEND_DRAINING, BACKEND_SERVING, Backend, Slot},
};
use std::{
    collections::HashMap,
    mem,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

/// [`Endpoint::service`] of one that an earlier agent left, if nothing says which Service had it.
pub const ANYBODYS: u32 = 0;

/// What makes an endpoint the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// [`ServicePort::number`], or [`ANYBODYS`].
    service: u32,
    addr: Addr,
    port: [u8; 2],
    proto: u8,
}

/// A port of a Service.
#[derive(Clone, Copy, Debug)]
pub struct ServicePort {
    /// [`sinabro_common::abi::service::Frontend::service`].
    pub number: u32,
    pub protocol: Protocol,
}

impl ServicePort {
    /// Its endpoint at an address and port.
    pub fn endpoint(self, at: SocketAddr) -> Endpoint {
        Endpoint {
            service: self.number,
            addr: at.ip().into(),
            port: at.port().to_be_bytes(),
            proto: self.protocol.number(),
        }
    }
}

impl Endpoint {
    fn of(service: u32, backend: &Backend) -> Self {
        Self {
            service,
            addr: backend.addr,
            port: backend.port,
            proto: backend.proto(),
        }
    }
}

/// Where one is.
pub fn at(backend: &Backend) -> SocketAddr {
    let ip = IpAddr::from(backend.addr).to_canonical();
    SocketAddr::new(ip, u16::from_be_bytes(backend.port))
}

/// Who has it.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    /// As in [`Endpoint`].
    service: u32,
    /// Sets that lead to it.
    sets: u32,
    /// How often it is held to finish its connections.
    draining: u32,
}

/// Of what is in the maps, the sets that lead to an endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct InSets {
    /// Whose they are, as in [`Endpoint`]; of several, whose the first is.
    pub service: u32,
    pub sets: u32,
}

pub struct Backends {
    /// What is in the map.
    index: Index,
    /// What is about to be.
    taken: HashMap<Endpoint, u32>,
    uses: Vec<Uses>,
    ids: Ids,
    /// One that datagrams went to was let go since somebody asked.
    lost_datagrams: bool,
}

impl Backends {
    /// Of what is in the maps: `in_sets` says by id how many sets lead there, and whose they are. Those that serve and are
    /// in none are held like draining ones, and returned.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn restore(
        tables: &impl Tables,
        end: u32,
        in_sets: &[InSets],
    ) -> Result<(Self, Vec<u32>), DatapathError> {
        let mut backends = Self {
            index: Index::default(),
            taken: HashMap::new(),
            uses: Vec::new(),
            ids: Ids::without(0, 0, |_| false),
            // Maybe while there was no agent.
            lost_datagrams: true,
        };
        let mut held = Vec::new();
        tables.for_each_backend(|id, backend| {
            let InSets { service, sets } = in_sets.get(id as usize).copied().unwrap_or_default();
            if sets == 0 && backend.flags & BACKEND_SERVING == 0 {
                return;
            }
            let uses = backends.uses_of(id);
            (uses.service, uses.sets) = (service, sets);
            if sets == 0 {
                uses.draining = 1;
                held.push(id);
            }
            let endpoint = Endpoint::of(service, &backend);
            match backends.get(tables, endpoint) {
                None => backends.put(tables, id, endpoint),
                // Both are there until one of them has no use any more.
                Some(other) if sets > 0 => {
                    backends.index.remove(other, endpoint);
                    backends.put(tables, id, endpoint);
                }
                Some(_) => {}
            }
        })?;
        for id in 0..backends.uses.len() as u32 {
            if !backends.uses_of(id).none() {
                backends.serves(tables, id);
            }
        }
        let uses = &backends.uses;
        let in_use = |id: u32| uses.get(id as usize).is_some_and(|uses| !uses.none());
        backends.ids = Ids::without(0, end, in_use);
        Ok((backends, held))
    }

    /// The id of one that sets lead to, and whether nobody had it.
    pub fn into_set(
        &mut self,
        tables: &impl Tables,
        now: Instant,
        endpoint: Endpoint,
    ) -> Option<(u32, bool)> {
        let known = self.get(tables, endpoint);
        let id = match known {
            Some(id) => id,
            None => {
                let id = self.ids.take(now)?;
                self.taken.insert(endpoint, id);
                id
            }
        };
        let uses = self.uses_of(id);
        uses.service = endpoint.service;
        uses.sets += 1;
        Some((id, known.is_none()))
    }

    /// The id of one that finishes its connections, if it can have any.
    pub fn drain(&mut self, tables: &impl Tables, endpoint: Endpoint) -> Option<u32> {
        let anybodys = Endpoint {
            service: ANYBODYS,
            ..endpoint
        };
        let own = self.get(tables, endpoint);
        let id = own.or_else(|| self.get(tables, anybodys))?;
        self.uses_of(id).draining += 1;
        Some(id)
    }

    pub fn get(&self, tables: &impl Tables, endpoint: Endpoint) -> Option<u32> {
        let taken = self.taken.get(&endpoint).copied();
        taken.or_else(|| self.index.get(endpoint, by_id(tables, &self.uses)))
    }

    /// Takes back what came to nothing: nobody has seen it.
    pub fn forget(&mut self, endpoint: Endpoint, id: u32) {
        self.taken.remove(&endpoint);
        self.uses[id as usize] = Uses::default();
        self.ids.give_back(id);
    }

    pub fn out_of_set(&mut self, id: u32) {
        let uses = self.uses_of(id);
        uses.sets = uses.sets.saturating_sub(1);
    }

    pub fn drained(&mut self, id: u32) {
        let uses = self.uses_of(id);
        uses.draining = uses.draining.saturating_sub(1);
    }

    /// Writes one down that nobody had.
    pub fn introduce(&mut self, tables: &impl Tables, id: u32, endpoint: Endpoint) {
        let generation = tables.backend(id).map_or(0, |before| before.generation);
        let backend = Backend {
            addr: endpoint.addr,
            port: endpoint.port,
            flags: self.uses_of(id).flags(),
            generation: generation.wrapping_add(1),
        };
        tables.put_backend(id, backend.with_proto(endpoint.proto));
        self.taken.remove(&endpoint);
        self.put(tables, id, endpoint);
    }

    /// Writes down what it does from now on.
    pub fn serves(&mut self, tables: &impl Tables, id: u32) {
        let flags = self.uses_of(id).flags();
        if let Some(before) = tables.backend(id) {
            let after = Backend { flags, ..before }.with_proto(before.proto());
            if after != before {
                tables.put_backend(id, after);
            }
        }
    }

    /// Writes down whether it serves, and takes new connections; lets it go if it does neither.
    pub fn tell(&mut self, tables: &impl Tables, now: Instant, id: u32) {
        let Some(before) = tables.backend(id) else {
            return;
        };
        let endpoint = Endpoint::of(self.uses_of(id).service, &before);
        self.serves(tables, id);
        // Let go once, when it loses its last use.
        if self.uses_of(id).none() && before.flags & BACKEND_SERVING != 0 {
            self.index.remove(id, endpoint);
            self.ids.rest(now, id);
            self.lost_datagrams |= before.proto() == Protocol::Udp.number();
        }
    }

    /// Whether one that datagrams went to was let go since this was asked last.
    pub fn take_lost_datagrams(&mut self) -> bool {
        mem::take(&mut self.lost_datagrams)
    }

    /// How a set names it.
    pub fn slot(&self, tables: &impl Tables, id: u32) -> Slot {
        Slot {
            backend: id,
            generation: tables.backend(id).map_or(0, |backend| backend.generation),
        }
    }

    /// Whether nothing says which Service has it.
    #[cfg(test)]
    pub fn is_anybodys(&self, id: u32) -> bool {
        self.uses[id as usize].service == ANYBODYS
    }

    pub fn count(&self) -> usize {
        self.index.len() + self.taken.len()
    }

    /// As [`Ids::end_rest`].
    pub fn end_rest(&mut self) {
        self.ids.end_rest();
    }

    /// As [`Ids::taken`].
    pub fn taken(&self) -> (u32, u32) {
        self.ids.taken(0)
    }

    fn put(&mut self, tables: &impl Tables, id: u32, endpoint: Endpoint) {
        self.index.put(id, endpoint, by_id(tables, &self.uses));
    }

    fn uses_of(&mut self, id: u32) -> &mut Uses {
        let index = id as usize;
        if self.uses.len() <= index {
            self.uses.resize(index + 1, Uses::default());
        }
        &mut self.uses[index]
    }
}

/// What an id of the map stands for.
fn by_id(tables: &impl Tables, uses: &[Uses]) -> impl Fn(u32) -> Option<Endpoint> {
    |id| {
        let service = uses.get(id as usize)?.service;
        let backend = tables.backend(id)?;
        Some(Endpoint::of(service, &backend))
    }
}

impl Uses {
    fn none(self) -> bool {
        self.sets == 0 && self.draining == 0
    }

    fn flags(self) -> u16 {
        match (self.sets, self.draining) {
            (0, 0) => 0,
            (0, _) => BACKEND_SERVING | BACKEND_DRAINING,
            _ => BACKEND_SERVING,
        }
    }
}
