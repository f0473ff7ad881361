//! The Node says whether pods may land on it: taint and condition follow the agent's readiness.
//!
//! Ready: the taint `sinabro.io/agent-not-ready` goes, whoever set it (kubelets may register
//! with it), and the condition NetworkUnavailable is False. Not ready for [`GRACE`], from the
//! start or later: the taint comes. A shorter failure, an agent's restart or upgrade, changes
//! nothing on the Node.
//!
//! What others may send to it a Node says by annotations ([`Annotation`]), once its agent is ready and until that is not so any more:
//! packets without a tunnel with `routing: native`, and UDP over IPv6 without a checksum if its VXLAN device takes that.
//!
//! Taints are one list that others write, too: it is replaced only in the version that was read.
//! A conflict means that a newer one is on its way through the watch, and is tried again with it.

use super::annotations::{Annotation, Takes};
use crate::{
    cluster_api::ClusterApi,
    watch::nodes::{ApiNode, OwnNode, Taint},
};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Client,
    api::{Patch, PatchParams},
    core::Request,
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tracing::{info, warn};

pub const TAINT: &str = "sinabro.io/agent-not-ready";
const EFFECT: &str = "NoSchedule";
pub const CONDITION: &str = "NetworkUnavailable";
pub const REASON: &str = "SinabroIsUp";

/// How long readiness may be missing before the Node says so.
const GRACE: Duration = Duration::from_secs(5);
/// How often readiness is looked at; nothing is sent.
const LOOK: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(10);
/// How soon after a failure the same is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Keeps the Node like `takes` and `ready`, for ever.
pub async fn keep(
    api: ClusterApi,
    name: String,
    mut own: watch::Receiver<Option<OwnNode>>,
    takes: impl Fn() -> Takes + Send,
    ready: impl Fn() -> bool + Send,
) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_ready = Instant::now();
    let mut tried: Option<Instant> = None;
    let mut failure: Option<String> = None;
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            changed = own.changed() => match changed {
                // A newer version: what failed may do now.
                Ok(()) => tried = None,
                Err(_) => return,
            },
        }
        let now = Instant::now();
        let is_ready = ready();
        if is_ready {
            last_ready = now;
        }
        if !is_ready && now < last_ready + GRACE {
            continue;
        }
        let Some(node) = own.borrow_and_update().clone() else {
            continue;
        };
        let steps = steps(&node, is_ready, takes());
        if steps.is_empty() || tried.is_some_and(|tried| now < tried + RETRY) {
            continue;
        }
        tried = Some(now);
        for step in steps {
            match carry_out(&api.client, &name, &node, &step).await {
                Ok(()) => {
                    info!("{}", step.said());
                    failure = None;
                }
                // The watch brings a newer version.
                Err(kube::Error::Api(status)) if status.code == 409 => break,
                Err(error) => {
                    let text = format!("cannot {}: {error}", step.asked());
                    if failure.as_ref() != Some(&text) {
                        warn!("{text}");
                    }
                    failure = Some(text);
                    break;
                }
            }
        }
    }
}

/// A change of the Node.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// The whole list, and whether the taint is in it.
    Taints(Vec<Taint>, bool),
    Condition,
    /// Whether there is to be one.
    Annotation(Annotation, bool),
}

impl Step {
    fn asked(&self) -> String {
        match self {
            Self::Taints(_, true) => format!("set the node's taint {TAINT}"),
            Self::Taints(_, false) => format!("remove the node's taint {TAINT}"),
            Self::Condition => format!("set the node's condition {CONDITION}"),
            Self::Annotation(annotation, true) => {
                format!("set the node's annotation {}", annotation.key())
            }
            Self::Annotation(annotation, false) => {
                format!("remove the node's annotation {}", annotation.key())
            }
        }
    }

    fn said(&self) -> String {
        match self {
            Self::Taints(_, true) => format!("the node has the taint {TAINT}: no new pods come"),
            Self::Taints(_, false) => format!("the node is without the taint {TAINT}"),
            Self::Condition => format!("the node's condition {CONDITION} is False"),
            Self::Annotation(annotation, true) => {
                format!("the node says that {}", annotation.meaning())
            }
            Self::Annotation(annotation, false) => {
                format!(
                    "the node does not say any more that {}",
                    annotation.meaning()
                )
            }
        }
    }
}

/// What the Node lacks to say that the agent is ready, or is not, and what it takes.
fn steps(node: &OwnNode, ready: bool, takes: Takes) -> Vec<Step> {
    let mut steps = Vec::new();
    let ours = |taint: &&Taint| taint.key == TAINT;
    match (node.taints.iter().find(ours), ready) {
        (Some(_), true) => {
            let others = node.taints.iter().filter(|taint| !ours(taint));
            steps.push(Step::Taints(others.cloned().collect(), false));
        }
        (None, false) => {
            let mut taints = node.taints.clone();
            taints.push(Taint {
                key: TAINT.into(),
                effect: EFFECT.into(),
                ..Taint::default()
            });
            steps.push(Step::Taints(taints, true));
        }
        _ => {}
    }
    let available = |(status, reason): &(String, String)| status == "False" && reason == REASON;
    if ready && !node.network_unavailable.as_ref().is_some_and(available) {
        // After the taint, which needs the version that this changes.
        steps.push(Step::Condition);
    }
    for annotation in Annotation::EVERY {
        let wanted = annotation.is_wanted(takes);
        let value = wanted.then(|| annotation.value());
        // What is taken is taken once the agent is ready.
        if annotation.of(node) != value.as_ref() && (ready || !wanted) {
            steps.push(Step::Annotation(annotation, wanted));
        }
    }
    steps
}

async fn carry_out(client: &Client, name: &str, node: &OwnNode, step: &Step) -> kube::Result<()> {
    let nodes = Request::new("/api/v1/nodes");
    let params = PatchParams::default();
    let request = match step {
        Step::Taints(taints, _) => {
            let patch = Patch::Merge(taints_patch(&node.resource_version, taints));
            nodes.patch(name, &params, &patch)
        }
        Step::Annotation(annotation, wanted) => {
            let patch = Patch::Merge(annotation.patch(*wanted));
            nodes.patch(name, &params, &patch)
        }
        // Conditions are merged by their type.
        Step::Condition => {
            let patch = Patch::Strategic(condition_patch(Timestamp::now()));
            nodes.patch_subresource("status", name, &params, &patch)
        }
    };
    let request = request.map_err(kube::Error::BuildRequest)?;
    match timeout(DEADLINE, client.request::<ApiNode>(request)).await {
        Ok(patched) => patched.map(|_| ()),
        Err(_) => Err(kube::Error::Service("no answer".into())),
    }
}

/// With the version that was read, so that nobody's change is lost.
fn taints_patch(version: &str, taints: &[Taint]) -> Value {
    json!({
        "metadata": { "resourceVersion": version },
        "spec": { "taints": taints },
    })
}

fn condition_patch(now: Timestamp) -> Value {
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({ "status": { "conditions": [{
        "type": CONDITION,
        "status": "False",
        "reason": REASON,
        "message": "pods of this node have their network from Sinabro",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }] } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stand_in::{Answer, StandIn};
    use sinabro_common::names::{ROUTING_ANNOTATION, TUNNELS_ANNOTATION, UDP6_ZERO_CHECKSUM};
    use tokio::task::AbortHandle;

    fn node(taints: &[(&str, &str)], condition: Option<(&str, &str)>) -> OwnNode {
        let taint = |(key, effect): &(&str, &str)| Taint {
            key: key.to_string(),
            effect: effect.to_string(),
            ..Taint::default()
        };
        OwnNode {
            uid: "u".into(),
            resource_version: "7".into(),
            taints: taints.iter().map(taint).collect(),
            network_unavailable: condition.map(|(s, r)| (s.into(), r.into())),
            zone: String::new(),
            routing: None,
            tunnels: None,
            is_going: false,
        }
    }

    const UP: Option<(&str, &str)> = Some(("False", REASON));
    const NOTHING: Takes = Takes {
        native: false,
        zero_checksum: false,
    };

    fn keys(steps: &[Step]) -> Vec<(Vec<&str>, bool)> {
        let taints = |step| match step {
            &Step::Taints(ref taints, ours) => {
                Some((taints.iter().map(|t| t.key.as_str()).collect(), ours))
            }
            Step::Condition | Step::Annotation(..) => None,
        };
        steps.iter().filter_map(taints).collect()
    }

    #[test]
    fn ready_removes_the_taint_alone_and_sets_the_condition() {
        let registered = node(
            &[("a", "NoExecute"), (TAINT, "NoSchedule"), ("b", "")],
            None,
        );
        let steps = steps(&registered, true, NOTHING);
        assert_eq!(steps[1], Step::Condition);
        assert_eq!(keys(&steps), [(vec!["a", "b"], false)]);
    }

    #[test]
    fn not_ready_adds_the_taint_once_and_leaves_the_condition() {
        let plain = node(&[("a", "NoExecute")], None);
        assert_eq!(
            keys(&steps(&plain, false, NOTHING)),
            [(vec!["a", TAINT], true)]
        );
        assert_eq!(steps(&plain, false, NOTHING).len(), 1);
        assert!(steps(&node(&[(TAINT, "NoSchedule")], None), false, NOTHING).is_empty());
    }

    #[test]
    fn a_node_as_it_should_be_is_left_alone() {
        assert!(steps(&node(&[("a", "")], UP), true, NOTHING).is_empty());
        for other in [("True", "NoRouteCreated"), ("False", "RouteCreated")] {
            assert_eq!(
                steps(&node(&[], Some(other)), true, NOTHING),
                [Step::Condition]
            );
        }
    }

    #[test]
    fn the_node_says_what_it_takes_once_that_is_so_and_no_longer_than_it_is() {
        for annotation in Annotation::EVERY {
            let says = |value: &str| {
                let value = Some(value.to_owned());
                let silent = node(&[(TAINT, "NoSchedule")], UP);
                match annotation {
                    Annotation::Routing => OwnNode {
                        routing: value,
                        ..silent
                    },
                    Annotation::Tunnels => OwnNode {
                        tunnels: value,
                        ..silent
                    },
                }
            };
            let takes = Takes {
                native: annotation == Annotation::Routing,
                zero_checksum: annotation == Annotation::Tunnels,
            };
            let silent = node(&[], UP);
            let said = [Step::Annotation(annotation, true)];
            assert_eq!(steps(&silent, true, takes), said);
            assert!(steps(&silent, true, NOTHING).is_empty());
            let unready = node(&[(TAINT, "NoSchedule")], UP);
            assert!(steps(&unready, false, takes).is_empty());
            assert!(steps(&says(&annotation.value()), false, takes).is_empty());
            let taken_back = [Step::Annotation(annotation, false)];
            for said in [&annotation.value(), "", "other"] {
                assert_eq!(steps(&says(said), false, NOTHING), taken_back);
            }
            // A word of another version.
            assert!(steps(&says("other"), true, takes).ends_with(&said));
        }
        let both = Takes {
            native: true,
            zero_checksum: true,
        };
        assert_eq!(
            steps(&node(&[], UP), true, both),
            Annotation::EVERY.map(|annotation| Step::Annotation(annotation, true))
        );
    }

    #[test]
    fn taints_are_replaced_as_they_were_read_and_in_that_version_only() {
        let text =
            r#"{"key":"k","effect":"NoExecute","value":"v","timeAdded":"2026-01-01T00:00:00Z"}"#;
        let taint: Taint = serde_json::from_str(text).unwrap();
        let patch = taints_patch("7", &[taint]);
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
        let back: Value = serde_json::from_str(text).unwrap();
        assert_eq!(patch["spec"]["taints"][0], back);
    }

    /// [`keep`] with a server, and what the Node is.
    async fn keeping(
        own: Option<OwnNode>,
        takes: Takes,
        ready: bool,
    ) -> (StandIn, watch::Sender<Option<OwnNode>>, AbortHandle) {
        let server = StandIn::start().await;
        let (sender, own) = watch::channel(own);
        let keeping = keep(
            server.api().await,
            "n1".into(),
            own,
            move || takes,
            move || ready,
        );
        let task = tokio::spawn(keeping).abort_handle();
        (server, sender, task)
    }

    fn patched() -> Answer {
        Answer::Whole(200, json!({"metadata": {"name": "n1"}}).to_string())
    }

    #[tokio::test]
    async fn a_conflict_is_tried_again_with_the_version_that_won() {
        let first = node(&[(TAINT, "NoSchedule")], UP);
        let (mut server, own, task) = keeping(Some(first.clone()), NOTHING, true).await;
        server.fail(409, "the object has been modified");
        let (request, body) = server.request().await;
        assert!(request.starts_with("PATCH /api/v1/nodes/n1?"), "{request}");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body, taints_patch("7", &[]));

        let other = [("other", "NoExecute"), (TAINT, "NoSchedule")];
        let newer = OwnNode {
            resource_version: "8".into(),
            ..node(&other, UP)
        };
        server.answer(patched());
        own.send_replace(Some(newer.clone()));
        let (_, body) = server.request().await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body, taints_patch("8", &newer.taints[..1]));
        task.abort();
    }

    #[tokio::test]
    async fn what_is_refused_is_tried_again_and_the_condition_is_merged() {
        let (mut server, _own, task) = keeping(Some(node(&[], None)), NOTHING, true).await;
        server.fail(403, "not allowed");
        server.answer(Answer::Reset);
        server.answer(patched());
        for _ in 0..3 {
            let (request, body) = server.request().await;
            assert!(
                request.starts_with("PATCH /api/v1/nodes/n1/status?"),
                "{request}"
            );
            let body: Value = serde_json::from_str(&body).unwrap();
            let condition = &body["status"]["conditions"][0];
            assert_eq!(condition["type"], "NetworkUnavailable");
            assert_eq!(condition["status"], "False");
            assert_eq!(condition["reason"], "SinabroIsUp");
        }
        task.abort();
    }

    #[tokio::test]
    async fn what_is_not_so_any_more_is_taken_back_and_what_is_so_now_is_said() {
        let own = OwnNode {
            routing: Some("native".into()),
            ..node(&[], UP)
        };
        let takes = Takes {
            zero_checksum: true,
            ..NOTHING
        };
        let (mut server, _own, task) = keeping(Some(own), takes, true).await;
        // Null takes away (RFC 7396); what others have written stays.
        for annotations in [
            json!({ROUTING_ANNOTATION: null}),
            json!({TUNNELS_ANNOTATION: UDP6_ZERO_CHECKSUM}),
        ] {
            server.answer(patched());
            let (request, body) = server.request().await;
            assert!(request.starts_with("PATCH /api/v1/nodes/n1?"), "{request}");
            let body: Value = serde_json::from_str(&body).unwrap();
            assert_eq!(body, json!({"metadata": {"annotations": annotations}}));
        }
        task.abort();
    }

    #[tokio::test]
    async fn a_node_that_comes_late_gets_the_taint_of_an_agent_that_is_not_ready() {
        let (mut server, own, task) = keeping(None, NOTHING, false).await;
        server.answer(patched());
        own.send_replace(Some(node(&[], None)));
        let began = Instant::now();
        let (_, body) = server.request().await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["spec"]["taints"][0]["key"], TAINT);
        assert_eq!(body["spec"]["taints"][0]["effect"], "NoSchedule");
        assert!(
            began.elapsed() + LOOK >= GRACE,
            "a moment's failure is nobody's business"
        );
        task.abort();
    }
}
