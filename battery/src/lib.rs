//! What applications see of a TCP connection, row by row.
//!
//! A row does something with connected sockets and says what it saw. It passes on accelerated
//! connections if it sees there what it sees on plain ones of the same kernel: nothing is expected
//! beforehand, so a row must see the same again and again on plain TCP. Nothing waits for ever:
//! what does not happen in time is an observation, too.
//!
//! - [`stage`]: connections, sockets, and work with a deadline;
//! - [`between`]: connections between network namespaces;
//! - [`compare`]: rows seen on two kinds of connections;
//! - [`message`]: what comes beside data;
//! - [`stream`]: bytes that tell their place;
//! - the rows, by what they look at: [`order`], [`pressure`], [`reading`], [`waiting`],
//!   [`closing`], [`sending`], [`urgent`], [`asking`], [`sharing`], [`lasting`].

mod asking;
mod between;
mod closing;
mod compare;
mod lasting;
mod message;
mod order;
mod pressure;
mod reading;
mod sending;
mod sharing;
mod stage;
mod stream;
mod urgent;
mod waiting;

pub use between::Between;
pub use compare::{Outcome, compare, table};
pub use stage::{Connect, Failed, Listener, SocketOption};

/// What it takes away from an application if a row differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Bytes come in another order, or not as they were sent.
    Order,
    /// A sender is not held back.
    BackPressure,
    /// A call behaves otherwise.
    Behaviour,
}

/// Something to see.
#[derive(Debug)]
pub struct Row {
    pub id: &'static str,
    pub title: &'static str,
    /// What it means for an application if this row differs.
    pub meaning: &'static str,
    pub class: Class,
    /// Done within a second, and without starting processes.
    pub quick: bool,
    pub run: fn(&dyn Connect) -> Result<String, Failed>,
}

impl Row {
    /// What is seen; that it could not be looked at is an observation, too.
    pub fn observe(&self, connect: &dyn Connect) -> String {
        (self.run)(connect).unwrap_or_else(|failed| failed.to_string())
    }
}

/// Every row, in the order in which they are shown.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    [
        order::ROWS,
        pressure::ROWS,
        reading::ROWS,
        waiting::ROWS,
        closing::ROWS,
        sending::ROWS,
        urgent::ROWS,
        asking::ROWS,
        sharing::ROWS,
        lasting::ROWS,
    ]
    .into_iter()
    .flatten()
}
