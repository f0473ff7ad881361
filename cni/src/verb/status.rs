//! STATUS: whether an ADD would find an agent that serves.

use crate::{
    agent_client::{Agent, AgentError, BUDGET},
    conf::Conf,
    error::{Code, Error},
};
use sinabro_common::api::{Request, Response, StatusReport};

/// # Errors
/// Code 50 or 51, in the details what does not hold.
pub fn run(conf: &Conf) -> Result<(), Error> {
    let report = ask(conf).map_err(|error| {
        let mut error = Error::from(error);
        error.code = Code::NotAvailable;
        error
    })?;
    judge(&report)
}

fn ask(conf: &Conf) -> Result<Box<StatusReport>, AgentError> {
    let mut agent = Agent::connect(&conf.socket, BUDGET)?;
    match agent.call(Request::Status)? {
        Response::Status(report) => Ok(report),
        _ => Err(agent.garbled("not a status".into())),
    }
}

/// Conditions that concern pods that are there already: the way to other nodes, and their own
/// places in the data path.
const TRAFFIC: [&str; 2] = ["overlay", "endpoints"];

fn judge(report: &StatusReport) -> Result<(), Error> {
    if report.ready {
        return Ok(());
    }
    let failing: Vec<_> = report.conditions.iter().filter(|c| !c.ok).collect();
    let code = if failing.iter().any(|c| TRAFFIC.contains(&&*c.name)) {
        Code::LimitedConnectivity
    } else {
        Code::NotAvailable
    };
    let details: Vec<_> = failing
        .iter()
        .map(|c| format!("{}: {}", c.name, c.detail))
        .collect();
    let error = Error::new(code, format!("agent on node {} is not ready", report.node));
    Err(match details.as_slice() {
        [] => error.details("it is still starting"),
        some => error.details(some.join("; ")),
    })
}
