//! The pod's link: a veth pair, routed on both sides.
//!
//! The pod's side has its addresses with host prefixes, link-local gateways with permanent
//! neighbour entries, and default routes through them; the host's side has a route and a
//! permanent neighbour entry for each address. So nothing on the link is ever asked for or
//! learnt.
//!
//! What stays on the node knows no segment size but the link's ([`sinabro_common::api::LocalMtu`]): the link's MTU is
//! large, routes to the node's own addresses have none, and the default routes have the MTU of all
//! other ways. Everything but the pair itself is an [`Item`] in a list: ADD makes the list, CHECK
//! compares it with the kernel.
//!
//! The pod's side cannot be up from the start: the kernel would open it before it is joined to
//! the other (ENOTCONN). So the pod's list begins with raising it.
//!
//! Five exchanges with the kernel make all of it: the pair, a qdisc for programs, the host side's
//! settings, the pod's list, the host's list. The settings make the node deaf to routers in the pod
//! ([`sinabro_netlink::distrust`]); that a pod sends none of their messages is the data path's to
//! see.
//!
//! Two things the kernel itself would do later, on work queues that a busy node may keep waiting
//! for seconds: make an IPv6 address's local route (see [`local_route`]) and set the host side's
//! queue to work (see [`wait_usable`]). Until then it drops packets without a word, so neither
//! is left to it.

use crate::error::{Code, Error, chain};
use ipnet::IpNet;
use sinabro_common::{api::Attachment, names};
use sinabro_netlink::{
    Conn, Family, NetNs, Request, ResultExt, addr::Addr, distrust::distrust, link, neigh::Neigh,
    route::Route, sysctl, tc, veth::Veth,
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

/// MTU of both sides.
pub fn link_mtu(attachment: &Attachment) -> u32 {
    let local = attachment.local.as_ref();
    local.map_or(attachment.mtu, |local| local.mtu)
}

/// What the pod's side has, `index` being its index.
pub fn pod_items(attachment: &Attachment, index: u32) -> Vec<Item> {
    let mut items = Vec::with_capacity(11);
    items.push(Item::Up(index));
    for (&address, &gateway) in attachment.addresses.iter().zip(&attachment.gateways) {
        items.push(Item::Addr(Addr::new(index, IpNet::from(address)).nodad()));
        items.push(Item::Neigh(Neigh::new(
            index,
            gateway,
            attachment.host_mac.0,
        )));
        items.extend(routes(attachment, gateway, index).map(Item::Route));
    }
    items
}

/// The pod's routes by one gateway: to everything, then to what may be larger.
fn routes(
    attachment: &Attachment,
    gateway: IpAddr,
    index: u32,
) -> impl Iterator<Item = Route> + use<'_> {
    let family = Family::of(gateway);
    let by_gateway = move |route: Route| route.via(gateway).dev(index).onlink();
    let default = match &attachment.local {
        Some(_) => Route::default_of(family).mtu(attachment.mtu),
        None => Route::default_of(family),
    };
    let local = attachment
        .local
        .iter()
        .flat_map(|local| &local.destinations);
    let local = local.filter(move |net| Family::of(net.addr()) == family);
    [default]
        .into_iter()
        .chain(local.map(|&net| Route::to(net)))
        .map(by_gateway)
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

/// How long the kernel has for a local route of its own. It needs microseconds, or seconds on a
/// node that is very busy.
const LOCAL_ROUTE_SECONDS: u32 = 600;

/// What lets the pod receive at an IPv6 address at once.
///
/// The kernel adds an address's local route not when it adds the address (inet6_addr_add) but in
/// addrconf_dad_work, also if no duplicates are looked for. That is one queue for all addresses
/// of all namespaces, whose every entry waits for the lock that every link being made needs too.
/// This route does the same meanwhile. The kernel's has a better metric, so both can be there;
/// this one expires, so that the pod does not keep an address that is taken from its link.
fn local_route(address: IpAddr, index: u32) -> Route {
    Route::to_host(address)
        .dev(index)
        .local()
        .protocol(names::ROUTE_PROTOCOL)
        .lifetime(LOCAL_ROUTE_SECONDS)
}

/// A pair that is ready.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// Index of the host's side.
    pub host_index: u32,
    /// Routes made in the pod, none of a family where it had a default route already.
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
        mtu: link_mtu(attachment),
        peer_name: ifname,
        peer_mac: attachment.mac.0,
        peer_netns: Some(netns),
    };
    let pair = make_pair(host, &veth)?;
    // For the agent's programs, which makes it itself if it is missing. The first filter of a qdisc
    // waits until an RCU grace period has passed since that was made (mini_qdisc_pair_swap), and
    // holds the lock that all links need: by the time it comes, one will have passed.
    if attachment.clsact {
        let _ = host.execute(tc::add_clsact(pair.index));
    }
    // While the pod's side is down: nothing comes from there yet.
    distrust(host, pair.index, veth.name).map_err(|error| {
        Error::new(Code::Kernel, format!("link {} cannot be set up", veth.name))
            .details(chain(&error))
    })?;
    let pod_index = pair
        .peer
        .ok_or_else(|| Error::new(Code::Kernel, format!("link {} has no peer", veth.name)))?;
    let enable = || {
        netns
            .run(|| enable_ipv6(ifname))
            .and_then(std::convert::identity)
    };
    let mut items = pod_items(attachment, pod_index);
    let v6 = attachment.addresses.iter().filter(|a| a.is_ipv6());
    items.extend(v6.map(|&address| Item::Route(local_route(address, pod_index))));
    let taken = apply(pod, &items, &enable).map_err(|error| {
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

    let gateways = attachment.gateways.iter();
    let routes = gateways.flat_map(|&gateway| routes(attachment, gateway, pod_index));
    let (theirs, routes): (Vec<_>, Vec<_>) =
        routes.partition(|route| taken.contains(&route.family()));
    // What is not the pod's way out is no shortcut either.
    let shortcuts = theirs.iter().filter(|route| route.dst.prefix_len() > 0);
    for outcome in pod.execute_each(shortcuts.map(Route::delete)) {
        outcome.ignore_not_found().map_err(|error| {
            let what = format!("routes of {ifname} in the pod cannot be removed");
            Error::new(Code::Kernel, what).details(chain(&error))
        })?;
    }
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

/// Waits until the host's side of a pair that is up sends what it is given.
///
/// A link's queue is noop_qdisc, which drops everything, until dev_activate. Raising a link calls
/// that (__dev_open), but to no effect as long as it has no carrier. veth_open gives both sides
/// carrier once the second is raised, which is the pod's: so the pod's is activated as it is
/// raised, while the host's waits for the event that netif_carrier_on leaves to a work queue
/// (linkwatch_event, then linkwatch_do_dev, which sets the operational state and calls
/// dev_activate under one hold of the RTNL lock).
///
/// One question is the rule: from Linux 6.8 on, rtnl_getlink runs the link's pending event before
/// it answers (linkwatch_sync_dev). Before that, the queue has to come round to it. The wait is
/// bounded, and its end no error: the link will work, and packets are sent again.
pub fn wait_usable(host: &mut Conn, index: u32) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while host
        .link_by_index(index)
        .is_ok_and(|link| !link.operational)
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(1));
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

/// Makes a list in one exchange. Returns the families of routes by a gateway that were there already.
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
