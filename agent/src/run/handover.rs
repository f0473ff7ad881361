//! The task that lets Services pass from kube-proxy to this agent, and back.

use crate::{
    config::Settings,
    datapath::{Datapath, Translation},
    handover::{Outcome, ServiceProxy, Turn, seen::Seen},
    troubles,
};
use anyhow::Context as _;
use std::{
    future::pending,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::watch, task::spawn_blocking, time::sleep};

/// How soon after it failed.
const AGAIN: Duration = Duration::from_secs(2);

/// What the task needs.
pub(super) struct HandoverTask {
    pub(super) settings: Arc<Settings>,
    pub(super) datapath: Arc<Datapath>,
    pub(super) seen: Seen,
    /// Whether it is published what all Services lead to.
    pub(super) published: watch::Receiver<bool>,
    /// For people.
    pub(super) status: watch::Sender<String>,
    /// What is wrong.
    pub(super) standing: troubles::Standing,
    /// Whether what begins is translated here.
    pub(super) translating: watch::Sender<bool>,
}

/// Whether there is anything to follow Services for.
pub(super) fn is_ours(wish: ServiceProxy, datapath: &Datapath) -> anyhow::Result<bool> {
    let state = datapath.translation();
    let state = state.context("cannot read whether Services are translated")?;
    Ok(wish.may_be_on() || state != Translation::Off)
}

/// Looks and acts for ever.
pub(super) async fn follow_handover(mut task: HandoverTask) -> anyhow::Result<()> {
    if task.settings.service_proxy.may_be_on() {
        task.status
            .send_replace("off, Services are not read yet".into());
        let published = task.published.wait_for(|is| *is).await;
        published.context("what publishes Services ended")?;
    }
    let mut turn = Turn::new(task.settings, task.datapath.clone(), task.seen);
    loop {
        let step = spawn_blocking(move || (turn.step(Instant::now()), turn));
        let outcome;
        (outcome, turn) = step.await.context("handing Services over failed")?;
        let Outcome {
            text,
            again,
            trouble,
        } = outcome.unwrap_or_else(|error| {
            let text = format!("{error:#}");
            tracing::warn!("{text}");
            Outcome::new(text, Some(AGAIN))
        });
        troubles::replace(&task.standing, "KubeProxyCame", trouble);
        task.status.send_replace(text);
        let state = task.datapath.translation();
        let is_ours = matches!(state, Ok(Translation::Handover | Translation::On));
        task.translating.send_if_modified(|known| {
            let is_new = *known != is_ours;
            *known = is_ours;
            is_new
        });
        match again {
            Some(later) => sleep(later).await,
            None => pending().await,
        }
    }
}
