//! When to make a pass (see [`super::pass`]), and what to say about it.
//!
//! - **after a change of the facts**: what is new since the last plan is done, and no table is read,
//!   however many nodes there are;
//! - **after an event** of the kernel that says something else than the plan, after a short wait in
//!   which more may come: the tables are read, compared and put right. What was just done here comes
//!   back as events, too, which say what the plan says: nothing follows from them. Should somebody
//!   undo every pass, the wait grows;
//! - **every 30 seconds** anyway, and after a failure with backoff: the tables are read.

use super::{
    OverlayConfig, OverlayStatus, PodRoute,
    fdb::Forwarding,
    kernel_events::KernelEvents,
    neighbours::Neighbours,
    pass::{self, Fault, Look, Outcome, Work},
    pods::Which,
    reconcile::{Backoff, Table as _},
    report::{OverlayReport, log_nodes, log_own},
    routes::Routes,
    ways::Ways,
};
use crate::{
    datapath::Datapath,
    plan::{OverlayPlan, Reached},
    watch::Snapshot,
};
use ipnet::IpNet;
use sinabro_common::{api::Mac, names::ROUTE_PROTOCOL};
use sinabro_netlink::{Event, NetNs};
use std::{
    future::pending,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
    time::{Interval, MissedTickBehavior, interval, sleep, sleep_until},
};
use tracing::{debug, warn};

/// A full pass is made this often whatever happens.
pub const PERIOD: Duration = Duration::from_secs(30);
/// Events come in groups; a pass waits for the rest.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// So many passes in a row may find something to change before the wait grows: somebody at work
/// by hand is answered at once, a program that undoes every pass is not met with a busy loop.
const PATIENCE: u32 = 8;
const RETRY: Duration = Duration::from_millis(250);
/// How long others may still send without a tunnel after they could have heard that this node does not take that any more.
const NATIVE_GRACE: Duration = Duration::from_secs(30);

/// The running reconciler.
#[derive(Debug)]
pub struct Overlay {
    pub status: watch::Receiver<OverlayStatus>,
    /// Ends when the facts' source ends.
    pub task: JoinHandle<()>,
}

/// Keeps the network namespace of this process as the facts ask.
pub fn spawn(
    config: OverlayConfig,
    datapath: Arc<Datapath>,
    facts: watch::Receiver<Snapshot>,
    pods: watch::Receiver<Vec<PodRoute>>,
    reached: watch::Receiver<Reached>,
    uplinks: watch::Receiver<Vec<u32>>,
) -> Overlay {
    spawn_in(None, Some(datapath), config, facts, pods, reached, uplinks)
}

/// The same for another network namespace; without a data path, whose programs are those of the
/// namespace that loaded it, tunnels are not checked.
pub fn spawn_in(
    netns: Option<NetNs>,
    datapath: Option<Arc<Datapath>>,
    config: OverlayConfig,
    facts: watch::Receiver<Snapshot>,
    pods: watch::Receiver<Vec<PodRoute>>,
    reached: watch::Receiver<Reached>,
    uplinks: watch::Receiver<Vec<u32>>,
) -> Overlay {
    let (sender, status) = watch::channel(OverlayStatus::default());
    let mut driver = Driver {
        watcher: KernelEvents::open(netns.as_ref()),
        netns,
        datapath,
        config,
        facts,
        pods,
        reached,
        uplinks,
        status: sender,
        plan: None,
        device: None,
        takes_zero_checksum: false,
        took_native: None,
        due: Due::Whole,
        due_pods: Which::All,
        faults: Vec::new(),
        report: OverlayReport::default(),
        ways: Arc::default(),
        pod_faults: Vec::new(),
        retry_at: None,
        backoff: Backoff::new(RETRY, PERIOD),
        churn: 0,
    };
    let task = tokio::spawn(async move { driver.run().await });
    Overlay { status, task }
}

struct Driver {
    netns: Option<NetNs>,
    datapath: Option<Arc<Datapath>>,
    config: OverlayConfig,
    facts: watch::Receiver<Snapshot>,
    pods: watch::Receiver<Vec<PodRoute>>,
    /// To whom packets get without a tunnel.
    reached: watch::Receiver<Reached>,
    /// Those that the data path knows: by which way peers are reached depends on them, and the kernel's events come before
    /// it has heard of another one.
    uplinks: watch::Receiver<Vec<u32>>,
    status: watch::Sender<OverlayStatus>,
    /// Absent while the kernel gives none; tried again every period.
    watcher: Option<KernelEvents>,
    plan: Option<Arc<OverlayPlan>>,
    /// Index of the VXLAN device, as of the last pass.
    device: Option<u32>,
    /// Whether that takes UDP over IPv6 without a checksum, as of the last pass that found it.
    takes_zero_checksum: bool,
    /// When packets were last to be taken without a tunnel.
    took_native: Option<Instant>,
    due: Due,
    due_pods: Which,
    /// What failed when the overlay was last looked at,
    faults: Vec<Fault>,
    /// and what is said about it.
    report: OverlayReport,
    ways: Arc<Ways>,
    /// What failed when pods were last looked at.
    pod_faults: Vec<Fault>,
    retry_at: Option<tokio::time::Instant>,
    backoff: Backoff,
    /// Passes in a row that changed something.
    churn: u32,
}

/// What is to be done to the overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Nothing,
    /// The facts have changed.
    Changes,
    /// The kernel may not be as it was left.
    Whole,
}

impl Driver {
    async fn run(&mut self) {
        let mut period = interval(self.config.period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        period.reset();
        loop {
            self.pass().await;
            if !self.wait(&mut period).await {
                return;
            }
            // What comes from the facts' source has waited for more there.
            if self.due == Due::Whole || !self.due_pods.is_none() {
                sleep(debounce(self.churn)).await;
                self.take_events();
            }
        }
    }

    /// Makes a pass and publishes how it went.
    async fn pass(&mut self) {
        let mut due = std::mem::replace(&mut self.due, Due::Nothing);
        let which = std::mem::replace(&mut self.due_pods, Which::none());
        let snapshot = {
            let facts = self.facts.borrow_and_update();
            // Facts that changed since the last wait are seen from here on, so this pass must
            // act on them, also if it was pods that it was made for.
            if facts.has_changed() {
                due = due.max(Due::Changes);
            }
            facts.clone()
        };
        let reached = {
            // So is to whom packets get.
            let reached = self.reached.borrow_and_update();
            if reached.has_changed() {
                due = due.max(Due::Changes);
            }
            reached.clone()
        };
        let looked_at_pods = !which.is_none();
        let pods = match looked_at_pods {
            true => self.pods.borrow().clone(),
            false => Vec::new(),
        };
        let (netns, config) = (self.netns.clone(), self.config.clone());
        let datapath = self.datapath.clone();
        let facts = snapshot.facts.clone();
        let work = Work {
            overlay: match (due, &self.plan, self.device) {
                (Due::Nothing, ..) => Look::Away,
                // After a failure nobody knows what the kernel holds.
                (Due::Changes, Some(plan), Some(device)) if self.faults.is_empty() => Look::Since {
                    plan: plan.clone(),
                    device,
                },
                _ => Look::Whole,
            },
            takes_native: (self.took_native).is_some_and(|took| took.elapsed() < NATIVE_GRACE),
            reached,
            uplinks: self.uplinks.borrow().clone(),
            pods: which,
        };
        let whole = matches!(work.overlay, Look::Whole);

        let started = Instant::now();
        let pass = spawn_blocking(move || {
            let (netns, datapath) = (netns.as_ref(), datapath.as_deref());
            pass::run(netns, datapath, &config, &work, facts.as_deref(), &pods)
        });
        let outcome = pass.await.unwrap_or_else(|error| {
            let fault = Fault::own(format!("the overlay's pass failed: {error}"));
            Outcome {
                faults: vec![fault],
                ..Outcome::default()
            }
        });
        let took = started.elapsed();
        debug!(changed = outcome.changed, ?took, "overlay pass");

        if due != Due::Nothing {
            self.device = outcome.device;
            if outcome.device.is_some() {
                self.takes_zero_checksum = outcome.takes_zero_checksum;
            }
            if outcome.plan.as_ref().is_some_and(|plan| plan.takes_native) {
                self.took_native = Some(Instant::now());
            }
            // Without a new plan the kernel is still as the last one wanted it.
            self.plan = outcome.plan.or(self.plan.take());
            self.faults = outcome.faults;
            // So are the ways.
            if let Some(ways) = outcome.ways {
                self.ways = Arc::new(ways);
            }
            let (own, plan) = (&self.config.node, self.plan.as_deref());
            self.report = OverlayReport::new(own, &snapshot, plan, &self.faults);
        }
        if looked_at_pods {
            self.pod_faults = outcome.pod_faults;
        }
        if self.faults.is_empty() && self.pod_faults.is_empty() {
            self.backoff.succeeded();
            self.retry_at = None;
        } else if due != Due::Nothing || self.retry_at.is_none() {
            self.retry_at = Some(tokio::time::Instant::now() + self.backoff.failed());
        }
        // Changes of the facts are nobody's undoing.
        if whole || looked_at_pods {
            self.churn = match outcome.changed {
                0 => 0,
                _ => self.churn.saturating_add(1),
            };
        }
        self.publish(took, snapshot.facts.is_some());
    }

    /// Waits until there is work; false once the facts' source has ended.
    async fn wait(&mut self, period: &mut Interval) -> bool {
        loop {
            if self.due != Due::Nothing || !self.due_pods.is_none() {
                return true;
            }
            let watcher = self.watcher.as_ref();
            let events = async {
                match watcher {
                    Some(watcher) => watcher.readable().await,
                    None => pending().await,
                }
            };
            let retry_at = self.retry_at;
            let retry = async {
                match retry_at {
                    Some(at) => sleep_until(at).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                changed = self.facts.changed() => {
                    if changed.is_err() {
                        return false;
                    }
                    self.due = self.due.max(Due::Changes);
                }
                // Without a sender nobody is asked, and it stays as it is.
                Ok(()) = self.reached.changed() => self.due = self.due.max(Due::Changes),
                Ok(()) = self.uplinks.changed() => self.due = Due::Whole,
                () = events => self.take_events(),
                () = retry => self.everything(),
                _ = period.tick() => {
                    if self.watcher.is_none() {
                        self.watcher = KernelEvents::open(self.netns.as_ref());
                    }
                    self.everything();
                }
            }
        }
    }

    fn everything(&mut self) {
        self.due = Due::Whole;
        self.due_pods = Which::All;
    }

    /// Turns what the kernel said until now into work.
    fn take_events(&mut self) {
        let Some(watcher) = &mut self.watcher else {
            return;
        };
        match watcher.read() {
            Ok(events) => {
                for event in events {
                    self.take(event);
                }
            }
            Err(error) => {
                warn!("lost the kernel's events, polling instead: {error}");
                self.watcher = None;
                self.everything();
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Link {
                index, name, up, ..
            } => {
                if name == self.config.device || name == self.config.uplink {
                    self.due = Due::Whole;
                }
                // A link that was down lost its routes without a word (fib_disable_ip).
                if up {
                    self.pod(index);
                }
            }
            Event::Addr { link, .. } if self.device == Some(link) => self.due = Due::Whole,
            Event::Addr { .. } => {}
            Event::Fdb {
                link,
                entry,
                removed,
            } => {
                let expected = |plan: &OverlayPlan| {
                    let Some(entry) = entry else { return false };
                    Forwarding { link }.expected(&plan.fdb, &Mac(entry.mac), &entry, removed)
                };
                if self.device == Some(link) {
                    self.unless(expected);
                }
            }
            Event::Route { route, removed } => match route.oif {
                Some(link) if self.device == Some(link) => self.unless(|plan| {
                    Routes { link }.expected(&plan.routes, &route.dst, &route, removed)
                }),
                // Also one that has replaced ours.
                Some(link) => {
                    if self.leads_to_a_peer(&route.dst) {
                        self.due = Due::Whole;
                    }
                    self.pod(link);
                }
                None if route.protocol == ROUTE_PROTOCOL && removed => self.due = Due::Whole,
                // One that refuses packets, or sends them to nobody.
                None if self.leads_to_a_peer(&route.dst) => self.due = Due::Whole,
                None => {}
            },
            Event::Neigh { neigh, removed } if self.device == Some(neigh.link) => {
                let link = neigh.link;
                self.unless(|plan| {
                    Neighbours { link }.expected(&plan.neighbours, &neigh.address, &neigh, removed)
                });
            }
            Event::Neigh { neigh, .. } => self.pod(neigh.link),
            Event::Settings { link } => {
                if self.device == Some(link) || self.uplinks.borrow().contains(&link) {
                    self.due = Due::Whole;
                }
                self.pod(link);
            }
            // To any of them.
            Event::Rule if self.config.direct => self.due = Due::Whole,
            Event::Rule => {}
            _ => self.everything(),
        }
    }

    /// Looks at the whole overlay unless what has happened is what the plan wants.
    fn unless(&mut self, expected: impl FnOnce(&OverlayPlan) -> bool) {
        if !self.plan.as_deref().is_some_and(expected) {
            self.due = Due::Whole;
        }
    }

    /// Whether the way to a peer may be another one by such a route.
    fn leads_to_a_peer(&self, dst: &IpNet) -> bool {
        let addresses = |plan: &OverlayPlan| {
            let native = plan.native.values().filter_map(|peer| peer.v6);
            let mut peers = plan.fdb.values().copied().chain(native);
            peers.any(|peer| dst.contains(&peer))
        };
        self.config.direct && self.plan.as_deref().is_some_and(addresses)
    }

    /// Looks at a pod again, if the link is a pod's.
    fn pod(&mut self, link: u32) {
        if let Which::Links(links) = &mut self.due_pods
            && self.pods.borrow().iter().any(|pod| pod.ifindex == link)
        {
            links.insert(link);
        }
    }

    /// Publishes how a pass went. What is said of the nodes changes with the overlay alone.
    fn publish(&self, took: Duration, known: bool) {
        let failed = !self.faults.is_empty() || !self.pod_faults.is_empty();
        let of_pods = self.pod_faults.iter().map(|fault| fault.text.clone());
        let problems: Vec<_> = self
            .report
            .problems
            .iter()
            .cloned()
            .chain(of_pods)
            .collect();
        self.status.send_modify(|status| {
            if !Arc::ptr_eq(&status.nodes, &self.report.nodes) {
                log_nodes(&status.nodes, &self.report.nodes);
                status.nodes = self.report.nodes.clone();
            }
            status.ways = self.ways.clone();
            status.takes_zero_checksum = self.takes_zero_checksum;
            log_own(status, &problems);
            status.problems = problems;
            status.runs += 1;
            status.failures += u64::from(failed);
            status.time_spent += took;
            if !failed && known {
                status.last_success = Some(SystemTime::now());
            }
        });
    }
}

/// The wait after that many passes in a row that changed something: up to 1.6 seconds.
fn debounce(churn: u32) -> Duration {
    DEBOUNCE * (1 << churn.saturating_sub(PATIENCE).min(5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_grows_only_when_every_pass_is_undone() {
        let waits = [0, PATIENCE, PATIENCE + 1, PATIENCE + 3, u32::MAX].map(debounce);
        assert_eq!(waits.map(|w| w.as_millis()), [50, 50, 100, 400, 1600]);
    }
}
