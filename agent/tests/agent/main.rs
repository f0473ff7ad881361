//! The real agent on the real kernel, spoken to as the CNI plugin speaks to it.

// A step that fails is a test that fails.
#![allow(clippy::unwrap_used)]

mod acceleration;
mod connections;
mod connections_room;
mod deprecated;
mod drops;
mod local_mtu;
mod node;
mod pods;
mod restart;
mod socket;
mod storm;
mod support;
