//! What the sets of a port's family are for.

use crate::plan::services::{FrontendKind, SetPlan, Sets};

/// What clients of cluster addresses have, what pods and nodes have of other frontends, what clients outside have.
pub const ROLES: usize = 3;

pub fn of(sets: &Sets) -> [&SetPlan; ROLES] {
    [&sets.internal, &sets.cluster, &sets.external]
}

/// What a frontend leads pods and nodes to, and what clients outside ([`Sets::of`]).
pub fn of_kind(kind: FrontendKind) -> [usize; 2] {
    match kind {
        FrontendKind::ClusterIp => [0, 0],
        FrontendKind::NodePort | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => [1, 2],
    }
}

/// For each that is used the first one that has the same set.
pub fn pattern(
    is_used: [bool; ROLES],
    alike: impl Fn(usize, usize) -> bool,
) -> [Option<usize>; ROLES] {
    std::array::from_fn(|role| {
        let first = (0..=role).find(|&first| is_used[first] && alike(first, role));
        first.filter(|_| is_used[role])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn roles_are_those_of_the_plan() {
        let set = |port| SetPlan::Balance(BTreeSet::from([([10, 0, 0, 1], port).into()]));
        let sets = Sets {
            internal: set(1),
            cluster: set(2),
            external: set(3),
            draining: BTreeSet::new(),
        };
        for kind in [
            FrontendKind::ClusterIp,
            FrontendKind::NodePort,
            FrontendKind::ExternalIp,
            FrontendKind::LoadBalancer,
        ] {
            assert_eq!(of_kind(kind).map(|role| of(&sets)[role]), sets.of(kind));
        }
        let same = |one: usize, other: usize| (one < 2) == (other < 2);
        assert_eq!(pattern([true; ROLES], same), [Some(0), Some(0), Some(2)]);
        let others = pattern([false, true, true], same);
        assert_eq!(others, [None, Some(1), Some(2)]);
    }
}
