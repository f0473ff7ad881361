//! Whether what pods send out of the cluster, and what answers it, goes past netfilter.
//!
//! Rules that others have there for what is forwarded, such as those of a firewall, would not be met any more. So
//! they are looked for, and so are queues on pods' links. Not theirs are those of Kubernetes' Services, which are translated before, and of `hostPort`s, whose
//! connections have no record and go by the stack all the same.

use super::next_hops::{only_uplink, without_limits};
use crate::{
    chain::Chain,
    config::Settings,
    datapath::{Datapath, DatapathError, DirectUplink},
    plan::Forwarding,
};
use ipnet::IpNet;
use sinabro_netlink::{
    Family,
    nft::{self, Nft, Rule},
    xtables,
};

/// Tables of kube-proxy, and of the plugin `portmap` by nftables.
pub const OF_SERVICES: [&str; 2] = ["kube-proxy", "cni_hostport"];
/// The chains to which rules of kube-proxy (iptables and IPVS), the kubelet and `portmap` lead from a hook. Names in
/// full: kube-router's network policies are in chains such as `KUBE-ROUTER-FORWARD`.
///
/// Of Istio's ambient mode the chain that gives the node's own probes of pods the source 169.254.7.127. It is for packets
/// of the node's sockets alone (`-m owner --socket-exists`).
const CHAINS_OF_SERVICES: [&str; 13] = [
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-NODE-PORT",
    "KUBE-FORWARD",
    "KUBE-POSTROUTING",
    "KUBE-PROXY-FIREWALL",
    "KUBE-FIREWALL",
    "KUBE-SOURCE-RANGES-FIREWALL",
    "CNI-HOSTPORT-DNAT",
    "CNI-HOSTPORT-MASQ",
    "CNI-HOSTPORT-SETMARK",
    "ISTIO_POSTRT",
];
/// Expressions that only say how a packet is tracked (conntrack), as NodeLocal DNSCache's rules do. What goes past the
/// stack is tracked by nobody, and a rule that asks for a packet's tracking counts by itself.
const OF_TRACKING: [&str; 3] = ["notrack", "target(CT)", "target(NOTRACK)"];
/// Tables of iptables-legacy.
const LEGACY: [&str; 5] = ["filter", "nat", "mangle", "raw", "security"];

/// Looks at the kernel and says so to the data path.
///
/// # Errors
/// If the data path cannot be told.
pub fn follow(settings: &Settings, datapath: &Datapath) -> Result<Forwarding, DatapathError> {
    let may_translate = settings.service_proxy.may_be_on();
    let uplink = datapath.direct_uplink()?;
    let obstacle = |rules_count: bool| {
        let rules = rules_count.then_some(RulesAbout::All);
        obstacle(settings, uplink, rules)
    };
    let chosen = Forwarding::choose(settings.forwarding, may_translate, obstacle);
    datapath.set_forwarding(chosen == Forwarding::Direct)?;
    Ok(chosen)
}

/// Which packets a rule of somebody's has to be about to count.
#[derive(Clone, Copy)]
pub(super) enum RulesAbout<'a> {
    All,
    /// Those from one of these ranges to another.
    Between(&'a [IpNet]),
}

impl RulesAbout<'_> {
    fn has(self, rule: &Rule) -> bool {
        match self {
            Self::All => true,
            Self::Between(ranges) => !rule.addresses.exclude(ranges),
        }
    }
}

/// What the kernel has that only its stack can do, with rules of others and limits of pods or without.
pub(super) fn obstacle(
    settings: &Settings,
    uplink: DirectUplink,
    rules: Option<RulesAbout<'_>>,
) -> Option<String> {
    let limits = |uplink| match rules {
        Some(_) => without_limits(&settings.cni_conf_dir, uplink),
        None => Ok(uplink),
    };
    match only_uplink(uplink).and_then(limits) {
        Err(why) => Some(why.to_string()),
        Ok(_) => rules.and_then(rules_of_others),
    }
}

/// The first place where somebody has rules for what is forwarded; what cannot be looked at may be one.
pub(super) fn rules_of_others(about: RulesAbout<'_>) -> Option<String> {
    let found = in_nftables(about).and_then(|found| match found {
        None => in_legacy_tables(),
        found => Ok(found),
    });
    found.unwrap_or_else(|error| Some(format!("cannot look for rules: {}", Chain(&error))))
}

fn in_nftables(about: RulesAbout<'_>) -> sinabro_netlink::Result<Option<String>> {
    let mut nft = Nft::new()?;
    for chain in nft.chains()? {
        if !sees_forwarded(&chain) {
            continue;
        }
        let drops = chain.base.as_ref().is_some_and(|base| base.drops);
        let mut has_rules = || {
            nft.rules_of(&chain).map(|rules| {
                rules
                    .iter()
                    .any(|rule| about.has(rule) && !is_passed_over(rule))
            })
        };
        if drops || (chain.uses > 0 && has_rules()?) {
            let nft::Chain {
                family,
                table,
                name,
                ..
            } = &chain;
            return Ok(Some(format!("rules in chain {family} {table} {name}")));
        }
    }
    Ok(None)
}

/// Whether a packet that the stack forwards passes a chain.
fn sees_forwarded(chain: &nft::Chain) -> bool {
    let Some(base) = &chain.base else {
        return false;
    };
    match chain.family.to_string().as_str() {
        "inet" | "ip" | "ip6" => {
            // Of a link, after our programs, by a table that has all families.
            let of_a_link = chain.family == nft::Family::INET && base.hook == nft::INGRESS;
            let hooks = [nft::PREROUTING, nft::FORWARD, nft::POSTROUTING];
            (of_a_link || hooks.contains(&base.hook))
                && !OF_SERVICES.contains(&chain.table.as_str())
        }
        // Of a link, after our programs.
        "netdev" => true,
        _ => false,
    }
}

/// Whether a rule is nothing to what goes past the stack.
fn is_passed_over(rule: &Rule) -> bool {
    let last = rule.expressions.last();
    is_of_services(rule) || last.is_some_and(|last| OF_TRACKING.contains(&last.as_str()))
}

/// Whether a rule does no more than to lead to the chains of Services.
pub fn is_of_services(rule: &Rule) -> bool {
    let leads_to = rule.expressions.last().and_then(|last| nft::leads_to(last));
    leads_to.is_some_and(|chain| CHAINS_OF_SERVICES.contains(&chain))
}

fn in_legacy_tables() -> sinabro_netlink::Result<Option<String>> {
    for (family, program) in [
        (Family::V4, "iptables-legacy"),
        (Family::V6, "ip6tables-legacy"),
    ] {
        for table in LEGACY {
            if xtables::is_used(family, table)? {
                return Ok(Some(format!("rules in table {table} of {program}")));
            }
        }
        let filter = xtables::filter(family)?;
        if filter.is_some_and(|filter| filter.drops_forwarded) {
            return Ok(Some(format!("{program} drops what is forwarded")));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(expressions: &[&str]) -> Rule {
        Rule {
            family: nft::Family(2),
            table: "filter".into(),
            chain: "FORWARD".into(),
            handle: 1,
            expressions: expressions.iter().map(ToString::to_string).collect(),
            ports: nft::Ports::Any,
            addresses: nft::Addresses::default(),
        }
    }

    #[test]
    fn rules_that_lead_to_services_are_nobody_elses() {
        for (expressions, is) in [
            (
                &["match(comment)", "counter", "jump(KUBE-FORWARD)"][..],
                true,
            ),
            (&["match(addrtype)", "jump(CNI-HOSTPORT-DNAT)"], true),
            (&["goto(KUBE-POSTROUTING)"], true),
            (&["jump(DOCKER-USER)"], false),
            (&["counter", "drop"], false),
            (&["jump(KUBE-PROXY-FIREWALL)"], true),
            (&["jump(KUBE-NODE-PORT)"], true),
            (&["jump(MY-KUBE-RULES)"], false),
            (
                &["match(comment)", "counter", "jump(KUBE-ROUTER-FORWARD)"],
                false,
            ),
            (&["jump(KUBE-FORWARD-EXTRA)"], false),
            (&["jump(KUBE-)"], false),
            (&["jump(CNI-HOSTPORT-FENCE)"], false),
            (&["jump(KUBE-POD-FW-ABCDEF)"], false),
            (&[], false),
        ] {
            assert_eq!(is_of_services(&rule(expressions)), is, "{expressions:?}");
        }
    }

    #[test]
    fn rules_that_only_say_how_packets_are_tracked_are_passed_over() {
        for (expressions, is) in [
            (&["payload", "cmp", "counter", "notrack"][..], true),
            (
                &["payload", "cmp", "match(udp)", "counter", "target(CT)"],
                true,
            ),
            (&["target(NOTRACK)"], true),
            (&["jump(ISTIO_POSTRT)"], true),
            (&["jump(KUBE-FORWARD)"], true),
            // Something follows.
            (&["notrack", "drop"], false),
            (&["target(CT)", "jump(DOCKER-USER)"], false),
            (&["target(TPROXY)"], false),
            (&["jump(ISTIO_PRERT)"], false),
            (&["ct"], false),
            (&[], false),
        ] {
            assert_eq!(is_passed_over(&rule(expressions)), is, "{expressions:?}");
        }
    }

    #[test]
    fn chains_of_what_is_forwarded_are_looked_at() {
        let chain = |family, table: &str, hook| nft::Chain {
            family: nft::Family(family),
            table: table.into(),
            name: "c".into(),
            base: Some(nft::Base {
                kind: "filter".into(),
                hook,
                priority: 0,
                drops: false,
            }),
            uses: 1,
        };
        for (family, table, hook, is) in [
            (2, "filter", nft::FORWARD, true),
            (10, "filter", nft::FORWARD, true),
            (1, "firewalld", nft::PREROUTING, true),
            (2, "nat", nft::POSTROUTING, true),
            (5, "filter", 0, true),
            (1, "fence", nft::INGRESS, true),
            (1, "kube-proxy", nft::PREROUTING, false),
            // What is for the node, or its own.
            (2, "filter", 1, false),
            (2, "filter", 3, false),
            // A bridge's, and kube-proxy's.
            (7, "filter", nft::FORWARD, false),
            (2, "kube-proxy", nft::FORWARD, false),
            (10, "cni_hostport", nft::PREROUTING, false),
        ] {
            let chain = chain(family, table, hook);
            assert_eq!(sees_forwarded(&chain), is, "{chain}");
            let called = nft::Chain {
                base: None,
                ..chain
            };
            assert!(!sees_forwarded(&called), "{called}");
        }
    }
}
