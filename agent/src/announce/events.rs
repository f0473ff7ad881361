//! Writes Events (events.k8s.io/v1), at a bounded rate.
//!
//! The same said again about the same object is not a new Event: it is counted, and the count
//! written at most every [`AGAIN`]. All together are held to a bucket, so that a node on which
//! everything fails costs the API server little. An Event that cannot be written is dropped.

use crate::watch::nodes::OwnNode;
use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event as ApiEvent, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use sinabro_common::api::PodRef;
use std::{borrow::Cow, collections::HashMap, time::Duration};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, timeout},
};
use tracing::debug;

/// How soon a repetition is written.
const AGAIN: Duration = Duration::from_secs(300);
/// After this the API server has forgotten an Event (kube-apiserver --event-ttl), and so it is
/// here.
const FORGET: Duration = Duration::from_secs(3600);
/// Events written at once,
const BURST: u32 = 20;
/// and how long until one more may be.
const REFILL: Duration = Duration::from_secs(10);
/// Different Events remembered.
const REMEMBERED: usize = 256;
const DEADLINE: Duration = Duration::from_secs(10);
/// Bounds of the API's validation, in bytes.
const MAX_NOTE: usize = 1024;
const MAX_INSTANCE: usize = 128;
const MAX_NAME: usize = 253;
const CONTROLLER: &str = "sinabro-agent";

/// What an Event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum About {
    /// This node.
    Node,
    Pod(PodRef),
}

#[derive(Clone, Debug)]
pub struct Event {
    pub about: About,
    pub reason: Cow<'static, str>,
    pub note: String,
}

/// Writes what comes until nobody can send any more.
pub(super) async fn write(
    client: Client,
    node: String,
    own: watch::Receiver<Option<OwnNode>>,
    mut events: mpsc::Receiver<Event>,
) {
    let mut limiter = Limiter::new(Instant::now());
    while let Some(event) = events.recv().await {
        let uid = own.borrow().as_ref().map(|own| own.uid.clone());
        let regarding = regarding(&event.about, &node, uid);
        let key = key(&regarding, &event);
        let step = limiter.next(&key, Instant::now());
        let namespace = regarding.namespace.clone();
        // Events about objects without a namespace are in this one.
        let namespace = namespace.unwrap_or_else(|| "default".into());
        let api: Api<ApiEvent> = Api::namespaced(client.clone(), &namespace);
        let outcome = match step {
            Step::Nothing => continue,
            Step::Create => {
                let made = made(&event, regarding, &node, &namespace);
                let name = made.metadata.name.clone().unwrap_or_default();
                let written = timeout(DEADLINE, api.create(&PostParams::default(), &made)).await;
                written.map(|written| written.map(|_| Some(name)))
            }
            Step::Count(name, count) => {
                let series = EventSeries {
                    count,
                    last_observed_time: MicroTime(Timestamp::now()),
                };
                let patch = Patch::Merge(serde_json::json!({ "series": series }));
                let params = PatchParams::default();
                let patched = timeout(DEADLINE, api.patch(&name, &params, &patch)).await;
                patched.map(|patched| patched.map(|_| None))
            }
        };
        match outcome {
            Ok(Ok(Some(name))) => limiter.created(key, name, Instant::now()),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => {
                debug!("cannot write an event: {error}");
                limiter.forget(&key);
            }
            Err(_) => {
                debug!("cannot write an event: no answer");
                limiter.forget(&key);
            }
        }
    }
}

fn regarding(about: &About, node: &str, uid: Option<String>) -> ObjectReference {
    let (kind, namespace, name, uid) = match about {
        // Where there is no Node, its name stands for its uid, as in the kubelet's Events.
        About::Node => ("Node", None, node, uid.unwrap_or_else(|| node.to_owned())),
        About::Pod(pod) => {
            let namespace = Some(pod.namespace.clone());
            ("Pod", namespace, pod.name.as_str(), pod.uid.clone())
        }
    };
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some(kind.into()),
        name: Some(name.to_owned()),
        namespace,
        uid: Some(uid).filter(|uid| !uid.is_empty()),
        ..ObjectReference::default()
    }
}

fn made(event: &Event, regarding: ObjectReference, node: &str, namespace: &str) -> ApiEvent {
    let now = Timestamp::now();
    let unique = format!(".{:x}", now.as_nanosecond());
    let object = regarding.name.clone().unwrap_or_default();
    // What is cut off may leave an end that no name has.
    let object = cut(&object, MAX_NAME - unique.len()).trim_end_matches(['-', '.']);
    let action = match event.about {
        About::Node => "ConfigureNode",
        About::Pod(_) => "AddPod",
    };
    ApiEvent {
        metadata: ObjectMeta {
            name: Some(format!("{object}{unique}")),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        action: Some(action.into()),
        reason: Some(event.reason.to_string()),
        note: Some(cut(&event.note, MAX_NOTE).into()),
        regarding: Some(regarding),
        reporting_controller: Some(CONTROLLER.into()),
        reporting_instance: Some(cut(node, MAX_INSTANCE).into()),
        type_: Some("Warning".into()),
        ..ApiEvent::default()
    }
}

/// As much of a text as fits, in whole characters.
fn cut(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

type Key = (
    Option<String>,
    Option<String>,
    Option<String>,
    Cow<'static, str>,
    String,
);

fn key(regarding: &ObjectReference, event: &Event) -> Key {
    (
        regarding.namespace.clone(),
        regarding.name.clone(),
        regarding.uid.clone(),
        event.reason.clone(),
        event.note.clone(),
    )
}

/// What to do with an Event.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Create,
    /// Write into the Event of this name how often it was.
    Count(String, i32),
    Nothing,
}

/// Decides which Events are written.
struct Limiter {
    told: HashMap<Key, Told>,
    /// When the bucket would be full: in the future by [`REFILL`] for each one taken.
    full_at: Instant,
}

struct Told {
    name: String,
    written: Instant,
    count: i32,
}

impl Limiter {
    fn new(now: Instant) -> Self {
        Self {
            told: HashMap::new(),
            full_at: now,
        }
    }

    fn next(&mut self, key: &Key, now: Instant) -> Step {
        self.told.retain(|_, told| now < told.written + FORGET);
        if let Some(told) = self.told.get_mut(key) {
            told.count = told.count.saturating_add(1);
            if now < told.written + AGAIN || !take(&mut self.full_at, now) {
                return Step::Nothing;
            }
            told.written = now;
            return Step::Count(told.name.clone(), told.count);
        }
        match take(&mut self.full_at, now) {
            true => Step::Create,
            false => Step::Nothing,
        }
    }

    fn created(&mut self, key: Key, name: String, now: Instant) {
        if self.told.len() >= REMEMBERED {
            let oldest = self.told.iter().min_by_key(|(_, told)| told.written);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.told.remove(&oldest);
            }
        }
        let told = Told {
            name,
            written: now,
            count: 1,
        };
        self.told.insert(key, told);
    }

    /// It was not written, or is gone: the next of its kind is a new one.
    fn forget(&mut self, key: &Key) {
        self.told.remove(key);
    }
}

/// Takes one from the bucket, if it is not empty.
fn take(full_at: &mut Instant, now: Instant) -> bool {
    let then = (*full_at).max(now) + REFILL;
    let enough = then <= now + REFILL * BURST;
    if enough {
        *full_at = then;
    }
    enough
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(note: &str) -> Event {
        Event {
            about: About::Pod(PodRef {
                namespace: "shop".into(),
                name: "cart-0".into(),
                uid: "u".into(),
            }),
            reason: "AddressRangeFull".into(),
            note: note.into(),
        }
    }

    fn key_of(note: &str) -> Key {
        let event = event(note);
        key(&regarding(&event.about, "n1", None), &event)
    }

    #[test]
    fn the_same_is_told_once_and_then_counted() {
        let now = Instant::now();
        let mut limiter = Limiter::new(now);
        let key = key_of("full");
        assert_eq!(limiter.next(&key, now), Step::Create);
        limiter.created(key.clone(), "e1".into(), now);
        let second = Duration::from_secs(1);
        for _ in 0..10 {
            assert_eq!(limiter.next(&key, now + AGAIN - second), Step::Nothing);
        }
        let counted = Step::Count("e1".into(), 12);
        assert_eq!(limiter.next(&key, now + AGAIN), counted);
        assert_eq!(limiter.next(&key, now + AGAIN + second), Step::Nothing);
        // Another note is another event, and what was not written is reported again.
        let other = limiter.next(&key_of("other"), now + AGAIN + second);
        assert_eq!(other, Step::Create);
        limiter.forget(&key);
        let later = now + AGAIN + second;
        assert_eq!(limiter.next(&key, later), Step::Create);
        limiter.created(key.clone(), "e2".into(), later);
        assert_eq!(limiter.next(&key, later + FORGET), Step::Create);
    }

    #[test]
    fn a_flood_is_held_to_the_bucket() {
        let mut now = Instant::now();
        let mut limiter = Limiter::new(now);
        let mut written = 0;
        let mut flood = |limiter: &mut Limiter, now: Instant| {
            for n in 0..1000 {
                let key = key_of(&format!("{written} {n}"));
                if limiter.next(&key, now) == Step::Create {
                    limiter.created(key, "e".into(), now);
                    written += 1;
                }
            }
            written
        };
        assert_eq!(flood(&mut limiter, now), 20);
        now += REFILL * 3;
        assert_eq!(flood(&mut limiter, now), 23);
        now += FORGET / 2;
        assert_eq!(flood(&mut limiter, now), 43);
        for hour in 1..20 {
            flood(&mut limiter, now + FORGET / 2 * hour);
        }
        assert!(limiter.told.len() <= REMEMBERED);
    }

    #[test]
    fn texts_are_cut_to_what_the_api_takes() {
        let long = Event {
            about: About::Node,
            ..event(&"ö".repeat(1000))
        };
        let node = format!("{}.{}", "a".repeat(230), "b".repeat(22));
        let about = regarding(&long.about, &node, None);
        assert_eq!(about.uid.as_deref(), Some(node.as_str()));
        let made = made(&long, about, &node, "default");
        assert!(made.note.unwrap().len() <= MAX_NOTE);
        assert!(made.reporting_instance.unwrap().len() <= MAX_INSTANCE);
        let name = made.metadata.name.unwrap();
        assert!(name.len() <= MAX_NAME, "{name}");
        assert!(
            name.starts_with(&"a".repeat(230)) && !name.contains(".."),
            "{name}"
        );
    }

    #[test]
    fn an_event_of_a_pod_is_in_its_namespace_and_names_its_uid() {
        let event = event("full");
        let about = regarding(&event.about, "n1", Some("node-uid".into()));
        assert_eq!(about.namespace.as_deref(), Some("shop"));
        assert_eq!(about.uid.as_deref(), Some("u"));
        let node = regarding(&About::Node, "n1", Some("node-uid".into()));
        assert_eq!(
            (node.namespace, node.uid.as_deref()),
            (None, Some("node-uid"))
        );
    }
}
