//! Where the cluster's files are, and its addresses.
//!
//! ```text
//! <cache>/bin           components, built once
//! <cache>/images        image archives, written once
//! <cache>/run/pki       certificates and kubeconfigs
//! <cache>/run/<node>    a node: init.pid, logs, disk/ (what survives a reboot)
//! ```

use anyhow::{Context as _, Result};
use std::{
    env,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

/// The machine of the control plane, which is also the nodes' router.
pub const CONTROL: &str = "control";
pub const API_PORT: u16 = 6443;

pub const PODS: &str = "10.244.0.0/16,fd00:10:244::/56";
pub const SERVICES: &str = "10.96.0.0/16,fd00:10:96::/112";
/// First address of the Services' range: the API server's own.
pub const API_SERVICE: &str = "10.96.0.1";
pub const DNS: &str = "10.96.0.10";

/// Address of the control plane, and the nodes' default gateway.
pub const CONTROL_V4: Ipv4Addr = Ipv4Addr::new(10, 240, 0, 1);
pub const CONTROL_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x240, 0, 0, 0, 0, 0, 1);

/// Addresses of the node with this number, from 1.
pub fn node_addresses(number: u8) -> (Ipv4Addr, Ipv6Addr) {
    let host = number + 10;
    (
        Ipv4Addr::new(10, 240, 0, host),
        Ipv6Addr::new(0xfd00, 0x240, 0, 0, 0, 0, 0, host.into()),
    )
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
    fn a_nodes_number_is_in_its_name() {
        for number in [1, 2, 200] {
            assert_eq!(node_number(&node_name(number)), Some(number));
        }
        for name in ["control", "n", "n0", "n201", "n-1", "m1", "n1x"] {
            assert_eq!(node_number(name), None, "{name}");
        }
    }
}
