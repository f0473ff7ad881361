//! What enrolled sockets' queues may cost, and what of that was never given back.
//!
//! Programs charge accounts and give back what they see end. A socket that TCP is done with while
//! its application still holds it ends unseen later; so does one whose end was not reported
//! because no program was attached then, or another program took the wish for it away. Such
//! charges are removed here, once their socket is in the map of sockets no more at two sweeps in a
//! row: one that is just being enrolled is charged before it is there.

use super::{error, found, raw, removed, take};
use crate::datapath::{DatapathError, raw_map::RawMap};
use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError, SockHash},
};
use sinabro_common::{
    abi::acceleration::{Account, Budget, Charge, ChargeKey, MAX_SOCKETS, NODE_ACCOUNT},
    algo::queue,
};
use std::{
    collections::{HashMap as StdMap, HashSet},
    os::fd::{AsFd as _, OwnedFd},
};

const CHARGES: &str = "QUEUE_CHARGES";
const ACCOUNTS: &str = "QUEUE_ACCOUNTS";
const BUDGETS: &str = "QUEUE_BUDGETS";
pub const SOCKETS: &str = "SOCKETS";

/// How many bytes of kernel memory enrolled sockets' queues may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Of the connections that one pod makes.
    pub pod: u64,
    /// Of all of the node.
    pub node: u64,
}

impl QueueLimits {
    /// With the usual part of it for each pod.
    pub fn of_node(node: u64) -> Self {
        let pod = node / 8;
        Self { pod, node }
    }
}

impl Default for QueueLimits {
    /// In proportion to the machine's memory.
    fn default() -> Self {
        let memory = nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total());
        Self::of_node(memory / 32)
    }
}

/// Bytes that are charged, and that may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueUsage {
    pub used: u64,
    pub limit: u64,
}

pub struct Queues {
    limits: QueueLimits,
    charges: HashMap<MapData, ChargeKey, Charge>,
    charges_raw: RawMap,
    accounts: HashMap<MapData, u32, Account>,
    budgets: HashMap<MapData, u32, Budget>,
    sockets: SockHash<MapData, u64>,
    /// Not in the map of sockets at the last sweep.
    suspects: HashSet<ChargeKey>,
}

impl Queues {
    pub fn take(ebpf: &mut Ebpf, limits: QueueLimits) -> Result<Self, DatapathError> {
        let charges = take(ebpf, CHARGES)?;
        let charges_raw = match &charges {
            Map::HashMap(data) => raw(data, CHARGES)?,
            _ => return Err(missing("hash map", CHARGES)),
        };
        // Attaching needs it, too.
        let sockets = match ebpf.map(SOCKETS) {
            Some(Map::SockHash(data)) => clone(data, SOCKETS)?,
            _ => return Err(missing("sock hash", SOCKETS)),
        };
        let sockets = MapData::from_fd(sockets).map_err(error(SOCKETS, "opening"))?;
        let open = error(ACCOUNTS, "opening");
        let mut queues = Self {
            limits,
            charges: charges.try_into().map_err(error(CHARGES, "opening"))?,
            charges_raw,
            accounts: take(ebpf, ACCOUNTS)?.try_into().map_err(open)?,
            budgets: take(ebpf, BUDGETS)?
                .try_into()
                .map_err(error(BUDGETS, "opening"))?,
            sockets: Map::SockHash(sockets)
                .try_into()
                .map_err(error(SOCKETS, "opening"))?,
            suspects: HashSet::new(),
        };
        queues.open_account_of(NODE_ACCOUNT, limits.node)?;
        Ok(queues)
    }

    /// Lets a pod spend as much as it may. Idempotent.
    pub fn open_account(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        self.open_account_of(ifindex, self.limits.pod)
    }

    fn open_account_of(&mut self, key: u32, limit: u64) -> Result<(), DatapathError> {
        let account = found(self.accounts.get(&key, 0)).map_err(error(ACCOUNTS, "reading from"))?;
        if account.is_none() {
            self.accounts
                .insert(key, Account::default(), 0)
                .map_err(error(ACCOUNTS, "writing to"))?;
        }
        let budget = self.budget(key)?.unwrap_or_default();
        self.set_budget(key, Budget { limit, ..budget })
    }

    /// A pod is gone. What its sockets cost the node is given back as they end.
    pub fn close_account(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        removed(self.budgets.remove(&ifindex)).map_err(error(BUDGETS, "removing from"))?;
        removed(self.accounts.remove(&ifindex)).map_err(error(ACCOUNTS, "removing from"))
    }

    /// Of a pod, or of the node; none if it is not accelerated.
    pub fn usage(&self, key: u32) -> Result<Option<QueueUsage>, DatapathError> {
        // In this order: what was given back is in the account that is read after it.
        let Some(budget) = self.budget(key)? else {
            return Ok(None);
        };
        let account = found(self.accounts.get(&key, 0)).map_err(error(ACCOUNTS, "reading from"))?;
        Ok(account.map(|account| QueueUsage {
            used: queue::used(&account, &budget),
            limit: budget.limit,
        }))
    }

    /// Cookies of the sockets that have a queue.
    pub fn open_sockets(&self) -> Result<HashSet<u64>, DatapathError> {
        // The walk begins again where its place was removed; without an end it would go on for
        // as long as sockets come and go.
        let most = 4 * MAX_SOCKETS as usize;
        self.sockets
            .keys()
            .take(most)
            .collect::<Result<_, _>>()
            .map_err(error(SOCKETS, "reading from"))
    }

    /// Gives back what sockets were charged with that are gone, and returns their cookies.
    pub fn sweep(&mut self) -> Result<HashSet<u64>, DatapathError> {
        let mut charges: StdMap<ChargeKey, Charge> = StdMap::new();
        let add = |key, charge| {
            charges.insert(key, charge);
        };
        self.charges_raw
            .for_each_of(add)
            .map_err(|source| error(CHARGES, "reading from")(MapError::from(source)))?;
        if charges.is_empty() {
            self.suspects.clear();
            return Ok(HashSet::new());
        }
        let open = self.open_sockets()?;
        let (over, suspects): (Vec<_>, Vec<_>) = charges
            .into_iter()
            .filter(|(key, _)| !open.contains(&key.cookie))
            .partition(|(key, _)| self.suspects.contains(key));
        self.suspects = suspects.into_iter().map(|(key, _)| key).collect();
        let mut gone = HashSet::new();
        for (key, charge) in over {
            match self.charges.remove(&key) {
                Ok(()) => {
                    // One by one: if this process is killed in between, one step is lost.
                    self.give_back(charge.payer, charge.bytes.into())?;
                    self.give_back(NODE_ACCOUNT, charge.bytes.into())?;
                    gone.insert(key.cookie);
                }
                // A program has, meanwhile.
                other => removed(other).map_err(error(CHARGES, "removing from"))?,
            }
        }
        Ok(gone)
    }

    fn give_back(&mut self, key: u32, bytes: u64) -> Result<(), DatapathError> {
        match self.budget(key)? {
            Some(budget) => {
                let returned = budget.returned.wrapping_add(bytes);
                self.set_budget(key, Budget { returned, ..budget })
            }
            None => Ok(()),
        }
    }

    fn budget(&self, key: u32) -> Result<Option<Budget>, DatapathError> {
        found(self.budgets.get(&key, 0)).map_err(error(BUDGETS, "reading from"))
    }

    fn set_budget(&mut self, key: u32, budget: Budget) -> Result<(), DatapathError> {
        self.budgets
            .insert(key, budget, 0)
            .map_err(error(BUDGETS, "writing to"))
    }
}

fn missing(what: &'static str, name: &'static str) -> DatapathError {
    DatapathError::Missing { what, name }
}

fn clone(data: &MapData, name: &'static str) -> Result<OwnedFd, DatapathError> {
    let clone = data.fd().as_fd().try_clone_to_owned();
    clone.map_err(|source| error(name, "opening")(source.into()))
}
