//! Routing policy rules.

use crate::{Conn, Family, Request, Result};
use ipnet::IpNet;

/// A rule that sends matching packets to a routing table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub family: Family,
    pub priority: u32,
    pub table: u32,
    pub src: Option<IpNet>,
    pub dst: Option<IpNet>,
    /// Mark and mask.
    pub fwmark: Option<(u32, u32)>,
    pub iif: Option<String>,
    pub oif: Option<String>,
    pub protocol: u8,
}

impl Rule {
    pub fn new(family: Family, priority: u32, table: u32) -> Rule {
        Rule {
            family,
            priority,
            table,
            src: None,
            dst: None,
            fwmark: None,
            iif: None,
            oif: None,
            protocol: libc::RTPROT_STATIC,
        }
    }

    pub fn add(&self) -> Request {
        unimplemented!()
    }

    pub fn delete(&self) -> Request {
        unimplemented!()
    }
}

impl Conn {
    /// Rules with the action "look up a table"; others are not Sinabro's business.
    pub fn rules(&mut self, family: Family) -> Result<Vec<Rule>> {
        let _ = family;
        unimplemented!()
    }
}
