//! What load balancers ask of a node: whether it translates Services at all ([`node`]), and whether it has endpoints of a
//! certain one ([`ports`]). Paths, ports and answers are kube-proxy's, for they are what load balancers are set up with.
//!
//! - [`ProxyHealth`]: whether what is published is up to date;
//! - [`Eligibility`]: whether the node is to stay (KEP-3836).

pub mod node;
pub mod ports;

#[cfg(test)]
mod tests;

use crate::watch::nodes::OwnNode;
use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use k8s_openapi::jiff::Timestamp;
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// What waits longer than this to be published makes the node unhealthy: twice kube-proxy's `--iptables-sync-period`.
const LATE: Duration = Duration::from_secs(60);
/// By whom a node is marked before it is taken away.
const AUTOSCALERS: &str = "ToBeDeletedByClusterAutoscaler";

/// Whether Services are translated as they should be.
#[derive(Debug, Default)]
pub struct ProxyHealth(Mutex<Published>);

#[derive(Debug, Default)]
struct Published {
    /// Since when changes wait.
    waiting: Option<Instant>,
    /// None until all were published once.
    last: Option<Timestamp>,
}

impl ProxyHealth {
    /// Changes are about to be published.
    pub fn waits(&self, now: Instant) {
        self.lock().waiting.get_or_insert(now);
    }

    /// All that was told is published.
    pub fn published(&self) {
        *self.lock() = Published {
            waiting: None,
            last: Some(Timestamp::now()),
        };
    }

    /// Whether what is published is up to date, and when it was last.
    pub fn state(&self, now: Instant) -> (bool, Option<Timestamp>) {
        let published = self.lock();
        let is_late = |since| now.saturating_duration_since(since) >= LATE;
        let is_late = published.waiting.is_some_and(is_late);
        (!is_late, published.last)
    }

    /// Whether clients outside may be sent here.
    pub fn is_serving(&self, now: Instant) -> bool {
        let (is_current, last) = self.state(now);
        is_current && last.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Published> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether clients may be sent to a node that they would have to leave soon.
#[derive(Debug)]
pub struct Eligibility {
    /// None without Kubernetes.
    own: Option<watch::Receiver<Option<OwnNode>>>,
    /// Whether it was ever seen: until then it is not gone but unknown.
    was_seen: Mutex<bool>,
}

impl Eligibility {
    pub fn new(own: Option<watch::Receiver<Option<OwnNode>>>) -> Self {
        let was_seen = Mutex::default();
        Self { own, was_seen }
    }

    pub fn is_eligible(&self) -> bool {
        let Some(own) = &self.own else {
            return true;
        };
        let mut was_seen = self.was_seen.lock().unwrap_or_else(PoisonError::into_inner);
        match &*own.borrow() {
            None => !*was_seen,
            Some(node) => {
                *was_seen = true;
                let is_marked = |taint: &crate::watch::nodes::Taint| taint.key == AUTOSCALERS;
                !node.is_going && !node.taints.iter().any(is_marked)
            }
        }
    }
}

fn answer(is_well: bool, json: String) -> Response {
    let status = match is_well {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (
            HeaderName::from_static("x-content-type-options"),
            HeaderValue::from_static("nosniff"),
        ),
    ];
    (status, headers, json).into_response()
}
