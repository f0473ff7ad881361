//! The built plugin in fresh network namespaces, against an agent that follows a script.
//!
//! Needs root, and nothing of the machine's own network: every test makes a "node" and its
//! "pods" as namespaces of their own, which vanish with it.

// Helpers beside the test functions are tests too.
#![allow(clippy::unwrap_used)]

mod add;
mod agent;
mod check;
mod del;
mod first;
mod kill;
mod node;
mod rest;
mod runtimes;
mod trace;
mod traffic;
mod undo;
