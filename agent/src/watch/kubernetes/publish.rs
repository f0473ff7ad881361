//! What is known of Nodes is published, if it is new; and so is whether the server answers.

use super::{Keep, Lost, Watcher, known::Known};
use crate::{
    plan::Facts,
    watch::{
        Snapshot,
        cache::{self, Cache},
        nodes::{ApiNode, OwnNode},
    },
};
use k8s_openapi::jiff::Timestamp;
use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::SystemTime};
use tokio::sync::watch;
use tracing::{info, warn};

/// Keeps what is known of Nodes.
pub(super) struct Nodes {
    known: Known,
    published: Option<Arc<Facts>>,
    sender: watch::Sender<Snapshot>,
    own: watch::Sender<Option<OwnNode>>,
    cache: Cache,
}

impl Nodes {
    pub(super) fn new(
        node: String,
        cache: PathBuf,
        sender: watch::Sender<Snapshot>,
        own: watch::Sender<Option<OwnNode>>,
    ) -> Self {
        Self {
            known: Known::of(&node),
            published: None,
            sender,
            own,
            cache: Cache::new(cache),
        }
    }

    /// Begins with what was known when the agent ended.
    pub(super) async fn load_cache(&mut self, server: &str) {
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
                "the Kubernetes API at {server} has not answered yet; the nodes kept from before are in use"
            )),
            stale_since: Some(Timestamp::now().into()),
        });
    }
}

impl Keep for Nodes {
    type Object = ApiNode;
    type List = Known;
    const PATH: &str = "/api/v1/nodes";
    const SELECTOR: Option<&str> = None;
    const NAMES: [&str; 2] = ["a Node", "nodes"];

    fn version(node: &ApiNode) -> &str {
        &node.metadata.resource_version
    }

    fn begin_list(&mut self) -> Known {
        self.known.emptied()
    }

    fn listed(list: &mut Known, node: &ApiNode) {
        list.insert(node);
    }

    fn unlisted(list: &mut Known, node: &ApiNode) {
        list.remove(&node.metadata.name);
    }

    fn end_list(&mut self, list: Known) {
        self.known = list;
    }

    fn present(&mut self, node: &ApiNode, _: bool) -> bool {
        self.known.insert(node)
    }

    fn gone(&mut self, node: &ApiNode) -> bool {
        self.known.remove(&node.metadata.name)
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

    fn count(&self) -> usize {
        self.known.facts.nodes.len()
    }

    fn agents(&self) -> usize {
        self.count()
    }

    fn has_facts(&self) -> bool {
        self.published.is_some()
    }

    fn report(&mut self, problem: Option<(String, SystemTime)>) {
        let (problem, stale_since) = problem.unzip();
        self.sender.send_if_modified(|snapshot| {
            if snapshot.problem == problem {
                return false;
            }
            snapshot.problem = problem;
            snapshot.stale_since = stale_since;
            true
        });
    }

    fn closed(&self) -> impl Future<Output = ()> + Send + use<> {
        let sender = self.sender.clone();
        async move { sender.closed().await }
    }
}

impl<K: Keep> Watcher<K> {
    /// The server answers, and what is published is what it has.
    pub(super) fn connected(&mut self) {
        let (count, [_, names]) = (self.keeper.count(), K::NAMES);
        match self.lost.take() {
            Some(lost) => info!(
                "the Kubernetes API at {} answers again with {count} {names}, which it did not since {}",
                self.server,
                seconds(lost.since)
            ),
            None if self.said_hello => {}
            None => info!("watching {names} at {}: {count}", self.server),
        }
        self.said_hello = true;
        self.keeper.report(None);
    }

    pub(super) fn disconnected(&mut self, why: &str) {
        let lost = self.lost.get_or_insert_with(|| Lost {
            since: Timestamp::now(),
            said: BTreeSet::new(),
        });
        let kept = match self.keeper.has_facts() {
            true => format!("; the last known {} stay in use", K::NAMES[1]),
            false => String::new(),
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
        self.keeper.report(Some((problem, lost.since.into())));
    }
}

fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
