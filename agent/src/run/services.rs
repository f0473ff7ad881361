//! The task that publishes what Services lead to.

mod ranges;
mod sockets;
mod whereabouts;

pub(super) use whereabouts::Whereabouts;

use crate::{
    apply::services::Publisher,
    chain::Chain,
    cluster_api::servers::Servers,
    datapath::{Datapath, DatapathError},
    plan::services::{Here, ServiceName, ServicePlan, Slice, plan, unused, why::Unused},
    service_health::{ProxyHealth, ports::HealthChecks},
    telemetry::metrics::Metrics,
    troubles,
    watch::services::{ServicesSource, Store},
};
use anyhow::{Context as _, bail};
use ipnet::IpNet;
use k8s_openapi::jiff::Timestamp;
use std::{
    collections::BTreeSet,
    future::pending,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{spawn, sync::watch, task::spawn_blocking, time::sleep_until};

/// How soon it is tried again to publish what had no room, and to begin; and how late, if that goes on not to help.
const AGAIN: Duration = Duration::from_secs(1);
const AT_LATEST: Duration = Duration::from_secs(30);
/// Services that are planned before any of them is published: what a plan takes is many times what is kept of it.
const TOGETHER: usize = 256;

const UNPUBLISHED: &str = "ServicesUnpublished";
const STALE: &str = "ServicesStale";

/// What is known of Services, and what of that is published.
pub struct Services {
    pub publisher: Shared,
    /// None where nothing says what there is any more, and what was published goes on.
    pub facts: Option<Arc<Facts>>,
}

/// The publisher, for the task and for who asks what is published.
pub type Shared = Arc<Mutex<Publisher<Arc<Datapath>>>>;

/// What the task needs.
pub(super) struct ServicesTask {
    pub(super) source: ServicesSource,
    pub(super) publisher: Shared,
    pub(super) datapath: Arc<Datapath>,
    /// To be told once everything is.
    pub(super) complete: watch::Sender<bool>,
    pub(super) whereabouts: Whereabouts,
    pub(super) facts: Arc<Facts>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) health: Arc<ProxyHealth>,
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
        complete,
        mut whereabouts,
        facts,
        metrics,
        health,
        standing,
    } = task;
    let ServicesSource {
        mut changes,
        health: mut source_health,
        mut ranges,
        task: mut reading,
        ..
    } = source;
    // Whose they are is not known yet.
    facts.ranges.tell(&datapath, &BTreeSet::new(), false);
    let (lost, is_lost) = watch::channel(());
    let mut sockets = spawn(sockets::follow(is_lost, datapath.clone(), standing.clone()));
    whereabouts.known(whereabouts::PATIENCE).await;
    facts.move_to(whereabouts.here());
    let mut is_begun = false;
    // When it is tried again; what is published by then goes on meanwhile.
    let mut again: Option<Instant> = None;
    let mut patience = AGAIN;
    loop {
        let changed = tokio::select! {
            changed = changes.next() => changed,
            () = at(again) => BTreeSet::new(),
            moved = whereabouts.changed() => {
                moved?;
                facts.move_to(whereabouts.here());
                continue;
            }
            changed = source_health.changed() => {
                changed.context("the source of Services ended")?;
                let problem = source_health.borrow_and_update().problem.clone();
                troubles::replace(&standing, STALE, problem);
                continue;
            }
            // They are told with what is published, and not before all Services are.
            Ok(()) = ranges.changed(), if is_begun => BTreeSet::new(),
            ended = &mut sockets => {
                ended.context("disconnecting sockets failed")?;
                bail!("disconnecting sockets ended");
            }
            ended = &mut reading => {
                ended.context("the source of Services failed")?;
                bail!("the source of Services ended");
            }
        };
        health.waits(Instant::now());
        let triggers = facts.store.take_triggers();
        let is_due = again.is_some_and(|again| again <= Instant::now());
        let work = {
            let (publisher, facts) = (publisher.clone(), facts.clone());
            let (datapath, ranges) = (datapath.clone(), ranges.borrow_and_update().clone());
            move || {
                let took = publish(&publisher, &facts, &changed);
                let helped = publish_waiting(&publisher, &facts, is_due);
                // All are known by the first change: what the agent before had and none of them has is nobody's.
                let begun = is_begun || complete_all(&publisher)?;
                let waiting = waiting(&publisher);
                let is_certain = waiting.is_none() && facts.store.faults().is_empty();
                facts.ranges.tell(&datapath, &ranges, is_certain);
                lock(&publisher).release_memory();
                Ok::<_, DatapathError>((took, begun, waiting, helped))
            }
        };
        let published = spawn_blocking(work).await;
        let mut helped = false;
        let problem = match published.context("publishing Services failed")? {
            Ok((took, begun, waiting, is_less)) => {
                if !is_begun && begun {
                    // All there is was read and planned.
                    crate::memory::release();
                }
                is_begun = begun;
                if begun && lock(&publisher).take_lost_datagrams() {
                    lost.send_replace(());
                }
                helped = is_less;
                health.published();
                for trigger in triggers {
                    let took = Timestamp::now().duration_since(trigger);
                    // By the clock of another machine, which may be ahead.
                    metrics.network_programmed(took.try_into().unwrap_or_default());
                }
                metrics.none_here(facts.count_none_here());
                facts.open_checks();
                complete.send_replace(begun);
                if let Some(took) = took {
                    metrics.services_changed(took);
                }
                waiting
            }
            Err(error) => Some(format!("Services are not translated: {}", Chain(&error))),
        };
        patience = match is_due && !helped {
            true => (2 * patience).min(AT_LATEST),
            false if helped || problem.is_none() => AGAIN,
            false => patience,
        };
        again = match (&problem, again) {
            (None, _) => None,
            (Some(_), Some(again)) if !is_due && !helped => Some(again),
            (Some(_), _) => Some(Instant::now() + patience),
        };
        troubles::replace(&standing, UNPUBLISHED, problem);
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time.into()).await,
        None => pending().await,
    }
}

/// Publishes these, and says how long that took if there were any.
fn publish(publisher: &Shared, facts: &Facts, changed: &BTreeSet<ServiceName>) -> Option<Duration> {
    let began = Instant::now();
    let mut names = changed.iter();
    loop {
        let some = names.by_ref().take(TOGETHER);
        let plans: Vec<_> = some.map(|name| (name, facts.planned(name))).collect();
        if plans.is_empty() {
            break;
        }
        for (name, plan) in &plans {
            facts.tell_of_api_servers(name, plan.as_ref());
            facts.tell_load_balancers(name, plan.as_ref());
            facts.note_none_here(name, plan.as_ref());
        }
        let changes = plans.iter().map(|(name, plan)| (*name, plan.as_ref()));
        lock(publisher).apply_all(Instant::now(), changes);
    }
    (!changed.is_empty()).then(|| began.elapsed())
}

/// Publishes what waits, if that is due or what it may wait for has gone. Whether less of it waits then.
fn publish_waiting(publisher: &Shared, facts: &Facts, is_due: bool) -> bool {
    let waiting = {
        let mut publisher = lock(publisher);
        let waiting = publisher.waiting_for_what_went();
        match is_due {
            true => publisher.waiting_names(),
            false => waiting,
        }
    };
    publish(publisher, facts, &waiting);
    lock(publisher).waiting().count() < waiting.len()
}

/// All are known, and published as far as there is room.
fn complete_all(publisher: &Shared) -> Result<bool, DatapathError> {
    let mut publisher = lock(publisher);
    publisher.complete(Instant::now())?;
    let usage = publisher.usage();
    tracing::info!(
        services = usage.services,
        endpoints = usage.endpoints,
        "services are published"
    );
    Ok(true)
}

/// What some Services wait for.
fn waiting(publisher: &Shared) -> Option<String> {
    let publisher = lock(publisher);
    let mut waiting = publisher.waiting();
    let (_, error) = waiting.next()?;
    let error = Chain(error).to_string();
    Some(match waiting.count() {
        0 => error,
        others => format!("{error}; so it is with {others} others (`sinabroctl services`)"),
    })
}

/// What is known of Services, and who wants to know.
pub struct Facts {
    store: Arc<Store>,
    here: Mutex<Arc<Here>>,
    /// To be told where the API servers are.
    servers: Option<Arc<Servers>>,
    checks: watch::Sender<HealthChecks>,
    /// Services with endpoints, but none here: for clients inside and outside.
    none_here: Mutex<[BTreeSet<ServiceName>; 2]>,
    /// Which addresses are nobody's.
    ranges: ranges::Ranges,
}

impl Facts {
    pub(super) fn new(
        store: Arc<Store>,
        servers: Option<Arc<Servers>>,
        checks: watch::Sender<HealthChecks>,
    ) -> Self {
        Self {
            store,
            here: Mutex::default(),
            servers,
            checks,
            none_here: Mutex::default(),
            ranges: ranges::Ranges::default(),
        }
    }

    /// Endpoints of a Service that some clients are not led to, and why.
    pub fn unused(&self, name: &ServiceName) -> Vec<Unused> {
        let Some((service, slices)) = self.store.get(name) else {
            return Vec::new();
        };
        let slices: Vec<&Slice> = slices.iter().collect();
        unused(&service, &slices, &self.here())
    }

    /// What is to be published of a Service; none if nothing is.
    fn planned(&self, name: &ServiceName) -> Option<ServicePlan> {
        let known = self.store.get(name);
        let service = known.as_ref().map(|(service, _)| service);
        self.ranges.note(name, service, &self.here().link_addresses);
        let (service, slices) = known?;
        let slices: Vec<&Slice> = slices.iter().collect();
        let plan = plan(&service, &slices, &self.here());
        (plan != ServicePlan::default()).then_some(plan)
    }

    /// Ranges of which what is for nobody is dropped.
    pub fn dropped_ranges(&self) -> Vec<IpNet> {
        self.ranges.told()
    }

    fn here(&self) -> Arc<Here> {
        let here = self.here.lock();
        here.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has all Services planned again, if this is another place.
    fn move_to(&self, new: Here) {
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        if **here == new {
            return;
        }
        tracing::info!(
            zone = new.zone,
            node_ports_at = ?new.node_ports_at,
            link_addresses = ?new.link_addresses,
            "all Services are planned again"
        );
        *here = Arc::new(new);
        drop(here);
        self.store.tell_all();
    }

    fn note_none_here(&self, name: &ServiceName, plan: Option<&ServicePlan>) {
        let none = plan.map_or([false; 2], ServicePlan::has_none_here);
        let mut all = self
            .none_here
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (all, is) in all.iter_mut().zip(none) {
            match is {
                true => drop(all.insert(name.clone())),
                false => drop(all.remove(name)),
            }
        }
    }

    fn count_none_here(&self) -> [usize; 2] {
        let all = self
            .none_here
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        [all[0].len(), all[1].len()]
    }

    /// What is answered at the Service's healthCheckNodePort from now on.
    fn tell_load_balancers(&self, name: &ServiceName, plan: Option<&ServicePlan>) {
        let check = plan.and_then(|plan| plan.health_check);
        self.checks.send_if_modified(|checks| {
            let before = match check {
                Some(check) => checks.services.insert(name.clone(), check),
                None => checks.services.remove(name),
            };
            before != check
        });
    }

    /// Where load balancers ask: at the node's own addresses, once Services are translated.
    fn open_checks(&self) {
        let here = self.here();
        self.checks.send_if_modified(|checks| {
            let is_new = checks.addresses != here.node_ports_at;
            checks.addresses.clone_from(&here.node_ports_at);
            is_new
        });
    }

    /// The agent asks them itself, whatever becomes of the Service that leads to them.
    fn tell_of_api_servers(&self, name: &ServiceName, plan: Option<&ServicePlan>) {
        if let (Some(servers), Some(plan)) = (&self.servers, plan)
            && (name.namespace(), name.name()) == ("default", "kubernetes")
        {
            servers.learn(plan.endpoints());
        }
    }
}
