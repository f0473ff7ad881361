//! Pods' links take packets as large as packets can be, and nothing but what stays on the node may
//! be larger than the ways out carry, whoever sends it.

mod kit;
mod nat;
mod ranges;
mod streams;
mod syn;
mod udp;
mod userspace;
mod way;
