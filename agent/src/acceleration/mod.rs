//! TCP acceleration as this node has it.
//!
//! - [`battery`]: what applications see of a TCP connection, row by row;
//! - [`self_test`]: whether they see the same on accelerated connections of this kernel;
//! - [`choice`]: which pods' connections are accelerated.

pub mod battery;
pub mod choice;
pub mod self_test;
