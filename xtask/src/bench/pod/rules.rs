//! The netfilter rules that nodes have: kube-proxy's, and flannel's masquerade.

use crate::bench::feed::feed;
use anyhow::Result;
use ipnet::IpNet;
use sinabro_lab::Node;
use std::{fmt::Write as _, net::IpAddr};

/// Pods of the whole cluster, of each family.
const CLUSTER: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];

/// What kube-proxy makes in mode iptables for so many Services with two endpoints each: a rule for each
/// in a list that every new connection goes along, and the filter's look at each packet's connection.
pub fn kube_proxy(node: &Node, services: u32) -> Result<()> {
    if services == 0 {
        return Ok(());
    }
    for ipv6 in [false, true] {
        restore(node, ipv6, &kube_proxy_rules(services, ipv6))?;
    }
    Ok(())
}

/// One more of these Services, after all others, with one endpoint, which gets what is sent to any port. A chain that is named
/// again would lose the others' rules.
pub fn service(node: &Node, frontends: [IpAddr; 2], endpoint: [IpAddr; 2]) -> Result<()> {
    for (ipv6, (frontend, endpoint)) in [false, true]
        .into_iter()
        .zip(frontends.into_iter().zip(endpoint))
    {
        let mut rules = String::from("*nat\n:KUBE-SVC-ONE - [0:0]\n:KUBE-SEP-ONE - [0:0]\n");
        for proto in ["tcp", "udp"] {
            rules += &format!("-A KUBE-SERVICES -d {frontend} -p {proto} -j KUBE-SVC-ONE\n");
            rules += &format!("-A KUBE-SEP-ONE -p {proto} -j DNAT --to-destination {endpoint}\n");
        }
        rules += "-A KUBE-SVC-ONE -j KUBE-SEP-ONE\nCOMMIT\n";
        restore(node, ipv6, &rules)?;
    }
    Ok(())
}

/// Has the kernel track a node's connections, as one rule that asks for their state does.
pub fn tracking(node: &Node) -> Result<()> {
    for ipv6 in [false, true] {
        let rules = "*filter\n-A FORWARD -m conntrack --ctstate INVALID -j DROP\nCOMMIT\n";
        restore(node, ipv6, rules)?;
    }
    Ok(())
}

/// Masquerade of what leaves a node's range to outside the cluster, as flannel makes it.
pub fn flannel(node: &Node, range: IpNet) -> Result<()> {
    let ipv6 = range.addr().is_ipv6();
    restore(node, ipv6, &flannel_rules(range, ipv6))
}

fn flannel_rules(range: IpNet, ipv6: bool) -> String {
    let (cluster, multicast) = (
        CLUSTER[usize::from(ipv6)],
        if ipv6 { "ff00::/8" } else { "224.0.0.0/4" },
    );
    format!(
        "*nat\n:FLANNEL-POSTRTG - [0:0]\n\
         -A POSTROUTING -j FLANNEL-POSTRTG\n\
         -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n\
         -A FLANNEL-POSTRTG -s {range} -d {cluster} -j RETURN\n\
         -A FLANNEL-POSTRTG -s {cluster} -d {range} -j RETURN\n\
         -A FLANNEL-POSTRTG ! -s {cluster} -d {range} -j RETURN\n\
         -A FLANNEL-POSTRTG -s {cluster} ! -d {multicast} -j MASQUERADE --random-fully\n\
         -A FLANNEL-POSTRTG ! -s {cluster} -d {cluster} -j MASQUERADE --random-fully\n\
         COMMIT\n\
         *filter\n:FLANNEL-FWD - [0:0]\n\
         -A FORWARD -j FLANNEL-FWD\n\
         -A FLANNEL-FWD -s {cluster} -j ACCEPT\n\
         -A FLANNEL-FWD -d {cluster} -j ACCEPT\n\
         COMMIT\n"
    )
}

fn kube_proxy_rules(services: u32, ipv6: bool) -> String {
    let cluster = CLUSTER[usize::from(ipv6)];
    let (mut chains, mut list, mut own) = (String::new(), String::new(), String::new());
    let mut write = || -> std::fmt::Result {
        for number in 0..services {
            let (high, low) = (number / 250, number % 250 + 1);
            let (service, endpoint) = match ipv6 {
                false => (
                    format!("10.96.{high}.{low}/32"),
                    format!("10.244.200.{low}"),
                ),
                true => (
                    format!("fd00:10:96::{high:x}:{low:x}/128"),
                    format!("fd00:10:244:200::{low:x}"),
                ),
            };
            let target = match ipv6 {
                false => format!("{endpoint}:8080"),
                true => format!("[{endpoint}]:8080"),
            };
            let to_service = format!("-d {service} -p tcp -m tcp --dport 80");
            writeln!(list, "-A KUBE-SERVICES {to_service} -j KUBE-SVC-{number}")?;
            writeln!(chains, ":KUBE-SVC-{number} - [0:0]")?;
            writeln!(
                own,
                "-A KUBE-SVC-{number} ! -s {cluster} {to_service} -j KUBE-MARK-MASQ\n\
                 -A KUBE-SVC-{number} -m statistic --mode random --probability 0.5 -j KUBE-SEP-{number}-0\n\
                 -A KUBE-SVC-{number} -j KUBE-SEP-{number}-1"
            )?;
            for end in 0..2 {
                writeln!(chains, ":KUBE-SEP-{number}-{end} - [0:0]")?;
                writeln!(
                    own,
                    "-A KUBE-SEP-{number}-{end} -s {endpoint} -j KUBE-MARK-MASQ\n\
                     -A KUBE-SEP-{number}-{end} -p tcp -m tcp -j DNAT --to-destination {target}"
                )?;
            }
        }
        Ok(())
    };
    // Writing into a string does not fail.
    let _ = write();
    format!(
        "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n\
         :KUBE-POSTROUTING - [0:0]\n{chains}\
         -A PREROUTING -j KUBE-SERVICES\n\
         -A OUTPUT -j KUBE-SERVICES\n\
         -A POSTROUTING -j KUBE-POSTROUTING\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n\
         -A KUBE-POSTROUTING -j MASQUERADE --random-fully\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
         {list}{own}\
         -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n\
         COMMIT\n\
         *filter\n:KUBE-FORWARD - [0:0]\n\
         -A FORWARD -j KUBE-FORWARD\n\
         -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
         -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\n\
         -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
         COMMIT\n"
    )
}

/// Adds rules to a node's, by the program that kube-proxy and flannel use.
pub fn restore(node: &Node, ipv6: bool, rules: &str) -> Result<()> {
    let program = if ipv6 {
        "ip6tables-restore"
    } else {
        "iptables-restore"
    };
    feed(node, program, &["--noflush"], rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_service_has_a_rule_in_the_list_and_a_chain() {
        for ipv6 in [false, true] {
            let rules = kube_proxy_rules(300, ipv6);
            let count = |start: &str| rules.lines().filter(|line| line.starts_with(start)).count();
            assert_eq!(count("-A KUBE-SERVICES -d "), 300);
            assert_eq!(count(":KUBE-SVC-"), 300);
            assert_eq!(count(":KUBE-SEP-"), 600);
            let mut services: Vec<_> = rules
                .lines()
                .filter_map(|line| line.strip_prefix("-A KUBE-SERVICES -d "))
                .collect();
            services.sort();
            services.dedup_by_key(|line| line.split(' ').next().map(str::to_owned));
            assert_eq!(services.len(), 300, "each its own address");
        }
    }
}
