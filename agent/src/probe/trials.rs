//! Whether packets of a kind get to other nodes; the clock is the caller's.
//!
//! Each node that takes such packets is asked by some: an echo request that goes so or not at all, whatever pods' packets
//! are in. [`ANSWERS`] in a row and pods' packets go so, too; [`LOSSES`](super::table::LOSSES) in a row and they go as before. Pods'
//! packets are lost until that is noticed, so a node for which it was soon taken back is tried again the later, the more often
//! that happened.

use super::{
    schedule::{soon, spread, within},
    table::{LOSSES, PATIENCE},
};
use crate::plan::{Facts, Node, facts::first_host};
use sinabro_common::api::NodeReport;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

/// Answers in a row that show that packets get there.
pub const ANSWERS: u32 = 3;
/// Between these.
const SOON: Duration = Duration::from_secs(1);
/// How long a node rests to which packets no longer get, at first and at most.
const REST: Duration = Duration::from_secs(10);
const LONGEST_REST: Duration = Duration::from_secs(600);

/// What is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No tunnel (`routing: auto`).
    Natively,
    /// Tunnels over IPv6 without a checksum (RFC 6935), which what is between the nodes may drop (RFC 6936 section 3).
    WithoutChecksum,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Natively, Self::WithoutChecksum];

    /// Numbers of its requests have this bit, those of [`super::table`] none of them.
    const fn bit(self) -> u64 {
        match self {
            Self::Natively => 1 << 63,
            Self::WithoutChecksum => 1 << 62,
        }
    }

    /// What a request with that number tries, if anything.
    pub fn of(number: u64) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|kind| number & kind.bit() != 0)
    }

    /// Addresses inside the overlay at which a node is asked. `own`: this node's.
    fn gateways(
        self,
        tunnel: IpAddr,
        node: &NodeReport,
        peer: &Node,
        own: &[IpAddr],
    ) -> Vec<IpAddr> {
        let is_of = |family: IpAddr, among: &[IpAddr]| {
            let mut among = among.iter();
            among.any(|address| address.is_ipv4() == family.is_ipv4())
        };
        let gateways = node.pod_cidrs.iter().copied().map(first_host);
        let gateways = gateways.filter(|gateway| is_of(*gateway, own));
        match self {
            // In each family that such packets may be of: IPv6 packets are given to IPv6 neighbours alone, IPv4 packets to those of both.
            Self::Natively if peer.native => gateways
                .filter(|gateway| tunnel.is_ipv6() || is_of(*gateway, &peer.addresses))
                .collect(),
            // What is inside makes no difference to who sees the outside.
            Self::WithoutChecksum if peer.zero_checksum && tunnel.is_ipv6() => {
                gateways.take(1).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whom to ask: the nodes that say that they take such packets.
    pub fn targets(self, nodes: &[NodeReport], own: &[IpAddr], facts: &Facts) -> Targets {
        let mut targets = Targets::new();
        for node in nodes.iter().filter(|node| !node.local) {
            let peer = facts.nodes.get(&node.name);
            if let (Some(tunnel), Some(peer)) = (node.tunnel, peer) {
                let gateways = self.gateways(tunnel, node, peer, own).into_iter();
                targets.extend(gateways.map(|gateway| (gateway, tunnel)));
            }
        }
        targets
    }
}

/// Addresses of other nodes inside the overlay that are asked, each with its node's tunnel address.
pub type Targets = BTreeMap<IpAddr, IpAddr>;

/// A request that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub kind: Kind,
    /// Of the node that is asked: inside the overlay and outside.
    pub gateway: IpAddr,
    pub tunnel: IpAddr,
    pub number: u64,
}

#[derive(Debug)]
pub struct Trials {
    pub kind: Kind,
    trials: BTreeMap<IpAddr, Trial>,
    /// When each is asked, or its answer too late.
    queue: BTreeSet<(Instant, IpAddr)>,
    last: u64,
    /// Whether others may be reached than when that was last asked.
    changed: bool,
}

#[derive(Debug)]
struct Trial {
    tunnel: IpAddr,
    due: Instant,
    /// The request that waits.
    asked: Option<u64>,
    answered: u32,
    lost: u32,
    /// Since when packets get there.
    passes: Option<Instant>,
    rest: Duration,
}

impl Trials {
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            trials: BTreeMap::new(),
            queue: BTreeSet::new(),
            last: 0,
            changed: false,
        }
    }

    /// Takes over who is to be asked.
    pub fn follow(&mut self, now: Instant, targets: &Targets) {
        self.changed = true;
        let queue = &mut self.queue;
        self.trials.retain(|gateway, trial| {
            let stays = targets.get(gateway) == Some(&trial.tunnel);
            if !stays {
                queue.remove(&(trial.due, *gateway));
            }
            stays
        });
        let round = soon(targets.len());
        for (&gateway, &tunnel) in targets {
            self.trials.entry(gateway).or_insert_with(|| {
                let due = now + within(round / 2);
                queue.insert((due, gateway));
                Trial {
                    tunnel,
                    due,
                    asked: None,
                    answered: 0,
                    lost: 0,
                    passes: None,
                    rest: REST,
                }
            });
        }
    }

    /// When there is something to do next.
    pub fn next(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Gives up what has waited too long; whom to ask now.
    pub fn ask(&mut self, now: Instant) -> Option<Request> {
        while let Some(&(due, gateway)) = self.queue.first()
            && due <= now
        {
            let round = soon(self.trials.len());
            let trial = self.trials.get(&gateway)?;
            if trial.asked.is_none() {
                let tunnel = trial.tunnel;
                self.last += 1;
                let number = self.kind.bit() | self.last;
                self.turn(now, gateway, |trial| {
                    trial.asked = Some(number);
                    PATIENCE
                });
                return Some(Request {
                    kind: self.kind,
                    gateway,
                    tunnel,
                    number,
                });
            }
            self.turn(now, gateway, |trial| {
                trial.asked = None;
                trial.lose(now, round)
            });
        }
        None
    }

    /// Takes an answer; false if it is to nothing that was asked there.
    pub fn answered(&mut self, now: Instant, from: IpAddr, number: u64) -> bool {
        let round = soon(self.trials.len());
        let Some(trial) = self.trials.get_mut(&from) else {
            return false;
        };
        if trial.asked.take_if(|asked| *asked == number).is_none() {
            return false;
        }
        self.turn(now, from, |trial| trial.take_answer(now, round));
        true
    }

    /// Whether [`Self::reached`] may say something else than when this was last asked.
    pub fn has_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Tunnel addresses of the nodes to which such packets get: of each family that is asked for.
    pub fn reached(&self) -> BTreeSet<IpAddr> {
        let of = |passes: bool| {
            let trials = self.trials.values();
            trials
                .filter(move |trial| trial.passes.is_some() == passes)
                .map(|trial| trial.tunnel)
        };
        let mut reached: BTreeSet<_> = of(true).collect();
        for tunnel in of(false) {
            reached.remove(&tunnel);
        }
        reached
    }

    /// Changes a trial, which has its next turn as long afterwards as that says.
    fn turn(&mut self, now: Instant, of: IpAddr, change: impl FnOnce(&mut Trial) -> Duration) {
        if let Some(trial) = self.trials.get_mut(&of) {
            let before = trial.passes;
            self.queue.remove(&(trial.due, of));
            trial.due = now + change(trial);
            self.queue.insert((trial.due, of));
            self.changed |= before != trial.passes;
        }
    }
}

impl Trial {
    /// How long until the next request.
    fn take_answer(&mut self, now: Instant, round: Duration) -> Duration {
        self.lost = 0;
        self.answered = self.answered.saturating_add(1);
        if self.answered >= ANSWERS {
            self.passes.get_or_insert(now);
        }
        match self.passes {
            Some(_) => spread(round),
            None => SOON,
        }
    }

    fn lose(&mut self, now: Instant, round: Duration) -> Duration {
        self.answered = 0;
        self.lost = self.lost.saturating_add(1);
        let Some(since) = self.passes else {
            return spread(round.max(self.rest));
        };
        if self.lost < LOSSES {
            return Duration::ZERO;
        }
        self.passes = None;
        self.rest = match now.duration_since(since) < LONGEST_REST {
            true => (self.rest * 2).min(LONGEST_REST),
            false => REST,
        };
        spread(round.max(self.rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::overlay::node_reports;
    use proptest::prelude::*;

    const A: [&str; 2] = ["10.244.1.0", "fd00:10:244:1::"];

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// One node of both families.
    fn targets() -> Targets {
        A.map(|gateway| (ip(gateway), ip("192.0.2.1"))).into()
    }

    struct World {
        now: Instant,
        trials: Trials,
        told: BTreeSet<IpAddr>,
    }

    impl World {
        fn new() -> Self {
            let mut trials = Trials::new(Kind::Natively);
            let now = Instant::now();
            trials.follow(now, &targets());
            let told = BTreeSet::new();
            Self { now, trials, told }
        }

        /// Whether the node is reached, after a while in which those that `answers` names have answered.
        fn after(&mut self, time: Duration, answers: impl Fn(IpAddr) -> bool) -> bool {
            let end = self.now + time;
            while let Some(next) = self.trials.next()
                && next <= end
            {
                self.now = self.now.max(next);
                if let Some(Request {
                    gateway, number, ..
                }) = self.trials.ask(self.now)
                    && answers(gateway)
                {
                    assert!(self.trials.answered(self.now, gateway, number));
                    assert!(!self.trials.answered(self.now, gateway, number), "twice");
                }
            }
            self.now = end;
            let reached = self.trials.reached();
            if self.trials.has_changed() {
                self.told = self.trials.reached();
            }
            assert_eq!(self.told, reached, "a change is told of");
            assert!(!self.trials.has_changed(), "once");
            !reached.is_empty()
        }
    }

    const MINUTE: Duration = Duration::from_secs(60);

    fn peer_with(addresses: &[&str]) -> Node {
        let cidrs = ["10.244.2.0/24", "fd00:10:244:2::/64"];
        Node {
            name: "peer".into(),
            addresses: addresses.iter().copied().map(ip).collect(),
            pod_cidrs: cidrs.map(|cidr| cidr.parse().unwrap()).into(),
            ..Node::default()
        }
    }

    /// At which addresses a node is asked.
    fn asked(kind: Kind, node: Node, tunnel: &str, own: &[IpAddr]) -> Vec<IpAddr> {
        let facts = Facts::new([node]);
        let mut reports = node_reports(&facts, "own", None);
        reports[0].tunnel = Some(ip(tunnel));
        let targets = kind.targets(&reports, own, &facts);
        assert!(targets.values().all(|node| *node == ip(tunnel)));
        targets.into_keys().collect()
    }

    #[test]
    fn nodes_are_asked_once_by_what_has_no_checksum_over_ipv6() {
        let own = ["10.244.1.1", "fd00:10:244:1::1"].map(ip);
        let (v4, v6) = ("192.0.2.2", "2001:db8::2");
        let asked = |tunnel: &str, own: &[IpAddr], zero_checksum| {
            let node = Node {
                zero_checksum,
                ..peer_with(&[v6, v4])
            };
            asked(Kind::WithoutChecksum, node, tunnel, own)
        };
        assert_eq!(asked(v6, &own, true), [ip("10.244.2.1")]);
        assert_eq!(asked(v6, &own[1..], true), [ip("fd00:10:244:2::1")]);
        assert!(asked(v6, &own, false).is_empty());
        assert!(asked(v4, &own, true).is_empty());
        assert!(asked(v6, &[], true).is_empty());
    }

    #[test]
    fn a_number_says_what_was_tried() {
        for kind in Kind::ALL {
            let mut trials = Trials::new(kind);
            let now = Instant::now();
            trials.follow(now, &targets());
            let asked = trials.ask(now + MINUTE).unwrap();
            assert_eq!((asked.kind, Kind::of(asked.number)), (kind, Some(kind)));
        }
        assert_eq!(Kind::of(u64::from(u32::MAX)), None);
    }

    #[test]
    fn nodes_are_asked_in_each_family_that_their_neighbours_can_be_given() {
        let own = ["10.244.1.1", "fd00:10:244:1::1"].map(ip);
        let peer = ["10.244.2.1", "fd00:10:244:2::1"];
        let asked = |addresses: &[&str], tunnel: &str, own: &[IpAddr], native: bool| {
            let node = Node {
                native,
                ..peer_with(addresses)
            };
            asked(Kind::Natively, node, tunnel, own)
        };
        let both = peer.map(ip);
        let (v4, v6) = ("192.0.2.2", "2001:db8::2");
        assert_eq!(asked(&[v4, v6], v4, &own, true), both);
        assert_eq!(asked(&[v4], v4, &own, true), both[..1]);
        assert_eq!(asked(&[v6], v6, &own, true), both);
        assert_eq!(asked(&[v6], v6, &own[1..], true), both[1..]);
        assert!(asked(&[v4, v6], v4, &own, false).is_empty());
    }

    #[test]
    fn who_answers_in_all_families_is_reached() {
        let mut world = World::new();
        assert!(world.trials.reached().is_empty());
        assert!(!world.after(MINUTE, |gateway| gateway.is_ipv4()));
        assert!(world.after(MINUTE, |_| true));
        assert!(!world.after(MINUTE, |gateway| gateway.is_ipv6()));
    }

    #[test]
    fn who_is_reached_is_so_until_it_is_silent() {
        let mut world = World::new();
        // Up to one until the first request, and two between three.
        assert!(world.after(3 * SOON, |_| true));
        assert!(world.after(10 * MINUTE, |_| true));
        // A round, and three requests that are waited for.
        assert!(!world.after(Duration::from_millis(5_500), |_| false));
    }

    #[test]
    fn who_falls_silent_again_and_again_rests_for_longer() {
        let mut world = World::new();
        assert!(world.after(MINUTE, |_| true));
        let mut rests = Vec::new();
        for _ in 0..8 {
            assert!(!world.after(MINUTE, |_| false));
            let mut seconds = 0;
            while !world.after(SOON, |_| true) {
                seconds += 1;
            }
            rests.push(seconds);
        }
        assert!(
            rests[0] < 60 && rests[7] > 350 && rests[7] <= 760,
            "{rests:?}"
        );
        // It is forgotten when all went well for as long.
        assert!(world.after(2 * LONGEST_REST, |_| true));
        assert!(!world.after(Duration::from_secs(16), |_| false));
        assert!(world.after(MINUTE, |_| true));
    }

    #[test]
    fn answers_that_nobody_waits_for_are_none() {
        let mut world = World::new();
        let (gateway, number) = loop {
            world.now += SOON;
            if let Some(Request {
                gateway, number, ..
            }) = world.trials.ask(world.now)
            {
                assert_eq!(Kind::of(number), Some(Kind::Natively));
                assert!(!world.trials.answered(world.now, gateway, number + 1));
                assert!(!world.trials.answered(world.now, ip("10.244.9.0"), number));
                break (gateway, number);
            }
        };
        // Too late.
        world.now += PATIENCE;
        world.trials.ask(world.now);
        world.trials.ask(world.now);
        assert!(!world.trials.answered(world.now, gateway, number));
        world.trials.follow(world.now, &Targets::new());
        assert_eq!(world.trials.next(), None);
        assert!(world.trials.reached().is_empty());
    }

    proptest! {
        /// Whatever answers and whoever comes and goes: each is in the queue once, and only who is asked is reached.
        #[test]
        fn each_has_one_turn(steps in proptest::collection::vec((0_u8..8, 0_u64..20, any::<bool>()), 1..200)) {
            let mut world = World::new();
            for (which, seconds, answers) in steps {
                let mut targets = targets();
                targets.retain(|gateway, _| which & (1 << usize::from(gateway.is_ipv6())) == 0);
                world.trials.follow(world.now, &targets);
                world.after(Duration::from_secs(seconds), |_| answers);
                prop_assert_eq!(world.trials.queue.len(), targets.len());
                prop_assert_eq!(world.trials.trials.len(), targets.len());
                prop_assert!(!targets.is_empty() || world.trials.reached().is_empty());
            }
        }
    }
}
