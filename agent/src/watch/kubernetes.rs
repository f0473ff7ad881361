//! Facts from the Kubernetes API, by one watch on Nodes.
//!
//! The watch begins with all Nodes as a stream, or page by page where the server does not have
//! streamed lists, and goes on with their changes. A watch that ends or breaks is taken up where
//! it was; only where the server has forgotten that point (410 Gone) are all Nodes read again.
//! Nothing is polled. Several changes in a row are published as one, and what changes nothing
//! (a heartbeat) is not published.
//!
//! kube's own watcher is not used: it keeps to itself that a server answers again before something
//! happens to a Node, and insists on streamed lists where there are none.
//!
//! A Node whose values cannot be read costs that Node alone. While the server cannot be reached
//! the last facts stay, and the problem says since when and why; so they do across restarts of
//! the agent, by [`super::cache`].

use super::{
    Snapshot, Source,
    cache::{self, Cache},
    nodes::{ApiNode, OwnNode, facts_of},
};
use crate::{chain::Chain, cluster_api::ClusterApi, plan::Facts};
use futures::TryStreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::{
    Client,
    api::{ListParams, WatchEvent, WatchParams},
    core::{Request, Status},
};
use serde::Deserialize;
use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    path::PathBuf,
    pin::pin,
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{info, warn};

const NODES: &str = "/api/v1/nodes";
/// Nodes of one page; a page is held as text while it is read.
const PAGE: u32 = 200;
/// How long the server may take to begin an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a watch may last before the server ends it, in seconds.
const WATCH: u32 = 290;
/// How long a watch may be silent: the server sends bookmarks every minute, and ends it by itself.
const SILENCE: Duration = Duration::from_secs(WATCH as u64 + 10);
/// How long the beginning of a streamed list may be silent.
const LIST_SILENCE: Duration = Duration::from_secs(30);
/// Changes that follow one another this quickly are published as one,
const PAUSE: Duration = Duration::from_millis(50);
/// but none waits longer than this.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A watch that ends sooner than this counts as failed, lest it be begun again without end.
const TOO_SHORT: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LONGEST_RETRY: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("the server refuses")]
    Refused(#[source] Box<Status>),
    #[error("the server does not answer")]
    NoAnswer,
    #[error("the server is silent")]
    Silent,
    #[error("the server ends the watch at once")]
    TooShort,
    #[error("the server sends no {0}")]
    Missing(&'static str),
    #[error(transparent)]
    Request(#[from] kube::core::request::Error),
}

impl WatchError {
    fn status(&self) -> Option<&Status> {
        match self {
            Self::Api(kube::Error::Api(status)) | Self::Refused(status) => Some(status),
            _ => None,
        }
    }

    /// The point to go on from is not known to the server any more.
    fn is_gone(&self) -> bool {
        self.status().is_some_and(|status| status.code == 410)
    }

    /// Streamed lists are refused as an invalid request where there are none.
    fn is_invalid(&self) -> bool {
        let code = self.status().map(|status| status.code);
        matches!(code, Some(400 | 405 | 406 | 415 | 422))
    }

    /// For people, without what kube wraps around it.
    fn text(&self) -> String {
        match self {
            Self::Refused(status) | Self::Api(kube::Error::Api(status)) => {
                format!("{} ({})", status.message, status.code)
            }
            Self::Api(kube::Error::Service(error)) => Chain(error.as_ref()).to_string(),
            other => Chain(other).to_string(),
        }
    }
}

/// A page of the list of Nodes.
#[derive(Deserialize)]
struct Page {
    metadata: PageMetadata,
    items: Vec<ApiNode>,
}

#[derive(Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[derive(Default)]
struct PageMetadata {
    resource_version: String,
    r#continue: String,
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
    let watcher = Watcher {
        client: api.client,
        server: api.server.clone(),
        node,
        known: Known::default(),
        published: None,
        streams: true,
        lost: None,
        said_hello: false,
        sender,
        own: own_sender,
        cache: Cache::new(cache),
    };
    let task = tokio::spawn(watcher.run());
    let from = format!("Kubernetes API at {}", api.server);
    (
        Source {
            from,
            updates,
            task,
        },
        own,
    )
}

struct Watcher {
    client: Client,
    server: String,
    /// This node's name.
    node: String,
    known: Known,
    published: Option<Arc<Facts>>,
    /// Whether the server streams lists, as far as is known.
    streams: bool,
    lost: Option<Lost>,
    /// Whether it was logged that the server answers.
    said_hello: bool,
    sender: watch::Sender<Snapshot>,
    own: watch::Sender<Option<OwnNode>>,
    cache: Cache,
}

/// A connection that is lost.
struct Lost {
    since: Timestamp,
    /// What was logged about it.
    said: BTreeSet<String>,
}

/// What Nodes told.
#[derive(Default)]
struct Known {
    facts: Facts,
    own: Option<OwnNode>,
}

impl Known {
    fn insert(&mut self, own: &str, node: &ApiNode) {
        let name = &node.metadata.name;
        self.remove(own, name);
        match facts_of(node) {
            Ok(known) => {
                self.facts.nodes.insert(name.clone(), known);
            }
            Err(why) => {
                self.facts.unreadable.insert(name.clone(), why);
            }
        }
        if name == own {
            self.own = Some(node.into());
        }
    }

    fn remove(&mut self, own: &str, name: &str) {
        self.facts.nodes.remove(name);
        self.facts.unreadable.remove(name);
        if name == own {
            self.own = None;
        }
    }
}

impl Watcher {
    async fn run(mut self) {
        self.load_cache().await;
        let receivers = self.sender.clone();
        tokio::select! {
            () = receivers.closed() => {}
            () = self.watch() => {}
        }
    }

    async fn load_cache(&mut self) {
        let Some(facts) = cache::load(self.cache.path()).await else {
            return;
        };
        info!(
            nodes = facts.nodes.len(),
            "starting with the nodes kept in {}",
            self.cache.path().display()
        );
        let facts = Arc::new(facts);
        self.known.facts = Facts::clone(&facts);
        self.published = Some(facts.clone());
        self.sender.send_replace(Snapshot {
            facts: Some(facts),
            problem: Some(format!(
                "the Kubernetes API at {} has not answered yet; the nodes kept from before are in use",
                self.server
            )),
            stale_since: Some(Timestamp::now().into()),
        });
    }

    async fn watch(&mut self) {
        // The point that the facts are of.
        let mut version = None;
        let mut retry = FIRST_RETRY;
        loop {
            let begun = Instant::now();
            let outcome = self.follow(&mut version).await;
            if self.lost.is_none() && begun.elapsed() > LONGEST_RETRY {
                retry = FIRST_RETRY;
            }
            let error = match outcome {
                Ok(()) if begun.elapsed() > TOO_SHORT => continue,
                Ok(()) => WatchError::TooShort,
                Err(error) if error.is_gone() => {
                    version = None;
                    // What the server asks for is no loss.
                    sleep(jitter(FIRST_RETRY)).await;
                    continue;
                }
                Err(error) => error,
            };
            if version.is_none() && self.streams && error.is_invalid() {
                info!(
                    "the Kubernetes API at {} does not stream lists",
                    self.server
                );
                self.streams = false;
                continue;
            }
            self.disconnected(&error.text());
            sleep(jitter(retry)).await;
            retry = (retry * 2).min(LONGEST_RETRY);
        }
    }

    /// Follows one watch until it ends, from `version` or, without one, from all Nodes.
    async fn follow(&mut self, version: &mut Option<String>) -> Result<(), WatchError> {
        let mut listed = None;
        if version.is_none() {
            if self.streams {
                listed = Some(Known::default());
            } else {
                *version = Some(self.read_pages().await?);
            }
        }
        let params = WatchParams {
            timeout: Some(WATCH),
            send_initial_events: listed.is_some(),
            ..WatchParams::default()
        };
        let from = version.clone().unwrap_or_default();
        let request = Request::new(NODES).watch(&params, &from)?;
        let events = self.client.request_events::<ApiNode>(request);
        let events = timeout(ANSWER, events)
            .await
            .map_err(|_| WatchError::NoAnswer)??;
        let mut events = pin!(events);
        if listed.is_none() {
            self.connected();
        }
        // Of the first change that is not published yet.
        let mut changed: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let until = match changed {
                Some(first) => (now + PAUSE).min(first + LONGEST_PAUSE),
                None if listed.is_some() => now + LIST_SILENCE,
                None => now + SILENCE,
            };
            let event = match timeout_at(until, events.try_next()).await {
                Ok(event) => event,
                Err(_) if changed.take().is_some() => {
                    self.publish();
                    continue;
                }
                // So it is where a server does not know the parameter.
                Err(_) if listed.is_some() => {
                    self.streams = false;
                    return Err(WatchError::Silent);
                }
                Err(_) => return Err(WatchError::Silent),
            };
            let over = matches!(event, Err(_) | Ok(None | Some(WatchEvent::Error(_))));
            if over && changed.take().is_some() {
                // The next watch goes on behind what was understood so far.
                self.publish();
            }
            let event = match event {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(()),
                Err(kube::Error::SerdeError(error)) => {
                    warn!("passing over a change of a Node that cannot be read: {error}");
                    continue;
                }
                // So kube calls an object that is no Node: every field of a status may be missing.
                Err(kube::Error::Api(status)) if status.code == 0 => {
                    warn!("passing over a change of a Node that is none");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            match event {
                WatchEvent::Added(node) | WatchEvent::Modified(node) => match &mut listed {
                    Some(listed) => listed.insert(&self.node, &node),
                    None => {
                        self.known.insert(&self.node, &node);
                        *version = Some(node.metadata.resource_version);
                        changed.get_or_insert_with(Instant::now);
                    }
                },
                WatchEvent::Deleted(node) => {
                    self.known.remove(&self.node, &node.metadata.name);
                    *version = Some(node.metadata.resource_version);
                    changed.get_or_insert_with(Instant::now);
                }
                WatchEvent::Bookmark(mark) => {
                    let ends = mark
                        .metadata
                        .annotations
                        .contains_key("k8s.io/initial-events-end");
                    if let Some(all) = listed.take_if(|_| ends) {
                        self.known = all;
                        self.publish();
                        self.connected();
                    }
                    if listed.is_none() {
                        *version = Some(mark.metadata.resource_version);
                    }
                }
                WatchEvent::Error(status) => return Err(WatchError::Refused(status)),
            }
        }
    }

    /// Reads all Nodes page by page and returns the point that they are of.
    async fn read_pages(&mut self) -> Result<String, WatchError> {
        let mut params = ListParams::default().limit(PAGE);
        let mut listed = Known::default();
        loop {
            let request = Request::new(NODES).list(&params)?;
            let page = self.client.request::<Page>(request);
            let page = timeout(ANSWER, page)
                .await
                .map_err(|_| WatchError::NoAnswer)??;
            for node in &page.items {
                listed.insert(&self.node, node);
            }
            if !page.metadata.r#continue.is_empty() {
                params.continue_token = Some(page.metadata.r#continue);
                continue;
            }
            if page.metadata.resource_version.is_empty() {
                return Err(WatchError::Missing("resourceVersion with its list"));
            }
            self.known = listed;
            self.publish();
            return Ok(page.metadata.resource_version);
        }
    }

    /// Publishes what is known, if it is new.
    fn publish(&mut self) {
        self.own.send_if_modified(|own| {
            let new = *own != self.known.own;
            if new {
                own.clone_from(&self.known.own);
            }
            new
        });
        if self.published.as_deref() == Some(&self.known.facts) {
            return;
        }
        let facts = Arc::new(self.known.facts.clone());
        self.published = Some(facts.clone());
        self.cache.keep(facts.clone());
        self.sender
            .send_modify(|snapshot| snapshot.facts = Some(facts));
    }

    /// The server answers, and what is published is what it has.
    fn connected(&mut self) {
        let nodes = self.known.facts.nodes.len();
        match self.lost.take() {
            Some(lost) => info!(
                nodes,
                "the Kubernetes API at {} answers again, which it did not since {}",
                self.server,
                seconds(lost.since)
            ),
            None if self.said_hello => {}
            None => info!(nodes, "watching the nodes at {}", self.server),
        }
        self.said_hello = true;
        self.sender.send_if_modified(|snapshot| {
            let was = snapshot.problem.take();
            snapshot.stale_since = None;
            was.is_some()
        });
    }

    fn disconnected(&mut self, why: &str) {
        let lost = self.lost.get_or_insert_with(|| Lost {
            since: Timestamp::now(),
            said: BTreeSet::new(),
        });
        let kept = match self.published {
            Some(_) => "; the last known nodes stay in use",
            None => "",
        };
        let problem = format!(
            "no connection to the Kubernetes API at {} since {}: {why}{kept}",
            self.server,
            seconds(lost.since)
        );
        // Each reason once for as long as the connection is lost.
        if lost.said.insert(why.to_owned()) {
            warn!("{problem}");
        }
        let since = lost.since.into();
        self.sender.send_if_modified(|snapshot| {
            if snapshot.problem.as_ref() == Some(&problem) {
                return false;
            }
            snapshot.problem = Some(problem);
            snapshot.stale_since = Some(since);
            true
        });
    }
}

fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Between half of it and all: the agents of a cluster must not come all at once.
fn jitter(time: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish();
    time / 2 + time / 2 * (random % 1000) as u32 / 1000
}

#[cfg(test)]
mod tests;
