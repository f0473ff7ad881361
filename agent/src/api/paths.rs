//! By which way packets between pods go to other nodes, and how many did.

use super::status::Core;
use crate::{
    apply::ways::Why,
    chain::Chain,
    datapath::{DatapathError, Level, PeerPackets, Translation},
    plan::Forwarding,
};
use sinabro_common::{
    abi::Addr,
    api::{NodeReport, PathCounts, PathPackets, PeerPath},
};

/// Adds to each node by which way it is reached.
///
/// # Errors
/// If the maps cannot be read.
pub fn complete(core: &Core, nodes: &mut [NodeReport]) -> Result<(), DatapathError> {
    let why = why(core);
    let packets = core.datapath.peer_packets()?;
    let overlay = core.overlay.borrow();
    for node in nodes {
        let Some(tunnel) = node.tunnel else {
            continue;
        };
        let why = why.as_ref().or_else(|| overlay.ways.not.get(&tunnel));
        let way = core.datapath.next_hop(tunnel.into());
        node.path = Some(match why {
            Some(why) => PeerPath::Kernel {
                why: why.to_string(),
            },
            None if way.is_some_and(|way| way.is_native()) => PeerPath::Native,
            None => PeerPath::Direct {
                why: (overlay.ways.tried.contains(&tunnel))
                    .then(|| "no answers without a tunnel".into()),
            },
        });
        node.packets = packets.get(&Addr::from(tunnel)).copied().map(count);
    }
    Ok(())
}

/// For `sinabroctl status`: `direct`, `direct but to 2 nodes`, `direct, beside kube-proxy`, `kernel: …`.
pub fn mode(core: &Core) -> String {
    if let Some(why) = why(core) {
        return format!("kernel: {why}");
    }
    let is_beside_proxy = match core.datapath.translation() {
        Err(error) => return format!("not known: {}", Chain(&error)),
        Ok(translation) => translation != Translation::On,
    };
    let but = match core.overlay.borrow().ways.not.len() {
        0 => String::new(),
        1 => " but to 1 node".into(),
        not => format!(" but to {not} nodes"),
    };
    let beside = if is_beside_proxy {
        ", beside kube-proxy"
    } else {
        ""
    };
    format!("direct{but}{beside}")
}

/// Of all nodes, also of those that are gone.
///
/// # Errors
/// If the maps cannot be read.
pub fn packets(core: &Core) -> Result<PathCounts, DatapathError> {
    let mut all = PeerPackets::default();
    for packets in core.datapath.peer_packets()?.into_values() {
        all += packets;
    }
    Ok(count(all))
}

/// Why no node is reached past the stack, if none is. What needs no look at the kernel comes first: it says most.
fn why(core: &Core) -> Option<Why> {
    let of_routes = core.overlay.borrow().ways.none.clone();
    if of_routes == Some(Why::Setting) {
        return of_routes;
    }
    of_programs(core).or_else(|| of_rules(core)).or(of_routes)
}

/// Why the programs send nothing past the stack, if they do not.
pub fn of_programs(core: &Core) -> Option<Why> {
    let choice = core.datapath.choice();
    let redirects = match choice.level {
        Level::Current | Level::LastGood => true,
        Level::Reduced => false,
        // Those that ran go on.
        Level::None => choice.ran,
    };
    (!redirects).then_some(Why::Programs)
}

/// Why the fast path between nodes is not to be taken, as the last look at the kernel found.
fn of_rules(core: &Core) -> Option<Why> {
    match &*core.beside_proxy.borrow() {
        None => Some(Why::NotYet),
        Some(Forwarding::Direct) => None,
        Some(Forwarding::Kernel(why)) => Some(Why::BesideProxy(why.clone())),
    }
}

fn count(PeerPackets { tunnels, native }: PeerPackets) -> PathCounts {
    let packets = |sent, received| PathPackets { sent, received };
    PathCounts {
        direct: packets(tunnels.direct_tx, tunnels.direct_rx),
        native: packets(native.tx, native.rx),
        kernel: packets(tunnels.kernel_tx, tunnels.kernel_rx),
    }
}
