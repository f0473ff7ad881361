//! Bridges.

use crate::Request;

/// Creates a bridge, up. Links are put under it by [`crate::link::set_master`].
pub fn create(name: &str) -> Request {
    let _ = name;
    unimplemented!()
}
