//! VLANs (IEEE 802.1Q) on top of another interface.

use crate::conn::{CREATE, Request};
use crate::link::{self, check_name};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVlan, LinkAttribute, LinkInfo};

/// Creates the interface of VLAN `id` (1 to 4094) on the interface of index `on`, up.
pub fn create(name: &str, on: u32, id: u16) -> Request {
    let what = format!("create VLAN {name}");
    if let Err(error) = check_name(name) {
        return Request::wrong(what, error);
    }
    let message = link::new_up(vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::Link(on),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Vlan),
            LinkInfo::Data(InfoData::Vlan(vec![InfoVlan::Id(id)])),
        ]),
    ]);
    Request::new(what, libc::RTM_NEWLINK, CREATE, &message)
}
