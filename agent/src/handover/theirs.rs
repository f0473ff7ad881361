//! What is seen of kube-proxy: its rules and its port, for its process is in another namespace.

use crate::chain::Chain;
use sinabro_netlink::{Conn, Family, nft::Nft, sock_diag::SockDiag, xtables};
use tracing::debug;

/// Where kube-proxy is asked whether it is well, unless it is told otherwise (`healthzBindAddress`).
pub const HEALTH_PORT: u16 = 10256;

/// In nftables, of either family.
const TABLE: &str = "kube-proxy";
/// In the table `nat`, by either kind of iptables.
const CHAIN: &str = "KUBE-SERVICES";
/// The link that has all Services' addresses with IPVS.
const LINK: &str = "kube-ipvs0";

/// What there is of kube-proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Theirs {
    /// Where its rules are; none if it has none.
    pub rules: Option<&'static str>,
    /// Somebody has its port.
    pub listens: bool,
}

impl Theirs {
    /// What the kernel cannot tell is not there.
    pub fn look() -> Self {
        Self {
            rules: rules(),
            listens: listens(),
        }
    }
}

fn rules() -> Option<&'static str> {
    match Nft::new().and_then(|mut nft| nft.chains()) {
        Ok(chains) => {
            for chain in chains {
                match (chain.table.as_str(), chain.name.as_str()) {
                    (TABLE, _) => return Some("nftables"),
                    ("nat", CHAIN) => return Some("iptables"),
                    _ => {}
                }
            }
        }
        // A kernel without nftables has none of it.
        Err(error) => debug!("cannot look at nftables: {}", Chain(&error)),
    }
    for family in Family::BOTH {
        match xtables::has_chain(family, "nat", CHAIN) {
            Ok(true) => return Some("iptables-legacy"),
            Ok(false) => {}
            Err(error) => debug!("{}", Chain(&error)),
        }
    }
    let has_link = Conn::new().is_ok_and(|mut conn| conn.link_by_name(LINK).is_ok());
    has_link.then_some("IPVS")
}

fn listens() -> bool {
    Family::BOTH.into_iter().any(|family| {
        let found = SockDiag::new().and_then(|mut diag| diag.listeners(family));
        match found {
            Ok(found) => found.iter().any(|bound| bound.at.port() == HEALTH_PORT),
            Err(error) => {
                debug!("cannot list listening sockets: {}", Chain(&error));
                false
            }
        }
    })
}
