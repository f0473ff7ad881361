//! Addresses of the VXLAN device.

use super::reconcile::Table;
use ipnet::IpNet;
use sinabro_netlink::{Conn, Request, Result, addr::Addr};
use std::net::IpAddr;

/// Addresses of one device, all of them Sinabro's but the kernel's own link-local one.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    pub link: u32,
}

impl Table for Addresses {
    type Key = IpNet;
    type Want = ();
    type Have = Addr;

    fn list(&self, conn: &mut Conn) -> Result<Vec<(IpNet, Addr)>> {
        let addrs = conn.addrs(Some(self.link))?;
        Ok(addrs.into_iter().map(|addr| (addr.net, addr)).collect())
    }

    fn same(&self, _: &IpNet, (): &(), have: &Addr) -> bool {
        // A tentative or failed address (RFC 4862 5.4) cannot be a route's source.
        have.flags & (libc::IFA_F_TENTATIVE | libc::IFA_F_DADFAILED) == 0
    }

    fn ours(&self, have: &Addr) -> bool {
        match have.net.addr() {
            IpAddr::V4(_) => true,
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        }
    }

    fn put(&self, key: &IpNet, (): &(), _: bool) -> Request {
        self.entry(key, &()).replace()
    }

    fn remove(&self, _: &IpNet, have: &Addr) -> Request {
        have.delete()
    }

    fn entry(&self, key: &IpNet, (): &()) -> Addr {
        Addr::new(self.link, *key).nodad()
    }
}
