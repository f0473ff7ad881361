//! TCP acceleration as this node has it.
//!
//! - [`battery`]: what applications see of a TCP connection, row by row.

pub mod battery;
