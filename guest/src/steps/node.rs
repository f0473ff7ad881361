//! The machine is a node from `prepare` to `uninstall`.

use crate::{
    node::{Node, Way, modes},
    report::Report,
};
use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use sinabro_guest::{Environment, Message};

pub fn run(report: &mut Report, environment: &Environment) -> Result<()> {
    report.doing("as a node")?;
    let node = Node::new(environment).context("cannot make the machine a node")?;
    report.check("prepare", node.prepare())?;
    let mut agent = node.start_agent(&Way::default())?;
    let status = node.wait_ready(&mut agent)?;
    report.say(&Message::Modes(modes(status)))?;

    report.check(
        "cni_status",
        node.cni("STATUS", None, json!({}))
            .map(|_| "possible".into()),
    )?;
    let pods = ["one", "two"].map(|id| node.add(id));
    let [one, two] = pods;
    let (one, two) = (one.context("ADD")?, two.context("ADD")?);
    report.check("cni_add", node.reach(&one, &two))?;
    report.check("cni_check", node.check(&one))?;
    if environment.sctp {
        report.check("sctp", node.sctp(&one, &two))?;
    }

    report.doing("as a node whose agent is killed")?;
    kill(Pid::from_raw(agent.id() as i32), Signal::SIGKILL)?;
    agent.wait()?;
    let without = node.reach(&one, &two).context("without an agent");
    let mut agent = node.start_agent(&Way::default())?;
    node.wait_ready(&mut agent)?;
    let with = node.reach(&one, &two).context("with a new agent");
    report.check("cni_agent_kill", without.and(with))?;

    report.doing("as a node that pods leave")?;
    report.check("cni_gc", node.collect(&one, &two))?;
    report.check("cni_del", node.delete(&one))?;

    report.doing("as a node that is given up")?;
    let ctl = ["uninstall"];
    let refused = node.ctl(&ctl)?;
    kill(Pid::from_raw(agent.id() as i32), Signal::SIGTERM)?;
    let ended = agent.wait()?;
    let uninstalled = || {
        ensure!(
            !refused.status.success(),
            "uninstalled below a running agent"
        );
        ensure!(ended.success(), "the agent ended with {ended}");
        node.said(&node.ctl(&ctl)?)?;
        node.nothing_left()
    };
    report.check("uninstall", uninstalled())
}
