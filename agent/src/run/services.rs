//! The task that publishes what Services lead to.

use crate::{
    apply::services::Publisher,
    chain::Chain,
    cluster_api::servers::Servers,
    datapath::Datapath,
    plan::services::{Here, ServiceName, ServicePlan, Slice, plan},
    telemetry::metrics::Metrics,
    troubles,
    watch::services::{ServicesSource, Store},
};
use anyhow::{Context as _, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{task::spawn_blocking, time::sleep};

/// How soon it is tried again to publish what had no room, and to begin.
const AGAIN: Duration = Duration::from_secs(1);
/// Services that are planned before any of them is published: what a plan takes is many times what is kept of it.
const TOGETHER: usize = 256;

const UNPUBLISHED: &str = "ServicesUnpublished";
const STALE: &str = "ServicesStale";

/// The publisher, for the task and for who asks what is published.
pub type Shared = Arc<Mutex<Publisher<Arc<Datapath>>>>;

/// What the task needs.
pub(super) struct ServicesTask {
    pub(super) source: ServicesSource,
    pub(super) publisher: Shared,
    pub(super) datapath: Arc<Datapath>,
    pub(super) here: Here,
    /// To be told where the API servers are.
    pub(super) servers: Option<Arc<Servers>>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) standing: troubles::Standing,
}

/// A panic leaves a publisher whose numbers may be wrong; the agent ends with the task.
pub fn lock(publisher: &Shared) -> MutexGuard<'_, Publisher<Arc<Datapath>>> {
    publisher.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Publishes what changes, for ever.
pub(super) async fn follow_services(task: ServicesTask) -> anyhow::Result<()> {
    let ServicesTask {
        source,
        publisher,
        datapath,
        here,
        servers,
        metrics,
        standing,
    } = task;
    let ServicesSource {
        mut changes,
        store,
        mut health,
        task: mut reading,
        ..
    } = source;
    let facts = Facts {
        store,
        here,
        servers,
    };
    let facts = Arc::new(facts);
    let mut is_begun = false;
    let mut is_waiting = false;
    // What is there already goes on meanwhile.
    let mut first = None;
    loop {
        let changed = tokio::select! {
            changed = changes.next() => changed,
            () = after(AGAIN, is_waiting || (first.is_some() && !is_begun)) => BTreeSet::new(),
            changed = health.changed() => {
                changed.context("the source of Services ended")?;
                let problem = health.borrow_and_update().problem.clone();
                troubles::replace(&standing, STALE, problem);
                continue;
            }
            ended = &mut reading => {
                ended.context("the source of Services failed")?;
                bail!("the source of Services ended");
            }
        };
        first.get_or_insert(());
        let work = {
            let (publisher, datapath) = (publisher.clone(), datapath.clone());
            let facts = facts.clone();
            move || publish(&publisher, &datapath, &facts, &changed, is_begun)
        };
        let published = spawn_blocking(work)
            .await
            .context("publishing Services failed")?;
        if let Some(took) = published.took {
            metrics.services_changed(took);
        }
        if let Some(text) = &published.failed {
            tracing::warn!("{text}");
        }
        is_begun |= published.failed.is_none();
        is_waiting = published.waiting.is_some();
        troubles::replace(
            &standing,
            UNPUBLISHED,
            published.waiting.or(published.failed),
        );
    }
}

async fn after(time: Duration, is: bool) {
    match is {
        true => sleep(time).await,
        false => pending().await,
    }
}

#[derive(Default)]
struct Published {
    /// How long changes took; none if there were none.
    took: Option<Duration>,
    /// Why the node's Services are not translated yet.
    failed: Option<String>,
    /// What some Services wait for.
    waiting: Option<String>,
}

fn publish(
    publisher: &Shared,
    datapath: &Datapath,
    facts: &Facts,
    changed: &BTreeSet<ServiceName>,
    is_begun: bool,
) -> Published {
    let began = Instant::now();
    let mut publisher = lock(publisher);
    let mut names = changed.iter();
    loop {
        let plans: BTreeMap<_, _> = names
            .by_ref()
            .take(TOGETHER)
            .map(|name| (name, facts.planned(name)))
            .collect();
        if plans.is_empty() {
            break;
        }
        facts.tell_of_api_servers(&plans);
        let changes = plans.iter().map(|(name, plan)| (*name, plan.as_ref()));
        publisher.apply_all(Instant::now(), changes);
    }
    if changed.is_empty() {
        publisher.retry(Instant::now());
    }
    let mut published = Published {
        took: (!changed.is_empty()).then(|| began.elapsed()),
        ..Published::default()
    };
    if !is_begun {
        // All are known: what the agent before had and no plan has is nobody's.
        let complete = publisher.complete(Instant::now());
        let begun = complete.and_then(|()| datapath.set_services(true));
        match begun {
            Ok(()) => tracing::info!(
                services = publisher.usage().services,
                took = ?began.elapsed(),
                "services are published"
            ),
            Err(error) => {
                published.failed = Some(format!("cannot publish Services: {}", Chain(&error)))
            }
        }
    }
    let mut waiting = publisher.waiting();
    if let Some((_, error)) = waiting.next() {
        let error = Chain(error).to_string();
        published.waiting = Some(match waiting.count() {
            0 => error,
            others => format!("{error}; so it is with {others} others (`sinabroctl services`)"),
        });
    }
    published
}

/// What is known of Services, and who wants to know.
struct Facts {
    store: Arc<Store>,
    here: Here,
    servers: Option<Arc<Servers>>,
}

impl Facts {
    /// What is to be published of a Service; none if nothing is.
    fn planned(&self, name: &ServiceName) -> Option<ServicePlan> {
        let (service, slices) = self.store.get(name)?;
        let slices: Vec<&Slice> = slices.iter().collect();
        let plan = plan(&service, &slices, &self.here);
        (plan != ServicePlan::default()).then_some(plan)
    }

    /// The agent asks them itself, whatever becomes of the Service that leads to them.
    fn tell_of_api_servers(&self, plans: &BTreeMap<&ServiceName, Option<ServicePlan>>) {
        let kubernetes = ServiceName {
            namespace: "default".into(),
            name: "kubernetes".into(),
        };
        if let Some(servers) = &self.servers
            && let Some(Some(plan)) = plans.get(&kubernetes)
        {
            servers.learn(plan.endpoints());
        }
    }
}
