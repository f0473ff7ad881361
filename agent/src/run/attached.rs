//! The task that puts programs back on interfaces and the cgroup when somebody takes them off: other agents delete qdiscs that
//! they do not know.

use crate::{
    apply::kernel_events::{Fd, follow, readable},
    chain::Chain,
    datapath::{Datapath, WhichAttached},
    troubles::{self, Standing},
};
use anyhow::Context as _;
use sinabro_netlink::tc::{Change, Changes};
use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::unix::AsyncFd,
    task::spawn_blocking,
    time::{self, interval_at, sleep},
};

/// How often all are looked at although nothing was heard,
const REFRESH: Duration = Duration::from_secs(30);
/// and how often links of eBPF are: nobody tells of them.
const LOOK: Duration = Duration::from_secs(1);
/// How long it is said that programs were taken off.
const SAID_FOR: Duration = Duration::from_secs(600);
const REASON: &str = "ProgramsRemoved";

pub(super) async fn follow_attached(
    datapath: Arc<Datapath>,
    standing: Standing,
) -> anyhow::Result<()> {
    let mut changes = open();
    let mut said = Said::default();
    let mut failure = None;
    let mut which = WhichAttached::All;
    let mut refreshes = interval_at(time::Instant::now() + REFRESH, REFRESH);
    loop {
        let datapath = datapath.clone();
        let mended = spawn_blocking(move || datapath.mend_attached(&which)).await;
        match mended.context("looking for programs on interfaces failed")? {
            Ok(mended) => {
                said.add(&mended, Instant::now());
                failure = None;
            }
            Err(error) => {
                let text = Chain(&error).to_string();
                // Every second, else.
                if failure.as_ref() != Some(&text) {
                    tracing::warn!("cannot put programs back: {text}");
                }
                failure = Some(text);
            }
        }
        troubles::replace(&standing, REASON, said.text(Instant::now()));
        which = tokio::select! {
            _ = refreshes.tick() => WhichAttached::All,
            () = sleep(LOOK) => WhichAttached::Links,
            links = changed(&mut changes) => links.map_or(WhichAttached::All, WhichAttached::Interfaces),
        };
    }
}

/// Without it, what changes is noticed by the next look.
fn open() -> Option<AsyncFd<Fd<Changes>>> {
    follow(Changes::follow(), "changes of filters")
}

/// Waits until somebody has changed filters, and of which links; none: of any.
async fn changed(changes: &mut Option<AsyncFd<Fd<Changes>>>) -> Option<BTreeSet<u32>> {
    loop {
        let Some(open) = changes else {
            return pending().await;
        };
        readable(open).await;
        match open.get_mut().0.read() {
            Ok(Some(all)) => {
                let links: BTreeSet<u32> = all
                    .iter()
                    .filter(|c| is_of_others(c))
                    .map(|c| c.link)
                    .collect();
                if !links.is_empty() {
                    return Some(links);
                }
            }
            Ok(None) => return None,
            Err(error) => {
                tracing::warn!("lost changes of filters, looking again: {}", Chain(&error));
                *changes = self::open();
                return None;
            }
        }
    }
}

/// Each pod's programs are set, too.
fn is_of_others(change: &Change) -> bool {
    !change.set.as_deref().is_some_and(Datapath::is_our_filter)
}

/// What was taken off in the last minutes.
#[derive(Default)]
struct Said {
    by_place: BTreeMap<String, (u32, Instant)>,
}

impl Said {
    fn add(&mut self, mended: &[(String, &'static str)], now: Instant) {
        for (place, program) in mended {
            tracing::warn!("somebody took {program} off {place}: it is back");
            let (times, last) = self.by_place.entry(place.clone()).or_insert((0, now));
            (*times, *last) = (*times + 1, now);
        }
    }

    fn text(&mut self, now: Instant) -> Option<String> {
        self.by_place
            .retain(|_, (_, last)| now.duration_since(*last) < SAID_FOR);
        let (place, (times, _)) = self.by_place.iter().max_by_key(|(_, (times, _))| *times)?;
        let others = match self.by_place.len() - 1 {
            0 => String::new(),
            others => format!(" and {others} other places"),
        };
        Some(format!(
            "somebody takes eBPF programs off {place} ({times} times){others}; each was put back, and until then packets passed unchecked \
             and sockets untranslated: find out who with `tc monitor` and `bpftool link`, and have it leave links of pods, uplinks, \
             sinabro_vxlan and the programs on the cgroup alone"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_off_is_said_for_a_while() {
        let mut said = Said::default();
        let began = Instant::now();
        assert_eq!(said.text(began), None);
        said.add(
            &[("lo", "pod_in"), ("lo", "pod_out"), ("eth0", "pod_in")]
                .map(|(place, program)| (place.to_owned(), program)),
            began,
        );
        let text = said.text(began).unwrap();
        assert!(
            text.contains("off lo (2 times) and 1 other places"),
            "{text}"
        );
        let later = began + SAID_FOR;
        said.add(&[("lo".to_owned(), "pod_in")], later);
        assert!(said.text(later).unwrap().contains("off lo (3 times);"));
        assert_eq!(said.text(later + SAID_FOR), None);
    }
}
