//! Whether packets between pods of two nodes take the fast path, beside kube-proxy or without.
//!
//! Rules of others for what is forwarded would not be met there, so they are looked for as in [`super::forwarding`]. Netfilter
//! has to pick up connections that it has not seen begin, too: those that return to it.

use super::{
    forwarding::{self, RulesAbout},
    ways::{Ways, Why},
};
use crate::{
    config::Settings,
    datapath::{Datapath, Translation, beside_proxy::OfStack},
    plan::{Forwarding, OverlayMode},
};
use anyhow::Context as _;
use sinabro_netlink::{conntrack::Conntrack, sysctl};
use std::time::{Duration, Instant};

/// The path of `net.netfilter.nf_conntrack_tcp_loose`.
const TCP_LOOSE: [&str; 3] = ["net", "netfilter", "nf_conntrack_tcp_loose"];
/// For how long connections that were idle since the fast path ended may end themselves. After that netfilter takes the FIN of one for
/// invalid.
const DRAIN: Duration = Duration::from_secs(3600);

/// What is known of the fast path beside kube-proxy from one look to the next.
#[derive(Debug, Default)]
pub struct BesideProxy {
    /// When it was first found that it is not to be taken.
    draining_since: Option<Instant>,
}

impl BesideProxy {
    /// Looks at the kernel and says so to the data path. `ways`: to other nodes, as of the last look.
    ///
    /// # Errors
    /// If the kernel does not say which connections netfilter translates, or the data path cannot be told.
    pub fn follow(
        &mut self,
        settings: &Settings,
        datapath: &Datapath,
        ways: &Ways,
    ) -> anyhow::Result<Forwarding> {
        datapath.set_conntrack_strict(!picks_up())?;
        if datapath.translation()? == Translation::On {
            self.draining_since = None;
            return follow_alone(settings, datapath, ways);
        }
        let Some(why) = obstacle(settings, datapath)? else {
            self.draining_since = None;
            datapath.begin_beside_proxy(translated)?;
            return Ok(Forwarding::Direct);
        };
        let since = *self.draining_since.get_or_insert_with(Instant::now);
        match since.elapsed() < DRAIN {
            true => datapath.drain_beside_proxy()?,
            false => datapath.end_beside_proxy()?,
        }
        Ok(Forwarding::Kernel(why))
    }
}

/// Where Services are translated here alone. The fast path drains for as long as there are rules: without that it takes all packets.
fn follow_alone(
    settings: &Settings,
    datapath: &Datapath,
    ways: &Ways,
) -> anyhow::Result<Forwarding> {
    if settings.overlay == OverlayMode::Kernel {
        datapath.end_beside_proxy()?;
        return Ok(Forwarding::Kernel(Why::Setting.to_string()));
    }
    let Some(why) = meet_rules(datapath)? else {
        // Connections go past netfilter without ways, too, until these are known ([`before_leaving`]).
        if ways.none != Some(Why::NotYet) {
            datapath.settle_beside_proxy()?;
        }
        return Ok(Forwarding::Direct);
    };
    Ok(Forwarding::Kernel(why))
}

/// Has the fast path drain if others have rules for what one pod sends to another: where.
fn meet_rules(datapath: &Datapath) -> anyhow::Result<Option<String>> {
    let ranges = datapath.pod_ranges()?;
    let rules = forwarding::rules_of_others(RulesAbout::Between(&ranges));
    if rules.is_some() {
        ensure(datapath)?;
        datapath.drain_beside_proxy()?;
    }
    Ok(rules)
}

/// To be called before Services are translated here alone: no packet is to go past rules that there are.
///
/// # Errors
/// As [`BesideProxy::follow`].
pub fn before_alone(settings: &Settings, datapath: &Datapath) -> anyhow::Result<()> {
    if settings.overlay == OverlayMode::Kernel {
        return Ok(());
    }
    datapath.set_conntrack_strict(!picks_up())?;
    meet_rules(datapath)?;
    Ok(())
}

/// To be called before the ways to other nodes are taken back. Connections that netfilter has not seen begin go past it all the same, by the
/// VXLAN device: it would take some of their segments for invalid.
///
/// # Errors
/// As [`BesideProxy::follow`].
pub fn before_leaving(datapath: &Datapath, ways: &Ways) -> anyhow::Result<()> {
    match ways.none.is_none() && datapath.translation()? == Translation::On {
        true => ensure(datapath),
        false => Ok(()),
    }
}

/// Begins, or goes on as it is.
///
/// # Errors
/// As [`BesideProxy::follow`].
pub fn ensure(datapath: &Datapath) -> anyhow::Result<()> {
    datapath.ensure_beside_proxy(translated)
}

fn obstacle(settings: &Settings, datapath: &Datapath) -> anyhow::Result<Option<String>> {
    if settings.overlay == OverlayMode::Kernel {
        return Ok(Some(Why::Setting.to_string()));
    }
    if !picks_up() {
        return Ok(Some("net.netfilter.nf_conntrack_tcp_loose is 0".into()));
    }
    let uplink = datapath.direct_uplink()?;
    let ranges = datapath.pod_ranges()?;
    let rules = RulesAbout::Between(&ranges);
    Ok(forwarding::obstacle(settings, uplink, Some(rules)))
}

/// Whether conntrack picks up connections of TCP in the middle. Without the setting there is no connection tracking.
fn picks_up() -> bool {
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
