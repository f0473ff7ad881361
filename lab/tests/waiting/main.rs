//! Tests that wait for agents most of their time: many of them run at once, beside other programs.
#![allow(clippy::unwrap_used)]

mod crash;
mod masquerade;
mod masquerade_settings;
mod node_sockets;
mod overlay_direct;
mod peers;
mod service_proxy;
mod troubles;
