//! What is seen of kube-proxy: its rules and its port, for its process is in another namespace.

use sinabro_netlink::{
    Conn, Error, Family, Result, ResultExt as _,
    nft::{Chain, Nft},
    sock_diag::SockDiag,
    xtables,
};

/// Where kube-proxy is asked whether it is well, unless it is told otherwise (`healthzBindAddress`).
pub const HEALTH_PORT: u16 = 10256;

/// In nftables, of either family.
const TABLE: &str = "kube-proxy";
/// In the table `nat`, by either kind of iptables.
const CHAIN: &str = "KUBE-SERVICES";
/// The link that has all Services' addresses with IPVS.
pub const LINK: &str = "kube-ipvs0";

/// What there is of kube-proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Theirs {
    /// Where its rules are; none if it has none.
    pub rules: Option<&'static str>,
    /// Somebody has its port.
    pub listens: bool,
}

impl Theirs {
    /// # Errors
    /// If the kernel cannot say: whoever takes that for "nothing" finishes a handover that is under way.
    pub fn look() -> Result<Self> {
        Ok(Self {
            rules: rules()?,
            listens: listens()?,
        })
    }
}

fn rules() -> Result<Option<&'static str>> {
    if let Some(found) = in_nftables(Nft::new().and_then(|mut nft| nft.chains()))? {
        return Ok(Some(found));
    }
    for family in Family::BOTH {
        if unless_unknown(xtables::has_chain(family, "nat", CHAIN))? == Some(true) {
            return Ok(Some("iptables-legacy"));
        }
    }
    let link = Conn::new()?.link_by_name(LINK).ignore_not_found()?;
    Ok(link.map(|_| "IPVS"))
}

fn in_nftables(chains: Result<Vec<Chain>>) -> Result<Option<&'static str>> {
    let chains = unless_unknown(chains)?.unwrap_or_default();
    let found = chains
        .iter()
        .find_map(|chain| match (chain.table.as_str(), chain.name.as_str()) {
            (TABLE, _) => Some("nftables"),
            ("nat", CHAIN) => Some("iptables"),
            _ => None,
        });
    Ok(found)
}

/// None if the kernel has no such thing: nf_tables that is not there is an unknown number of a subsystem (nfnetlink_rcv_msg).
pub(super) fn unless_unknown<T>(looked: Result<T>) -> Result<Option<T>> {
    match looked {
        Ok(found) => Ok(Some(found)),
        Err(Error::Invalid(_) | Error::NotSupported(_) | Error::NotFound(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether somebody has its port.
///
/// # Errors
/// As [`Theirs::look`].
pub fn listens() -> Result<bool> {
    for family in Family::BOTH {
        // Of IPv6 there may be nothing.
        let found = unless_unknown(SockDiag::new().and_then(|mut diag| diag.listeners(family)))?;
        if found.is_some_and(|found| found.iter().any(|bound| bound.at.port() == HEALTH_PORT)) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_netlink::netns::in_fresh;

    #[test]
    fn what_cannot_be_seen_is_not_gone() {
        let what = || "list chains of nf_tables".to_owned();
        for error in [
            Error::Timeout { what: what() },
            Error::Interrupted { what: what() },
            Error::Malformed {
                what: what(),
                reason: "short".into(),
            },
        ] {
            assert!(in_nftables(Err(error)).is_err());
        }
        in_fresh(|| assert_eq!(Theirs::look().unwrap(), Theirs::default()));
    }
}
