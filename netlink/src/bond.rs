//! Bonds: several links as one (Documentation/networking/bonding.rst).

use crate::conn::{CREATE, Request};
use crate::link::{self, check_name};
use netlink_packet_route::link::{BondMode, InfoBond, InfoData, InfoKind, LinkAttribute, LinkInfo};

/// Creates a bond, up, that has one link in use, and another as soon as that one has no carrier; every so many milliseconds it
/// looks. Links are put under it by [`crate::link::set_master`], while they are down.
pub fn create_active_backup(name: &str, look_every: u32) -> Request {
    let what = format!("create bond {name}");
    if let Err(error) = check_name(name) {
        return Request::wrong(what, error);
    }
    let message = link::new_up(vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bond),
            LinkInfo::Data(InfoData::Bond(vec![
                InfoBond::Mode(BondMode::ActiveBackup),
                InfoBond::MiiMon(look_every),
            ])),
        ]),
    ]);
    Request::new(what, libc::RTM_NEWLINK, CREATE, &message)
}
