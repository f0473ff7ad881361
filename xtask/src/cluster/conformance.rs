//! Kubernetes' own end-to-end tests, run by their own runner, and what came of them.

use super::{Cluster, components, control, layout};
use crate::{report, ui};
use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs,
    io::Read as _,
    path::PathBuf,
    process::{ExitCode, Stdio},
};

/// All conformance tests of the network.
const FOCUS: &str = r"\[sig-network\].*\[Conformance\]";
/// Their names, sorted, one a line: each must run and pass on every cluster.
const EXPECTED: &str = include_str!("../../cluster/conformance.txt");

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Run tests whose name matches this regular expression
    #[arg(long, value_name = "REGEX", default_value = FOCUS)]
    pub focus: String,

    /// But not those that match this one
    #[arg(long, value_name = "REGEX")]
    pub skip: Option<String>,

    /// Tests that run beside one another
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    pub procs: u8,

    /// Write the outcome to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            focus: FOCUS.into(),
            skip: None,
            procs: 4,
            json: None,
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    pub passed: Vec<String>,
    pub failed: Vec<Failure>,
    /// Chosen, but the test itself found that this cluster is none for it.
    pub skipped: Vec<Failure>,
}

impl Outcome {
    /// What is wrong with it: failures, and with the usual choice each test that did not pass or is
    /// not known.
    pub fn faults(&self, options: &Options) -> Vec<String> {
        let mut faults: Vec<String> = self
            .failed
            .iter()
            .map(|failure| format!("{}: {}", failure.name, failure.message))
            .collect();
        if options.focus == FOCUS && options.skip.is_none() {
            faults.extend(self.differences(EXPECTED));
        } else if self.passed.is_empty() {
            faults.push("no test passed".into());
        }
        faults
    }

    fn differences(&self, expected: &str) -> Vec<String> {
        let expected: BTreeSet<&str> = expected.lines().collect();
        let passed: BTreeSet<&str> = self.passed.iter().map(String::as_str).collect();
        let failed: BTreeSet<&str> = self.failed.iter().map(|f| f.name.as_str()).collect();
        let missing = expected
            .difference(&passed)
            .filter(|name| !failed.contains(*name));
        let unknown = passed.difference(&expected);
        missing
            .map(|name| format!("{name}: did not run"))
            .chain(unknown.map(|name| format!("{name}: is not in conformance.txt")))
            .collect()
    }
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub name: String,
    pub message: String,
}

pub fn command(cluster: &Cluster, options: &Options) -> Result<ExitCode> {
    let outcome = run(cluster, options)?;
    if let Some(path) = &options.json {
        report::write(path, &outcome)?;
    }
    let faults = outcome.faults(options);
    for fault in &faults {
        ui::error(fault);
    }
    Ok(match faults.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

pub fn run(cluster: &Cluster, options: &Options) -> Result<Outcome> {
    let dir = layout::state()?.join("e2e");
    fs::create_dir_all(&dir)?;
    let (found, log) = (dir.join("report.json"), dir.join("log"));
    let _ = fs::remove_file(&found);
    let mut step = ui::step("running the tests");
    let mut command = control::machine().network_command(components::path("ginkgo")?)?;
    command
        .arg(format!("--procs={}", options.procs))
        .args(["--no-color", "--timeout=40m", "--json-report=report.json"])
        .arg(format!("--output-dir={}", dir.display()))
        .arg(format!("--focus={}", options.focus));
    if let Some(skip) = &options.skip {
        command.arg(format!("--skip={skip}"));
    }
    command
        .arg(components::path("e2e.test")?)
        .args([
            "--",
            "--provider=skeleton",
            "--minStartupPods=1",
            "--allowed-not-ready-nodes=0",
        ])
        .arg(format!(
            "--kubeconfig={}",
            layout::pki()?.join("admin.kubeconfig").display()
        ))
        .arg(format!(
            "--kubectl-path={}",
            components::path("kubectl")?.display()
        ))
        .arg(format!("--num-nodes={}", cluster.nodes().len()))
        .args(["--dump-logs-on-failure=false"])
        .current_dir(&dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(dir.join("errors"))?);
    let mut child = command.spawn().context("cannot start the tests")?;
    let mut output = child.stdout.take().context("no output")?;
    let (mut text, mut buffer) = (Vec::new(), [0; 8192]);
    loop {
        let len = output.read(&mut buffer)?;
        if len == 0 {
            break;
        }
        text.extend_from_slice(&buffer[..len]);
        // The runner prints a bullet for each test that passed.
        let done = String::from_utf8_lossy(&text).matches('•').count();
        step.now(format!("{done} tests have ended"));
    }
    let status = child.wait()?;
    fs::write(&log, &text)?;
    let outcome = fs::read(&found)
        .with_context(|| format!("the tests left no report, see {}", log.display()))
        .and_then(|bytes| parse(&bytes))?;
    // Failed, or stopped before all had run.
    ensure!(
        status.success() || !outcome.failed.is_empty(),
        "the test runner failed ({status}), see {}",
        log.display()
    );
    step.done_in_time();
    for name in &outcome.passed {
        println!("  {}  {}", ui::verdict(true), short(name));
    }
    for failure in &outcome.failed {
        println!(
            "  {}  {}\n        {}",
            ui::verdict(false),
            short(&failure.name),
            failure.message.replace('\n', "\n        ")
        );
    }
    for skipped in &outcome.skipped {
        println!(
            "  skipped  {}\n        {}",
            short(&skipped.name),
            skipped.message
        );
    }
    println!(
        "\n  {} passed, {} failed, {} skipped; log in {}",
        outcome.passed.len(),
        outcome.failed.len(),
        outcome.skipped.len(),
        log.display()
    );
    Ok(outcome)
}

fn short(name: &str) -> &str {
    name.trim_start_matches("[sig-network] ")
}

/// A report as `ginkgo --json-report` writes it (ginkgo/v2/types.Report).
fn parse(bytes: &[u8]) -> Result<Outcome> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Suite {
        #[serde(default)]
        spec_reports: Option<Vec<Spec>>,
        #[serde(default)]
        special_suite_failure_reasons: Option<Vec<String>>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Spec {
        #[serde(default)]
        container_hierarchy_texts: Option<Vec<String>>,
        #[serde(default)]
        leaf_node_text: String,
        leaf_node_type: String,
        state: String,
        #[serde(default)]
        failure: Option<Fault>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Fault {
        #[serde(default)]
        message: String,
    }
    let suites: Vec<Suite> =
        serde_json::from_slice(bytes).context("the report is no report of ginkgo's")?;
    let mut outcome = Outcome::default();
    for suite in suites {
        let reasons = suite.special_suite_failure_reasons.unwrap_or_default();
        for spec in suite.spec_reports.unwrap_or_default() {
            let mut words = spec.container_hierarchy_texts.unwrap_or_default();
            words.push(spec.leaf_node_text);
            let name = words.join(" ").trim().to_string();
            let test = spec.leaf_node_type == "It";
            match spec.state.as_str() {
                "passed" if test => outcome.passed.push(name),
                "passed" => {}
                // With a reason the test skipped itself; without, it was not chosen.
                "skipped" | "pending" => outcome.skipped.extend(
                    (spec.failure.filter(|reason| !reason.message.is_empty()))
                        .map(|Fault { message }| Failure { name, message }),
                ),
                // Also of what prepares the suite.
                _ => outcome.failed.push(Failure {
                    name: if name.is_empty() {
                        spec.leaf_node_type
                    } else {
                        name
                    },
                    message: spec
                        .failure
                        .map(|fault| fault.message)
                        .unwrap_or(spec.state),
                }),
            }
        }
        if outcome.failed.is_empty() && !reasons.is_empty() {
            bail!("the tests did not run: {}", reasons.join("; "));
        }
    }
    outcome.passed.sort();
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_and_failed_tests_are_told_by_their_whole_names() {
        let report = br#"[{"SpecReports":[
            {"LeafNodeType":"SynchronizedBeforeSuite","State":"passed"},
            {"ContainerHierarchyTexts":["[sig-network] DNS"],"LeafNodeType":"It","LeafNodeText":"works [Conformance]","State":"passed"},
            {"ContainerHierarchyTexts":["[sig-network]","Pods"],"LeafNodeType":"It","LeafNodeText":"talk","State":"failed","Failure":{"Message":"no answer"}},
            {"ContainerHierarchyTexts":["[sig-apps] x"],"LeafNodeType":"It","LeafNodeText":"y","State":"skipped"},
            {"ContainerHierarchyTexts":["[sig-network] x"],"LeafNodeType":"It","LeafNodeText":"z","State":"skipped","Failure":{"Message":"needs two zones"}},
            {"ContainerHierarchyTexts":null,"LeafNodeType":"AfterSuite","LeafNodeText":"","State":"panicked"}]}]"#;
        let outcome = parse(report).unwrap();
        assert_eq!(outcome.passed, ["[sig-network] DNS works [Conformance]"]);
        assert_eq!(outcome.skipped.len(), 1);
        assert_eq!(outcome.skipped[0].message, "needs two zones");
        let failed: Vec<_> = outcome
            .failed
            .iter()
            .map(|f| (f.name.as_str(), f.message.as_str()))
            .collect();
        assert_eq!(
            failed,
            [
                ("[sig-network] Pods talk", "no answer"),
                ("AfterSuite", "panicked")
            ]
        );
    }

    #[test]
    fn a_test_that_did_not_run_and_one_that_is_new_are_faults() {
        let outcome = Outcome {
            passed: vec!["a".into(), "c".into()],
            ..Outcome::default()
        };
        assert_eq!(
            outcome.differences("a\nb\n"),
            ["b: did not run", "c: is not in conformance.txt"]
        );
        assert!(outcome.differences("a\nc\n").is_empty());
        // The usual choice is held to the list, another to passing at all.
        assert!(!outcome.faults(&Options::default()).is_empty());
        let other = Options {
            focus: "DNS".into(),
            ..Options::default()
        };
        assert!(outcome.faults(&other).is_empty());
        assert_eq!(Outcome::default().faults(&other), ["no test passed"]);
    }

    #[test]
    fn the_list_has_each_test_once_in_order() {
        let names: Vec<&str> = EXPECTED.lines().collect();
        assert!(names.is_sorted_by(|a, b| a < b));
        assert_eq!(names.len(), 45);
        assert!(
            names.iter().all(|name| {
                name.starts_with("[sig-network]") && name.contains("[Conformance]")
            })
        );
    }

    #[test]
    fn a_suite_that_did_not_run_is_no_success() {
        let report =
            br#"[{"SpecReports":null,"SpecialSuiteFailureReasons":["Interrupted by User"]}]"#;
        assert!(
            parse(report)
                .unwrap_err()
                .to_string()
                .contains("Interrupted")
        );
        for garbage in [&b""[..], b"{}", b"[{\"SpecReports\":7}]"] {
            assert!(parse(garbage).is_err());
        }
    }
}
