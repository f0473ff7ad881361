//! Kubernetes' own end-to-end tests, run by their own runner, and what came of them.

use super::{Cluster, balancer::Balancer, components, control, layout};
use crate::{report, ui};
use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs,
    io::Read as _,
    path::PathBuf,
    process::{ExitCode, Stdio},
};

/// A choice of tests, each of which must run and pass: their names, sorted, one a line, are in
/// xtask/cluster/NAME.txt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Tests {
    /// All conformance tests of the network
    #[default]
    Conformance,
    /// Everything about Services that a cluster without a cloud can show
    Services,
    /// Services of type LoadBalancer, behind a load balancer that routes to nodes
    LoadBalancers,
}

impl Tests {
    fn focus(self) -> &'static str {
        match self {
            Self::Conformance => r"\[sig-network\].*\[Conformance\]",
            Self::Services => {
                r"\[sig-network\].*(Services|Granular Checks|Conntrack|Traffic Distribution|EndpointSlice|Connectivity Pod Lifecycle|Service endpoints latency|Service CIDRs|HostPort)"
            }
            Self::LoadBalancers => r"\[sig-network\] LoadBalancers",
        }
    }

    fn skip(self) -> Option<&'static str> {
        match self {
            Self::Conformance | Self::LoadBalancers => None,
            // What breaks other tests, asks kube-proxy itself, or needs what the cluster has not: one wants a pod of another
            // node to see a node's socket by the address that it is bound to, which no tunnel leaves it (docs/masquerade.md).
            Self::Services => Some(
                r"Disruptive|kube-proxy urls|KubeProxy|SCTP|LoadBalancers|Internet|HealthCheckNodePort correctly when",
            ),
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Conformance => include_str!("../../cluster/conformance.txt"),
            Self::Services => include_str!("../../cluster/services.txt"),
            Self::LoadBalancers => include_str!("../../cluster/load-balancers.txt"),
        }
    }

    /// How many run beside one another: most wait for the better part of their time, but the conformance tests.
    fn procs(self) -> u8 {
        match self {
            Self::Conformance => 4,
            Self::Services | Self::LoadBalancers => 12,
        }
    }

    /// Nodes and zones of a cluster on which none of them skips itself.
    pub fn nodes_and_zones(self) -> (u8, u8) {
        match self {
            Self::Conformance | Self::LoadBalancers => (2, 0),
            // `PreferSameNode` is told from `PreferSameZone` by two nodes in each of three zones.
            Self::Services => (6, 3),
        }
    }
}

#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// Which tests
    #[arg(long, value_name = "NAME", default_value = "conformance")]
    pub tests: Tests,

    /// Run tests whose name matches this regular expression instead
    #[arg(long, value_name = "REGEX")]
    pub focus: Option<String>,

    /// But not those that match this one
    #[arg(long, value_name = "REGEX")]
    pub skip: Option<String>,

    /// Tests that run beside one another [default: as many as the choice suggests]
    #[arg(long, value_name = "COUNT")]
    pub procs: Option<u8>,

    /// Write the outcome to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Options {
    pub fn of(tests: Tests) -> Self {
        Self {
            tests,
            ..Self::default()
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
    /// What is wrong with it: failures, and of a named choice each test that did not pass or is not known.
    pub fn faults(&self, options: &Options) -> Vec<String> {
        let mut faults: Vec<String> = self
            .failed
            .iter()
            .map(|failure| format!("{}: {}", failure.name, failure.message))
            .collect();
        if options.focus.is_none() && options.skip.is_none() {
            faults.extend(self.differences(options.tests));
        } else if self.passed.is_empty() {
            faults.push("no test passed".into());
        }
        faults
    }

    fn differences(&self, tests: Tests) -> Vec<String> {
        let name = tests.to_possible_value();
        let name = name.as_ref().map_or("", |value| value.get_name());
        self.differences_to(tests.expected(), name)
    }

    fn differences_to(&self, expected: &str, list: &str) -> Vec<String> {
        let expected: BTreeSet<&str> = expected.lines().collect();
        let passed: BTreeSet<&str> = self.passed.iter().map(String::as_str).collect();
        let failed: BTreeSet<&str> = self.failed.iter().map(|f| f.name.as_str()).collect();
        let missing = expected
            .difference(&passed)
            .filter(|name| !failed.contains(*name));
        let unknown = passed.difference(&expected);
        missing
            .map(|name| format!("{name}: did not run"))
            .chain(unknown.map(|name| format!("{name}: is not in {list}.txt")))
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
    let (focus, skip) = match &options.focus {
        Some(focus) => (focus.as_str(), options.skip.as_deref()),
        None => (
            options.tests.focus(),
            options.skip.as_deref().or(options.tests.skip()),
        ),
    };
    let balancer = match options.tests {
        Tests::LoadBalancers => Some(Balancer::start(cluster)?),
        Tests::Conformance | Tests::Services => None,
    };
    let mut step = ui::step("running the tests");
    let mut command = control::machine().network_command(components::path("ginkgo")?)?;
    command
        .arg(format!(
            "--procs={}",
            options.procs.unwrap_or(options.tests.procs())
        ))
        .args(["--no-color", "--timeout=60m", "--json-report=report.json"])
        .arg(format!("--output-dir={}", dir.display()))
        .arg(format!("--focus={focus}"));
    if let Some(skip) = skip {
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
    if let Some(balancer) = balancer {
        balancer.stop()?;
    }
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
            outcome.differences_to("a\nb\n", "list"),
            ["b: did not run", "c: is not in list.txt"]
        );
        assert!(outcome.differences_to("a\nc\n", "list").is_empty());
        // The usual choice is held to the list, another to passing at all.
        assert!(!outcome.faults(&Options::default()).is_empty());
        let other = Options {
            focus: Some("DNS".into()),
            ..Options::default()
        };
        assert!(outcome.faults(&other).is_empty());
        assert_eq!(Outcome::default().faults(&other), ["no test passed"]);
    }

    #[test]
    fn each_list_has_each_test_once_in_order() {
        for (tests, count) in [
            (Tests::Conformance, 45),
            (Tests::Services, 110),
            (Tests::LoadBalancers, 17),
        ] {
            let names: Vec<&str> = tests.expected().lines().collect();
            assert!(names.is_sorted_by(|a, b| a < b), "{tests:?}");
            assert_eq!(names.len(), count, "{tests:?}");
            assert!(names.iter().all(|name| name.starts_with("[sig-network]")));
        }
        let all: Vec<&str> = Tests::Conformance.expected().lines().collect();
        assert!(all.iter().all(|name| name.contains("[Conformance]")));
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
