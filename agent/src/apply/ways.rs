//! By which way packets between pods go to other nodes, and why not past the stack.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

/// What a look at the kernel's routes found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ways {
    /// Why no node is reached past the stack, if none is,
    pub none: Option<Why>,
    /// and why these are not, by their tunnel addresses.
    pub not: BTreeMap<IpAddr, Why>,
    /// These are reached through tunnels as long as nothing gets to them without.
    pub tried: BTreeSet<IpAddr>,
}

impl Default for Ways {
    /// Before the first look.
    fn default() -> Self {
        Self::none(Why::NotYet)
    }
}

impl Ways {
    pub fn none(why: Why) -> Self {
        Self {
            none: Some(why),
            not: BTreeMap::new(),
            tried: BTreeSet::new(),
        }
    }
}

/// Why packets go by the kernel's routes and VXLAN device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    NotYet,
    /// `dataPath: kernel`.
    Setting,
    /// Those that run do not send past the stack.
    Programs,
    /// What the kernel has that only its stack can do, such as rules of others.
    BesideProxy(String),
    NoUplink,
    SeveralUplinks,
    /// Another header than Ethernet's, or none.
    OtherHeader,
    /// Tunnels over IPv6 by programs that may know of none.
    EarlierPrograms,
    /// Over IPv6 what is sent past the stack has no checksum, and that node has not said that it takes that.
    ZeroChecksum,
    /// It has, but does not answer such.
    ZeroChecksumLost,
    /// The kernel has no program put a packet into a tunnel.
    Kernel,
    Ipsec,
    /// Pods have limits that the stack alone keeps.
    Bandwidth,
    /// Whether IPsec has policies: what the kernel said.
    IpsecUnknown(String),
    /// To that node: what the kernel said.
    NoRoute(String),
    /// It is none that leads to one machine.
    OtherRoute,
    /// Another than the uplink.
    OtherDevice,
    SeveralNextHops,
    /// The next hop's is not the node's.
    OtherFamily,
}

impl fmt::Display for Why {
    /// In words that lead to the next step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotYet => "not looked up yet",
            Self::Setting => "the setting dataPath is kernel",
            Self::Programs => "the programs do not redirect, see mode programs of status",
            Self::EarlierPrograms => {
                "programs of an earlier version run, see mode programs of status"
            }
            Self::BesideProxy(why) => return f.write_str(why),
            Self::NoUplink => "no uplink, see the setting uplinks",
            Self::SeveralUplinks => "several uplinks, see the setting uplinks",
            Self::OtherHeader => "the uplink is not Ethernet",
            Self::ZeroChecksum => "its tunnels take no UDP over IPv6 without a checksum",
            Self::ZeroChecksumLost => "no answers to UDP over IPv6 without a checksum",
            Self::Kernel => "this node's Linux is older than 5.13",
            Self::Bandwidth => "the plugin bandwidth limits by queues of the stack",
            Self::Ipsec => "IPsec has policies, see ip xfrm policy",
            Self::IpsecUnknown(error) => {
                return write!(f, "whether IPsec has policies is not known: {error}");
            }
            Self::NoRoute(error) => return f.write_str(error),
            Self::OtherRoute => "the route to it is not unicast, see ip route get",
            Self::OtherDevice => "the route to it is not by the uplink, see ip route get",
            Self::SeveralNextHops => "the route to it has several next hops, see ip route get",
            Self::OtherFamily => "the route to it has a next hop of the other IP version",
        })
    }
}
