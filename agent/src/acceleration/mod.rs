//! TCP acceleration as this node has it.
//!
//! - [`battery`]: what applications see of a TCP connection, row by row;
//! - [`self_test`]: whether they see the same on accelerated connections of this kernel.

pub mod battery;
pub mod self_test;
