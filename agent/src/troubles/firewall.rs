//! Other people's rules that drop what is forwarded.
//!
//! Docker, ufw and many a hardening guide set the policy of the FORWARD hook to drop; firewalld
//! rejects what belongs to no zone. Every packet of a pod is forwarded. The agent changes no
//! firewall: it names the rule that is missing, and is silent as soon as a rule speaks of pods'
//! links. Tables of iptables-legacy, which nf_tables knows nothing of, are looked at as well.

use super::{fences, trouble};
use crate::chain::Chain;
use sinabro_common::api::Trouble;
use sinabro_netlink::{
    nft::{self, Family, Nft},
    xtables,
};
use std::ops::RangeInclusive;
use tracing::debug;

/// What names of pods' links begin with.
const POD_LINKS: &[u8] = b"snb";
const IPV4: Family = Family(2);
const IPV6: Family = Family(10);
/// A zone of firewalld is in force if it has chains.
const TRUSTED: &str = "trusted";

/// What stands in the way of pods' packets, as far as nftables and both kinds of iptables have it.
///
/// `node_ports` where Services are translated here, or may be.
pub fn find(node_ports: Option<&RangeInclusive<u16>>) -> Vec<Trouble> {
    let mut found = look(node_ports).unwrap_or_else(|error| {
        // A kernel without nftables has none of it.
        debug!("cannot look at nftables: {}", Chain(&error));
        Vec::new()
    });
    for (family, program) in [
        (sinabro_netlink::Family::V4, "iptables-legacy"),
        (sinabro_netlink::Family::V6, "ip6tables-legacy"),
    ] {
        match xtables::filter(family) {
            Ok(filter) => found.extend(filter.and_then(|filter| of_legacy(&filter, program))),
            Err(error) => debug!("{}", Chain(&error)),
        }
    }
    found
}

fn of_legacy(filter: &xtables::Filter, program: &str) -> Option<Trouble> {
    let mut interfaces = filter.interfaces.iter();
    if !filter.drops_forwarded || interfaces.any(|name| name.starts_with(POD_LINKS)) {
        return None;
    }
    Some(trouble(
        "FirewallDropsForwarded",
        format!(
            "chain FORWARD of {program} drops what is forwarded unless a rule accepts it, and none speaks of pods' links: run `{}`, and have it kept over restarts",
            accept(program)
        ),
    ))
}

/// Has iptables accept what pods send and receive.
fn accept(program: &str) -> String {
    format!("{program} -I FORWARD -i snb+ -j ACCEPT; {program} -I FORWARD -o snb+ -j ACCEPT")
}

fn look(node_ports: Option<&RangeInclusive<u16>>) -> sinabro_netlink::Result<Vec<Trouble>> {
    let mut nft = Nft::new()?;
    let chains = nft.chains()?;
    let mut found = Vec::new();
    for chain in chains.iter().filter(|chain| drops_forwarded(chain)) {
        if !nft.mentions(chain, POD_LINKS)? {
            found.push(of_policy(chain));
        }
    }
    if let Some(node_ports) = node_ports {
        found.extend(fences::find(&mut nft, &chains, node_ports)?);
    }
    let of_firewalld: Vec<_> = chains.iter().filter(|c| c.table == "firewalld").collect();
    if !of_firewalld.is_empty() && !of_firewalld.iter().any(|c| c.name.contains(TRUSTED)) {
        found.push(trouble(
            "FirewallDropsForwarded",
            "firewalld is at work and no zone has the pods: run `firewall-cmd --permanent --zone=trusted --add-source=CIDR` with the pod range of the whole cluster, for each family, then `firewall-cmd --reload`",
        ));
    }
    Ok(found)
}

fn drops_forwarded(chain: &nft::Chain) -> bool {
    let base = chain.base.as_ref();
    // inet, ip, ip6: a bridge has a hook of that number, too.
    matches!(chain.family, Family(1) | IPV4 | IPV6)
        && base.is_some_and(|base| base.hook == nft::FORWARD && base.drops)
}

fn of_policy(chain: &nft::Chain) -> Trouble {
    let nft::Chain {
        family,
        table,
        name,
        ..
    } = chain;
    let iptables = match (*family, table.as_str(), name.as_str()) {
        (IPV4, "filter", "FORWARD") => Some("iptables"),
        (IPV6, "filter", "FORWARD") => Some("ip6tables"),
        _ => None,
    };
    let next = match iptables {
        Some(program) => accept(program),
        None => {
            let rule = format!("nft insert rule {family} {table} {name}");
            format!("{rule} iifname \"snb*\" accept; {rule} oifname \"snb*\" accept")
        }
    };
    trouble(
        "FirewallDropsForwarded",
        format!(
            "chain {name} of table {family} {table} drops what is forwarded unless a rule accepts it, and none speaks of pods' links: run `{next}`, and have it kept over restarts"
        ),
    )
}
