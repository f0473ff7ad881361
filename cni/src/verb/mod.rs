//! The verbs of the specification, a file each. Each gets what is parsed and checked already.

pub mod add;
pub mod check;
pub mod del;
pub mod gc;
pub mod status;
pub mod version;
