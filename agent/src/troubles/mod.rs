//! What is wrong on this node or around it although the agent serves: seen, named, and each with
//! its next step. In `sinabroctl status`, in the log, in Events on the Node.
//!
//! None of it makes the node unready: pods that work go on, and a taint would cure nothing. (What does
//! is a condition, see [`crate::api::status`], and may be a trouble besides.)
//!
//! - [`forwarding`]: the kernel's switches for forwarding, which others turn off;
//! - [`firewall`]: other people's rules that drop what is forwarded;
//! - [`fences`]: their rules for node ports, which no packet meets;
//! - [`addresses`]: addresses that two nodes claim, ranges that are full, pods outside of them;
//! - [`programs`]: eBPF programs that the kernel refused;
//! - [`peers`]: nodes that do not answer through their tunnels, or not to large packets.

pub mod addresses;
pub mod fences;
pub mod firewall;
pub mod forwarding;
pub mod peers;
pub mod programs;

use crate::{
    acceleration::self_test::SelfTest,
    datapath::Datapath,
    endpoint::Endpoints,
    node::NodeStatus,
    probe::Probe,
    watch::{Snapshot, masquerade_file},
};
use sinabro_common::api::Trouble;
use std::{
    collections::BTreeSet,
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};
use tracing::{info, warn};

/// How often all but the [switches for forwarding](forwarding) is looked at.
const LOOK: Duration = Duration::from_secs(5);

/// How often rules are: there may be tens of thousands.
const LOOK_AT_RULES: Duration = Duration::from_secs(30);

/// A trouble, for whoever finds one. `reason` is a word in CamelCase, `text` says what is wrong
/// and what to do.
pub fn trouble(reason: &str, text: impl Into<String>) -> Trouble {
    Trouble {
        reason: reason.into(),
        text: text.into(),
    }
}

/// What troubles are found in.
pub struct Sources {
    /// This node's name.
    pub node_name: String,
    pub facts: watch::Receiver<Snapshot>,
    pub node: watch::Receiver<NodeStatus>,
    pub endpoints: Arc<Endpoints>,
    pub masquerade: masquerade_file::Updates,
    pub probe: Arc<Probe>,
    pub asked: peers::Asked,
    pub rules: Rules,
    /// First and last, where Services are translated here, or may be.
    pub node_ports: Option<RangeInclusive<u16>>,
    /// What other parts of the agent say.
    pub standing: Standing,
    pub datapath: Arc<Datapath>,
    pub self_test: Arc<SelfTest>,
}

/// Troubles that last until they are taken back.
pub type Standing = Arc<Mutex<Vec<Trouble>>>;

/// Adds a trouble.
pub fn stand(standing: &Standing, trouble: Trouble) {
    let mut all = standing.lock().unwrap_or_else(PoisonError::into_inner);
    all.push(trouble);
}

/// Puts this in place of what stands for the reason.
pub fn replace(standing: &Standing, reason: &str, text: Option<String>) {
    let mut all = standing.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|standing| standing.reason != reason);
    all.extend(text.map(|text| trouble(reason, text)));
}

/// What was found in the rules, and when.
pub type Rules = Mutex<Option<(Instant, Vec<Trouble>)>>;

impl Sources {
    fn firewall(&self) -> Vec<Trouble> {
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        match &*rules {
            Some((looked, found)) if looked.elapsed() < LOOK_AT_RULES => found.clone(),
            _ => {
                let found = firewall::find(self.node_ports.as_ref());
                *rules = Some((Instant::now(), found.clone()));
                found
            }
        }
    }

    fn find(&self) -> Vec<Trouble> {
        let standing = self.standing.lock();
        let mut found = standing.unwrap_or_else(PoisonError::into_inner).clone();
        let state = self.node.borrow().state.clone();
        let facts = self.facts.borrow().facts.clone();
        if let Some(state) = &state {
            found.extend(state.warnings.iter().cloned());
            found.extend(self.firewall());
            found.extend(addresses::outside(&self.endpoints, &state.pod_cidrs));
        }
        if let Some(facts) = facts {
            found.extend(addresses::contested(&facts, &self.node_name));
        }
        let masquerade = self.masquerade.borrow();
        let problem = masquerade.as_ref().and_then(|said| said.problem.clone());
        found.extend(problem.map(|text| trouble("MasqueradeFileInvalid", text)));
        found.extend(programs::acceleration(&self.datapath, &self.self_test));
        found.extend(addresses::nearly_full(&self.endpoints));
        found.extend(peers::find(&self.probe, self.asked));
        found
    }
}

/// Looks for troubles for ever; the task ends with its last receiver.
pub fn spawn(sources: Sources) -> (watch::Receiver<Vec<Trouble>>, tokio::task::JoinHandle<()>) {
    let (sender, receiver) = watch::channel(Vec::new());
    let sources = Arc::new(sources);
    let mut node = sources.node.clone();
    let task = tokio::spawn(async move {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !sender.is_closed() {
            let unknown = node.borrow_and_update().state.is_none();
            tokio::select! {
                _ = looks.tick() => {}
                // Its pods' families may not be forwarded yet.
                Ok(()) = node.changed(), if unknown => {}
            }
            let sources = sources.clone();
            let found = spawn_blocking(move || sources.find()).await;
            let found = found.unwrap_or_else(|error| {
                let text = format!("cannot look for troubles: {error}");
                vec![trouble("LookFailed", text)]
            });
            log(&sender.borrow(), &found);
            sender.send_replace(found);
        }
    });
    (receiver, task)
}

/// Says once what is new, and what is over.
fn log(before: &[Trouble], now: &[Trouble]) {
    let old: BTreeSet<_> = before.iter().collect();
    for new in now.iter().filter(|trouble| !old.contains(trouble)) {
        warn!("{}: {}", new.reason, new.text);
    }
    let reasons: BTreeSet<_> = now.iter().map(|trouble| &trouble.reason).collect();
    let over: BTreeSet<_> = before.iter().map(|trouble| &trouble.reason).collect();
    for reason in over.difference(&reasons) {
        info!("{reason} is over");
    }
}
