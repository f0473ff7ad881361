//! Routing policy rules.

use crate::conn::{CREATE, Request};
use crate::link::check_name;
use crate::wire::{self, Garbage, Message};
use crate::{Conn, Family, Result};
use ipnet::IpNet;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleHeader, RuleMessage};

/// Length of `struct fib_rule_hdr`.
const HEADER: usize = 12;

// linux/fib_rules.h; the libc crate has none of them.
const FRA_DST: u16 = 1;
const FRA_SRC: u16 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_OIFNAME: u16 = 17;
const FRA_PROTOCOL: u16 = 21;

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

    /// Adds; fails with Exists if the very same rule is there.
    pub fn add(&self) -> Request {
        self.request("add", libc::RTM_NEWRULE, CREATE)
    }

    /// Deletes the first rule that matches in all that is given here.
    pub fn delete(&self) -> Request {
        self.request("delete", libc::RTM_DELRULE, 0)
    }

    fn request(&self, verb: &str, kind: u16, flags: u16) -> Request {
        let what = format!("{verb} {self}");
        for name in self.iif.iter().chain(&self.oif) {
            if let Err(error) = check_name(name) {
                return Request::wrong(what, error);
            }
        }
        let length = |net: Option<IpNet>| net.map_or(0, |net| net.prefix_len());
        let mut message = RuleMessage::default();
        message.header = RuleHeader {
            family: self.family.code(),
            dst_len: length(self.dst),
            src_len: length(self.src),
            // Tables above 255 do not fit: the attribute counts then.
            table: u8::try_from(self.table).unwrap_or(libc::RT_TABLE_UNSPEC),
            action: RuleAction::ToTable,
            ..RuleHeader::default()
        };
        let attributes = &mut message.attributes;
        attributes.push(RuleAttribute::Priority(self.priority));
        attributes.push(RuleAttribute::Table(self.table));
        attributes.push(RuleAttribute::Protocol(self.protocol.into()));
        attributes.extend(self.src.map(|src| RuleAttribute::Source(src.network())));
        attributes.extend(
            self.dst
                .map(|dst| RuleAttribute::Destination(dst.network())),
        );
        if let Some((mark, mask)) = self.fwmark {
            attributes.push(RuleAttribute::FwMark(mark));
            attributes.push(RuleAttribute::FwMask(mask));
        }
        attributes.extend(self.iif.clone().map(RuleAttribute::Iifname));
        attributes.extend(self.oif.clone().map(RuleAttribute::Oifname));
        Request::new(what, kind, flags, &message)
    }

    /// From the body of an RTM_NEWRULE message; none if its action is another.
    pub(crate) fn parse(body: &[u8]) -> std::result::Result<Option<Rule>, Garbage> {
        let header = RuleHeader::parse(body)?;
        let Some(family) = Family::of_code(header.family) else {
            return Ok(None);
        };
        if header.action != RuleAction::ToTable {
            return Ok(None);
        }
        let net = |ip, length| {
            IpNet::new(ip, length).map_err(|_| Garbage(format!("prefix length {length} of {ip}")))
        };
        let mut rule = Rule::new(family, 0, header.table.into());
        rule.protocol = 0;
        let (mut mark, mut mask) = (None, u32::MAX);
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                FRA_SRC => rule.src = Some(net(attr.ip()?, header.src_len)?),
                FRA_DST => rule.dst = Some(net(attr.ip()?, header.dst_len)?),
                FRA_IIFNAME => rule.iif = Some(attr.text()),
                FRA_OIFNAME => rule.oif = Some(attr.text()),
                FRA_PRIORITY => rule.priority = attr.u32()?,
                FRA_TABLE => rule.table = attr.u32()?,
                FRA_FWMARK => mark = Some(attr.u32()?),
                FRA_FWMASK => mask = attr.u32()?,
                FRA_PROTOCOL => rule.protocol = attr.u8()?,
                _ => {}
            }
        }
        rule.fwmark = mark.map(|mark| (mark, mask));
        Ok(Some(rule))
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let family = match self.family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        write!(f, "{family} rule {} to table {}", self.priority, self.table)
    }
}

impl Conn {
    /// Rules with the action "look up a table"; others are not Sinabro's business.
    pub fn rules(&mut self, family: Family) -> Result<Vec<Rule>> {
        let mut message = RuleMessage::default();
        message.header.family = family.code();
        self.dump(
            "list rules",
            libc::RTM_GETRULE,
            &message,
            |message: &Message<'_>| match message.kind {
                libc::RTM_NEWRULE => Rule::parse(message.body),
                _ => Ok(None),
            },
        )
    }
}
