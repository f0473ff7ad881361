//! The pod's link: a veth pair, routed on both sides.
//!
//! The pod's side has its addresses with host prefixes, link-local gateways with permanent
//! neighbour entries, and default routes through them; the host's side has a route and a
//! permanent neighbour entry for each address. So nothing on the link is ever asked for or
//! learnt. Everything but the pair itself is an [`Item`] in a list: ADD makes the list, CHECK
//! compares it with the kernel.
//!
//! The pod's side cannot be up from the start: the kernel would open it before it is joined to
//! the other (ENOTCONN). So the pod's list begins with raising it.
//!
//! Three exchanges with the kernel make all of it: the pair, the pod's list, the host's list.

use crate::error::{Code, Error, chain};
use ipnet::IpNet;
use nix::libc::RTN_LOCAL;
use sinabro_common::{api::Attachment, names};
use sinabro_netlink::{
    Conn, Family, NetNs, Request, ResultExt, addr::Addr, link, neigh::Neigh, route::Route, sysctl,
    veth::Veth,
};
use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

type Netlink = sinabro_netlink::Error;

/// One thing on a link.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// The link of this index is up.
    Up(u32),
    Addr(Addr),
    Neigh(Neigh),
    Route(Route),
}

impl Item {
    fn family(&self) -> Option<Family> {
        match self {
            Self::Up(_) => None,
            Self::Addr(addr) => Some(Family::of(addr.net.addr())),
            Self::Neigh(neigh) => Some(Family::of(neigh.address)),
            Self::Route(route) => Some(route.family()),
        }
    }

    fn make(&self) -> Request {
        match self {
            &Self::Up(index) => link::set_up(index),
            Self::Addr(addr) => addr.add(),
            // Replaced: a new link has none, unless this is the second try.
            Self::Neigh(neigh) => neigh.replace(),
            // The pod's first default route wins; a host route of a leased address is ours.
            Self::Route(route) if route.gateway.is_some() => route.add(),
            Self::Route(route) => route.replace(),
        }
    }
}

/// What the pod's side has, `index` being its index.
pub fn pod_items(attachment: &Attachment, index: u32) -> Vec<Item> {
    let mut items = Vec::with_capacity(7);
    items.push(Item::Up(index));
    for (&address, &gateway) in attachment.addresses.iter().zip(&attachment.gateways) {
        items.push(Item::Addr(Addr::new(index, IpNet::from(address)).nodad()));
        items.push(Item::Neigh(Neigh::new(
            index,
            gateway,
            attachment.host_mac.0,
        )));
        items.push(Item::Route(default_route(gateway, index)));
    }
    items
}

/// What the host's side has, `index` being its index.
pub fn host_items(attachment: &Attachment, index: u32) -> Vec<Item> {
    let mut items = Vec::with_capacity(4);
    for &address in &attachment.addresses {
        items.push(Item::Neigh(Neigh::new(index, address, attachment.mac.0)));
        items.push(Item::Route(
            Route::to_host(address)
                .dev(index)
                .scope_link()
                .protocol(names::ROUTE_PROTOCOL),
        ));
    }
    items
}

fn default_route(gateway: IpAddr, index: u32) -> Route {
    Route::default_of(Family::of(gateway))
        .via(gateway)
        .dev(index)
        .onlink()
}

/// A pair that is ready.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// Index of the host's side.
    pub host_index: u32,
    /// Default routes made in the pod, which are none where it had one already.
    pub routes: Vec<Route>,
}

/// Makes the pair and all that hangs on it. On an error some of it may be there: deleting the
/// host's side takes it all away.
///
/// # Errors
/// Code 103 if the pod has an interface of that name, 104 if the kernel refuses anything else.
pub fn make(
    host: &mut Conn,
    pod: &mut Conn,
    netns: &NetNs,
    attachment: &Attachment,
    ifname: &str,
) -> Result<Made, Error> {
    let veth = Veth {
        name: &attachment.link,
        mac: attachment.host_mac.0,
        mtu: attachment.mtu,
        peer_name: ifname,
        peer_mac: attachment.mac.0,
        peer_netns: Some(netns),
    };
    let pair = make_pair(host, &veth)?;
    let pod_index = pair
        .peer
        .ok_or_else(|| Error::new(Code::Kernel, format!("link {} has no peer", veth.name)))?;

    let enable = || {
        netns
            .run(|| enable_ipv6(ifname))
            .and_then(std::convert::identity)
    };
    let taken = apply(pod, &pod_items(attachment, pod_index), &enable).map_err(|error| {
        Error::new(
            Code::Kernel,
            format!("interface {ifname} in the pod cannot be set up"),
        )
        .details(chain(&error))
    })?;

    let enable = || enable_ipv6(veth.name);
    apply(host, &host_items(attachment, pair.index), &enable).map_err(|error| {
        Error::new(Code::Kernel, format!("link {} cannot be set up", veth.name))
            .details(chain(&error))
    })?;

    let routes = attachment
        .gateways
        .iter()
        .map(|&gateway| default_route(gateway, pod_index))
        .filter(|route| !taken.contains(&route.family()))
        .collect();
    Ok(Made {
        host_index: pair.index,
        routes,
    })
}

fn make_pair(host: &mut Conn, veth: &Veth) -> Result<sinabro_netlink::Link, Error> {
    let refused = |error: Netlink| {
        let what = format!("link {} with {} in the pod", veth.name, veth.peer_name);
        Error::new(Code::Kernel, format!("{what} cannot be made")).details(chain(&error))
    };
    match host.create_veth(veth) {
        Err(Netlink::Exists(_)) => {}
        other => return other.map_err(refused),
    }
    // One of the two names is taken. The host's is this attachment's own: what has it is left
    // from an ADD that was cut short.
    host.execute(link::delete_by_name(veth.name))
        .ignore_not_found()
        .map_err(refused)?;
    host.create_veth(veth).map_err(|error| match error {
        Netlink::Exists(_) => exists(veth.peer_name),
        other => refused(other),
    })
}

/// Waits until the pod can receive at its addresses. The kernel makes an IPv6 address's local
/// route later, on a work queue that contends for the same lock as every link being made. It is
/// there by the time this is called, unless the node is very busy; so the wait is short and its
/// end no error.
pub fn wait_usable(pod: &mut Conn, attachment: &Attachment) {
    let deadline = Instant::now() + Duration::from_secs(1);
    for &address in attachment.addresses.iter().filter(|a| a.is_ipv6()) {
        let mut local = || {
            let route = pod.route_get(address);
            route.is_ok_and(|route| route.kind == RTN_LOCAL)
        };
        while !local() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Code 103.
pub fn exists(ifname: &str) -> Error {
    Error::new(
        Code::InterfaceExists,
        format!("the pod has an interface {ifname} already"),
    )
    .details("DEL this attachment first, or ask for another CNI_IFNAME")
}

/// Makes a list in one exchange. Returns the families whose default route was there already.
fn apply(
    conn: &mut Conn,
    items: &[Item],
    enable_ipv6: &dyn Fn() -> Result<(), Netlink>,
) -> Result<Vec<Family>, Netlink> {
    let mut taken = Vec::new();
    let mut again = Vec::new();
    let mut disabled = false;
    let outcomes = conn.execute_each(items.iter().map(Item::make));
    for (item, outcome) in items.iter().zip(outcomes) {
        match outcome {
            Err(error) if item.family() == Some(Family::V6) && !error.is_exists() => {
                // What the kernel says of an address or route on a link without IPv6. Others
                // fail in other ways for the same reason.
                disabled |= matches!(error, Netlink::Permission(_));
                again.push((item, error));
            }
            other => settle(item, other, &mut taken)?,
        }
    }
    if disabled {
        enable_ipv6()?;
        let outcomes = conn.execute_each(again.iter().map(|(item, _)| item.make()));
        for ((item, _), outcome) in again.into_iter().zip(outcomes) {
            settle(item, outcome, &mut taken)?;
        }
    } else if let Some((_, error)) = again.into_iter().next() {
        return Err(error);
    }
    Ok(taken)
}

fn settle(
    item: &Item,
    outcome: Result<(), Netlink>,
    taken: &mut Vec<Family>,
) -> Result<(), Netlink> {
    match (item, outcome) {
        (Item::Route(route), Err(Netlink::Exists(_))) => {
            taken.push(route.family());
            Ok(())
        }
        (_, outcome) => outcome,
    }
}

fn enable_ipv6(link: &str) -> Result<(), Netlink> {
    sysctl::write(&["net", "ipv6", "conf", link, "disable_ipv6"], "0")
}
