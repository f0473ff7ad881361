//! What is known of each peer's answers, and which is to be asked when; the clock is the caller's.
//!
//! - A peer is asked for a small echo every ten seconds, in large clusters less often, so that an
//!   agent asks ten peers a second at most. A loss is asked again at once; [`LOSSES`] in a row are
//!   silence.
//! - Now and then the request fills the overlay's MTU. If those are lost and the small ones between
//!   them are not, packets of some size do not get through: which, is searched for by halves.
//!
//! An answer counts if it is from the peer that was asked, to the request that waits, of its length.

use super::{
    path::{Path, Search},
    schedule::{interval, spread, within},
};
use sinabro_common::api::{PeerProbe, PeersReport};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long an answer may take.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Small requests in a row without an answer that make silence.
pub const LOSSES: u32 = 3;
/// Rounds between two requests that fill the MTU,
const ROUNDS: u32 = 10;
/// and while they are known to be lost.
const ROUNDS_OF_LOST: u32 = 3;
/// Peers that are asked for the size that gets through at the same time.
const SEARCHES: usize = 4;

pub type Name = Arc<str>;

/// A peer as the rest of the agent knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub gateway: IpAddr,
    pub tunnel: IpAddr,
    /// Whether its kubelet says that it is; none if there is none to say.
    pub ready: Option<bool>,
}

/// A request that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    pub gateway: IpAddr,
    pub number: u64,
    /// Size of the whole packet; none: as small as can be.
    pub packet: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    number: u64,
    at: Instant,
    packet: Option<u32>,
    /// As sent, to be answered by the same; none until it is.
    length: Option<usize>,
}

#[derive(Debug)]
pub struct Peer {
    pub target: Target,
    /// Since when its kubelet has said so without a break.
    pub ready_since: Instant,
    asked: Option<Asked>,
    due: Instant,
    /// Small requests lost in a row, and when the first was made.
    lost: u32,
    first_lost: Instant,
    pub round_trip: Option<Duration>,
    pub silent_since: Option<Instant>,
    pub path: Path,
    /// A large request was lost: a small one tells whether it was for its size.
    confirm: bool,
    path_due: Instant,
}

#[derive(Debug, Default)]
pub struct Table {
    peers: BTreeMap<Name, Peer>,
    by_gateway: HashMap<IpAddr, Name>,
    /// Peers to be asked, and those that were.
    due: BTreeSet<(Instant, Name)>,
    waiting: BTreeSet<(Instant, Name)>,
    last: u64,
    mtu: u32,
    searches: usize,
    /// The last peers that answered, or did not often enough; the newest last.
    pub verdicts: Verdicts,
}

/// The last that was heard of as many different peers.
#[derive(Debug, Default)]
pub struct Verdicts(Vec<(Name, bool)>);

impl Verdicts {
    pub const KEPT: usize = 20;

    fn push(&mut self, name: &Name, answers: bool) {
        self.0.retain(|(known, _)| known != name);
        self.0.push((name.clone(), answers));
        if self.0.len() > Self::KEPT {
            self.0.remove(0);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &(Name, bool)> {
        self.0.iter()
    }
}

impl Table {
    /// Takes over which peers there are, and how large the overlay's packets may be.
    pub fn follow(&mut self, now: Instant, mtu: u32, targets: BTreeMap<Name, Target>) {
        if mtu != self.mtu {
            self.mtu = mtu;
            self.forget_paths(now);
        }
        let count = targets.len();
        let gone: Vec<Name> = self
            .peers
            .keys()
            .filter(|name| !targets.contains_key(*name))
            .cloned()
            .collect();
        for name in gone {
            self.remove(&name);
        }
        for (name, target) in targets {
            match self.peers.get_mut(&name) {
                Some(peer) if peer.is_reached_as(&target) => {
                    if target.ready == Some(true) && peer.target.ready != target.ready {
                        peer.ready_since = now;
                    }
                    peer.target = target;
                }
                _ => {
                    self.remove(&name);
                    self.add(now, name, target, count);
                }
            }
        }
    }

    fn forget_paths(&mut self, now: Instant) {
        for peer in self.peers.values_mut() {
            peer.path = Path::Unknown;
            peer.confirm = false;
            peer.path_due = now;
        }
        self.searches = 0;
    }

    fn add(&mut self, now: Instant, name: Name, target: Target, count: usize) {
        // Not all at once, here or by all agents: a new node is news to each of them.
        let peer = Peer::new(now, target, now + within(interval(count)));
        self.by_gateway.insert(target.gateway, name.clone());
        self.due.insert((peer.due, name.clone()));
        self.peers.insert(name, peer);
    }

    fn remove(&mut self, name: &Name) {
        let Some(peer) = self.peers.remove(name) else {
            return;
        };
        // Another may have taken the address over.
        if self.by_gateway.get(&peer.target.gateway) == Some(name) {
            self.by_gateway.remove(&peer.target.gateway);
        }
        self.due.remove(&(peer.due, name.clone()));
        self.waiting.remove(&(peer.due, name.clone()));
        self.searches -= usize::from(peer.path.is_searched());
        self.verdicts.0.retain(|(known, _)| known != name);
    }

    /// When there is something to do next: a request that was not answered, or one to make.
    pub fn next_loss(&self) -> Option<Instant> {
        self.waiting.first().map(|(at, _)| *at)
    }

    pub fn next_ask(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// The request to make now, if one is due.
    pub fn ask(&mut self, now: Instant) -> Option<Ask> {
        let first = self.due.first()?;
        if first.0 > now {
            return None;
        }
        let (_, name) = self.due.pop_first()?;
        let (number, mtu) = (self.last + 1, self.mtu);
        let peer = self.peers.get_mut(&name)?;
        let packet = peer.next_packet(now, mtu);
        self.last = number;
        peer.asked = Some(Asked {
            number,
            at: now,
            packet,
            length: None,
        });
        peer.due = now + PATIENCE;
        let gateway = peer.target.gateway;
        self.waiting.insert((peer.due, name));
        Some(Ask {
            gateway,
            number,
            packet,
        })
    }

    /// A request left with this length.
    pub fn sent(&mut self, ask: &Ask, length: usize) {
        let name = self.by_gateway.get(&ask.gateway);
        let peer = name.and_then(|name| self.peers.get_mut(name));
        let asked = peer.and_then(|peer| peer.asked.as_mut());
        if let Some(asked) = asked.filter(|asked| asked.number == ask.number) {
            asked.length = Some(length);
        }
    }

    /// A request did not leave, which says nothing of the peer.
    pub fn withdraw(&mut self, now: Instant, ask: &Ask) {
        let round = interval(self.peers.len());
        let Some(name) = self.by_gateway.get(&ask.gateway).cloned() else {
            return;
        };
        let Some(peer) = self.peers.get_mut(&name) else {
            return;
        };
        if peer
            .asked
            .take_if(|asked| asked.number == ask.number)
            .is_some()
        {
            if ask.packet.is_some() {
                peer.path_due = now + round;
            }
            self.queue(&name, now + PATIENCE);
        }
    }

    /// Takes an answer, and how long it took; none if it is to nothing that was asked of that peer.
    pub fn answered(
        &mut self,
        now: Instant,
        from: IpAddr,
        number: u64,
        length: usize,
    ) -> Option<Duration> {
        let name = self.by_gateway.get(&from)?.clone();
        let peer = self.peers.get_mut(&name)?;
        let ours = |asked: &mut Asked| asked.number == number && asked.length == Some(length);
        let asked = peer.asked.take_if(ours)?;
        let took = now.duration_since(asked.at);
        let round = interval(self.by_gateway.len());
        let searched = peer.path.is_searched();
        let soon = peer.take_answer(now, &asked, took, round);
        self.searches -= usize::from(searched && !peer.path.is_searched());
        let due = if soon { now } else { now + spread(round) };
        self.verdicts.push(&name, true);
        self.queue(&name, due);
        Some(took)
    }

    /// Gives up what has waited too long; how many.
    pub fn give_up(&mut self, now: Instant) -> usize {
        let mut lost = 0;
        while let Some((deadline, _)) = self.waiting.first()
            && *deadline <= now
            && let Some((_, name)) = self.waiting.pop_first()
        {
            lost += 1;
            self.lose(now, &name);
        }
        lost
    }

    fn lose(&mut self, now: Instant, name: &Name) {
        let round = interval(self.peers.len());
        let (mtu, may_search) = (self.mtu, self.searches < SEARCHES);
        let Some((peer, asked)) = self.peers.get_mut(name).and_then(|peer| {
            let asked = peer.asked.take()?;
            Some((peer, asked))
        }) else {
            return;
        };
        let searched = peer.path.is_searched();
        match asked.packet {
            None => peer.lose_small(now, &asked),
            Some(packet) => peer.lose_large(now, packet, mtu, may_search, round),
        }
        let silent = peer.silent_since.is_some();
        match (searched, peer.path.is_searched()) {
            (false, true) => self.searches += 1,
            (true, false) => self.searches -= 1,
            _ => {}
        }
        if silent {
            self.verdicts.push(name, false);
            self.queue(name, now + spread(round));
        } else {
            self.queue(name, now);
        }
    }

    fn queue(&mut self, name: &Name, due: Instant) {
        if let Some(peer) = self.peers.get_mut(name) {
            self.waiting.remove(&(peer.due, name.clone()));
            self.due.remove(&(peer.due, name.clone()));
            peer.due = due;
            self.due.insert((due, name.clone()));
        }
    }

    pub fn peers(&self) -> impl Iterator<Item = (&Name, &Peer)> {
        self.peers.iter()
    }

    pub fn peer(&self, name: &str) -> Option<&Peer> {
        self.peers.get(name)
    }

    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    pub fn counts(&self) -> PeersReport {
        let mut counts = PeersReport::default();
        for peer in self.peers.values() {
            match peer.report(peer.due) {
                PeerProbe::Unknown => counts.unknown += 1,
                PeerProbe::Answers { .. } => counts.answering += 1,
                PeerProbe::SmallOnly { .. } => counts.small_only += 1,
                PeerProbe::Silent { .. } => counts.silent += 1,
            }
        }
        counts
    }
}

impl Peer {
    fn new(now: Instant, target: Target, due: Instant) -> Self {
        Self {
            target,
            ready_since: now,
            asked: None,
            due,
            lost: 0,
            first_lost: now,
            round_trip: None,
            silent_since: None,
            path: Path::Unknown,
            confirm: false,
            path_due: now,
        }
    }

    fn is_reached_as(&self, target: &Target) -> bool {
        (self.target.gateway, self.target.tunnel) == (target.gateway, target.tunnel)
    }

    /// Size of the next request, if it is to have one.
    fn next_packet(&self, now: Instant, mtu: u32) -> Option<u32> {
        if self.lost > 0 || self.confirm || self.round_trip.is_none() {
            return None;
        }
        match &self.path {
            Path::Searched(search) => Some(search.next()),
            Path::Losing(_) => Some(mtu),
            _ => (self.path_due <= now).then_some(mtu),
        }
    }

    /// Whether there is more to ask at once.
    fn take_answer(
        &mut self,
        now: Instant,
        asked: &Asked,
        took: Duration,
        round: Duration,
    ) -> bool {
        self.lost = 0;
        self.silent_since = None;
        self.confirm = false;
        self.round_trip = Some(took);
        match (asked.packet, &mut self.path) {
            (None, Path::Losing(_) | Path::Searched(_)) => true,
            (None, _) => self.path_due <= now,
            (Some(packet), Path::Searched(search)) => {
                let found = search.passed(packet);
                self.settle(now, found, round)
            }
            (Some(_), _) => {
                self.path = Path::Whole;
                self.path_due = now + round * ROUNDS;
                false
            }
        }
    }

    fn lose_small(&mut self, now: Instant, asked: &Asked) {
        if self.lost == 0 {
            self.first_lost = asked.at;
        }
        self.lost = self.lost.saturating_add(1);
        if self.lost >= LOSSES {
            self.silent_since.get_or_insert(self.first_lost);
            self.path = Path::Unknown;
            self.confirm = false;
            self.path_due = now;
        }
    }

    fn lose_large(
        &mut self,
        now: Instant,
        packet: u32,
        mtu: u32,
        may_search: bool,
        round: Duration,
    ) {
        self.confirm = true;
        match &mut self.path {
            Path::Unknown | Path::Whole => self.path = Path::Losing(1),
            Path::Losing(times) if *times + 1 < LOSSES => *times += 1,
            Path::Losing(_) if may_search => self.path = Path::Searched(Search::below(mtu)),
            Path::Losing(_) => {
                self.path = Path::Narrow(None);
                self.path_due = now + round * ROUNDS_OF_LOST;
            }
            Path::Searched(search) => {
                let found = search.lost(packet);
                self.settle(now, found, round);
            }
            Path::Narrow(_) => self.path_due = now + round * ROUNDS_OF_LOST,
        }
    }

    /// Ends a search that found something; whether it goes on.
    fn settle(&mut self, now: Instant, found: Option<u32>, round: Duration) -> bool {
        let Some(largest) = found else {
            return true;
        };
        self.path = Path::Narrow(Some(largest));
        self.path_due = now + round * ROUNDS_OF_LOST;
        false
    }

    pub fn report(&self, now: Instant) -> PeerProbe {
        if let Some(since) = self.silent_since {
            let seconds = now.saturating_duration_since(since).as_secs();
            return PeerProbe::Silent { seconds };
        }
        let Some(round_trip) = self.round_trip else {
            return PeerProbe::Unknown;
        };
        let round_trip_microseconds = round_trip.as_micros() as u64;
        match &self.path {
            Path::Unknown | Path::Whole | Path::Losing(_) => PeerProbe::Answers {
                round_trip_microseconds,
            },
            Path::Searched(_) | Path::Narrow(_) => PeerProbe::SmallOnly {
                round_trip_microseconds,
                largest: self.path.largest(),
            },
        }
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
