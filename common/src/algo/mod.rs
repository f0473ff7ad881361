//! Pure logic that the kernel programs call and the host tests.
//!
//! No allocation, no panics, no loops without a constant bound, so that the verifier can follow.

pub mod acceleration;
pub mod checksum;
pub mod client_hash;
pub mod crc32c;
pub mod ct_state;
pub mod flow;
pub mod hash;
pub mod lifetime;
pub mod port_pick;
pub mod queue;
pub mod room;
#[cfg(test)]
mod tcp_automaton;
pub mod tcp_window;
