//! Facts about the cluster become the desired state of this node.
//!
//! Everything here is a pure function: no clock, no I/O, no kernel. The same facts in any order
//! give the same plan, so a plan can be compared, tested and shown.

pub mod conflicts;
pub mod facts;
pub mod forwarding;
pub mod masquerade;
pub mod overlay;
pub mod services;

#[cfg(test)]
mod tests;

pub use facts::{Facts, Node};
pub use forwarding::{Forwarding, ForwardingMode};
pub use masquerade::{MasqueradeIpv6, Masquerading, UdpMapping, non_masquerade};
pub use overlay::{
    DeviceSpec, Native, OverlayMode, OverlayPlan, OverlaySettings, Peer, PlanError, Reach, Reached,
    RouteSpec, Routing, own_device,
};
