//! Permanent neighbours of a link: the peers' gateways on the VXLAN device.

use super::reconcile::Table;
use sinabro_common::api::Mac;
use sinabro_netlink::{Conn, Request, Result, neigh::Neigh};
use std::net::IpAddr;

/// Neighbours of one device. What the kernel learnt by itself is left alone.
#[derive(Clone, Copy, Debug)]
pub struct Neighbours {
    pub link: u32,
}

impl Table for Neighbours {
    type Key = IpAddr;
    type Want = Mac;
    type Have = Neigh;

    fn list(&self, conn: &mut Conn) -> Result<Vec<(IpAddr, Neigh)>> {
        let neighs = conn.neighs(self.link)?;
        Ok(neighs.into_iter().map(|n| (n.address, n)).collect())
    }

    fn same(&self, _: &IpAddr, want: &Mac, have: &Neigh) -> bool {
        have.is_permanent() && have.mac == Some(want.0)
    }

    fn ours(&self, have: &Neigh) -> bool {
        have.is_permanent()
    }

    fn put(&self, key: &IpAddr, want: &Mac, _: bool) -> Request {
        self.entry(key, want).replace()
    }

    fn remove(&self, _: &IpAddr, have: &Neigh) -> Request {
        have.delete()
    }

    fn entry(&self, key: &IpAddr, want: &Mac) -> Neigh {
        Neigh::new(self.link, *key, want.0)
    }
}
