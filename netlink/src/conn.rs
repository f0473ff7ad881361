//! One NETLINK_ROUTE socket in one network namespace.

use crate::{NetNs, Result};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A change to make, ready to be sent. Made by the nouns' verbs, executed by a [`Conn`].
///
/// One that can not be right, such as a link name that is too long, is made too; executing it
/// gives the error, and nothing is sent.
#[must_use = "a request does nothing until a Conn executes it"]
#[derive(Debug)]
pub struct Request {
    what: String,
    /// Kept open until the kernel has seen its number in the message.
    _fd: Option<Arc<OwnedFd>>,
}

impl Request {
    /// What it attempts, such as `add route 10.0.0.0/24 dev #3`.
    pub fn what(&self) -> &str {
        &self.what
    }
}

/// A NETLINK_ROUTE socket. It works in the namespace it was opened in, whatever thread uses it.
#[derive(Debug)]
pub struct Conn {}

impl Conn {
    /// Opens a socket in the calling thread's network namespace.
    pub fn new() -> Result<Conn> {
        unimplemented!()
    }

    /// Opens a socket in another network namespace; the calling thread stays where it is.
    pub fn in_netns(netns: &NetNs) -> Result<Conn> {
        let _ = netns;
        unimplemented!()
    }

    /// Executes one request and waits for the kernel's answer.
    pub fn execute(&mut self, request: Request) -> Result<()> {
        let _ = request;
        unimplemented!()
    }

    /// Executes requests in order, many per system call. The error is the first that failed.
    ///
    /// The kernel goes on after a refusal: requests behind the failing one are executed too, so
    /// an undo has to cover them all.
    pub fn execute_all(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<()> {
        self.execute_each(requests).into_iter().collect()
    }

    /// Executes requests in order, many per system call, and returns the outcome of each.
    pub fn execute_each(&mut self, requests: impl IntoIterator<Item = Request>) -> Vec<Result<()>> {
        let _ = requests.into_iter();
        unimplemented!()
    }
}
