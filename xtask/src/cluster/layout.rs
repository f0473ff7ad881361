//! Where the cluster's files are, and its addresses.
//!
//! ```text
//! <cache>/bin           components, built once
//! <cache>/images        image archives, written once
//! <cache>/run/pki       certificates and kubeconfigs
//! <cache>/run/<node>    a node: init.pid, logs, disk/ (what survives a reboot)
//! ```

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::{
    env, fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
};

/// The machine of the control plane, which is also the nodes' router.
pub const CONTROL: &str = "control";
pub const API_PORT: u16 = 6443;

/// Families of addresses that nodes, pods and Services of a cluster have; the first is primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Families {
    Ipv4,
    Ipv6,
    /// Both, IPv4 first.
    Dual,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    pub fn has(self, address: IpAddr) -> bool {
        address.is_ipv6() == (self == Self::Ipv6)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

impl Families {
    pub fn list(self) -> &'static [Family] {
        match self {
            Self::Ipv4 => &[Family::Ipv4],
            Self::Ipv6 => &[Family::Ipv6],
            Self::Dual => &[Family::Ipv4, Family::Ipv6],
        }
    }

    /// What there is of each family.
    fn of<T: Clone>(self, v4: T, v6: T) -> Vec<T> {
        let each = self.list().iter().map(|family| match family {
            Family::Ipv4 => v4.clone(),
            Family::Ipv6 => v6.clone(),
        });
        each.collect()
    }

    pub fn pods(self) -> String {
        self.of("10.244.0.0/16", "fd00:10:244::/56").join(",")
    }

    pub fn services(self) -> String {
        self.of("10.96.0.0/16", "fd00:10:96::/112").join(",")
    }

    /// First address of the Services' range: the API server's own.
    pub fn api_service(self) -> IpAddr {
        self.primary(
            Ipv4Addr::new(10, 96, 0, 1),
            Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 1),
        )
    }

    pub fn dns(self) -> IpAddr {
        self.primary(
            Ipv4Addr::new(10, 96, 0, 10),
            Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 10),
        )
    }

    /// Where the control plane's bridge is, which is also the nodes' default gateway.
    pub fn control(self) -> Vec<IpAddr> {
        self.at(1)
    }

    /// Address of the API server, as others reach it.
    pub fn api(self) -> SocketAddr {
        SocketAddr::new(self.control()[0], API_PORT)
    }

    /// Addresses of the node with this number, from 1.
    pub fn node(self, number: u8) -> Vec<IpAddr> {
        self.at(number + 10)
    }

    /// Addresses in the network of all machines.
    fn at(self, host: u8) -> Vec<IpAddr> {
        self.of(
            Ipv4Addr::new(10, 240, 0, host).into(),
            Ipv6Addr::new(0xfd00, 0x240, 0, 0, 0, 0, 0, host.into()).into(),
        )
    }

    fn primary(self, v4: Ipv4Addr, v6: Ipv6Addr) -> IpAddr {
        self.of(v4.into(), v6.into())[0]
    }
}

pub fn node_name(number: u8) -> String {
    format!("n{number}")
}

/// The number in a node's name.
pub fn node_number(name: &str) -> Option<u8> {
    let number = name.strip_prefix('n')?.parse().ok()?;
    (1..=200).contains(&number).then_some(number)
}

/// Environment variable that names another directory for [`cache`].
pub const CACHE: &str = "SINABRO_CLUSTER_DIR";

/// What is built once and kept, outside the tree.
///
/// # Errors
/// If there is no home directory and none was given.
pub fn cache() -> Result<PathBuf> {
    if let Some(dir) = env::var_os(CACHE) {
        return Ok(std::path::absolute(dir)?);
    }
    let base =
        match env::var_os("XDG_CACHE_HOME") {
            Some(dir) => PathBuf::from(dir),
            None => PathBuf::from(env::var_os("HOME").context(
                "no HOME: give a directory for the cluster's files by SINABRO_CLUSTER_DIR",
            )?)
            .join(".cache"),
        };
    Ok(base.join("sinabro"))
}

pub fn binaries() -> Result<PathBuf> {
    Ok(cache()?.join("bin"))
}

pub fn images() -> Result<PathBuf> {
    Ok(cache()?.join("images"))
}

pub fn state() -> Result<PathBuf> {
    Ok(cache()?.join("run"))
}

pub fn pki() -> Result<PathBuf> {
    Ok(state()?.join("pki"))
}

/// Sources of the components: the Go modules beside this package.
pub fn sources() -> PathBuf {
    crate::workspace::root().join("xtask/cluster")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_of_one_family_has_nothing_of_the_other() {
        for (families, has) in [
            (Families::Ipv4, [true, false]),
            (Families::Ipv6, [false, true]),
            (Families::Dual, [true, true]),
        ] {
            let listed = [Family::Ipv4, Family::Ipv6].map(|f| families.list().contains(&f));
            assert_eq!(listed, has);
            for ranges in [families.pods(), families.services()] {
                assert_eq!([ranges.contains('.'), ranges.contains(':')], has);
            }
            let nodes = families.node(1);
            assert_eq!(nodes.iter().any(IpAddr::is_ipv4), has[0]);
            assert_eq!(nodes.iter().any(IpAddr::is_ipv6), has[1]);
            for address in [families.api_service(), families.dns(), families.api().ip()] {
                assert_eq!(address.is_ipv4(), has[0]);
            }
        }
        assert_eq!(Families::Ipv6.api().to_string(), "[fd00:240::1]:6443");
    }

    #[test]
    fn a_nodes_number_is_in_its_name() {
        for number in [1, 2, 200] {
            assert_eq!(node_number(&node_name(number)), Some(number));
        }
        for name in ["control", "n", "n0", "n201", "n-1", "m1", "n1x"] {
            assert_eq!(node_number(name), None, "{name}");
        }
    }
}
