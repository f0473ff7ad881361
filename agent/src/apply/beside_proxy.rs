//! Whether packets between pods of two nodes take the fast path while kube-proxy translates Services.
//!
//! Rules of others for what is forwarded would not be met there, so they are looked for as in [`super::forwarding`]. Netfilter
//! has to take up connections that it has not seen begin, too: those that return to it.

use super::forwarding;
use crate::{
    config::Settings,
    datapath::{Datapath, beside_proxy::OfStack},
    plan::OverlayMode,
};
use anyhow::Context as _;
use sinabro_netlink::{conntrack::Conntrack, sysctl};

/// The path of `net.netfilter.nf_conntrack_tcp_loose`.
const TCP_LOOSE: [&str; 3] = ["net", "netfilter", "nf_conntrack_tcp_loose"];

/// Looks at the kernel and says so to the data path. Returns why the fast path is not taken, if it is not.
///
/// # Errors
/// If the kernel does not say which connections netfilter translates, or the data path cannot be told.
pub fn follow(settings: &Settings, datapath: &Datapath) -> anyhow::Result<Option<String>> {
    let why = obstacle(settings, datapath)?;
    match why {
        Some(_) => datapath.end_beside_proxy()?,
        None => datapath.begin_beside_proxy(translated)?,
    }
    Ok(why)
}

fn obstacle(settings: &Settings, datapath: &Datapath) -> anyhow::Result<Option<String>> {
    if settings.overlay == OverlayMode::Kernel {
        return Ok(Some("the setting dataPath is kernel".into()));
    }
    if !settings.beside_proxy {
        return Ok(Some("the setting besideProxy is false".into()));
    }
    if settings.service_proxy.may_be_on() {
        return Ok(Some("Services may be Sinabro's".into()));
    }
    if !takes_up() {
        return Ok(Some("net.netfilter.nf_conntrack_tcp_loose is 0".into()));
    }
    let uplink = datapath.direct_uplink()?;
    Ok(forwarding::obstacle(settings, uplink, true))
}

/// Whether netfilter takes up connections of TCP in the middle. Without the setting there is no connection tracking.
fn takes_up() -> bool {
    sysctl::read(&TCP_LOOSE).map_or(true, |value| value.trim() != "0")
}

fn translated() -> anyhow::Result<Vec<OfStack>> {
    let list = || Conntrack::new()?.translated();
    let all = list().context("cannot list connections of netfilter")?;
    let under_way = all.into_iter().filter(|flow| !flow.is_over);
    let of_stack = under_way.map(|flow| OfStack {
        proto: flow.proto,
        client: flow.seen_as,
        server: flow.server,
    });
    Ok(of_stack.collect())
}
