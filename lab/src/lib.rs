//! Sinabro's laboratory: machines made of namespaces, the real programs, real traffic.
//!
//! ```text
//!   n1 eth0 ──┐
//!   n2 eth0 ──┤ router br0        router out0 ── outside eth0
//!   …         │ 172.30.0.1/24     192.0.2.1/24   192.0.2.10/24
//!             │ fd00:172:30::1    2001:db8:2::1  2001:db8:2::10
//! ```
//!
//! - [`namespace`], [`holder`]: a machine, and ways to run things inside;
//! - [`place`]: its network alone, or a pod's, and cables between networks; [`cgroup`]: what its sockets belong to;
//! - [`lab`]: the drawing above; [`underlay`]: what else its cables may be; [`node`], [`agent`], [`pod`], [`cni`]: what is on a node;
//! - [`wire`]: cables that carry bytes alone; [`machine`]: a virtual machine behind one;
//! - [`congestion`]: what TCP of all networks goes by;
//! - [`program`]: other programs, in a pod and on a CPU;
//! - [`tools`]: those that people try a network with;
//! - [`confinement`]: programs that may do no more than in an unprivileged container;
//! - [`datapath`]: the maps of a node's data path;
//! - [`kernel`]: what the running kernel lacks;
//! - [`traffic`]: what is sent between them;
//! - [`checks`], [`measures`]: what must hold and how well, for the demo and the tests alike;
//! - [`amount`]: how much tests do;
//! - [`wait`]: how everything here waits for a condition;
//! - [`residue`]: what is left behind on the machine, which must be nothing.
//!
//! The router and the outside host have no route to pods: what the outside answers must have
//! come from a node's address. Needs root.

pub mod agent;
pub mod amount;
pub mod cgroup;
pub mod checks;
pub mod cni;
pub mod confinement;
pub mod congestion;
pub mod datapath;
pub mod holder;
pub mod kernel;
pub mod lab;
pub mod machine;
pub mod measures;
pub mod namespace;
pub mod node;
pub mod place;
pub mod pod;
pub mod program;
pub mod raise;
pub mod residue;
pub mod tools;
pub mod traffic;
pub mod underlay;
pub mod wait;
pub mod wire;

pub use cgroup::Cgroup;
pub use holder::Lifetime;
pub use lab::{Binaries, Lab};
pub use machine::Machine;
pub use namespace::Namespace;
pub use node::{Node, NodeEntry};
pub use place::Place;
pub use pod::Pod;
pub use program::Program;
pub use underlay::Underlay;
