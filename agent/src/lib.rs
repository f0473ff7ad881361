//! The per-node agent. Modules in reading order:
//!
//! - [`config`]: flags, environment and file become settings;
//! - [`prepare`]: what the kernel has to allow first;
//! - [`node`]: what facts and kernel say about this node;
//! - [`run`]: start order, supervision, stop;
//! - pod ADD: [`api`] → [`ipam`] → [`endpoint`] → [`datapath`];
//! - cluster change: [`cluster_api`] → [`watch`] → [`plan`] → [`apply`];
//! - back to the cluster: [`announce`];
//! - [`acceleration`]: which TCP connections go from socket to socket, and what that changes;
//! - [`install`]: plugin and network configuration on the node;
//! - [`probe`]: whether other nodes answer through their tunnels;
//! - [`connections`]: the connections of this node's pods, for people;
//! - [`troubles`]: what is wrong although the agent serves, and what to do;
//! - [`telemetry`]: metrics and health;
//! - [`service_health`]: what load balancers ask of a node;
//! - [`uninstall`]: takes all of it away again;
//! - [`ctl`]: `sinabroctl`, for people;
//! - [`memory`]: no more of it than is used.
//!
//! Only `apply`, `endpoint` and `datapath` change the kernel; `plan` is pure.

pub mod acceleration;
pub mod announce;
pub mod api;
pub mod apply;
mod chain;
pub mod cluster_api;
pub mod config;
pub mod connections;
pub mod ctl;
pub mod datapath;
mod dir_watch;
pub mod endpoint;
pub mod handover;
pub mod install;
pub mod ipam;
pub mod memory;
pub mod node;
pub mod own_node;
pub mod plan;
pub mod prepare;
pub mod probe;
pub mod run;
pub mod service_health;
#[cfg(test)]
mod stand_in;
pub mod state_file;
mod state_lock;
pub mod telemetry;
pub mod troubles;
pub mod uninstall;
pub mod watch;
