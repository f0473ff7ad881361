//! Bonds: several links as one (Documentation/networking/bonding.rst).

use crate::conn::{CREATE, Request};
use crate::link::{self, check_name};
use netlink_packet_route::link::{
    BondLacpRate, BondMode, BondXmitHashPolicy, InfoBond, InfoData, InfoKind, LinkAttribute,
    LinkInfo,
};

/// How a bond uses its links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One is in use, and another as soon as that one has no carrier.
    ActiveBackup,
    /// All that the other end has put together, too, as both find out by LACP (IEEE 802.1AX), asking each second. Which one a
    /// packet takes follows from addresses and ports.
    Lacp,
}

/// Creates a bond, up, that looks every so many milliseconds at its links' carriers. Links are put under it by
/// [`crate::link::set_master`], while they are down.
pub fn create(name: &str, mode: Mode, look_every: u32) -> Request {
    let what = format!("create bond {name}");
    if let Err(error) = check_name(name) {
        return Request::wrong(what, error);
    }
    let mut data = match mode {
        Mode::ActiveBackup => vec![InfoBond::Mode(BondMode::ActiveBackup)],
        Mode::Lacp => vec![
            InfoBond::Mode(BondMode::Ieee8023Ad),
            InfoBond::AdLacpRate(BondLacpRate::Fast),
            InfoBond::XmitHashPolicy(BondXmitHashPolicy::Layer34),
        ],
    };
    data.push(InfoBond::MiiMon(look_every));
    let message = link::new_up(vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bond),
            LinkInfo::Data(InfoData::Bond(data)),
        ]),
    ]);
    Request::new(what, libc::RTM_NEWLINK, CREATE, &message)
}
