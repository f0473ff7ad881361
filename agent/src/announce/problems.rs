//! What is wrong with the node becomes Events on its Node.
//!
//! A problem is reported once it has lasted [`LASTING`], for many are over in a moment, and again
//! every [`AGAIN`] for as long as it lasts, for the API server forgets Events in an hour.

use super::Announcer;
use crate::{apply::OverlayStatus, install::InstallStatus, node::NodeStatus};
use sinabro_common::api::Trouble;
use std::{borrow::Cow, collections::BTreeMap, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};

const LOOK: Duration = Duration::from_secs(1);
const LASTING: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_secs(900);

/// Reason and note.
type Problem = (Cow<'static, str>, String);

/// Tells the problems of node, overlay and installation as they come, for ever.
pub async fn tell(
    announcer: Announcer,
    node: watch::Receiver<NodeStatus>,
    overlay: watch::Receiver<OverlayStatus>,
    install: Option<watch::Receiver<InstallStatus>>,
    troubles: watch::Receiver<Vec<Trouble>>,
) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut due = Due::default();
    loop {
        looks.tick().await;
        let mut problems = problems(&node.borrow(), &overlay.borrow());
        if let Some(install) = &install {
            problems.extend(of_install(&install.borrow()));
        }
        let troubles = troubles.borrow().clone().into_iter();
        problems.extend(troubles.map(|trouble| (trouble.reason.into(), trouble.text)));
        for (reason, note) in due.next(problems, Instant::now()) {
            announcer.node_event(reason, note);
        }
    }
}

fn problems(node: &NodeStatus, overlay: &OverlayStatus) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(problem) = &node.problem {
        problems.push(("NodeNotUsable".into(), problem.clone()));
        // Without the node's own entry there is no overlay, for the same reason.
        if node.state.is_none() {
            return problems;
        }
    }
    let overlay = overlay.problems.iter();
    problems.extend(overlay.map(|problem| ("OverlayFailed".into(), problem.clone())));
    problems
}

fn of_install(install: &InstallStatus) -> Vec<Problem> {
    let problems = install
        .problems
        .iter()
        .map(|problem| ("InstallFailed", problem));
    let warnings = install.warnings.iter();
    let all = problems.chain(warnings.map(|warning| (warning.reason, &warning.text)));
    all.map(|(reason, note)| (reason.into(), note.clone()))
        .collect()
}

/// When each problem is to be reported.
#[derive(Default)]
struct Due(BTreeMap<Problem, Instant>);

impl Due {
    /// Those that are to be reported now.
    fn next(&mut self, problems: Vec<Problem>, now: Instant) -> Vec<Problem> {
        self.0.retain(|known, _| problems.contains(known));
        let mut tell = Vec::new();
        for problem in problems {
            let due = self.0.entry(problem.clone()).or_insert(now + LASTING);
            if *due <= now {
                *due = now + AGAIN;
                tell.push(problem);
            }
        }
        tell
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::Warning;

    #[test]
    fn a_problem_is_told_when_it_lasts_and_again_only_after_long() {
        let mut due = Due::default();
        let start = Instant::now();
        let bad = || vec![("NodeNotUsable".into(), "no pod CIDR".to_owned())];
        let second = Duration::from_secs(1);
        assert!(due.next(bad(), start).is_empty());
        assert!(due.next(bad(), start + LASTING - second).is_empty());
        assert_eq!(due.next(bad(), start + LASTING), bad());
        for n in 1..AGAIN.as_secs() as u32 {
            assert!(due.next(bad(), start + LASTING + second * n).is_empty());
        }
        assert_eq!(due.next(bad(), start + LASTING + AGAIN), bad());
        // Gone and back: news, if it lasts.
        assert!(due.next(Vec::new(), start + AGAIN * 2).is_empty());
        assert!(due.next(bad(), start + AGAIN * 2).is_empty());
        assert_eq!(due.next(bad(), start + AGAIN * 2 + LASTING), bad());
    }

    #[test]
    fn what_keeps_pods_from_this_network_is_told() {
        let install = InstallStatus {
            installed: false,
            problems: vec!["disk full".into()],
            warnings: vec![Warning {
                reason: "OtherNetworkFirst",
                text: "00-other.conf comes first".into(),
            }],
            notes: vec!["all is well".into()],
        };
        let told = of_install(&install);
        assert_eq!(
            told,
            [
                ("InstallFailed".into(), "disk full".to_owned()),
                (
                    "OtherNetworkFirst".into(),
                    "00-other.conf comes first".to_owned()
                )
            ]
        );
    }

    #[test]
    fn a_node_that_is_not_known_is_told_once_not_as_an_overlay_that_fails_too() {
        let overlay = OverlayStatus {
            problems: vec!["vxlan".into()],
            ..OverlayStatus::default()
        };
        let node = NodeStatus {
            state: None,
            problem: Some("no pod CIDR".into()),
        };
        let found = problems(&node, &overlay);
        assert_eq!(found, [("NodeNotUsable".into(), "no pod CIDR".to_owned())]);
        let found = problems(&NodeStatus::default(), &overlay);
        assert_eq!(found, [("OverlayFailed".into(), "vxlan".to_owned())]);
    }
}
