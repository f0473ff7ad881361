//! TCP acceleration as this node has it.
//!
//! - [`self_test`]: whether this kernel's accelerated connections keep order and back-pressure;
//! - [`choice`]: which pods' connections are accelerated.

pub mod choice;
pub mod self_test;
