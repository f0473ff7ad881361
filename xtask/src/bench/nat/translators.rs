//! Who else translates addresses: the kernel's netfilter, by the rules of iptables or of nftables.
//!
//! Their pods are attached by the reference plugin `ptp`: a veth pair and a route, as ours are.

use crate::{
    bench::{feed::feed, pod::rules},
    workspace::output,
};
use anyhow::Result;
use ipnet::IpNet;
use sinabro_lab::Node;
use std::process::Command;

pub const IPTABLES: &str = "iptables";
pub const NFTABLES: &str = "nftables";
/// Packets keep their source, and the host outside knows the way back.
pub const ROUTED: &str = "routed, no NAT (limit)";

/// What programs make the rules, and which of its two ways iptables goes.
pub fn versions() -> Result<String> {
    let version = |program: &str| -> Result<String> {
        let text = output(Command::new(program).arg("--version"))?;
        Ok(text.trim().to_owned())
    };
    Ok(format!("{}; {}", version("iptables")?, version("nft")?))
}

/// Masquerade of a pod range by iptables, with ports that nobody can foresee, as ours.
pub fn iptables(node: &Node, range: IpNet) -> Result<()> {
    let rules = format!(
        "*nat\n-A POSTROUTING -s {range} ! -d {range} -j MASQUERADE --random-fully\nCOMMIT\n"
    );
    rules::restore(node, range.addr().is_ipv6(), &rules)
}

/// The same by nftables.
pub fn nftables(node: &Node, range: IpNet) -> Result<()> {
    let (family, header) = match range {
        IpNet::V4(_) => ("ip", "ip"),
        IpNet::V6(_) => ("ip6", "ip6"),
    };
    let rules = format!(
        "table {family} bench {{\n  chain postrouting {{\n    \
         type nat hook postrouting priority srcnat;\n    \
         {header} saddr {range} {header} daddr != {range} masquerade fully-random\n  }}\n}}\n"
    );
    feed(node, "nft", &["-f", "-"], &rules)
}
