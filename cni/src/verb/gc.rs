//! GC: the agent removes every attachment of this network that the runtime does not name.

use crate::{
    agent_client::{Agent, BUDGET},
    conf::Conf,
    error::Error,
};
use sinabro_common::api::{Request, Response};

/// # Errors
/// Code 7 if the list of valid attachments is missing; those of the agent, also if it is away:
/// runtimes repeat GC.
pub fn run(conf: &Conf) -> Result<(), Error> {
    let valid = conf.valid_attachments()?;
    let mut agent = Agent::connect(&conf.socket, BUDGET)?;
    match agent.call(Request::Gc {
        network: conf.name.clone(),
        valid,
    })? {
        Response::Removed(_) => Ok(()),
        _ => Err(agent
            .garbled("not a list of what was removed".into())
            .into()),
    }
}
