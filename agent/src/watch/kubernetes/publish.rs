//! What is known is published, if it is new; and so is whether the server answers.

use super::{Lost, Watcher};
use k8s_openapi::jiff::Timestamp;
use std::{collections::BTreeSet, sync::Arc};
use tracing::{info, warn};

impl Watcher {
    /// Publishes what is known, if it is new.
    pub(super) fn publish(&mut self) {
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
    pub(super) fn connected(&mut self) {
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

    pub(super) fn disconnected(&mut self, why: &str) {
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
