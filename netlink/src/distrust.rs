//! Settings of a link whose other end nobody vouches for: no router is heard on it. What comes in by it is forwarded, whatever
//! new links have (`net.ipv4.conf.default.forwarding`, which hardening guides turn off).
//!
//! IPv4's go with one request (`inet_set_link_af`), IPv6's have none and are files.

use crate::{Conn, Result, ResultExt, conn::Request, link, sysctl};
use netlink_packet_core::DefaultNla;
use netlink_packet_route::link::{AfSpecInet, AfSpecUnspec, LinkAttribute};

/// `IFLA_INET_CONF` of IFLA_AF_SPEC (linux/if_link.h).
const INET_CONF: u16 = 1;

/// Redirects are neither taken (RFC 1812 §5.2.7.2) nor sent, nor is a sender's own route followed
/// (§5.3.13.4); `IPV4_DEVCONF_*` of linux/ip.h.
const IPV4: [(u16, &str); 4] = [
    (4, "accept_redirects"),
    (5, "secure_redirects"),
    (6, "send_redirects"),
    (9, "accept_source_route"),
];

/// `IPV4_DEVCONF_FORWARDING`.
const FORWARDING: u16 = 1;

/// No router advertisement makes a route or an address, whatever the node does elsewhere, and no
/// redirect changes one (RFC 4861 §6.1.2, §8.1).
const IPV6: [&str; 3] = ["accept_ra", "accept_redirects", "autoconf"];

/// Makes a link's settings so.
///
/// # Errors
/// Those of the kernel. One without IPv6 is none.
pub fn distrust(conn: &mut Conn, index: u32, name: &str) -> Result<()> {
    conn.execute(ipv4(index))?;
    IPV6.iter().try_for_each(|setting| {
        sysctl::write(&["net", "ipv6", "conf", name, setting], "0")
            .ignore_not_found()
            .map(drop)
    })
}

/// The same for a link that may be so already; what was changed.
///
/// # Errors
/// Those of the kernel, as where /proc/sys is read-only.
pub fn repair(name: &str) -> Result<Vec<String>> {
    let ipv4 = IPV4.iter().map(|(_, setting)| ("ipv4", *setting));
    let all = ipv4.chain(IPV6.iter().map(|setting| ("ipv6", *setting)));
    let mut changed = Vec::new();
    for (family, setting) in all {
        let path = ["net", family, "conf", name, setting];
        if sysctl::ensure(&path, "0").ignore_not_found()? == Some(true) {
            changed.push(path.join("."));
        }
    }
    Ok(changed)
}

fn ipv4(index: u32) -> Request {
    let off = IPV4.iter().map(|(id, _)| (*id, 0));
    let what = format!("change the IPv4 settings of link #{index}");
    set_ipv4(what, index, off.chain([(FORWARDING, 1)]))
}

/// Has a link forward IPv4 packets that come in by it. Each link has a setting of its own, which a new one has from
/// `net.ipv4.conf.default.forwarding`; of IPv6 the one for all links counts (`ip6_forward`).
pub fn forward_ipv4(index: u32) -> Request {
    let what = format!("have link #{index} forward IPv4");
    set_ipv4(what, index, [(FORWARDING, 1)].into_iter())
}

fn set_ipv4(what: String, index: u32, values: impl Iterator<Item = (u16, u32)>) -> Request {
    let mut nested = Vec::new();
    for (id, value) in values {
        nested.extend_from_slice(&8_u16.to_ne_bytes());
        nested.extend_from_slice(&id.to_ne_bytes());
        nested.extend_from_slice(&value.to_ne_bytes());
    }
    let conf = AfSpecInet::Other(DefaultNla::new(INET_CONF, nested));
    let families = vec![AfSpecUnspec::Inet(vec![conf])];
    link::set(what, index, LinkAttribute::AfSpecUnspec(families))
}
