//! The lab.
pub mod holder;
pub mod namespace;
