//! DEL: the agent takes the pod off the network and deletes its link, many at a time, which is
//! what takes long.
//!
//! Needs neither the namespace nor the agent: without an agent the plugin deletes the host side
//! of the pair itself, and with it the pod's side and both ends' addresses and routes, and
//! queues a file, by which the agent frees the addresses when it is back.

use crate::{
    agent_client::{Agent, AgentError, BUDGET},
    conf::Conf,
    error::{Code, Error, chain},
};
use sinabro_common::{
    api::{Owner, Request, Response},
    atomic_file::AtomicFile,
    names,
};
use sinabro_netlink::{Conn, link};
use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

/// # Errors
/// Those of an agent that is there and refuses. Without one: code 104 if the link cannot be
/// deleted, its addresses stay leased then; code 5 if the delete cannot be queued.
pub fn run(conf: &Conf, owner: &Owner) -> Result<(), Error> {
    match release(conf, owner) {
        Err(error) if can_wait(&error) => {
            delete_link(&owner.link())?;
            queue(&conf.state_dir, owner).map_err(|source| {
                let file = queue_file(&conf.state_dir, owner);
                Error::new(
                    Code::Io,
                    format!("delete of {owner} cannot be queued as {}", file.display()),
                )
                .details(source)
                .also(chain(&error))
            })
        }
        other => Ok(other?),
    }
}

fn delete_link(name: &str) -> Result<(), Error> {
    use sinabro_netlink::Error as Netlink;
    match Conn::new().and_then(|mut host| host.execute(link::delete_by_name(name))) {
        // Busy: the agent's own collection takes it, once whatever holds it is done.
        Ok(()) | Err(Netlink::NotFound(_) | Netlink::Busy(_)) => Ok(()),
        Err(error) => Err(
            Error::new(Code::Kernel, format!("link {name} cannot be deleted"))
                .details(chain(&error)),
        ),
    }
}

fn release(conf: &Conf, owner: &Owner) -> Result<(), AgentError> {
    let mut agent = Agent::connect(&conf.socket, BUDGET)?;
    let owner = owner.clone();
    match agent.call(Request::Release { owner })? {
        Response::Done => Ok(()),
        _ => Err(agent.garbled("no confirmation".into())),
    }
}

/// Whether an agent that comes later can do it: not if this one has looked and refused.
fn can_wait(error: &AgentError) -> bool {
    match error {
        AgentError::Garbled { .. } => true,
        other => other.is_away(),
    }
}

/// The file that stands for a delete the agent does not know of.
fn queue_file(state_dir: &Path, owner: &Owner) -> PathBuf {
    state_dir
        .join(names::DELETES_DIR)
        .join(format!("{}.json", owner.link()))
}

/// Written in one step: the agent never sees half a file.
fn queue(state_dir: &Path, owner: &Owner) -> io::Result<()> {
    let file = queue_file(state_dir, owner);
    // After a reboot the plugin may be first.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state_dir.join(names::DELETES_DIR))?;
    AtomicFile::new(&file).replace(&serde_json::to_vec(owner)?)
}
