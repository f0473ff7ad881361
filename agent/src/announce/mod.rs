//! What the agent tells the cluster about its node and its pods.
//!
//! - [`node`]: the Node's taint and its condition NetworkUnavailable follow the agent's readiness;
//! - [`problems`]: what is wrong with the node becomes Events on it;
//! - [`events`]: Events are written, at a bounded rate.
//!
//! Telling is never waited for and changes nothing here: what cannot be told while the API server
//! is away is told later if it still holds, or not at all. With a nodes file nothing of this is
//! there, and an [`Announcer`] that was never started takes everything and does nothing.

pub mod events;
pub mod node;
pub mod problems;

use crate::{cluster_api::ClusterApi, watch::nodes::OwnNode};
use events::{About, Event};
use sinabro_common::api::{ApiError, ErrorCode, PodRef};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

/// Events that wait to be written; more are not kept.
const WAITING: usize = 64;

/// Takes what is to be told. Its clones tell through the same queue.
#[derive(Clone, Debug, Default)]
pub struct Announcer {
    events: Option<mpsc::Sender<Event>>,
}

impl Announcer {
    /// Starts to write Events, those about the node on its Node as `own` has it.
    pub fn start(
        api: &ClusterApi,
        node: String,
        own: watch::Receiver<Option<OwnNode>>,
    ) -> (Self, JoinHandle<()>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        let task = tokio::spawn(events::write(api.client.clone(), node, own, receiver));
        let events = Some(sender);
        (Self { events }, task)
    }

    /// Writes a warning on this node's Node. `reason` is a word in CamelCase, `note` a sentence.
    pub fn node_event(&self, reason: &'static str, note: impl Into<String>) {
        self.tell(About::Node, reason, note.into());
    }

    /// Writes a warning on a pod, if it is one of Kubernetes.
    pub fn pod_event(&self, pod: &PodRef, reason: &'static str, note: impl Into<String>) {
        if !pod.namespace.is_empty() && !pod.name.is_empty() {
            self.tell(About::Pod(pod.clone()), reason, note.into());
        }
    }

    /// Tells of an ADD that was refused. What only asks for patience is no news.
    pub fn refused(&self, pod: &PodRef, error: &ApiError) {
        let reason = match error.code {
            ErrorCode::RangeFull => "AddressRangeFull",
            ErrorCode::AddressUnavailable => "AddressUnavailable",
            ErrorCode::Invalid => "InvalidRequest",
            ErrorCode::Internal => "NetworkFailed",
            ErrorCode::NotReady | ErrorCode::NotFound | ErrorCode::Version => return,
        };
        if error.code == ErrorCode::RangeFull {
            self.node_event(reason, &*error.message);
        }
        let note = format!("the pod gets no network: {}", error.message);
        self.pod_event(pod, reason, note);
    }

    fn tell(&self, about: About, reason: &'static str, note: String) {
        let Some(events) = &self.events else {
            return;
        };
        let event = Event {
            about,
            reason,
            note,
        };
        if let Err(error) = events.try_send(event) {
            tracing::debug!("an event is not told: {error}");
        }
    }
}
