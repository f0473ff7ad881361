//! The events of one watch, sorted.

use super::{ANSWER, NODES, Watcher, error::WatchError};
use crate::watch::nodes::ApiNode;
use futures::{TryStreamExt as _, stream::BoxStream};
use kube::{
    api::{WatchEvent, WatchParams},
    core::Request,
};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::warn;

/// What a watch tells.
pub(super) enum Event {
    /// A Node that came or changed.
    Present(ApiNode),
    Gone(ApiNode),
    Bookmark {
        version: String,
        /// Every Node that there is was reported.
        ends_list: bool,
    },
}

/// A watch that has begun.
pub(super) struct Events(BoxStream<'static, kube::Result<WatchEvent<ApiNode>>>);

impl Watcher {
    /// Begins a watch: of the changes after `from`, or of all Nodes first.
    pub(super) async fn begin(&self, from: &str, all_first: bool) -> Result<Events, WatchError> {
        let params = WatchParams {
            timeout: Some(super::watch_seconds()),
            send_initial_events: all_first,
            ..WatchParams::default()
        };
        let request = Request::new(NODES).watch(&params, from)?;
        let events = self.client.request_events::<ApiNode>(request);
        let events = timeout(ANSWER, events)
            .await
            .map_err(|_| WatchError::NoAnswer)??;
        Ok(Events(Box::pin(events)))
    }
}

impl Events {
    /// The next event; none at the end of the watch, [`WatchError::Silent`] if none comes in time.
    /// What is not a Node is passed over.
    pub(super) async fn next(&mut self, until: Instant) -> Result<Option<Event>, WatchError> {
        loop {
            let event = timeout_at(until, self.0.try_next())
                .await
                .map_err(|_| WatchError::Silent)?;
            let event = match event {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(None),
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
            return Ok(Some(match event {
                WatchEvent::Added(node) | WatchEvent::Modified(node) => Event::Present(node),
                WatchEvent::Deleted(node) => Event::Gone(node),
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
