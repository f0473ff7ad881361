//! The connections of this node's pods, for people: listed, counted, forgotten.
//!
//! The table may have half a million records, and a reply a megabyte. So it is looked at in steps, each with a
//! bound ([`STEP`]) and without anything kept in between: a step says where the next one begins. What comes or goes
//! meanwhile may be missed, as it may be over when it is read.
//!
//! - [`filter`]: which of them;
//! - [`row`]: a record in words;
//! - [`stats`]: how many of which kind;
//! - [`room`]: for how many there is room, if the settings do not say.

mod filter;
mod room;
mod row;
mod stats;

use crate::{
    datapath::{Connections, DatapathError},
    endpoint::PodNames,
};
use filter::Filter;
pub use room::{Room, nearest_power, power_below};
use sinabro_common::{
    abi::connection::{Connection, ConnectionKey, Limits, Share},
    api::{CONNECTIONS_OF_A_PAGE, ConnectionFilter, ConnectionStats, ConnectionsPage, FlushReport},
};

/// Records that one request reads at most, about.
const STEP: usize = 32_768;

/// The table, as far as it is looked at here.
pub trait Table {
    fn capacity(&self) -> u32;
    fn limits(&self) -> Result<Limits, DatapathError>;
    /// By the index of the link of who pays.
    fn shares(&self) -> Result<Vec<(u32, Share)>, DatapathError>;
    /// Reads some records, about [`CONNECTIONS_OF_A_PAGE`], from a place on, which `None` begins with; returns the
    /// place after them, if there are more.
    fn read(
        &self,
        from: Option<u32>,
        each: &mut dyn FnMut(ConnectionKey, Connection),
    ) -> Result<Option<u32>, DatapathError>;
    /// Removes a record and then its alias.
    fn remove(&self, key: &ConnectionKey, connection: &Connection) -> Result<(), DatapathError>;
}

impl Table for Connections {
    fn capacity(&self) -> u32 {
        self.capacity()
    }

    fn limits(&self) -> Result<Limits, DatapathError> {
        self.limits()
    }

    fn shares(&self) -> Result<Vec<(u32, Share)>, DatapathError> {
        self.shares()
    }

    fn read(
        &self,
        from: Option<u32>,
        each: &mut dyn FnMut(ConnectionKey, Connection),
    ) -> Result<Option<u32>, DatapathError> {
        self.some(from, CONNECTIONS_OF_A_PAGE, each)
    }

    fn remove(&self, key: &ConnectionKey, connection: &Connection) -> Result<(), DatapathError> {
        self.remove(key, connection)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConnectionsError {
    #[error("there is no pod {0} on this node; `sinabroctl endpoints` lists them")]
    NoPod(String),
    #[error("no filter is given: forgetting every connection has to be asked for by --all")]
    Everything,
    #[error(transparent)]
    Datapath(#[from] DatapathError),
}

/// How a moment's records are looked at.
pub struct View<'a> {
    pub table: &'a dyn Table,
    pub pods: &'a PodNames,
    /// `bpf_ktime_get_ns`.
    pub now_ns: u64,
}

impl View<'_> {
    /// Some of the connections that a filter lets through.
    ///
    /// # Errors
    /// If the filter names what is not there, or the table cannot be read.
    pub fn page(
        &self,
        filter: &ConnectionFilter,
        from: Option<u32>,
    ) -> Result<ConnectionsPage, ConnectionsError> {
        let filter = Filter::new(filter, self.pods)?;
        let limits = self.table.limits()?;
        let mut connections = Vec::new();
        let next = self.steps(from, |key, record| {
            let row = row::Row::new(key, record, &limits, self.now_ns);
            if let Some(row) = row
                && filter.wants(&row, self.pods)
            {
                connections.push(row.report(self.pods));
            }
            connections.len() < CONNECTIONS_OF_A_PAGE
        })?;
        Ok(ConnectionsPage { connections, next })
    }

    /// Forgets some of the connections that a filter lets through.
    ///
    /// # Errors
    /// As [`Self::page`]; if there is no filter and not all are to be forgotten.
    pub fn flush(
        &self,
        filter: &ConnectionFilter,
        all: bool,
        from: Option<u32>,
    ) -> Result<FlushReport, ConnectionsError> {
        if filter.is_empty() && !all {
            return Err(ConnectionsError::Everything);
        }
        let filter = Filter::new(filter, self.pods)?;
        let limits = self.table.limits()?;
        let mut wanted = Vec::new();
        let next = self.steps(from, |key, record| {
            let row = row::Row::new(key, record, &limits, self.now_ns);
            if row.is_some_and(|row| filter.wants(&row, self.pods)) {
                wanted.push((key, record));
            }
            true
        })?;
        for (key, record) in &wanted {
            self.table.remove(key, record)?;
        }
        Ok(FlushReport {
            flushed: wanted.len() as u64,
            next,
        })
    }

    /// How many of which kind.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn stats(&self) -> Result<ConnectionStats, ConnectionsError> {
        let limits = self.table.limits()?;
        let mut count = stats::Count::default();
        self.all(&limits, |row| count.add(&row, self.pods))?;
        // The candidates are known: once more for their numbers.
        let mut remotes = count.candidates();
        self.all(&limits, |row| remotes.add(&row, self.pods))?;
        let shares = self.table.shares()?;
        Ok(count.report(self.table.capacity(), &limits, &shares, remotes, self.pods))
    }

    fn all(&self, limits: &Limits, mut each: impl FnMut(row::Row)) -> Result<(), ConnectionsError> {
        let mut from = None;
        loop {
            from = self.table.read(from, &mut |key, record| {
                if let Some(row) = row::Row::new(key, record, limits, self.now_ns) {
                    each(row);
                }
            })?;
            if from.is_none() {
                return Ok(());
            }
        }
    }

    /// Reads until `each` has enough, or a step's worth.
    fn steps(
        &self,
        mut from: Option<u32>,
        mut each: impl FnMut(ConnectionKey, Connection) -> bool,
    ) -> Result<Option<u32>, ConnectionsError> {
        let mut read = 0;
        loop {
            let mut wants_more = true;
            from = self.table.read(from, &mut |key, record| {
                read += 1;
                wants_more &= each(key, record);
            })?;
            if from.is_none() || !wants_more || read >= STEP {
                return Ok(from);
            }
        }
    }
}

#[cfg(test)]
mod tests;
