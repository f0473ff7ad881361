//! Where facts about the cluster come from.
//!
//! A source is a task that publishes a [`Snapshot`] whenever what it knows changes, and decides
//! nothing. The rest of the agent sees the [`Source`] alone and cannot tell a nodes file from
//! the Kubernetes API. A source that fails keeps the last good facts and says what is wrong; it
//! ends when the last receiver is gone.
//!
//! - [`nodes_file`], [`nodes_parse`]: a nodes file;
//! - [`kubernetes`], [`nodes`], [`cache`]: the Kubernetes API.
//!
//! What is not masqueraded is said by a file, too: [`masquerade_file`], [`masquerade_parse`]. Services have sources
//! and a store of their own: [`services`].

pub mod cache;
pub mod followed_file;
pub mod kubernetes;
pub mod masquerade_file;
pub mod masquerade_parse;
pub mod nodes;
pub mod nodes_file;
pub mod nodes_parse;
pub mod services;

use crate::plan::Facts;
use std::{sync::Arc, time::SystemTime};
use tokio::{sync::watch, task::JoinHandle};

/// The latest a source knows.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The last good facts; none before the first.
    pub facts: Option<Arc<Facts>>,
    /// Why `facts` may be out of date, while it lasts.
    pub problem: Option<String>,
    /// Since when the source cannot be read, while it cannot.
    pub stale_since: Option<SystemTime>,
}

/// A running source.
#[derive(Debug)]
pub struct Source {
    /// What it is, for people: `nodes file /etc/nodes.yaml`.
    pub from: String,
    pub updates: watch::Receiver<Snapshot>,
    pub task: JoinHandle<()>,
}
