//! How TCP in the lab finds out what a path takes: by CUBIC, Linux's default and so what pods have nearly everywhere.
//!
//! A new network has what the machine's first one has. Where that is BBR, as on some machines, TCP holds
//! itself back to a rate that it has found out, and figures are about that rate: between pods of one node it finds one far below
//! what the machine does, the lower the smaller segments are.

use crate::Place;
use anyhow::{Context as _, Result};
use sinabro_netlink::sysctl;
use std::sync::OnceLock;

pub const DEFAULT: &str = "cubic";
const SETTING: [&str; 3] = ["net", "ipv4", "tcp_congestion_control"];

static CHOSEN: OnceLock<String> = OnceLock::new();

/// Has all networks that are made from now on use another one. To be called once, before the first is made.
pub fn choose(name: &str) -> Result<()> {
    let chosen = CHOSEN.get_or_init(|| name.into());
    anyhow::ensure!(chosen == name, "the lab uses {chosen} already");
    Ok(())
}

/// Gives a new network what was chosen.
pub(crate) fn set(place: &Place) -> Result<()> {
    let name = CHOSEN.get().map_or(DEFAULT, String::as_str);
    place.run(|| {
        sysctl::ensure(&SETTING, name)
            .map(drop)
            .with_context(|| format!("TCP of {} cannot use {name}", place.name()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the machine's first network has.
    #[test]
    fn new_networks_have_linuxs_default() {
        let place = Place::fresh("congestion").unwrap();
        let read = || Ok(sysctl::read(&SETTING)?);
        assert_eq!(place.run(read).unwrap(), DEFAULT);
        assert!(choose(DEFAULT).is_ok());
        let error = choose("reno").unwrap_err().to_string();
        assert!(error.contains(DEFAULT), "{error}");
    }
}
