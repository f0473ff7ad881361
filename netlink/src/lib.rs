//! Typed, blocking access to the kernel's network configuration.
//!
//! - [`conn`]: one socket in one network namespace; sends requests, alone or many in one call;
//! - [`error`]: kernel refusals as variants, decided by errno alone;
//! - [`link`], [`veth`], [`vxlan`], [`bridge`], [`vlan`], [`bond`], [`wireguard`]: interfaces;
//! - [`addr`], [`route`], [`rule`], [`neigh`], [`fdb`]: what hangs on them;
//! - [`nft`], [`xtables`], [`tc`], [`conntrack`]: firewalls and filters, anybody's, to be looked at, and connections;
//! - [`sock_diag`]: the namespace's sockets; [`xfrm`]: whether IPsec has policies;
//! - [`monitor`], [`changes`]: what the kernel says has changed;
//! - [`ipvs`]: services of the kernel's load balancer;
//! - [`netns`]: network namespaces, entered on threads of their own;
//! - [`sysctl`]: settings below /proc/sys.
//!
//! A noun is a plain struct (`Route`, `Addr`, …). Its verbs (`add`, `replace`, `delete`) make a
//! [`Request`]; a [`Conn`] executes it. So several can go to the kernel in one system call:
//!
//! ```no_run
//! use sinabro_netlink::{Conn, addr::Addr, link, route::Route};
//! # fn main() -> sinabro_netlink::Result<()> {
//! let mut conn = Conn::new()?;
//! let eth0 = conn.link_by_name("eth0")?.index;
//! conn.execute_all([
//!     Addr::new(eth0, "fd00::5/128".parse().unwrap()).nodad().add(),
//!     Route::to("fd00:1::/64".parse().unwrap()).via("fd00::1".parse().unwrap()).dev(eth0).onlink().add(),
//!     link::set_up(eth0),
//! ])?;
//! # Ok(()) }
//! ```

pub mod addr;
pub mod bond;
pub mod bridge;
pub mod changes;
pub mod conn;
pub mod conntrack;
pub mod distrust;
pub mod error;
pub mod fdb;
mod generic;
pub mod ipvs;
pub mod link;
pub mod monitor;
pub mod neigh;
pub mod netns;
pub mod nft;
mod nft_addresses;
mod nft_ports;
pub mod route;
pub mod rule;
pub mod sock_diag;
pub mod sysctl;
pub mod tc;
pub mod veth;
pub mod vlan;
pub mod vxlan;
mod wire;
pub mod wireguard;
pub mod xfrm;
pub mod xtables;

pub use conn::{Conn, Request};
pub use error::{Error, Result, ResultExt};
pub use link::{Link, Mac};
pub use monitor::{Event, Monitor};
pub use netns::NetNs;

use netlink_packet_route::AddressFamily;

/// An IP address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];

    pub fn of(address: std::net::IpAddr) -> Family {
        match address {
            std::net::IpAddr::V4(_) => Family::V4,
            std::net::IpAddr::V6(_) => Family::V6,
        }
    }

    pub(crate) fn code(self) -> AddressFamily {
        match self {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        }
    }

    pub(crate) fn of_code(code: AddressFamily) -> Option<Family> {
        match code {
            AddressFamily::Inet => Some(Family::V4),
            AddressFamily::Inet6 => Some(Family::V6),
            _ => None,
        }
    }
}
