//! Facts from the Kubernetes API, by one watch on each kind of objects: here Nodes, and what
//! [`super::services`] watches.
//!
//! A watch begins with all objects as a stream, or after a list where the server does not stream
//! them, and goes on with their changes. A watch that ends or breaks is taken up where it was;
//! only where the server has forgotten that point (410 Gone) are all objects read again. Nothing is
//! polled. Several changes in a row are published as one, and what changes nothing (a heartbeat)
//! is not published.
//!
//! Every node of the cluster runs this, so it must cost the API server little: all objects are asked
//! for as the server's own cache has them, never from etcd, and never older than what was known
//! before (KEP-3157, KEP-365); watches end at different times; and after a loss that all agents
//! share they come back spread over a time that grows with the cluster.
//!
//! - [`follow`]: one watch: all objects, then changes;
//! - [`events`], [`list`]: the server's answers, sorted and parsed;
//! - [`keep`]: what is watched, and who keeps what comes of it;
//! - [`known`], [`publish`]: what is known of Nodes, and what the rest of the agent sees of it.
//!
//! kube's own watcher is not used: it keeps to itself that a server answers again before something
//! happens to an object, and insists on streamed lists where there are none.
//!
//! A Node whose values cannot be read costs that Node alone. While the server cannot be reached
//! the last facts stay, and the problem says since when and why; so they do across restarts of
//! the agent, by [`super::cache`].

mod error;
mod events;
mod follow;
mod keep;
mod known;
mod list;
mod publish;

pub(super) use keep::Keep;

use super::{Snapshot, Source, nodes::OwnNode};
use crate::cluster_api::ClusterApi;
use error::WatchError;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use publish::Nodes;
use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    path::PathBuf,
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tracing::{debug, info};

/// How long the server may take to begin an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a watch lasts before the server ends it, in seconds: a time between these, so that
/// agents that began together do not come back together.
const WATCH: std::ops::Range<u32> = 240..480;
/// How long a watch may be silent: the server sends a bookmark every minute. One whose data were put back from a backup
/// sends nothing at all to who watches from a point that it has not reached again.
const SILENCE: Duration = Duration::from_secs(190);
/// How long a list may be silent.
const LIST_SILENCE: Duration = Duration::from_secs(30);
/// Changes that follow one another this quickly are published as one,
const PAUSE: Duration = Duration::from_millis(50);
/// but none waits longer than this.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A watch that ends sooner than this counts as failed, so that it is not begun without pause.
const TOO_SHORT: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LONGEST_RETRY: Duration = Duration::from_secs(15);
/// Share of each node in the time over which agents list again when the server has forgotten
/// their point, as it has after a restart: 500 lists a second from the whole cluster.
const LIST_SHARE: Duration = Duration::from_millis(2);
/// How soon a server is asked again for objects that it may be without.
const ABSENT: Duration = Duration::from_secs(15 * 60);
/// Any state that the server's cache has will do.
const ANY: &str = "0";

/// Where in the history of the objects the facts are.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Point {
    /// At this resourceVersion; the changes after it are wanted.
    After(String),
    /// Nowhere; all objects are wanted, at this resourceVersion or later.
    Lost { not_before: String },
}

/// Watches until the last receiver of the facts is gone. The second channel has this node's own
/// Node, none while there is none.
pub fn spawn(
    api: ClusterApi,
    node: String,
    cache: PathBuf,
) -> (Source, watch::Receiver<Option<OwnNode>>) {
    let (sender, updates) = watch::channel(Snapshot::default());
    let (own_sender, own) = watch::channel(None);
    let nodes = Nodes::new(node, cache, sender, own_sender);
    let from = format!("Kubernetes API at {}", api.server);
    let task = tokio::spawn(async move {
        let mut watcher = Watcher::new(api, nodes);
        watcher.keeper.load_cache(&watcher.server).await;
        watcher.run().await;
    });
    (
        Source {
            from,
            updates,
            task,
        },
        own,
    )
}

/// Follows one kind of objects.
pub(super) struct Watcher<K> {
    client: Client,
    server: String,
    keeper: K,
    /// Whether the server streams lists, as far as is known.
    streams: bool,
    point: Point,
    lost: Option<Lost>,
    /// How long a watch may be silent.
    silence: Duration,
    /// Whether it was logged that the server answers.
    said_hello: bool,
}

/// A connection that is lost.
struct Lost {
    since: Timestamp,
    /// What was logged about it.
    said: BTreeSet<String>,
}

impl<K: Keep> Watcher<K> {
    pub(super) fn new(api: ClusterApi, keeper: K) -> Self {
        Self {
            client: api.client,
            server: api.server,
            keeper,
            streams: true,
            point: Point::Lost {
                not_before: ANY.into(),
            },
            lost: None,
            silence: SILENCE,
            said_hello: false,
        }
    }

    /// Watches until nobody wants to know any more.
    pub(super) async fn run(mut self) {
        let closed = self.keeper.closed();
        tokio::select! {
            () = closed => {}
            () = self.watch() => {}
        }
    }

    async fn watch(&mut self) {
        let mut retry = FIRST_RETRY;
        loop {
            let begun = Instant::now();
            let outcome = self.follow().await;
            if self.lost.is_none() && begun.elapsed() > LONGEST_RETRY {
                retry = FIRST_RETRY;
            }
            let error = match outcome {
                Ok(()) if begun.elapsed() > TOO_SHORT => continue,
                Ok(()) => WatchError::TooShort,
                Err(error) => error,
            };
            if K::MAY_BE_ABSENT && error.is_absent() {
                debug!(
                    "the Kubernetes API at {} has no {}: {}",
                    self.server,
                    K::NAMES[1],
                    error.text()
                );
                sleep(jitter(ABSENT)).await;
                continue;
            }
            let listing = matches!(self.point, Point::Lost { .. });
            if let Point::After(version) = &self.point
                && error.is_gone()
            {
                // What the server asks for is no loss.
                self.point = Point::Lost {
                    not_before: version.clone(),
                };
                let agents = self.keeper.agents() as u32;
                sleep(jitter(FIRST_RETRY.max(LIST_SHARE * agents))).await;
                continue;
            }
            if listing && error.is_ahead() {
                info!(
                    "the Kubernetes API at {} has older data than before",
                    self.server
                );
                self.point = Point::Lost {
                    not_before: ANY.into(),
                };
            } else if listing && self.streams && error.is_invalid() {
                info!(
                    "the Kubernetes API at {} does not stream lists",
                    self.server
                );
                self.streams = false;
                continue;
            }
            if let Point::After(version) = &self.point
                && matches!(error, WatchError::Silent)
            {
                let not_before = version.clone();
                self.point = Point::Lost { not_before };
            }
            self.disconnected(&error.text());
            sleep(jitter(retry)).await;
            retry = (retry * 2).min(LONGEST_RETRY);
        }
    }
}

/// How long the next watch is to last.
fn watch_seconds() -> u32 {
    WATCH.start + (random() % u64::from(WATCH.end - WATCH.start)) as u32
}

/// Between half of it and all: the agents of a cluster must not come all at once.
fn jitter(time: Duration) -> Duration {
    time / 2 + time / 2 * (random() % 1000) as u32 / 1000
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
