//! What an ADD has done so far, taken back in reverse if it fails.
//!
//! Two steps are all there is to take back: deleting the host side of the pair takes the pod's
//! side and every address, neighbour and route of both with it, and the agent releases what it
//! leased. If the plugin is killed, or cannot reach the agent any more, the agent does both by
//! itself, because the connection ends before the endpoint is active.

use crate::{
    agent_client::Agent,
    error::{Error, chain},
};
use sinabro_common::api::{Owner, Request};
use sinabro_netlink::{Conn, ResultExt, link};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The agent has leased addresses to this attachment.
    Leased(Owner),
    /// A pair of this host-side name has been asked for. The name is the attachment's own, so
    /// there is no one else's to hit.
    Linked(String),
}

/// Steps in the order they were begun: one that failed half way is taken back too.
#[derive(Debug, Default)]
pub struct Undo(Vec<Step>);

impl Undo {
    pub fn begin(&mut self, step: Step) {
        self.0.push(step);
    }

    /// Takes everything back and returns `error` with whatever else went wrong.
    pub fn run(self, mut error: Error, host: &mut Conn, agent: &mut Agent) -> Error {
        for step in self.0.into_iter().rev() {
            match step {
                Step::Linked(name) => {
                    let deleted = host.execute(link::delete_by_name(&name));
                    if let Err(more) = deleted.ignore_not_found() {
                        error = error.also(format!(
                            "and link {name} is left, for the agent or a DEL to remove: {}",
                            chain(&more)
                        ));
                    }
                }
                // Asked, not only implied by closing, so that it is done when the runtime hears
                // of the failure. If the agent does not hear it, closing has to do.
                Step::Leased(owner) => drop(agent.call(Request::Release { owner })),
            }
        }
        error
    }
}
