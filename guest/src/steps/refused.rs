//! A reboot into a kernel that refuses programs: what ran last is kept on the node, and what the agent
//! falls back to after it.
//!
//! Three boots: of another kernel, where all is well until the power fails; of this kernel, which
//! refuses the programs of a new agent and takes those that were kept; and of one that refuses these,
//! too. The new agent's programs are made such that no verifier takes them
//! (`sinabro_common::fail_point::REFUSED`), all else is the kernel's.

use crate::{
    node::{Node, Way, modes},
    report::Report,
};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use sinabro_common::{api::StatusReport, names};
use sinabro_guest::{Environment, Message, Survivor};
use sinabro_lab::wait::wait_for;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Child,
};

/// CNI specification, section 5, "Error": try again later.
const TRY_AGAIN: u64 = 11;
/// Section 4, "STATUS": the plugin cannot serve ADD requests.
const NOT_AVAILABLE: u64 = 51;

fn kept() -> PathBuf {
    Path::new(names::PROGRAMS_DIR).join(names::PROGRAMS_FILE)
}

/// A node on which all is well until the power fails.
pub fn power_off(report: &mut Report, environment: &Environment) -> Result<()> {
    report.doing("as a node before a reboot")?;
    let node = Node::new(environment).context("cannot make the machine a node")?;
    node.prepare()?;
    let mut agent = node.start_agent(&Way::default())?;
    let status = node.wait_ready(&mut agent)?;
    let level = &status.modes["programs"];
    ensure!(level == "current", "{level} programs before the reboot");
    // They are written once they run on all pods.
    wait_for("the programs to be kept", || {
        Ok(kept().is_file().then_some(()))
    })?;
    for entry in fs::read_dir(names::PROGRAMS_DIR)? {
        let path = entry?.path();
        let content = fs::read(&path)?;
        report.say(&Message::Survives(Survivor { path, content }))?;
    }
    Ok(())
}

/// The verifier's words end with `R0 !read_ok`, or in Linux 7.3 with the advice to initialize R0.
const VERDICT: &str = "R0";

/// A new agent, whose programs this kernel refuses.
pub fn last_good(report: &mut Report, environment: &Environment) -> Result<()> {
    report.doing("with an agent whose programs are refused")?;
    let node = booted(environment)?;
    let check = || -> Result<String> {
        let (_agent, status) = start(&node, &refusing("current"))?;
        level(&node, &status, "last good, of version ", "last-good")?;
        let why = node.trouble("ProgramsRefused")?;
        ensure!(why.contains(VERDICT), "not the verifier's words: {why}");
        node.cni("STATUS", None, json!({}))?;
        let (one, two) = (node.add("one")?, node.add("two")?);
        Ok(format!("those that ran last; {}", node.reach(&one, &two)?))
    };
    report.check("refused_last_good", check())
}

/// The kernel refuses those that were kept, too.
pub fn all(report: &mut Report, environment: &Environment) -> Result<()> {
    report.doing("with an agent whose programs and those kept are refused")?;
    let node = booted(environment)?;
    let before = fs::read(kept())?;
    let result = levels(report, &node);
    let untouched = fs::read(kept())? == before;
    result?;
    ensure!(
        untouched,
        "the programs that ran last are not kept any more"
    );
    Ok(())
}

fn levels(report: &mut Report, node: &Node) -> Result<()> {
    report.check("refused_none", none(node))?;

    // An agent that runs is ended whatever came of the check: it holds the node.
    let way = Way {
        flags: &["--require-programs=false"],
        ..refusing("current,last-good")
    };
    let (agent, status) = start(node, &way)?;
    let allowed = || -> Result<_> {
        let (one, two) = (node.add("one")?, node.add("two")?);
        level(node, &status, "none", "none")?;
        node.cni("STATUS", None, json!({}))?;
        let said = node.reach_pods(&one, &two)?;
        Ok(((one, two), said))
    };
    let allowed = allowed();
    end(agent)?;
    let (one, two) = match allowed {
        Ok((pods, said)) => {
            report.check("refused_none_allowed", Ok(said))?;
            pods
        }
        Err(error) => bail!("with requirePrograms: false: {error:#}"),
    };

    let (agent, status) = start(node, &refusing("redirect,last-good"))?;
    let reduced = || -> Result<String> {
        let said = "reduced: without redirection and acceleration";
        level(node, &status, said, "reduced")?;
        node.trouble("ProgramsReduced")?;
        node.cni("STATUS", None, json!({}))?;
        // The pods of before have them, too.
        node.reach(&one, &two)
    };
    report.check("refused_reduced", reduced())?;
    end(agent)?;

    let (_agent, status) = start(node, &Way::default())?;
    let current = || -> Result<String> {
        level(node, &status, "current", "current")?;
        ensure!(status.troubles.is_empty(), "{:?}", status.troubles);
        node.reach(&one, &two)
    };
    report.check("refused_current_again", current())?;
    report.say(&Message::Modes(modes(status)))
}

/// Without programs no pod is added, and everybody is told.
fn none(node: &Node) -> Result<String> {
    let mut agent = node.start_agent(&refusing("current,last-good"))?;
    let mut check = || -> Result<String> {
        let status = node.wait_ready_but_for(Some("programs"), &mut agent)?;
        level(node, &status, "none", "none")?;
        let said = node.trouble("ProgramsMissing")?;
        ensure!(said.contains("nothing is masqueraded"), "{said}");
        let (code, why) = node.cni_refused("STATUS", None)?;
        ensure!(code == NOT_AVAILABLE, "STATUS: {why}");
        ensure!(why.contains(VERDICT), "not the verifier's words: {why}");
        node.sandbox("refused")?;
        let (code, why) = node.cni_refused("ADD", Some("refused"))?;
        ensure!(code == TRY_AGAIN, "ADD: {why}");
        let links = node.links()?;
        ensure!(links.is_empty(), "links of pods: {links:?}");
        Ok(format!("STATUS {NOT_AVAILABLE}, ADD {TRY_AGAIN}"))
    };
    let outcome = check();
    end(agent)?;
    outcome
}

/// A node that has what survived, and nothing that runs.
fn booted(environment: &Environment) -> Result<Node> {
    ensure!(kept().is_file(), "no programs survived the reboot");
    let node = Node::new(environment).context("cannot make the machine a node")?;
    node.prepare()?;
    Ok(node)
}

fn refusing(programs: &str) -> Way<'_> {
    Way {
        refused: Some(programs),
        ..Way::default()
    }
}

fn start(node: &Node, way: &Way<'_>) -> Result<(Child, StatusReport)> {
    let mut agent = node.start_agent(way)?;
    let status = node.wait_ready(&mut agent)?;
    Ok((agent, status))
}

/// As a node's agent ends when it is replaced by another version.
fn end(mut agent: Child) -> Result<()> {
    agent.kill()?;
    agent.wait()?;
    Ok(())
}

/// The status says it, and so does the metric.
fn level(node: &Node, status: &StatusReport, begins: &str, label: &str) -> Result<()> {
    let said = status.modes.get("programs").map_or("", String::as_str);
    ensure!(
        said.starts_with(begins),
        "programs: {said:?}, not {begins:?}"
    );
    let metrics = node.metrics()?;
    let line = format!("sinabro_programs{{level=\"{label}\"}} 1");
    ensure!(metrics.contains(&line), "no metric {line}");
    Ok(())
}
