//! Pods whose new connections are refused, because they have as many as they may: said in the log, and in an Event
//! on the pod and on the Node that names it.
//!
//! The programs count what they refuse. Looked at now and then, a count that has grown is a pod that floods, or
//! one that a limit is too low for; who reads it decides.

use super::Announcer;
use crate::endpoint::EndpointRecord;
use sinabro_common::abi::connection::{Share, is_of_pod};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// How often a pod that goes on is said again. An Event is counted meanwhile, as all are that say the same.
const AGAIN: Duration = Duration::from_secs(300);

/// What was seen when last looked.
pub struct Floods {
    refused: HashMap<u32, u64>,
    logged: HashMap<u32, Instant>,
}

/// A pod that was refused connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flood {
    /// Index of its host-side link.
    payer: u32,
    /// How many since the last look.
    refused: u64,
    /// Whether it is time to log it.
    log: bool,
}

impl Floods {
    /// What was refused until now, under an agent of before, is no news.
    pub fn since(shares: &[(u32, Share)]) -> Self {
        Self {
            refused: refused(shares),
            logged: HashMap::new(),
        }
    }

    /// Tells of every pod that was refused connections since the last look.
    pub fn tell(
        &mut self,
        announcer: &Announcer,
        pods: &[EndpointRecord],
        shares: &[(u32, Share)],
    ) {
        for flood in self.look(shares, Instant::now()) {
            // One that has just gone floods no more.
            let Some(pod) = pods.iter().find(|pod| pod.ifindex == flood.payer) else {
                continue;
            };
            let name = pod.pod.display(&pod.owner);
            if flood.log {
                tracing::warn!(
                    pod = name,
                    refused = flood.refused,
                    "new connections of a pod are refused, it has its share of the table"
                );
            }
            // Without numbers, which change: the same said again is counted.
            let note = "new connections are refused: the pod has its share of the node's table of connections; \
                        `sinabroctl connections stats` on the node shows how many there are, and where they lead to";
            announcer.node_event("ConnectionsRefused", format!("pod {name}: {note}"));
            announcer.pod_event(&pod.pod, "ConnectionsRefused", note);
        }
    }

    fn look(&mut self, shares: &[(u32, Share)], now: Instant) -> Vec<Flood> {
        let before = std::mem::replace(&mut self.refused, refused(shares));
        self.logged
            .retain(|payer, at| self.refused.contains_key(payer) && now < *at + AGAIN);
        let mut floods = Vec::new();
        for (&payer, &refused) in &self.refused {
            // A link that was not there is of a new pod.
            let more = refused.saturating_sub(before.get(&payer).copied().unwrap_or(0));
            if more > 0 {
                let log = !self.logged.contains_key(&payer);
                if log {
                    self.logged.insert(payer, now);
                }
                floods.push(Flood {
                    payer,
                    refused: more,
                    log,
                });
            }
        }
        floods.sort_by_key(|flood| flood.payer);
        floods
    }
}

/// How many connections of each pod were refused.
fn refused(shares: &[(u32, Share)]) -> HashMap<u32, u64> {
    let of_pods = shares.iter().filter(|(payer, _)| is_of_pod(*payer));
    of_pods
        .map(|(payer, share)| (*payer, share.refused))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_common::abi::connection::{ALL_SHARES, HOST_SHARE};

    fn shares(refused: &[(u32, u64)]) -> Vec<(u32, Share)> {
        let share = |refused| Share {
            refused,
            ..Share::default()
        };
        refused
            .iter()
            .map(|&(payer, n)| (payer, share(n)))
            .collect()
    }

    fn flood(payer: u32, refused: u64, log: bool) -> Flood {
        Flood {
            payer,
            refused,
            log,
        }
    }

    #[test]
    fn only_what_is_refused_from_now_on_is_news() {
        let now = Instant::now();
        let mut floods = Floods::since(&shares(&[(5, 100), (6, 0)]));
        assert_eq!(floods.look(&shares(&[(5, 100), (6, 0)]), now), []);
        let found = floods.look(&shares(&[(5, 100), (6, 3)]), now);
        assert_eq!(found, [flood(6, 3, true)]);
        // A pod that came since, and one that went and whose number came again.
        let found = floods.look(&shares(&[(6, 3), (7, 1)]), now);
        assert_eq!(found, [flood(7, 1, true)]);
        let found = floods.look(&shares(&[(5, 2), (6, 3), (7, 1)]), now);
        assert_eq!(found, [flood(5, 2, true)]);
        // What is nobody's, and what is everybody's.
        let sums = [(HOST_SHARE, 9), (ALL_SHARES, 99), (5, 2), (6, 3), (7, 1)];
        assert_eq!(floods.look(&shares(&sums), now), []);
    }

    #[test]
    fn who_goes_on_is_logged_rarely() {
        let now = Instant::now();
        let mut floods = Floods::since(&shares(&[(5, 0)]));
        let second = Duration::from_secs(1);
        let steps = [
            (1, now, true),
            (2, now + AGAIN - second, false),
            (3, now + AGAIN, true),
            (4, now + AGAIN + second, false),
        ];
        for (refused, at, log) in steps {
            assert_eq!(
                floods.look(&shares(&[(5, refused)]), at),
                [flood(5, 1, log)]
            );
        }
    }
}
