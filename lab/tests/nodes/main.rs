//! What a node does for its pods: from the agent's installation to its removal.
#![allow(clippy::unwrap_used)]

mod acceleration;
mod acceleration_kill;
mod attached;
mod chained;
mod connectivity;
mod debug;
mod install;
mod local_mtu;
mod measuring;
mod overlay;
mod privilege;
mod repeat;
mod restored;
mod router;
mod status;
mod tunnels;
mod underlay;
mod uninstall;
mod uplinks;
