//! TCP acceleration as this node has it.
//!
//! - [`self_test`]: whether applications see the same on accelerated connections of this kernel as
//!   on plain ones;
//! - [`choice`]: which pods' connections are accelerated.

pub mod choice;
pub mod self_test;
