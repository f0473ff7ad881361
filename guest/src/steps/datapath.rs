//! The suite of the data path, `agent/tests/datapath`.

use crate::report::Report;
use anyhow::{Context as _, Result, bail, ensure};
use sinabro_guest::{BIN_DIR, DATAPATH_SUITE, Message};
use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::{Command, Stdio},
};

/// Of what a failed test printed, as much as tells why.
const DETAIL: usize = 1500;

/// Of each hook and of each way of attaching something, where the whole takes too long: every test
/// loads all programs, which is seconds of a verifier under emulation. Of accelerated connections the
/// step `lab` sees every row.
const SOME: [&str; 22] = [
    "every_truncation_is_malformed",
    "other_sources_are_dropped",
    "same_node_traffic_is_redirected_one_hop_on",
    "a_restart_keeps_every_flow",
    "the_way_of_attaching_can_change",
    "echo_requests_reach_the_outside_and_their_replies_the_pod",
    "pods_of_a_node_talk_past_its_stack",
    "the_outside_sees_the_node",
    "only_what_has_the_stamp_leaves_a_tunnel_and_only_for_this_node",
    "whether_a_kernel_does_it_is_known",
    "every_truncation_of_a_pods_packet_is_dropped_and_of_others_passes",
    "pods_leave_as_the_node_and_get_their_replies",
    "both_families_leave_as_the_node_and_get_their_replies",
    "sctp_gets_another_port_and_its_checksum_stays_right",
    "fragments_follow_their_first",
    "what_is_early_comes_in_again_behind_the_one_before_it",
    "errors_about_what_a_pod_sent_reach_it_with_what_it_sent",
    "errors_about_what_a_pod_got_leave_with_what_was_sent",
    "a_pod_begins_what_it_likes_while_it_is_flooded_from_outside",
    "a_count_below_zero_refuses_nobody",
    "closed_connections_make_way_after_a_second",
    "closed_connections_of_a_pod_make_way_for_its_next",
];

pub fn run(report: &mut Report, thorough: bool) -> Result<()> {
    report.doing("the data path's tests")?;
    let mut suite = Command::new(Path::new(BIN_DIR).join(DATAPATH_SUITE));
    if !thorough {
        suite.args(SOME);
    }
    let mut suite = suite
        .args(["--test-threads", "2", "--color", "never", "--show-output"])
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .context("cannot start the suite")?;
    let stdout = suite.stdout.take().context("no standard output")?;
    let mut said = String::new();
    let mut lines = BufReader::new(stdout);
    let mut done = 0;
    loop {
        let mut line = String::new();
        if lines.by_ref().read_line(&mut line)? == 0 {
            break;
        }
        if outcome(&line).is_some() {
            done += 1;
            // Somebody waits, and takes a machine that says nothing for one that hangs.
            report.doing(&format!("the data path's tests, {done} done"))?;
        }
        said += &line;
    }
    let status = suite.wait()?;
    let found = parse(&said)?;
    let ran = found.passed + found.failed.len();
    ensure!(
        thorough || ran == SOME.len(),
        "{ran} of {} tests ran: one has another name now",
        SOME.len()
    );
    ensure!(
        status.success() == found.failed.is_empty(),
        "the suite ended with {status}, and {} tests failed",
        found.failed.len()
    );
    if found.filtered > 0 {
        let all = ran + found.filtered;
        let left_out = format!(
            "{} of the data path's {all} tests; --thorough",
            found.filtered
        );
        report.say(&Message::LeftOut(left_out))?;
    }
    for (why, tests) in skipped(&said) {
        report.say(&Message::LeftOut(format!("{}: {why}", tests.join(", "))))?;
    }
    for (name, why) in &found.failed {
        report.check(&format!("datapath::{name}"), Err(anyhow::anyhow!("{why}")))?;
    }
    let summary = format!("{} passed, {} failed", found.passed, found.failed.len());
    let outcome = match found.failed.is_empty() {
        true => Ok(summary),
        false => Err(anyhow::anyhow!("{summary}")),
    };
    report.check("datapath", outcome)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    passed: usize,
    /// And what each printed.
    failed: Vec<(String, String)>,
    /// How many were not asked for.
    filtered: usize,
}

/// The name of a test and whether it passed, if the line tells.
fn outcome(line: &str) -> Option<(&str, bool)> {
    let rest = line.strip_prefix("test ")?;
    let (name, outcome) = rest.rsplit_once(" ... ")?;
    match outcome.trim_end() {
        "ok" => Some((name, true)),
        "FAILED" => Some((name, false)),
        _ => None,
    }
}

/// What libtest prints. A suite that says less than its own summary counts is an error.
fn parse(said: &str) -> Result<Found> {
    let mut found = Found::default();
    for (name, ok) in said.lines().filter_map(outcome) {
        match ok {
            true => found.passed += 1,
            false => found.failed.push((name.to_owned(), printed(said, name))),
        }
    }
    let summary = said
        .lines()
        .find_map(|line| line.strip_prefix("test result: "))
        .context("the suite ended before its end")?;
    let count = |what: &str| -> Option<usize> {
        let words: Vec<_> = summary.split_whitespace().collect();
        let at = words
            .iter()
            .position(|word| word.trim_end_matches(';') == what)?;
        words.get(at.checked_sub(1)?)?.parse().ok()
    };
    found.filtered = count("filtered").unwrap_or_default();
    let counted = (count("passed"), count("failed"));
    if counted != (Some(found.passed), Some(found.failed.len())) {
        bail!(
            "the suite counts {summary}, and {} passed and {} failed were seen",
            found.passed,
            found.failed.len()
        );
    }
    ensure!(found.passed > 0, "the suite has no tests");
    Ok(found)
}

/// Tests that pass because this kernel lacks what they are about, by what they say of it.
fn skipped(said: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut test = "";
    for line in said.lines() {
        let head = line.strip_prefix("---- ");
        if let Some(name) = head.and_then(|rest| rest.strip_suffix(" stdout ----")) {
            test = name;
        }
        if let Some(why) = line.strip_prefix("skipped: ") {
            let tests = found.entry(why).or_default();
            if tests.last() != Some(&test) {
                tests.push(test);
            }
        }
    }
    found
}

/// What a failed test printed.
fn printed(said: &str, name: &str) -> String {
    let head = format!("---- {name} stdout ----\n");
    let Some((_, text)) = said.split_once(&head) else {
        return "it printed nothing".into();
    };
    let end = text.find("\n---- ").or_else(|| text.find("\nfailures:"));
    let text = text.get(..end.unwrap_or(text.len())).unwrap_or(text);
    // Why it failed comes first, a backtrace after it.
    let text = text.split("\nstack backtrace:").next().unwrap_or(text);
    text.trim().chars().take(DETAIL).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\nrunning 3 tests\n\
        test nat::a ... ok\n\
        test nat::b ... FAILED\n\
        test of ... dots ... ok\n\
        \nsuccesses:\n\n---- nat::a stdout ----\nskipped: no acceleration, it is too old\n\
        skipped: no acceleration, it is too old\n\n\
        \nsuccesses:\n    nat::a\n    of ... dots\n\
        \nfailures:\n\n---- nat::b stdout ----\nthread 'nat::b' panicked at x.rs:1:\nno route\n\
        stack backtrace:\n   0: rust_begin_unwind\n\n\nfailures:\n    nat::b\n\n\
        test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 1.0s\n";

    #[test]
    fn finds_each_test_and_why_it_failed() {
        let found = parse(SAID).expect("it is whole");
        assert_eq!(found.passed, 2);
        let why = "thread 'nat::b' panicked at x.rs:1:\nno route";
        assert_eq!(found.failed, [("nat::b".to_owned(), why.to_owned())]);
        assert_eq!(found.filtered, 9);
        let why = "no acceleration, it is too old";
        assert_eq!(skipped(SAID), BTreeMap::from([(why, vec!["nat::a"])]));
    }

    #[test]
    fn a_suite_that_died_or_counts_otherwise_is_an_error() {
        let end = SAID.find("test result").expect("there is one");
        assert!(parse(&SAID[..end]).is_err());
        assert!(parse(&SAID.replace("test nat::a ... ok\n", "")).is_err());
        assert!(parse(&SAID.replace("1 failed", "x failed")).is_err());
        assert!(parse("").is_err());
        assert!(parse("test result: ok. 0 passed; 0 failed;").is_err());
    }
}
