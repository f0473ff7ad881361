//! Forwarding entries of the VXLAN device: which peer has which MAC.

use super::reconcile::Table;
use sinabro_common::api::Mac;
use sinabro_netlink::{Conn, Request, Result, fdb::Fdb};
use std::net::IpAddr;

/// Entries of one device, all of them Sinabro's: the device learns none.
#[derive(Clone, Copy, Debug)]
pub struct Forwarding {
    pub link: u32,
}

impl Table for Forwarding {
    type Key = Mac;
    type Want = IpAddr;
    type Have = Fdb;

    fn list(&self, conn: &mut Conn) -> Result<Vec<(Mac, Fdb)>> {
        let entries = conn.fdb(self.link)?;
        Ok(entries.into_iter().map(|e| (Mac(e.mac), e)).collect())
    }

    fn same(&self, _: &Mac, want: &IpAddr, have: &Fdb) -> bool {
        have.dst == *want
    }

    fn ours(&self, _: &Fdb) -> bool {
        true
    }

    fn put(&self, key: &Mac, want: &IpAddr, _: bool) -> Request {
        self.entry(key, want).replace()
    }

    fn remove(&self, _: &Mac, have: &Fdb) -> Request {
        have.delete()
    }

    fn entry(&self, key: &Mac, want: &IpAddr) -> Fdb {
        Fdb {
            link: self.link,
            mac: key.0,
            dst: *want,
        }
    }
}
