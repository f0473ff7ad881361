//! CHECK: what the runtime got as a result, what the agent knows and what the kernel has, compared.
//!
//! What a later plugin of the chain may change goes by `prevResult` (the pod's MTU, its routes);
//! what only this plugin makes goes by the agent's record.

use crate::{
    agent_client::{Agent, AgentError, BUDGET},
    conf::Conf,
    env::Target,
    error::{Code, Error, chain},
    pod_link::{Item, host_items, link_mtu, pod_items},
    result::CniResult,
    verb::add::open_netns,
};
use sinabro_common::api::{ApiError, Attachment, ErrorCode, Mac, Request, Response};
use sinabro_netlink::{
    Conn, Link, ResultExt,
    route::{Route, RouteFilter},
};

type Netlink = sinabro_netlink::Error;

/// # Errors
/// Code 3 if nothing of the attachment exists, 105 naming everything that is not as it was
/// made, 7 without a `prevResult`.
pub fn run(conf: &Conf, target: &Target) -> Result<(), Error> {
    let previous = conf.prev_result()?.ok_or_else(|| {
        Error::new(
            Code::InvalidConfig,
            "network configuration: prevResult: missing",
        )
    })?;
    let refused = |error: Netlink| {
        Error::new(
            Code::Kernel,
            "the kernel's network configuration cannot be read",
        )
        .details(chain(&error))
    };
    let link = target.owner.link();
    let mut host = Conn::new().map_err(refused)?;
    let outer = host
        .link_by_name(&link)
        .ignore_not_found()
        .map_err(refused)?;
    let Some(record) = record(conf, target)? else {
        return Err(match outer {
            None => Error::new(
                Code::UnknownContainer,
                format!("attachment {} does not exist", target.owner),
            ),
            Some(_) => Error::new(
                Code::Mismatch,
                format!("the agent has no record of attachment {}", target.owner),
            )
            .details(format!("link {link} is there; DEL removes it")),
        });
    };
    let mut pod = open_netns(target)?.conn;
    let inner = pod
        .link_by_name(&target.owner.ifname)
        .ignore_not_found()
        .map_err(refused)?;

    let mut found = Mismatches::default();
    let told = compare_told(&mut found, &previous, target, &record);
    compare_links(
        &mut found,
        target,
        &record,
        &told,
        outer.as_ref(),
        inner.as_ref(),
    );
    if let Some(inner) = &inner {
        let items = pod_items(&record, inner.index);
        let wanted = items.into_iter().filter_map(|item| match item {
            // A later plugin may have taken the route over or changed it, and said so.
            Item::Route(route) => {
                let same = |r: &&crate::result::Route| r.dst == route.dst && r.gw == route.gateway;
                let mtu = told.routes.iter().find(same)?.mtu().or(route.mtu);
                Some(Item::Route(Route { mtu, ..route }))
            }
            other => Some(other),
        });
        let place = format!("in the pod, on {}", inner.name);
        compare_items(&mut found, &mut pod, inner, wanted, &place).map_err(refused)?;
    }
    if let Some(outer) = &outer {
        let wanted = host_items(&record, outer.index).into_iter();
        let place = format!("on the host, on {}", outer.name);
        compare_items(&mut found, &mut host, outer, wanted, &place).map_err(refused)?;
    }
    found.into_result(target)
}

fn record(conf: &Conf, target: &Target) -> Result<Option<Attachment>, Error> {
    let mut agent = Agent::connect(&conf.socket, BUDGET)?;
    let owner = target.owner.clone();
    match agent.call(Request::Check { owner }) {
        Ok(Response::Attachment(record)) => Ok(Some(record)),
        Ok(_) => Err(agent.garbled("not an attachment".into()).into()),
        Err(AgentError::Refused(ApiError {
            code: ErrorCode::NotFound,
            ..
        })) => Ok(None),
        Err(other) => Err(other.into()),
    }
}

#[derive(Default)]
struct Mismatches(Vec<String>);

impl Mismatches {
    fn add(&mut self, what: String) {
        self.0.push(what);
    }

    fn into_result(self, target: &Target) -> Result<(), Error> {
        match self.0.as_slice() {
            [] => Ok(()),
            [first, rest @ ..] => Err(Error::new(Code::Mismatch, first).details(format!(
                "attachment {} is not as it was made{}{}",
                target.owner,
                if rest.is_empty() { "" } else { "; also: " },
                rest.join("; ")
            ))),
        }
    }
}

/// What `prevResult` says about this attachment.
#[derive(Default)]
struct Told {
    mac: Option<String>,
    mtu: Option<u32>,
    routes: Vec<crate::result::Route>,
}

fn compare_told(
    found: &mut Mismatches,
    previous: &CniResult,
    target: &Target,
    record: &Attachment,
) -> Told {
    let ifname = &target.owner.ifname;
    let mut told = Told {
        routes: previous.routes.clone(),
        ..Told::default()
    };
    let outer = previous
        .interfaces
        .iter()
        .find(|i| i.name == record.link && i.sandbox.as_deref().is_none_or(str::is_empty));
    if outer.is_none() {
        found.add(format!("prevResult has no host interface {}", record.link));
    }
    let inner = previous
        .interfaces
        .iter()
        .position(|i| i.name == *ifname && i.sandbox.as_deref() == Some(&*target.netns));
    let Some(index) = inner else {
        found.add(format!(
            "prevResult has no interface {ifname} in {}",
            target.netns
        ));
        return told;
    };
    told.mac.clone_from(&previous.interfaces[index].mac);
    told.mtu = previous.interfaces[index].mtu;
    for address in &record.addresses {
        let known = |ip: &crate::result::IpConfig| {
            ip.interface == Some(index) && ip.address.addr() == *address
        };
        if !previous.ips.iter().any(known) {
            found.add(format!(
                "address {address} of {ifname} is in the agent's record, but not in prevResult"
            ));
        }
    }
    for ip in previous.ips.iter().filter(|ip| ip.interface == Some(index)) {
        if !record.addresses.contains(&ip.address.addr()) {
            found.add(format!(
                "address {} of {ifname} is in prevResult, but not in the agent's record",
                ip.address
            ));
        }
    }
    told
}

fn compare_links(
    found: &mut Mismatches,
    target: &Target,
    record: &Attachment,
    told: &Told,
    outer: Option<&Link>,
    inner: Option<&Link>,
) {
    let ifname = &target.owner.ifname;
    match outer {
        None => found.add(format!("link {} is missing on the host", record.link)),
        Some(outer) => {
            if !outer.up {
                found.add(format!("link {} is down on the host", record.link));
            }
            if outer.mac != Some(record.host_mac.0) {
                found.add(format!(
                    "link {} has MAC address {} instead of {}",
                    record.link,
                    show(outer.mac),
                    record.host_mac
                ));
            }
        }
    }
    let Some(inner) = inner else {
        found.add(format!("interface {ifname} is missing in the pod"));
        return;
    };
    if let Some(outer) = outer
        && outer.peer != Some(inner.index)
    {
        found.add(format!(
            "interface {ifname} in the pod is not the other end of {}",
            record.link
        ));
    }
    if !inner.up {
        found.add(format!("interface {ifname} is down in the pod"));
    }
    if inner.mac != Some(record.mac.0) {
        found.add(format!(
            "interface {ifname} has MAC address {}, but the agent lets only {} through",
            show(inner.mac),
            record.mac
        ));
    }
    if let Some(mac) = &told.mac
        && mac.parse::<Mac>().ok().map(|mac| mac.0) != inner.mac
    {
        found.add(format!(
            "interface {ifname} has MAC address {} instead of prevResult's {mac}",
            show(inner.mac)
        ));
    }
    let mtu = told.mtu.unwrap_or_else(|| link_mtu(record));
    if inner.mtu != mtu {
        found.add(format!(
            "interface {ifname} has MTU {} instead of {mtu}",
            inner.mtu
        ));
    }
}

fn show_mtu(mtu: Option<u32>) -> String {
    mtu.map_or_else(|| "the link's MTU".to_owned(), |mtu| format!("MTU {mtu}"))
}

fn show(mac: Option<[u8; 6]>) -> String {
    mac.map_or_else(|| "none".to_owned(), |mac| Mac(mac).to_string())
}

/// Compares what should hang on a link with what does.
fn compare_items(
    found: &mut Mismatches,
    conn: &mut Conn,
    link: &Link,
    wanted: impl Iterator<Item = Item>,
    place: &str,
) -> Result<(), Netlink> {
    let addrs = conn.addrs(Some(link.index))?;
    let neighs = conn.neighs(link.index)?;
    // Of any table: a later plugin may have moved a route into one of its own.
    let routes = conn.routes(&RouteFilter {
        oif: Some(link.index),
        ..RouteFilter::default()
    })?;
    for item in wanted {
        match item {
            // Said by `compare_links`.
            Item::Up(_) => {}
            Item::Addr(want) => {
                if !addrs.iter().any(|addr| addr.net == want.net) {
                    found.add(format!("address {} is missing {place}", want.net));
                }
            }
            Item::Neigh(want) => {
                let same = neighs.iter().find(|n| n.address == want.address);
                match same {
                    Some(n) if n.mac == want.mac && n.is_permanent() => {}
                    Some(n) => found.add(format!(
                        "neighbour {} has MAC address {} instead of a permanent {} {place}",
                        want.address,
                        show(n.mac),
                        show(want.mac)
                    )),
                    None => found.add(format!("neighbour {} is missing {place}", want.address)),
                }
            }
            Item::Route(want) => {
                let same = |r: &&Route| r.dst == want.dst && r.gateway == want.gateway;
                match routes.iter().find(same) {
                    None => found.add(format!("route {} is missing {place}", want.dst)),
                    Some(is) if want.mtu.is_some() && is.mtu != want.mtu => found.add(format!(
                        "route {} has {} instead of {} {place}",
                        want.dst,
                        show_mtu(is.mtu),
                        show_mtu(want.mtu)
                    )),
                    Some(_) => {}
                }
            }
        }
    }
    Ok(())
}
