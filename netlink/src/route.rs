//! Routes.

use crate::conn::{CREATE, REPLACE, Request, malformed};
use crate::wire::{self, Attr, Garbage, Message, align, u16_at, u32_at};
use crate::{Conn, Family, Result};
use ipnet::IpNet;
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteVia,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Length of `struct rtmsg`.
const HEADER: usize = 12;
/// Length of `struct rtnexthop`.
const NEXT_HOP: usize = 8;

pub const TABLE_MAIN: u32 = libc::RT_TABLE_MAIN as u32;
pub const TABLE_LOCAL: u32 = libc::RT_TABLE_LOCAL as u32;

/// A route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub dst: IpNet,
    pub gateway: Option<IpAddr>,
    /// Index of the link it leaves by.
    pub oif: Option<u32>,
    /// Preferred source address.
    pub src: Option<IpAddr>,
    /// `libc::RT_SCOPE_*`; the kernel ignores it for IPv6.
    pub scope: u8,
    /// `libc::RTPROT_*` or one's own.
    pub protocol: u8,
    pub table: u32,
    /// The gateway counts as on the link even where no prefix of the link covers it.
    pub onlink: bool,
    /// 0 is the kernel's choice (IPv6: 1024).
    pub metric: u32,
    pub mtu: Option<u32>,
    /// `libc::RTN_*`.
    pub kind: u8,
    /// Seconds after which the kernel takes it away, IPv6 only. Not read back.
    pub lifetime: Option<u32>,
    /// Further next hops of a multipath route, after the one in `gateway` and `oif`. Read only.
    pub more_hops: Vec<Hop>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    pub gateway: Option<IpAddr>,
    pub oif: u32,
}

impl Route {
    /// A unicast route of the main table, protocol static.
    pub fn to(dst: IpNet) -> Route {
        Route {
            dst: dst.trunc(),
            gateway: None,
            oif: None,
            src: None,
            scope: libc::RT_SCOPE_UNIVERSE,
            protocol: libc::RTPROT_STATIC,
            table: TABLE_MAIN,
            onlink: false,
            metric: 0,
            mtu: None,
            kind: libc::RTN_UNICAST,
            lifetime: None,
            more_hops: Vec::new(),
        }
    }

    /// 0.0.0.0/0 or ::/0.
    pub fn default_of(family: Family) -> Route {
        Route::to(match family {
            Family::V4 => IpNet::new_assert(Ipv4Addr::UNSPECIFIED.into(), 0),
            Family::V6 => IpNet::new_assert(Ipv6Addr::UNSPECIFIED.into(), 0),
        })
    }

    /// A single address.
    pub fn to_host(address: IpAddr) -> Route {
        Route::to(address.into())
    }

    pub fn via(mut self, gateway: IpAddr) -> Route {
        self.gateway = Some(gateway);
        self
    }

    pub fn dev(mut self, oif: u32) -> Route {
        self.oif = Some(oif);
        self
    }

    pub fn src(mut self, src: IpAddr) -> Route {
        self.src = Some(src);
        self
    }

    pub fn scope_link(mut self) -> Route {
        self.scope = libc::RT_SCOPE_LINK;
        self
    }

    pub fn protocol(mut self, protocol: u8) -> Route {
        self.protocol = protocol;
        self
    }

    pub fn table(mut self, table: u32) -> Route {
        self.table = table;
        self
    }

    pub fn onlink(mut self) -> Route {
        self.onlink = true;
        self
    }

    pub fn metric(mut self, metric: u32) -> Route {
        self.metric = metric;
        self
    }

    pub fn mtu(mut self, mtu: u32) -> Route {
        self.mtu = Some(mtu);
        self
    }

    /// Packets to it are the host's own.
    pub fn local(mut self) -> Route {
        self.kind = libc::RTN_LOCAL;
        self.table(TABLE_LOCAL)
    }

    pub fn lifetime(mut self, seconds: u32) -> Route {
        self.lifetime = Some(seconds);
        self
    }

    pub fn family(&self) -> Family {
        Family::of(self.dst.addr())
    }

    /// Adds; fails with Exists if a route to the same prefix, table and metric is there.
    pub fn add(&self) -> Request {
        self.request("add", libc::RTM_NEWROUTE, CREATE)
    }

    /// Adds, or takes the place of the route to the same prefix, table and metric.
    pub fn replace(&self) -> Request {
        self.request("replace", libc::RTM_NEWROUTE, REPLACE)
    }

    /// Deletes the route to the same prefix and table whose protocol is the same too, as are
    /// gateway, link and metric where they are given.
    pub fn delete(&self) -> Request {
        self.request("delete", libc::RTM_DELROUTE, 0)
    }

    fn request(&self, verb: &str, kind: u16, flags: u16) -> Request {
        let deleting = kind == libc::RTM_DELROUTE;
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: self.family().code(),
            destination_prefix_length: self.dst.prefix_len(),
            source_prefix_length: 0,
            tos: 0,
            // Tables above 255 do not fit: the attribute counts then.
            table: u8::try_from(self.table).unwrap_or(libc::RT_TABLE_UNSPEC),
            protocol: self.protocol.into(),
            // For a delete "nowhere" means any (fib_table_delete).
            scope: if deleting {
                libc::RT_SCOPE_NOWHERE.into()
            } else {
                self.scope.into()
            },
            kind: self.kind.into(),
            flags: if self.onlink {
                RouteFlags::Onlink
            } else {
                RouteFlags::empty()
            },
        };
        let attributes = &mut message.attributes;
        attributes.push(RouteAttribute::Table(self.table));
        if self.dst.prefix_len() > 0 {
            attributes.push(RouteAttribute::Destination(self.dst.network().into()));
        }
        // The first hop alone would not match a multipath route.
        if self.more_hops.is_empty() {
            attributes.extend(self.gateway.map(|gateway| match (self.family(), gateway) {
                // RFC 5549: an IPv4 route may have an IPv6 gateway.
                (Family::V4, IpAddr::V6(gateway)) => RouteAttribute::Via(RouteVia::Inet6(gateway)),
                _ => RouteAttribute::Gateway(gateway.into()),
            }));
            attributes.extend(self.oif.map(RouteAttribute::Oif));
        }
        if self.metric != 0 {
            attributes.push(RouteAttribute::Priority(self.metric));
        }
        if !deleting {
            attributes.extend(self.src.map(|src| RouteAttribute::PrefSource(src.into())));
            attributes.extend(
                self.mtu
                    .map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])),
            );
            attributes.extend(self.lifetime.map(RouteAttribute::Expires));
        }
        Request::new(format!("{verb} {self}"), kind, flags, &message)
    }

    /// From the body of an RTM_NEWROUTE or RTM_DELROUTE message; none if it is of another family
    /// or a cached one.
    pub(crate) fn parse(body: &[u8]) -> std::result::Result<Option<Route>, Garbage> {
        let header = RouteHeader::parse(body)?;
        let Some(family) = Family::of_code(header.address_family) else {
            return Ok(None);
        };
        let mut route = Route {
            scope: header.scope.into(),
            protocol: header.protocol.into(),
            table: header.table.into(),
            onlink: header.flags.contains(RouteFlags::Onlink),
            kind: header.kind.into(),
            ..Route::default_of(family)
        };
        let mut dst = route.dst.addr();
        let mut hops = Vec::new();
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                libc::RTA_DST => dst = attr.ip()?,
                libc::RTA_GATEWAY => route.gateway = Some(attr.ip()?),
                RTA_VIA => route.gateway = via(&attr)?,
                libc::RTA_OIF => route.oif = Some(attr.u32()?),
                libc::RTA_PREFSRC => route.src = Some(attr.ip()?),
                libc::RTA_TABLE => route.table = attr.u32()?,
                libc::RTA_PRIORITY => route.metric = attr.u32()?,
                libc::RTA_METRICS => {
                    for metric in wire::attrs(attr.value) {
                        let metric = metric?;
                        if metric.kind == RTAX_MTU {
                            route.mtu = Some(metric.u32()?);
                        }
                    }
                }
                libc::RTA_MULTIPATH => hops = next_hops(attr.value)?,
                _ => {}
            }
        }
        if !hops.is_empty() {
            let first = hops.remove(0);
            route.gateway = first.gateway;
            route.oif = Some(first.oif);
            route.more_hops = hops;
        }
        let length = header.destination_prefix_length;
        if Family::of(dst) != family {
            return wire::garbage(format!("destination {dst} of the other family"));
        }
        route.dst = IpNet::new(dst, length)
            .map_err(|_| Garbage(format!("prefix length {length} of {dst}")))?;
        Ok(Some(route))
    }
}

// linux/rtnetlink.h; the libc crate has them for some C libraries only.
const RTA_VIA: u16 = 18;
const RTAX_MTU: u16 = 2;

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "route {}", self.dst)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(oif) = self.oif {
            write!(f, " dev #{oif}")?;
        }
        if self.table != TABLE_MAIN {
            write!(f, " table {}", self.table)?;
        }
        if self.metric != 0 {
            write!(f, " metric {}", self.metric)?;
        }
        Ok(())
    }
}

/// `struct rtvia`: a family and an address.
fn via(attr: &Attr<'_>) -> std::result::Result<Option<IpAddr>, Garbage> {
    let address = Attr {
        kind: attr.kind,
        value: attr.value.get(2..).unwrap_or_default(),
    };
    match u16_at(attr.value, 0).map(i32::from) {
        Some(libc::AF_INET | libc::AF_INET6) => address.ip().map(Some),
        Some(_) => Ok(None),
        None => wire::garbage("a gateway without a family"),
    }
}

/// An array of `struct rtnexthop`, each followed by its attributes.
fn next_hops(mut rest: &[u8]) -> std::result::Result<Vec<Hop>, Garbage> {
    let mut hops = Vec::new();
    while !rest.is_empty() {
        let (Some(length), Some(oif)) = (u16_at(rest, 0), u32_at(rest, 4)) else {
            return wire::garbage("a next hop cut short");
        };
        let length = usize::from(length);
        let Some(tail) = rest.get(NEXT_HOP..length) else {
            return wire::garbage(format!("a next hop of {length} bytes in {}", rest.len()));
        };
        let mut gateway = None;
        for attr in wire::attrs(tail) {
            let attr = attr?;
            match attr.kind {
                libc::RTA_GATEWAY => gateway = Some(attr.ip()?),
                RTA_VIA => gateway = via(&attr)?,
                _ => {}
            }
        }
        hops.push(Hop { gateway, oif });
        rest = rest.get(align(length)..).unwrap_or_default();
    }
    Ok(hops)
}

/// Which routes to list; absent means any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteFilter {
    pub family: Option<Family>,
    pub oif: Option<u32>,
    pub protocol: Option<u8>,
    pub table: Option<u32>,
}

impl RouteFilter {
    fn takes(&self, route: &Route) -> bool {
        self.family.is_none_or(|family| family == route.family())
            && self
                .protocol
                .is_none_or(|protocol| protocol == route.protocol)
            && self.table.is_none_or(|table| table == route.table)
            && self.oif.is_none_or(|oif| {
                route.oif == Some(oif) || route.more_hops.iter().any(|hop| hop.oif == oif)
            })
    }
}

impl Conn {
    /// Lists routes. A table that does not exist is an empty one; a link that does not exist is
    /// NotFound.
    pub fn routes(&mut self, filter: &RouteFilter) -> Result<Vec<Route>> {
        let mut message = RouteMessage::default();
        if let Some(family) = filter.family {
            message.header.address_family = family.code();
        }
        message.header.protocol = filter.protocol.unwrap_or(0).into();
        let attributes = &mut message.attributes;
        attributes.extend(filter.table.map(RouteAttribute::Table));
        attributes.extend(filter.oif.map(RouteAttribute::Oif));
        let listed = self.dump(
            "list routes",
            libc::RTM_GETROUTE,
            &message,
            |message: &Message<'_>| match message.kind {
                libc::RTM_NEWROUTE => {
                    Ok(Route::parse(message.body)?.filter(|route| filter.takes(route)))
                }
                _ => Ok(None),
            },
        );
        match listed {
            // A missing table is ENOENT, a missing link ENODEV.
            Err(error) if error.errno() == Some(nix::errno::Errno::ENOENT) => Ok(Vec::new()),
            other => other,
        }
    }

    /// The default route of the main table with the lowest metric.
    pub fn default_route(&mut self, family: Family) -> Result<Option<Route>> {
        Ok(self.default_routes(family)?.into_iter().next())
    }

    /// The default routes of the main table that have the lowest metric: several of IPv6 where
    /// several routers advertise themselves.
    pub fn default_routes(&mut self, family: Family) -> Result<Vec<Route>> {
        let mut routes = self.routes(&RouteFilter {
            family: Some(family),
            table: Some(TABLE_MAIN),
            ..RouteFilter::default()
        })?;
        routes.retain(|route| route.dst.prefix_len() == 0 && route.kind == libc::RTN_UNICAST);
        let lowest = routes.iter().map(|route| route.metric).min();
        routes.retain(|route| Some(route.metric) == lowest);
        Ok(routes)
    }

    /// The route that a packet to `dst` would take now. Unreachable if there is none.
    pub fn route_get(&mut self, dst: IpAddr) -> Result<Route> {
        let what = format!("look up the route to {dst}");
        // Else the answer says "main" whatever the table; IPv6 always names the table.
        let flags = match dst {
            IpAddr::V4(_) => RouteFlags::LookupTable,
            IpAddr::V6(_) => RouteFlags::empty(),
        };
        self.look_up(what, dst, None, None, flags)
    }

    /// The same of a packet that is to leave by a link. Where no route leads there by it, IPv4 takes
    /// what is asked for to be on the link.
    pub fn route_get_by(&mut self, dst: IpAddr, oif: u32) -> Result<Route> {
        let what = format!("look up the route to {dst} by link #{oif}");
        self.look_up(what, dst, None, Some(oif), RouteFlags::empty())
    }

    /// The entry of the tables that a packet to `dst` is routed by now, as [`Conn::routes`] would
    /// list it: found without a look at any other. Unreachable if there is none.
    pub fn route_entry(&mut self, dst: IpAddr) -> Result<Route> {
        let what = format!("look up the entry for {dst} in the routing tables");
        self.look_up(what, dst, None, None, RouteFlags::FibMatch)
    }

    /// The same of a packet that this host sends from one of its addresses, which rules may send another way.
    pub fn route_entry_from(&mut self, src: IpAddr, dst: IpAddr) -> Result<Route> {
        let what = format!("look up the entry for {dst} from {src} in the routing tables");
        self.look_up(what, dst, Some(src), None, RouteFlags::FibMatch)
    }

    fn look_up(
        &mut self,
        what: String,
        dst: IpAddr,
        src: Option<IpAddr>,
        oif: Option<u32>,
        flags: RouteFlags,
    ) -> Result<Route> {
        let mut message = RouteMessage::default();
        message.header.address_family = Family::of(dst).code();
        let host = IpNet::from(dst).prefix_len();
        message.header.destination_prefix_length = host;
        message.header.source_prefix_length = src.map_or(0, |_| host);
        message.header.flags = flags;
        message.attributes = vec![RouteAttribute::Destination(dst.into())];
        let attributes = &mut message.attributes;
        attributes.extend(src.map(|src| RouteAttribute::Source(src.into())));
        attributes.extend(oif.map(RouteAttribute::Oif));
        let body = self.query(Request::get(what.clone(), libc::RTM_GETROUTE, &message))?;
        match Route::parse(&body) {
            Ok(Some(route)) => Ok(route),
            Ok(None) => Err(malformed(what, Garbage("not an IP route".into()))),
            Err(garbage) => Err(malformed(what, garbage)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::in_fresh;
    use crate::{bridge, conn};
    use netlink_packet_route::route::{RouteNextHop, RouteNextHopFlags};

    /// One that Sinabro never makes, but finds on nodes.
    fn multipath(dst: IpNet, hops: &[Hop]) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: Family::of(dst.addr()).code(),
            destination_prefix_length: dst.prefix_len(),
            table: libc::RT_TABLE_MAIN,
            protocol: libc::RTPROT_STATIC.into(),
            kind: libc::RTN_UNICAST.into(),
            ..RouteHeader::default()
        };
        let hops = hops.iter().map(|hop| {
            let mut next = RouteNextHop::default();
            next.flags = RouteNextHopFlags::Onlink;
            next.interface_index = hop.oif;
            let gateway = hop.gateway.map(|ip| RouteAttribute::Gateway(ip.into()));
            next.attributes.extend(gateway);
            next
        });
        message.attributes = vec![
            RouteAttribute::Destination(dst.network().into()),
            RouteAttribute::MultiPath(hops.collect()),
        ];
        message
    }

    #[test]
    fn a_multipath_route_lists_all_its_hops_and_can_be_deleted() {
        for (dst, one, two) in [
            ("10.9.0.0/16", "192.0.2.1", "192.0.2.2"),
            ("fd09::/64", "fe80::1", "fe80::2"),
        ] {
            in_fresh(|| {
                let mut conn = Conn::new().unwrap();
                let mut hop = |name: &str, gateway: &str| {
                    conn.execute(bridge::create(name)).unwrap();
                    Hop {
                        gateway: Some(gateway.parse().unwrap()),
                        oif: conn.link_by_name(name).unwrap().index,
                    }
                };
                let hops = [hop("br1", one), hop("br2", two)];
                let dst: IpNet = dst.parse().unwrap();
                let message = multipath(dst, &hops);
                let add = Request::new("add".into(), libc::RTM_NEWROUTE, conn::CREATE, &message);
                conn.execute(add).unwrap();

                let by_second = RouteFilter {
                    oif: Some(hops[1].oif),
                    protocol: Some(libc::RTPROT_STATIC),
                    ..RouteFilter::default()
                };
                let found = conn.routes(&by_second).unwrap();
                assert_eq!(found.len(), 1, "{found:?}");
                assert_eq!(found[0].dst, dst);
                assert_eq!(
                    (found[0].gateway, found[0].oif),
                    (hops[0].gateway, Some(hops[0].oif))
                );
                assert_eq!(found[0].more_hops, hops[1..]);

                conn.execute(found[0].delete()).unwrap();
                assert_eq!(conn.routes(&by_second).unwrap(), []);
            });
        }
    }
}
