//! Bridges.

use crate::conn::{CREATE, Request};
use crate::link::{self, check_name};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo};

/// Creates a bridge, up. Links are put under it by [`crate::link::set_master`].
pub fn create(name: &str) -> Request {
    let what = format!("create bridge {name}");
    if let Err(error) = check_name(name) {
        return Request::wrong(what, error);
    }
    let message = link::new_up(vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
    ]);
    Request::new(what, libc::RTM_NEWLINK, CREATE, &message)
}
