//! Links: finding, changing, deleting.

use crate::conn::{Request, malformed};
use crate::vxlan::VxlanSettings;
use crate::wire::{self, Attr, Garbage, Message};
use crate::{Conn, Error, NetNs, Result};
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkFlags, LinkHeader, LinkMessage,
};
use std::fs;
use std::os::fd::{AsFd, AsRawFd};

/// linux/if.h; the libc crate has it not.
const IF_OPER_UP: u8 = 6;

pub type Mac = [u8; 6];

/// Length of `struct ifinfomsg`.
const HEADER: usize = 16;

/// The longest name, without the terminating zero (IFNAMSIZ).
pub const NAME_MAX: usize = libc::IFNAMSIZ - 1;

/// A network interface as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// Absent on links without an Ethernet address.
    pub mac: Option<Mac>,
    pub mtu: u32,
    /// Administratively up (IFF_UP).
    pub up: bool,
    /// Carrier (IFF_LOWER_UP).
    pub carrier: bool,
    /// IFLA_OPERSTATE is up: the kernel has seen to the carrier, and what is sent is not dropped.
    /// From 6.8 on, asking for one link makes the kernel do so first (linkwatch_sync_dev).
    pub operational: bool,
    pub loopback: bool,
    /// `ARPHRD_*` (linux/if_arp.h): which header its packets have in front of that of IP.
    pub hardware: u16,
    /// `veth`, `vxlan`, `bridge`, …; absent on loopback and physical devices.
    pub kind: Option<String>,
    /// Index of the other end (veth) or lower link; may count in another namespace.
    pub peer: Option<u32>,
    /// The namespace in which `peer` counts, if it is another: its id in this one.
    pub peer_netns: Option<u32>,
    pub master: Option<u32>,
    pub alias: Option<String>,
    /// Settings of a VXLAN device.
    pub vxlan: Option<VxlanSettings>,
    /// Whether IPv4 packets that come in by it are forwarded (`net.ipv4.conf.NAME.forwarding`); none without IPv4.
    pub forwards_ipv4: Option<bool>,
}

impl Conn {
    pub fn link_by_name(&mut self, name: &str) -> Result<Link> {
        let what = format!("find link {name}");
        let body = self.query(get_by_name(what.clone(), name))?;
        Link::parse(&body).map_err(|garbage| malformed(what, garbage))
    }

    pub fn link_by_index(&mut self, index: u32) -> Result<Link> {
        let what = format!("find link #{index}");
        let body = self.query(Request::get(
            what.clone(),
            libc::RTM_GETLINK,
            &message(index, vec![without_statistics()]),
        ))?;
        Link::parse(&body).map_err(|garbage| malformed(what, garbage))
    }

    /// All links of the namespace.
    pub fn links(&mut self) -> Result<Vec<Link>> {
        self.dump(
            "list links",
            libc::RTM_GETLINK,
            &message(0, vec![without_statistics()]),
            |message: &Message<'_>| match message.kind {
                libc::RTM_NEWLINK => Link::parse(message.body).map(Some),
                _ => Ok(None),
            },
        )
    }
}

/// Whether the calling thread's network namespace has a link of this name. Read from a file that the
/// kernel makes under RCU: RTM_GETLINK waits for the lock that every link being made needs, and
/// SIOCGIFINDEX looks for a module of that name (dev_load).
pub fn is_here(name: &str) -> Result<bool> {
    let what = || format!("look for link {name}");
    let text = fs::read_to_string("/proc/thread-self/net/dev");
    let text = text.map_err(|error| Error::system(what(), &error))?;
    // Two lines of headings; a name has no colon (dev_valid_name).
    let mut links = text.lines().filter_map(|line| line.split_once(':'));
    Ok(links.any(|(link, _)| link.trim_start() == name))
}

pub fn set_up(index: u32) -> Request {
    set_flags(format!("set link #{index} up"), index, LinkFlags::Up)
}

pub fn set_up_by_name(name: &str) -> Request {
    let what = format!("set link {name} up");
    match check_name(name) {
        Ok(()) => {
            let message = new_up(vec![LinkAttribute::IfName(name.into())]);
            Request::new(what, libc::RTM_SETLINK, 0, &message)
        }
        Err(error) => Request::wrong(what, error),
    }
}

pub fn set_down(index: u32) -> Request {
    set_flags(format!("set link #{index} down"), index, LinkFlags::empty())
}

fn set_flags(what: String, index: u32, flags: LinkFlags) -> Request {
    let mut message = message(index, Vec::new());
    message.header.flags = flags;
    message.header.change_mask = LinkFlags::Up;
    Request::new(what, libc::RTM_SETLINK, 0, &message)
}

pub fn set_mtu(index: u32, mtu: u32) -> Request {
    let what = format!("set MTU of link #{index} to {mtu}");
    set(what, index, LinkAttribute::Mtu(mtu))
}

/// Lets a link have TCP's super-packets of IPv4 that are as long as this, header included: beyond 65,535 bytes since Linux 6.3
/// (commit 9eefedd58ae1, "BIG TCP"). Where such a packet is longer its length field is zero.
pub fn set_gso_ipv4_max_size(index: u32, bytes: u32) -> Request {
    let what = format!("set gso_ipv4_max_size of link #{index} to {bytes}");
    set(what, index, LinkAttribute::GsoIpv4MaxSize(bytes))
}

pub fn set_mac(index: u32, mac: Mac) -> Request {
    let what = format!("set MAC of link #{index} to {}", wire::mac_text(mac));
    set(what, index, LinkAttribute::Address(mac.to_vec()))
}

/// Renames a link. Kernels before 6.2 want it to be down.
pub fn set_name(index: u32, name: &str) -> Request {
    let what = format!("rename link #{index} to {name}");
    match check_name(name) {
        Ok(()) => set(what, index, LinkAttribute::IfName(name.into())),
        Err(error) => Request::wrong(what, error),
    }
}

/// Sets the free text that goes with a link; an empty one takes it away.
pub fn set_alias(index: u32, alias: &str) -> Request {
    let what = format!("set alias of link #{index}");
    // The kernel takes the attribute's bytes, a terminating zero included.
    let text = netlink_packet_core::DefaultNla::new(libc::IFLA_IFALIAS, alias.into());
    set(what, index, LinkAttribute::Other(text))
}

/// Puts a link under a bridge, or takes it out.
pub fn set_master(index: u32, master: Option<u32>) -> Request {
    let what = match master {
        Some(master) => format!("put link #{index} under #{master}"),
        None => format!("take link #{index} from its master"),
    };
    set(what, index, LinkAttribute::Controller(master.unwrap_or(0)))
}

/// Moves a link to another namespace.
pub fn set_netns(index: u32, netns: &NetNs) -> Request {
    let what = format!("move link #{index} to another namespace");
    set(what, index, in_netns(netns)).holding(netns.shared_fd())
}

pub(crate) fn set(what: String, index: u32, attribute: LinkAttribute) -> Request {
    Request::new(what, libc::RTM_SETLINK, 0, &message(index, vec![attribute]))
}

pub fn delete(index: u32) -> Request {
    let what = format!("delete link #{index}");
    Request::new(what, libc::RTM_DELLINK, 0, &message(index, Vec::new()))
}

/// Deletes by name: no look-up before it, so no race with a rename or a new link.
pub fn delete_by_name(name: &str) -> Request {
    let what = format!("delete link {name}");
    match check_name(name) {
        Ok(()) => {
            let name = LinkAttribute::IfName(name.into());
            Request::new(what, libc::RTM_DELLINK, 0, &message(0, vec![name]))
        }
        Err(error) => Request::wrong(what, error),
    }
}

/// Puts a link into a group of the namespace, so that [`delete_group`] takes it. All links start
/// in group 0.
pub fn set_group(index: u32, group: u32) -> Request {
    let what = format!("put link #{index} into group {group}");
    set(what, index, LinkAttribute::Group(group))
}

/// Deletes all links of a group but group 0. NotFound if there is none.
///
/// A delete waits some 20 ms for RCU grace periods, whatever the link; this waits once for all.
/// Links that cannot be deleted, such as physical ones, make the kernel refuse it as a whole.
pub fn delete_group(group: u32) -> Request {
    let what = format!("delete links of group {group}");
    if group == 0 {
        // The kernel would: it is every link that nobody put elsewhere.
        let message = Some("group 0 is all links".to_string());
        let error = Error::refused(what.clone(), nix::errno::Errno::EINVAL, message);
        return Request::wrong(what, error);
    }
    let group = LinkAttribute::Group(group);
    Request::new(what, libc::RTM_DELLINK, 0, &message(0, vec![group]))
}

pub(crate) fn get_by_name(what: String, name: &str) -> Request {
    match check_name(name) {
        Ok(()) => {
            let name = LinkAttribute::IfName(name.into());
            let message = message(0, vec![name, without_statistics()]);
            Request::get(what, libc::RTM_GETLINK, &message)
        }
        Err(error) => Request::wrong(what, error),
    }
}

pub(crate) fn message(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

/// A message that makes a link down: what must be there before the first packet can be.
pub(crate) fn new_down(attributes: Vec<LinkAttribute>) -> LinkMessage {
    message(0, attributes)
}

/// A message that makes a link up.
pub(crate) fn new_up(attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = message(0, attributes);
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message
}

pub(crate) fn in_netns(netns: &NetNs) -> LinkAttribute {
    LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd())
}

/// Counters are most of a link's description, and nobody here reads them.
fn without_statistics() -> LinkAttribute {
    LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])
}

/// The kernel's rules (dev_valid_name), so that the error says which one was broken. `%` is
/// refused too: the kernel would replace `%d` by a number.
pub fn check_name(name: &str) -> Result<()> {
    let reason = if name.is_empty() {
        "is empty"
    } else if name.len() > NAME_MAX {
        "is longer than 15 bytes"
    } else if name == "." || name == ".." {
        "is not allowed"
    } else if name
        .bytes()
        // The kernel's isspace takes Latin-1's no-break space for one, within UTF-8 too.
        .any(|b| matches!(b, b'/' | b':' | b'%' | 0 | b' ' | b'\t'..=b'\r' | 0xa0))
    {
        "contains a slash, colon, percent sign or white space"
    } else {
        return Ok(());
    };
    Err(Error::Name {
        name: name.into(),
        reason,
    })
}

/// Of IFLA_AF_SPEC: by family, and of IPv4 an array of settings in the order of `IPV4_DEVCONF_*`, which begin at one.
fn forwards_ipv4(spec: &Attr<'_>) -> std::result::Result<Option<bool>, Garbage> {
    /// IFLA_INET_CONF (linux/if_link.h).
    const CONF: u16 = 1;
    for family in wire::attrs(spec.value) {
        let family = family?;
        if i32::from(family.kind) != libc::AF_INET {
            continue;
        }
        for attr in wire::attrs(family.value) {
            let attr = attr?;
            if attr.kind == CONF {
                return Ok(wire::u32_at(attr.value, 0).map(|value| value != 0));
            }
        }
    }
    Ok(None)
}

impl Link {
    /// From the body of an RTM_NEWLINK message.
    pub(crate) fn parse(body: &[u8]) -> std::result::Result<Link, Garbage> {
        let header = LinkHeader::parse(body)?;
        let mut link = Link {
            index: header.index,
            name: String::new(),
            mac: None,
            mtu: 0,
            up: header.flags.contains(LinkFlags::Up),
            carrier: header.flags.contains(LinkFlags::LowerUp),
            operational: false,
            loopback: header.flags.contains(LinkFlags::Loopback),
            hardware: header.link_layer_type.into(),
            kind: None,
            peer: None,
            peer_netns: None,
            master: None,
            alias: None,
            vxlan: None,
            forwards_ipv4: None,
        };
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                libc::IFLA_IFNAME => link.name = attr.text(),
                libc::IFLA_ADDRESS => link.mac = attr.mac(),
                libc::IFLA_MTU => link.mtu = attr.u32()?,
                // Zero: the other end is gone or invisible.
                libc::IFLA_LINK => link.peer = Some(attr.u32()?).filter(|index| *index != 0),
                libc::IFLA_LINK_NETNSID => link.peer_netns = Some(attr.u32()?),
                libc::IFLA_OPERSTATE => link.operational = attr.value == [IF_OPER_UP],
                libc::IFLA_MASTER => link.master = Some(attr.u32()?),
                libc::IFLA_IFALIAS => link.alias = Some(attr.text()),
                libc::IFLA_LINKINFO => link.parse_info(&attr)?,
                libc::IFLA_AF_SPEC => link.forwards_ipv4 = forwards_ipv4(&attr)?,
                _ => {}
            }
        }
        if link.name.is_empty() {
            return wire::garbage(format!("link #{} without a name", link.index));
        }
        Ok(link)
    }

    fn parse_info(&mut self, info: &Attr<'_>) -> std::result::Result<(), Garbage> {
        let mut data = None;
        for attr in wire::attrs(info.value) {
            let attr = attr?;
            match attr.kind {
                libc::IFLA_INFO_KIND => self.kind = Some(attr.text()),
                libc::IFLA_INFO_DATA => data = Some(attr.value),
                _ => {}
            }
        }
        if let (Some("vxlan"), Some(data)) = (self.kind.as_deref(), data) {
            self.vxlan = Some(VxlanSettings::parse(data)?);
        }
        Ok(())
    }
}
