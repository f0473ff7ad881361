//! Links, addresses, routes, rules, neighbours, forwarding entries, filters, and the chains and rules
//! of firewalls, one line each.

use super::{Part, text};
use sinabro_common::api::Mac;
use sinabro_netlink::{Conn, Family, Link, nft::Nft, route::RouteFilter};
use std::collections::BTreeMap;

pub fn parts() -> Vec<(String, Part)> {
    let make: [(&str, List); 7] = [
        ("links", links),
        ("addresses", addresses),
        ("routes", routes),
        ("rules", rules),
        ("neighbours", neighbours),
        ("fdb", fdb),
        ("filters", filters),
    ];
    let names = Conn::new().and_then(|mut conn| conn.links());
    let names: Names = names
        .unwrap_or_default()
        .into_iter()
        .map(|link| (link.index, link))
        .collect();
    let part = |(name, make): (&str, List)| {
        // A connection for each: what went wrong with one is no matter for the next.
        let lines = Conn::new().and_then(|mut conn| make(&mut conn, &names));
        let part = lines.map(text).map_err(anyhow::Error::from);
        (format!("network/{name}.txt"), part)
    };
    let firewall: [(&str, FirewallList); 2] =
        [("nft-chains", chains), ("nft-rules", firewall_rules)];
    let of_firewall = |(name, make): (&str, FirewallList)| {
        let lines = Nft::new().and_then(|mut nft| make(&mut nft));
        let part = lines.map(text).map_err(anyhow::Error::from);
        (format!("network/{name}.txt"), part)
    };
    let links = make.into_iter().map(part);
    links.chain(firewall.into_iter().map(of_firewall)).collect()
}

/// A FORWARD chain whose policy is to drop is the usual reason why nothing is forwarded.
fn chains(nft: &mut Nft) -> Lines {
    Ok(nft.chains()?.iter().map(ToString::to_string).collect())
}

fn firewall_rules(nft: &mut Nft) -> Lines {
    Ok(nft.rules()?.iter().map(ToString::to_string).collect())
}

/// Filters of clsact qdiscs. Programs of tcx links are pinned, or of others.
fn filters(conn: &mut Conn, names: &Names) -> Lines {
    let mut lines = Vec::new();
    for (index, link) in names {
        for filter in conn.filters(*index)? {
            lines.push(format!("dev {} {filter}", link.name));
        }
    }
    Ok(lines)
}

/// Links by index.
type Names = BTreeMap<u32, Link>;
type Lines = sinabro_netlink::Result<Vec<String>>;
type List = fn(&mut Conn, &Names) -> Lines;
type FirewallList = fn(&mut Nft) -> Lines;

fn name(names: &Names, index: u32) -> String {
    match names.get(&index) {
        Some(link) => link.name.clone(),
        None => format!("#{index}"),
    }
}

fn links(conn: &mut Conn, _: &Names) -> Lines {
    let line = |link: Link| {
        let mac = link.mac.map(|mac| Mac(mac).to_string());
        format!(
            "{} {} kind {} mac {} mtu {} up {} carrier {} peer {:?} master {:?} vxlan {:?}",
            link.index,
            link.name,
            link.kind.as_deref().unwrap_or("-"),
            mac.as_deref().unwrap_or("-"),
            link.mtu,
            link.up,
            link.carrier,
            link.peer,
            link.master,
            link.vxlan,
        )
    };
    Ok(conn.links()?.into_iter().map(line).collect())
}

fn addresses(conn: &mut Conn, names: &Names) -> Lines {
    let addrs = conn.addrs(None)?.into_iter();
    let line = |addr: sinabro_netlink::addr::Addr| {
        let link = name(names, addr.link);
        format!(
            "{} dev {link} scope {} flags {:#x}",
            addr.net, addr.scope, addr.flags
        )
    };
    Ok(addrs.map(line).collect())
}

fn routes(conn: &mut Conn, names: &Names) -> Lines {
    let line = |route: sinabro_netlink::route::Route| {
        let gateway = route.gateway.map(|gateway| format!(" via {gateway}"));
        let link = route
            .oif
            .map(|index| format!(" dev {}", name(names, index)));
        let source = route.src.map(|source| format!(" src {source}"));
        format!(
            "table {} {}{}{}{} protocol {} scope {} type {} metric {} mtu {:?} onlink {} more {:?}",
            route.table,
            route.dst,
            gateway.unwrap_or_default(),
            link.unwrap_or_default(),
            source.unwrap_or_default(),
            route.protocol,
            route.scope,
            route.kind,
            route.metric,
            route.mtu,
            route.onlink,
            route.more_hops,
        )
    };
    let routes = conn.routes(&RouteFilter::default())?;
    Ok(routes.into_iter().map(line).collect())
}

fn rules(conn: &mut Conn, _: &Names) -> Lines {
    let mut rules = conn.rules(Family::V4)?;
    rules.extend(conn.rules(Family::V6)?);
    Ok(rules.iter().map(|rule| format!("{rule:?}")).collect())
}

fn neighbours(conn: &mut Conn, names: &Names) -> Lines {
    let mut lines = Vec::new();
    for (index, link) in names {
        for neigh in conn.neighs(*index)? {
            let mac = neigh.mac.map(|mac| Mac(mac).to_string());
            let mac = mac.as_deref().unwrap_or("-");
            let (name, address, state) = (&link.name, neigh.address, neigh.state);
            lines.push(format!("{address} dev {name} mac {mac} state {state:#x}"));
        }
    }
    Ok(lines)
}

fn fdb(conn: &mut Conn, names: &Names) -> Lines {
    let mut lines = Vec::new();
    let tunnels = names.values().filter(|link| link.vxlan.is_some());
    for link in tunnels {
        for entry in conn.fdb(link.index)? {
            let (mac, name) = (Mac(entry.mac), &link.name);
            lines.push(format!("{mac} dev {name} dst {}", entry.dst));
        }
    }
    Ok(lines)
}
