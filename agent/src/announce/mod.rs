//! What the agent tells the cluster about its node and its pods.
//!
//! - [`node`]: the Node's taint and its condition NetworkUnavailable follow the agent's readiness,
//!   and its [`annotations`] what the node takes;
//! - [`problems`]: what is wrong with the node becomes Events on it;
//! - [`floods`]: so do pods whose connections are refused, on them, too;
//! - [`events`]: Events are written, at a bounded rate.
//!
//! Reporting is never waited for and changes nothing here: what cannot be reported while the API server
//! is away is reported later if it still holds, or not at all. With a nodes file nothing of this is
//! there, and an [`Announcer`] that was never started takes everything and does nothing.

pub mod annotations;
pub mod events;
pub mod floods;
pub mod node;
pub mod problems;

use crate::{cluster_api::ClusterApi, watch::nodes::OwnNode};
use events::{About, Event};
use sinabro_common::api::{ApiError, ErrorCode, PodRef};
use std::borrow::Cow;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

/// Events that wait to be written; more are not kept.
const WAITING: usize = 64;

/// Takes what is to be reported. Its clones report through the same queue.
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
    pub fn node_event(&self, reason: impl Into<Cow<'static, str>>, note: impl Into<String>) {
        self.tell(About::Node, reason.into(), note.into());
    }

    /// Writes a warning on a pod, if it is one of Kubernetes.
    pub fn pod_event(
        &self,
        pod: &PodRef,
        reason: impl Into<Cow<'static, str>>,
        note: impl Into<String>,
    ) {
        if !pod.namespace.is_empty() && !pod.name.is_empty() {
            self.tell(About::Pod(pod.clone()), reason.into(), note.into());
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

    /// Tells of something wrong with a pod that was added nevertheless.
    pub fn passed_over(&self, pod: &PodRef, warning: &str) {
        self.pod_event(pod, "InvalidSetting", warning);
    }

    fn tell(&self, about: About, reason: Cow<'static, str>, note: String) {
        let Some(events) = &self.events else {
            return;
        };
        let event = Event {
            about,
            reason,
            note,
        };
        if let Err(error) = events.try_send(event) {
            tracing::debug!("an event is not reported: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stand_in::{Answer, StandIn};
    use serde_json::Value;

    fn pod() -> PodRef {
        PodRef {
            namespace: "shop".into(),
            name: "cart-0".into(),
            uid: "7".into(),
        }
    }

    async fn started() -> (StandIn, Announcer, JoinHandle<()>) {
        let server = StandIn::start().await;
        let (_, own) = watch::channel(None);
        let api = server.api().await;
        let (announcer, task) = Announcer::start(&api, "n1".into(), own);
        (server, announcer, task)
    }

    #[tokio::test]
    async fn a_full_range_is_told_on_the_node_and_on_the_pod() {
        let (mut server, announcer, _task) = started().await;
        let full = ApiError::new(ErrorCode::RangeFull, "pod range 10.0.0.0/24 is full");
        for _ in 0..2 {
            server.answer(Answer::Whole(201, "{}".into()));
        }
        // A repetition is not reported again.
        announcer.refused(&pod(), &full);
        announcer.refused(&pod(), &full);
        announcer.passed_over(&pod(), "end");
        let mut told = Vec::new();
        for _ in 0..3 {
            let (request, body) = server.request().await;
            let body: Value = serde_json::from_str(&body).unwrap();
            let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
            let path = request.split('?').next().unwrap_or_default().to_owned();
            told.push((path, text(&body["reason"]), text(&body["note"])));
            assert_eq!(body["type"], "Warning");
            assert_eq!(body["reportingController"], "sinabro-agent");
            assert_eq!(body["reportingInstance"], "n1");
        }
        let path = |ns: &str| format!("POST /apis/events.k8s.io/v1/namespaces/{ns}/events");
        let full = "pod range 10.0.0.0/24 is full";
        let on_pod = format!("the pod gets no network: {full}");
        let reason = || "AddressRangeFull".to_owned();
        assert_eq!(told[0], (path("default"), reason(), full.to_owned()));
        assert_eq!(told[1], (path("shop"), reason(), on_pod));
        // A pod that is added loses no network.
        assert_eq!(
            told[2],
            (path("shop"), "InvalidSetting".into(), "end".into())
        );
    }

    #[tokio::test]
    async fn a_pod_that_floods_is_named_on_the_node_and_told_on_the_pod() {
        use crate::{announce::floods::Floods, endpoint::pod_names::record};
        use sinabro_common::abi::connection::Share;
        let (mut server, announcer, _task) = started().await;
        for _ in 0..2 {
            server.answer(Answer::Whole(201, "{}".into()));
        }
        let record = record(7, pod(), &["10.0.0.1"]);
        let mut floods = Floods::since(&[]);
        // Of another pod, which is gone, nothing is told; of a repetition neither.
        for refused in [0, 10, 20] {
            let share = Share {
                refused,
                ..Share::default()
            };
            let shares = [(7, share), (8, share)];
            floods.tell(&announcer, std::slice::from_ref(&record), &shares);
        }
        announcer.pod_event(&pod(), "End", "end");
        let mut told = Vec::new();
        for _ in 0..3 {
            let (request, body) = server.request().await;
            let body: Value = serde_json::from_str(&body).unwrap();
            let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
            let namespace = request.split('/').nth(5).unwrap_or_default().to_owned();
            told.push((namespace, text(&body["reason"]), text(&body["note"])));
        }
        let reason = || "ConnectionsRefused".to_owned();
        assert_eq!((&*told[0].0, &told[0].1), ("default", &reason()));
        assert!(told[0].2.contains("pod shop/cart-0: "), "{told:?}");
        assert_eq!((&*told[1].0, &told[1].1), ("shop", &reason()));
        assert!(told[1].2.contains("its share"), "{told:?}");
        assert_eq!(told[2].1, "End");
    }

    #[tokio::test]
    async fn telling_never_waits_and_patience_is_no_news() {
        let (mut server, announcer, _task) = started().await;
        announcer.refused(&pod(), &ApiError::new(ErrorCode::NotReady, "not yet"));
        announcer.pod_event(&PodRef::default(), "NotOfKubernetes", "x");
        // The server takes the first and answers none: the others are held, or dropped.
        for n in 0..WAITING * 10 {
            announcer.node_event("Many", format!("problem {n}"));
        }
        let (_, body) = server.request().await;
        assert!(body.contains("problem 0"), "{body}");
        // Never started: there is nobody to tell.
        Announcer::default().node_event("Reason", "note");
    }
}
