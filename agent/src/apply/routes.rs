//! Routes into the tunnel.
//!
//! A route is Sinabro's by its protocol. A new one is added, not replaced into place: where
//! somebody else's route has the prefix, the kernel refuses and the refusal is reported.

use super::reconcile::Table;
use crate::plan::RouteSpec;
use ipnet::IpNet;
use sinabro_common::names::ROUTE_PROTOCOL;
use sinabro_netlink::{
    Conn, Family, Request, Result,
    route::{Route, RouteFilter, TABLE_MAIN},
};

/// Metric the kernel gives an IPv6 route without one (IP6_RT_PRIO_USER).
const METRIC_V6: u32 = 1024;

/// Sinabro's routes. Those of other links (pods) are listed, so that a prefix that moves from
/// one to the other is replaced, but never removed.
#[derive(Clone, Copy, Debug)]
pub struct Routes {
    pub link: u32,
}

impl Table for Routes {
    type Key = IpNet;
    type Want = RouteSpec;
    type Have = Route;

    fn list(&self, conn: &mut Conn) -> Result<Vec<(IpNet, Route)>> {
        let routes = ours(conn)?;
        Ok(routes.into_iter().map(|r| (r.dst, r)).collect())
    }

    fn same(&self, _: &IpNet, want: &RouteSpec, have: &Route) -> bool {
        have.gateway == Some(want.gateway)
            && have.src == Some(want.source)
            && have.oif == Some(self.link)
            && have.protocol == ROUTE_PROTOCOL
            && have.kind == libc::RTN_UNICAST
            && have.metric == default_metric(have)
            && have.more_hops.is_empty()
    }

    fn ours(&self, have: &Route) -> bool {
        have.oif == Some(self.link) && have.protocol == ROUTE_PROTOCOL
    }

    fn put(&self, key: &IpNet, want: &RouteSpec, replaces: bool) -> Request {
        let route = self.entry(key, want);
        if replaces {
            route.replace()
        } else {
            route.add()
        }
    }

    fn remove(&self, _: &IpNet, have: &Route) -> Request {
        have.delete()
    }

    fn entry(&self, key: &IpNet, want: &RouteSpec) -> Route {
        Route::to(*key)
            .via(want.gateway)
            .dev(self.link)
            .onlink()
            .src(want.source)
            .protocol(ROUTE_PROTOCOL)
    }
}

/// All routes of Sinabro's protocol.
///
/// # Errors
/// Those of the dump.
pub fn ours(conn: &mut Conn) -> Result<Vec<Route>> {
    conn.routes(&RouteFilter {
        protocol: Some(ROUTE_PROTOCOL),
        table: Some(TABLE_MAIN),
        ..RouteFilter::default()
    })
}

/// What a route's metric is if nobody asked for one.
pub fn default_metric(route: &Route) -> u32 {
    match route.family() {
        Family::V4 => 0,
        Family::V6 => METRIC_V6,
    }
}
