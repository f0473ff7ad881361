//! Routes.

use crate::{Conn, Family, Request, Result};
use ipnet::IpNet;
use std::net::IpAddr;

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
            more_hops: Vec::new(),
        }
    }

    /// 0.0.0.0/0 or ::/0.
    pub fn default_of(family: Family) -> Route {
        let _ = family;
        unimplemented!()
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

    pub fn family(&self) -> Family {
        Family::of(self.dst.addr())
    }

    /// Adds; fails with Exists if a route to the same prefix, table and metric is there.
    pub fn add(&self) -> Request {
        unimplemented!()
    }

    pub fn replace(&self) -> Request {
        unimplemented!()
    }

    pub fn delete(&self) -> Request {
        unimplemented!()
    }
}

/// Which routes to list; absent means any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteFilter {
    pub family: Option<Family>,
    pub oif: Option<u32>,
    pub protocol: Option<u8>,
    pub table: Option<u32>,
}

impl Conn {
    pub fn routes(&mut self, filter: &RouteFilter) -> Result<Vec<Route>> {
        let _ = filter;
        unimplemented!()
    }

    /// The default route of the main table with the lowest metric.
    pub fn default_route(&mut self, family: Family) -> Result<Option<Route>> {
        let _ = family;
        unimplemented!()
    }

    /// The route that a packet to `dst` would take now.
    pub fn route_get(&mut self, dst: IpAddr) -> Result<Route> {
        let _ = dst;
        unimplemented!()
    }
}
