//! The events of one watch, sorted.

use super::{ANSWER, Keep, Watcher, error::WatchError};
use futures::{TryStreamExt as _, stream::BoxStream};
use kube::{
    api::{WatchEvent, WatchParams},
    core::Request,
};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::warn;

/// What a watch tells.
pub(super) enum Event<T> {
    /// An object that came or, by the server's word, only changed.
    Present {
        object: T,
        changed: bool,
    },
    Gone(T),
    Bookmark {
        version: String,
        /// Every object that there is was reported.
        ends_list: bool,
    },
}

/// A watch that has begun.
pub(super) struct Events<K: Keep>(
    pub(super) BoxStream<'static, kube::Result<WatchEvent<K::Object>>>,
);

impl<K: Keep> Watcher<K> {
    /// Begins a watch: of the changes after `from`, or of all objects first.
    pub(super) async fn begin(&self, from: &str, all_first: bool) -> Result<Events<K>, WatchError> {
        let params = WatchParams {
            label_selector: K::SELECTOR.map(Into::into),
            timeout: Some(super::watch_seconds()),
            send_initial_events: all_first,
            ..WatchParams::default()
        };
        let request = Request::new(K::PATH).watch(&params, from)?;
        let events = self.client.request_events::<K::Object>(request);
        let events = timeout(ANSWER, events)
            .await
            .map_err(|_| WatchError::NoAnswer)??;
        Ok(Events(Box::pin(events)))
    }
}

impl<K: Keep> Events<K> {
    /// The next event; none at the end of the watch, [`WatchError::Silent`] if none comes in time.
    /// What is not an object of the kind is passed over.
    pub(super) async fn next(
        &mut self,
        until: Instant,
    ) -> Result<Option<Event<K::Object>>, WatchError> {
        let [one, _] = K::NAMES;
        loop {
            let event = timeout_at(until, self.0.try_next())
                .await
                .map_err(|_| WatchError::Silent)?;
            let event = match event {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(None),
                Err(kube::Error::SerdeError(error)) => {
                    warn!("passing over a change of {one} that cannot be read: {error}");
                    continue;
                }
                // So kube calls an object of another kind: every field of a status may be missing.
                Err(kube::Error::Api(status)) if status.code == 0 => {
                    warn!("passing over a change of {one} that is none");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            return Ok(Some(match event {
                WatchEvent::Added(object) => Event::Present {
                    object,
                    changed: false,
                },
                WatchEvent::Modified(object) => Event::Present {
                    object,
                    changed: true,
                },
                WatchEvent::Deleted(object) => Event::Gone(object),
                WatchEvent::Bookmark(mark) => {
                    let mark = mark.metadata;
                    let ends_list = mark.annotations.contains_key("k8s.io/initial-events-end");
                    Event::Bookmark {
                        version: mark.resource_version,
                        ends_list,
                    }
                }
                WatchEvent::Error(status) => return Err(WatchError::Refused(status)),
            }));
        }
    }
}
