//! Rules that others have to keep clients from node ports, and that no packet meets where Services are translated here.
//!
//! A node port is commonly fenced where packets come in: `tcp dport 30082 drop` in a chain of the hook prerouting or ingress. Programs on
//! uplinks come before all of these, so what they translate has a pod's address there. kube-proxy's packets did meet such rules, so it is
//! said before Services pass from it to the agent, too. Rules of iptables-legacy are not looked at.

use super::trouble;
use crate::apply::forwarding::{OF_SERVICES, is_of_services};
use sinabro_common::api::Trouble;
use sinabro_netlink::nft::{self, Chain, Nft, Rule};
use std::ops::RangeInclusive;

/// Chains that lead to chains, at most: the kernel has 16 (NFT_JUMP_STACK_SIZE).
const DEPTH: u32 = 16;

/// Chains with rules for node ports that come too late, as one trouble.
///
/// # Errors
/// If rules cannot be read.
pub fn find(
    nft: &mut Nft,
    chains: &[Chain],
    node_ports: &RangeInclusive<u16>,
) -> sinabro_netlink::Result<Option<Trouble>> {
    // Those of kube-proxy may be tens of thousands, and are read only where somebody else has some.
    let mut late = Vec::new();
    for chain in chains.iter().filter(|chain| comes_after_us(chain)) {
        let drops = chain.base.as_ref().is_some_and(|base| base.drops);
        if drops || !nft.rules_of(chain)?.iter().all(is_of_services) {
            late.push(chain);
        }
    }
    if late.is_empty() {
        return Ok(None);
    }
    let rules = nft.rules()?;
    let fenced = late
        .into_iter()
        .filter(|chain| is_fence(&rules, chain, node_ports));
    let names: Vec<_> = fenced
        .map(
            |Chain {
                 family,
                 table,
                 name,
                 ..
             }| format!("chain {name} of table {family} {table}"),
        )
        .collect();
    if names.is_empty() {
        return Ok(None);
    }
    Ok(Some(trouble(
        "NodePortRulesBypassed",
        format!(
            "rules that drop by ports of node ports see no packet from outside that is for one, where Services are translated here: {}. \
             Put them into a chain of the hook forward, for the pods' addresses and ports, or limit clients by nodePortAddresses or a \
             Service's loadBalancerSourceRanges",
            names.join(", ")
        ),
    )))
}

/// Whether packets pass a chain after the programs on uplinks, and before they are for pods.
fn comes_after_us(chain: &Chain) -> bool {
    let Some(base) = &chain.base else {
        return false;
    };
    let is_early = match chain.family.to_string().as_str() {
        "inet" => matches!(base.hook, nft::PREROUTING | nft::INGRESS),
        "ip" | "ip6" => base.hook == nft::PREROUTING,
        // NF_NETDEV_INGRESS.
        "netdev" => base.hook == 0,
        _ => false,
    };
    is_early && !OF_SERVICES.contains(&chain.table.as_str())
}

fn is_fence(rules: &[Rule], chain: &Chain, node_ports: &RangeInclusive<u16>) -> bool {
    let has_ports = |rule: &Rule| rule.ports.may_be_in(node_ports);
    let of_chain = |name: &str| {
        let same = move |rule: &&Rule| {
            (rule.family, &rule.table, rule.chain.as_str()) == (chain.family, &chain.table, name)
        };
        rules.iter().filter(same).collect::<Vec<_>>()
    };
    // All but what is named is dropped.
    let drops = chain.base.as_ref().is_some_and(|base| base.drops);
    if drops && of_chain(&chain.name).into_iter().any(has_ports) {
        return true;
    }
    // By which chains packets come to a rule, and whether their ports have been compared.
    let mut at = vec![(chain.name.as_str(), false, 0)];
    while let Some((name, compared, depth)) = at.pop() {
        for rule in of_chain(name) {
            let compared = compared || has_ports(rule);
            let verdict = rule
                .expressions
                .last()
                .map(String::as_str)
                .unwrap_or_default();
            match verdict {
                "drop" | "reject" | "target(DROP)" | "target(REJECT)" if compared => return true,
                _ if depth < DEPTH => {
                    if let Some(next) = nft::leads_to(verdict) {
                        at.push((next, compared, depth + 1));
                    }
                }
                _ => {}
            }
        }
    }
    false
}
