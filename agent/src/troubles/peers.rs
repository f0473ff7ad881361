//! Nodes that do not answer through their tunnels, or not to large packets.
//!
//! One trouble of each kind, whatever the number of peers, and its text changes only with the
//! first few of them: each text is an Event of its own. A peer that its cluster calls NotReady is
//! not named, and another only after the time in which the cluster would have noticed: a node that
//! is started again is not worth an Event by each of the others. `sinabroctl nodes` and the metrics
//! have it at once.

use super::trouble;
use crate::{
    config::MIN_MTU,
    plan::Routing,
    probe::{
        Probe, State,
        path::Path,
        table::{Name, Peer, Verdicts},
    },
};
use sinabro_common::api::Trouble;
use std::time::{Duration, Instant};

/// More than kube-controller-manager takes to notice that a node is gone
/// (--node-monitor-grace-period: 40 seconds, 50 from Kubernetes 1.32 on).
const GRACE: Duration = Duration::from_secs(60);
/// Where nobody says whether nodes are ready they may just be starting.
const GRACE_TO_START: Duration = Duration::from_secs(20);
/// Peers named in one text.
const NAMED: usize = 5;
/// If so many of a hundred peers that were last heard of, or not, are silent, it is this node.
const MOST: usize = 80;

/// By what peers are asked: the tunnels' UDP port, and whether packets may be in none.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub port: u16,
    pub routing: Routing,
}

impl Asked {
    /// What firewalls have to let pass. Who does not answer without a tunnel is asked in one, where that is found out.
    fn passes(self) -> String {
        let port = format!("UDP port {}", self.port);
        match self.routing {
            Routing::Tunnel | Routing::Auto => format!("let {port} pass"),
            Routing::Native => {
                format!("let {port} pass, and what pods send by their own addresses,")
            }
        }
    }

    /// How tcpdump shows it.
    fn shown(self) -> String {
        match self.routing {
            Routing::Tunnel | Routing::Auto => format!("`tcpdump -ni any udp port {}`", self.port),
            Routing::Native => {
                format!("`tcpdump -ni any udp port {} or icmp or icmp6`", self.port)
            }
        }
    }
}

/// What peers' answers, and their silence, say.
pub fn find(probe: &Probe, asked: Asked) -> Vec<Trouble> {
    find_at(probe, asked, Instant::now())
}

fn find_at(probe: &Probe, asked: Asked, now: Instant) -> Vec<Trouble> {
    let state = probe.state();
    if state.problem.is_some() {
        return Vec::new();
    }
    let silent = silent(&state, now);
    let mut found = Vec::new();
    if !silent.is_empty() {
        found.push(match is_alone(&state) {
            true => alone(asked),
            false => of_silent(&silent, asked),
        });
        if let Some(refusal) = &state.refusal {
            let text = format!(
                "this node's kernel refuses to send into the tunnels: {refusal}: look for a rule that drops what this node sends (`nft list ruleset`)"
            );
            found.push(trouble("OverlaySilent", text));
        }
    }
    found.extend(of_narrow(&state));
    found
}

/// Whether a peer's silence is to be named.
fn is_named(peer: &Peer, now: Instant) -> bool {
    let Some(since) = peer.silent_since else {
        return false;
    };
    let lasts = |since, grace| now.saturating_duration_since(since) >= grace;
    match peer.target.ready {
        None => lasts(since, GRACE_TO_START),
        Some(false) => false,
        Some(true) => lasts(since.max(peer.ready_since), GRACE),
    }
}

/// The silent peers to be named, those first that are silent for longest.
fn silent(state: &State, now: Instant) -> Vec<(&Name, &Peer)> {
    let peers = state.table.peers();
    let mut silent: Vec<_> = peers.filter(|(_, peer)| is_named(peer, now)).collect();
    silent.sort_by_key(|(name, peer)| (peer.silent_since, *name));
    silent
}

/// Whether it is this node that nobody answers: most of those that were asked last did not. In a large
/// cluster none of them has been silent for long, for each is asked every few minutes.
fn is_alone(state: &State) -> bool {
    let is_up = |peer: &&Peer| peer.target.ready != Some(false);
    let up = state.table.peers().filter(|(_, peer)| is_up(peer)).count();
    let verdicts = state.table.verdicts.iter();
    let heard: Vec<bool> = verdicts
        .filter_map(|(name, answers)| {
            let peer = state.table.peer(name).filter(is_up)?;
            Some(!answers && peer.silent_since.is_some())
        })
        .collect();
    let silent = heard.iter().filter(|silent| **silent).count();
    up >= 2 && heard.len() >= up.min(Verdicts::KEPT) && silent * 100 >= heard.len() * MOST
}

fn alone(asked: Asked) -> Trouble {
    trouble(
        "OverlaySilent",
        format!(
            "no answer through the tunnels from any other node: {} between this node's address and theirs, both ways (firewall, security group); {} here shows what leaves and what comes",
            asked.passes(),
            asked.shown()
        ),
    )
}

fn of_silent(silent: &[(&Name, &Peer)], asked: Asked) -> Trouble {
    let names = names(silent);
    trouble(
        "PeerSilent",
        format!(
            "no answer through the tunnel from {names}: {} between these nodes' addresses, both ways, and ICMP echo requests from pod ranges into them; {} on both shows where it ends; all of them: `sinabroctl nodes`",
            asked.passes(),
            asked.shown()
        ),
    )
}

fn of_narrow(state: &State) -> Option<Trouble> {
    let peers = state.table.peers();
    // Once it is known what passes, so that there is one text and not two.
    let narrow: Vec<_> = peers
        .filter(|(_, peer)| matches!(peer.path, Path::Narrow(_)))
        .collect();
    if narrow.is_empty() {
        return None;
    }
    let (mtu, names) = (state.table.mtu(), names(&narrow));
    let largest = narrow.iter().filter_map(|(_, p)| p.path.largest()).min();
    let found = largest.map(|largest| format!(", those of {largest} are not"));
    let set = match largest {
        Some(largest) if largest >= MIN_MTU => format!(
            "set `mtu: {largest}` on all nodes and start their pods again, or correct the link"
        ),
        Some(_) => format!("correct it, {MIN_MTU} is the least that `mtu` may be"),
        None => "set a smaller `mtu` on all nodes and start their pods again, or correct the link"
            .into(),
    };
    Some(trouble(
        "PeerPathMtu",
        format!(
            "packets of {mtu} bytes, the overlay's MTU, are lost on the way to {names} or back{}: a link between the nodes takes less than this node's uplink; {set}",
            found.unwrap_or_default()
        ),
    ))
}

fn names(peers: &[(&Name, &Peer)]) -> String {
    let named = peers.iter().take(NAMED);
    let named: Vec<_> = named
        .map(|(name, peer)| format!("{name} ({})", peer.target.tunnel))
        .collect();
    // Not how many: that changes from second to second.
    let more = match peers.len() > NAMED {
        true => " and others",
        false => "",
    };
    format!("{}{more}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::table::{PATIENCE, Target};
    use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

    const SECOND: Duration = Duration::from_secs(1);

    fn address(prefix: &str, n: usize) -> IpAddr {
        format!("{prefix}.{}.{}", n / 256, n % 256).parse().unwrap()
    }

    fn targets(count: usize, ready: impl Fn(usize) -> Option<bool>) -> BTreeMap<Name, Target> {
        let target = |n: usize| {
            let target = Target {
                gateway: address("10.244", n),
                tunnel: address("172.30", n),
                ready: ready(n),
            };
            (Name::from(format!("n{n:04}")), target)
        };
        (1..=count).map(target).collect()
    }

    /// A probe that has run for so long since `began`; those answer who are said to.
    fn run(
        probe: &Probe,
        began: Instant,
        time: Duration,
        answers: impl Fn(IpAddr) -> bool,
    ) -> Instant {
        let mut state = probe.state();
        let (mut now, end) = (began, began + time);
        while now < end {
            state.table.give_up(now);
            while let Some(ask) = state.table.ask(now) {
                state.table.sent(&ask, 24);
                if answers(ask.gateway) {
                    state.table.answered(now, ask.gateway, ask.number, 24);
                }
            }
            now += PATIENCE / 4;
        }
        now
    }

    const ASKED: Asked = Asked {
        port: 8472,
        routing: Routing::Tunnel,
    };

    fn reasons(probe: &Probe, now: Instant) -> Vec<String> {
        let found = find_at(probe, ASKED, now).into_iter();
        found.map(|trouble| trouble.reason).collect()
    }

    fn probe(targets: BTreeMap<Name, Target>, now: Instant) -> Arc<Probe> {
        let probe = Arc::new(Probe::default());
        probe.state().table.follow(now, 1450, targets);
        probe
    }

    #[test]
    fn a_node_that_is_started_again_is_not_named() {
        let began = Instant::now();
        let probe = probe(targets(5, |_| Some(true)), began);
        let others = |gateway| gateway != address("10.244", 3);
        let now = run(&probe, began, SECOND * 20, |_| true);
        assert_eq!(reasons(&probe, now), [""; 0]);
        // Gone; the cluster notices after forty seconds.
        let now = run(&probe, now, SECOND * 50, others);
        assert_eq!(probe.report().silent, 1);
        assert_eq!(reasons(&probe, now), [""; 0]);
        let not_ready = |n| Some(n != 3);
        probe.state().table.follow(now, 1450, targets(5, not_ready));
        let now = run(&probe, now, SECOND * 600, others);
        assert_eq!(reasons(&probe, now), [""; 0]);
        // Its kubelet is there before its tunnels are.
        probe
            .state()
            .table
            .follow(now, 1450, targets(5, |_| Some(true)));
        let now = run(&probe, now, SECOND * 30, others);
        assert_eq!(reasons(&probe, now), [""; 0]);
        // They do not come.
        let now = run(&probe, now, SECOND * 60, others);
        assert_eq!(reasons(&probe, now), ["PeerSilent"]);
        let now = run(&probe, now, SECOND * 20, |_| true);
        assert_eq!(reasons(&probe, now), [""; 0]);
    }

    #[test]
    fn many_silent_peers_are_one_trouble_whose_text_does_not_change() {
        let began = Instant::now();
        let probe = probe(targets(100, |_| None), began);
        let now = run(&probe, began, SECOND * 20, |_| true);
        let half = |gateway: IpAddr| match gateway {
            IpAddr::V4(gateway) => gateway.octets()[3] % 2 == 0,
            IpAddr::V6(_) => false,
        };
        let now = run(&probe, now, SECOND * 50, half);
        let found = find_at(&probe, ASKED, now);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].reason, "PeerSilent");
        assert!(found[0].text.contains("and others"), "{}", found[0].text);
        assert!(found[0].text.len() < 1024);
        let later = run(&probe, now, SECOND * 300, half);
        assert_eq!(find_at(&probe, ASKED, later), found);
        assert_eq!(probe.named_peers().silent.len(), 20);
    }

    #[test]
    fn a_node_that_nobody_answers_says_that_of_itself_at_once_and_alone() {
        let began = Instant::now();
        let probe = probe(targets(5000, |_| None), began);
        let now = run(&probe, began, SECOND * 600, |_| true);
        // Long before all have been asked again.
        let now = run(&probe, now, SECOND * 50, |_| false);
        assert!(probe.report().silent < 1000);
        assert_eq!(reasons(&probe, now), ["OverlaySilent"]);
        probe.state().refusal = Some("Operation not permitted".into());
        let found = find_at(&probe, ASKED, now);
        assert!(found[1].text.contains("Operation not permitted"));
        let now = run(&probe, now, SECOND * 700, |_| true);
        assert_eq!(reasons(&probe, now), [""; 0]);
    }

    #[test]
    fn of_two_nodes_neither_knows_whose_end_it_is() {
        let began = Instant::now();
        let probe = probe(targets(1, |_| None), began);
        let now = run(&probe, began, SECOND * 40, |_| false);
        assert_eq!(reasons(&probe, now), ["PeerSilent"]);
        // Nor is a node alone whose other peers are switched off.
        let probe = self::probe(targets(3, |n| (n != 1).then_some(false)), began);
        let now = run(&probe, began, SECOND * 40, |_| false);
        assert_eq!(reasons(&probe, now), ["PeerSilent"]);
    }

    #[test]
    fn what_is_not_probed_is_no_trouble() {
        let probe = Probe::off("the setting");
        assert_eq!(reasons(&probe, Instant::now()), [""; 0]);
        assert_eq!(probe.report().problem.as_deref(), Some("the setting"));
    }
}
