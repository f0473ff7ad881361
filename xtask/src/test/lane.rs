//! What a test's path says of how it is run. A path is `PROGRAM::MODULE::TEST`, and a mark anywhere in it counts.

use std::thread;

/// Tests that measure for how long traffic stands still are in a module or a program of this name,
const ALONE: &str = "alone::";
/// or have this in their names.
const UNDER_LOAD: &str = "under_load";
/// So do those that need the programs of the released state: these take minutes to build.
const SINCE_RELEASE: &str = "since_release";
/// Tests that wait for agents most of their time are in a module or a program of this name.
const WAITING: &str = "waiting::";
/// What takes long and seldom finds anything: of each night, not of every change.
const NIGHTLY: &str = "nightly";

/// Tests that are run in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// When all others are done.
    Alone,
    /// One program after the other.
    Working,
    /// Beside those that work, many at once.
    Waiting,
    /// Not in a run of every change.
    Nightly,
}

impl Lane {
    pub fn of(test: &str) -> Self {
        let is = |marks: &[&str]| marks.iter().any(|mark| test.contains(mark));
        if is(&[NIGHTLY]) {
            Self::Nightly
        } else if is(&[ALONE, UNDER_LOAD, SINCE_RELEASE]) {
            Self::Alone
        } else if is(&[WAITING]) {
            Self::Waiting
        } else {
            Self::Working
        }
    }

    /// How many of its tests run at once.
    fn at_once(self) -> usize {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        match self {
            // A meter's threads need a processor as soon as they have something to do. With three at once beside
            // another program agents waited a minute for one: some have streams as fast as they go.
            Self::Alone | Self::Nightly => processors.min(2),
            Self::Working => 2 * processors,
            Self::Waiting => 4 * processors,
        }
    }
}

/// How many of these tests run at once: as many as each of them bears.
pub fn at_once<'a>(tests: impl IntoIterator<Item = &'a str>) -> Option<usize> {
    tests.into_iter().map(|test| Lane::of(test).at_once()).min()
}

/// Whether a test needs the programs of the released state.
pub fn needs_released(test: &str) -> bool {
    test.contains(SINCE_RELEASE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tests_path_says_in_which_lane_it_is() {
        for (test, lane) in [
            ("nodes::install::a_full_disk", Lane::Working),
            ("peers::where_pods_have_ipv6_alone", Lane::Working),
            ("waiting::peers::a_peer_is_silent", Lane::Waiting),
            ("waiting::overlay_direct::moves_under_load", Lane::Alone),
            ("alone::restart::a_killed_agent", Lane::Alone),
            ("sinabro_lab::traffic::gaps::alone::no_gap", Lane::Alone),
            ("layouts::found_since_release", Lane::Alone),
            ("masquerade::floods_under_load_nightly", Lane::Nightly),
            ("masquerade::nightly::crowds", Lane::Nightly),
        ] {
            assert_eq!(Lane::of(test), lane, "{test}");
        }
    }

    #[test]
    fn as_many_tests_run_at_once_as_all_of_them_bear() {
        let of = |tests: &[&str]| at_once(tests.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["waiting::a"]), Some(Lane::Waiting.at_once()));
        assert_eq!(
            of(&["waiting::a", "waiting::a_under_load"]),
            Some(Lane::Alone.at_once())
        );
    }
}
