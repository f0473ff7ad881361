//! Whether other nodes answer through their tunnels.
//!
//! Echo requests go from this node's address inside the overlay to that of each peer, and the peer's
//! kernel answers: whether its agent runs, and of which release it is, does not matter
//! (docs/adr/0015-peers-are-probed-by-echo-requests.md).
//!
//! - [`wire`]: requests and answers as bytes; [`echo`]: the socket;
//! - [`table`]: what is known of each peer, and who is asked next; [`path`]: how large packets may
//!   be; [`schedule`]: how often;
//! - [`trials`]: to whom packets of other kinds get; [`without_checksum`]: the socket for one of these;
//! - here: the task, and what it says of itself.
//!
//! Which way pods' packets go depends on [`trials`]; no silence in the tunnels changes what the agent does.

pub mod echo;
pub mod path;
pub mod schedule;
pub mod table;
pub mod trials;
pub mod wire;
pub mod without_checksum;

use crate::{
    apply::OverlayStatus,
    chain::Chain,
    datapath::Datapath,
    node::NodeStatus,
    plan::{Reach, Reached, facts::first_host},
    telemetry::metrics::Metrics,
    watch::Snapshot,
};
use echo::{Echo, NotSent};
use schedule::APART;
use sinabro_common::api::{NodeReport, PeersReport};
use std::{
    collections::BTreeMap,
    future::pending,
    io,
    mem::MaybeUninit,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use table::{Ask, Name, Peer, Table, Target};
use tokio::{sync::watch, task::JoinHandle, time::sleep_until};
use tracing::{debug, warn};
use trials::{Kind, Request, Trials};
use wire::Nonce;
use without_checksum::{Tunnel, WithoutChecksum};

/// The largest datagram there is.
const LARGEST: usize = 65_536;
/// How soon more is read of what comes faster than it is read.
const FLOODED: Duration = Duration::from_millis(10);
const NO_SOCKET: &str = "there is no socket";
/// How soon a socket that could not be opened is tried again.
const OPEN_AGAIN: Duration = Duration::from_secs(10);

/// What the probe knows, for those who report it.
#[derive(Debug, Default)]
pub struct Probe {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub struct State {
    pub table: Table,
    /// Why nobody is asked.
    pub problem: Option<String>,
    /// What this node's kernel said when it refused to send.
    pub refusal: Option<String>,
}

impl Probe {
    /// One that asks nobody.
    pub fn off(why: &str) -> Arc<Self> {
        let probe = Self::default();
        probe.state().problem = Some(why.to_owned());
        Arc::new(probe)
    }

    /// What is known now. Not to be held for long.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn report(&self) -> PeersReport {
        let state = self.state();
        PeersReport {
            problem: state.problem.clone(),
            ..state.table.counts()
        }
    }

    /// The first of the peers that have something wrong. Not all: each of thousands of agents may
    /// have lost thousands.
    pub fn named_peers(&self) -> NamedPeers {
        let state = self.state();
        if state.problem.is_some() {
            return NamedPeers::default();
        }
        let of = |wrong: fn(&Peer) -> bool| {
            let peers = state.table.peers().filter(|(_, peer)| wrong(peer));
            let names = peers.map(|(name, _)| name.to_string());
            names.take(NamedPeers::MOST).collect()
        };
        NamedPeers {
            silent: of(|peer| peer.silent_since.is_some()),
            narrow: of(|peer| peer.path.is_narrow()),
        }
    }

    /// Adds to each node what its answers say.
    pub fn complete(&self, nodes: &mut [NodeReport]) {
        let (state, now) = (self.state(), Instant::now());
        if state.problem.is_some() {
            return;
        }
        for node in nodes {
            let peer = state.table.peer(&node.name);
            node.probe = peer.map(|peer| peer.report(now));
        }
    }
}

/// Peers that have metrics of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedPeers {
    pub silent: Vec<String>,
    /// They lose packets of the overlay's MTU.
    pub narrow: Vec<String>,
}

impl NamedPeers {
    pub const MOST: usize = 20;
}

/// What the probe follows.
pub struct Sources {
    /// The VXLAN device.
    pub device: &'static str,
    pub facts: watch::Receiver<Snapshot>,
    pub node: watch::Receiver<NodeStatus>,
    pub overlay: watch::Receiver<OverlayStatus>,
    pub metrics: Arc<Metrics>,
    /// Who knows how to ask without a tunnel, where packets go so to who answers.
    pub natively: Option<Arc<Datapath>>,
    /// How to ask in a tunnel without a checksum, likewise.
    pub without_checksum: Option<Tunnel>,
    /// Who is told to whom packets get so.
    pub reached: watch::Sender<Reached>,
}

/// Asks peers for ever; the task ends with the overlay.
pub fn spawn(sources: Sources) -> (Arc<Probe>, JoinHandle<()>) {
    let probe = Arc::new(Probe::default());
    let kinds = [
        (sources.natively.is_some(), Kind::Natively),
        (sources.without_checksum.is_some(), Kind::WithoutChecksum),
    ];
    let kinds = kinds.into_iter().filter(|(is_tried, _)| *is_tried);
    let mut prober = Prober {
        trials: kinds.map(|(_, kind)| Trials::new(kind)).collect(),
        sources,
        probe: probe.clone(),
        nonce: Nonce::random(),
        nodes: Arc::default(),
        own: Vec::new(),
        own_end: None,
        sockets: [Family::default(), Family::default()],
        without_checksum: None,
        buffer: vec![MaybeUninit::uninit(); LARGEST].into(),
        not_before: Instant::now(),
    };
    let task = tokio::spawn(async move { prober.run().await });
    (probe, task)
}

/// The socket of one family, and when it is opened again if there is none.
#[derive(Debug, Default)]
struct Family {
    echo: Option<Echo>,
    again: Option<Instant>,
}

struct Prober {
    sources: Sources,
    probe: Arc<Probe>,
    trials: Vec<Trials>,
    nonce: Nonce,
    /// The nodes that the table was made of.
    nodes: Arc<Vec<NodeReport>>,
    /// This node's addresses inside the overlay.
    own: Vec<IpAddr>,
    /// Its end of tunnels over IPv6.
    own_end: Option<IpAddr>,
    /// IPv4, IPv6.
    sockets: [Family; 2],
    without_checksum: Option<WithoutChecksum>,
    buffer: Box<[MaybeUninit<u8>]>,
    /// When the next request may be made.
    not_before: Instant,
}

impl Prober {
    async fn run(&mut self) {
        self.follow();
        loop {
            // What came while this task waited for its turn is not lost, however late it is read.
            let flooded = self.take_answers();
            let now = Instant::now();
            let lost = self.probe.state().table.give_up(now);
            self.sources.metrics.peer_probes_lost(lost);
            if self.not_before <= now && self.ask_next(now) {
                self.not_before = now + APART;
            }
            self.tell_whom_packets_reach();
            let wake = self.wake(flooded);
            let [v4, v6] = &self.sockets;
            tokio::select! {
                () = sleep_until(wake.into()) => {}
                () = readable(v4, flooded) => {}
                () = readable(v6, flooded) => {}
                changed = self.sources.overlay.changed() => match changed {
                    Ok(()) => self.follow(),
                    Err(_) => return,
                },
                changed = self.sources.facts.changed() => match changed {
                    Ok(()) => self.follow_facts(),
                    Err(_) => return,
                },
            }
        }
    }

    /// When there is something to do although nothing happens.
    fn wake(&self, flooded: bool) -> Instant {
        let now = Instant::now();
        if flooded {
            return now + FLOODED;
        }
        let state = self.probe.state();
        let trials = self.trials.iter().filter_map(Trials::next);
        let ask = state.table.next_ask().into_iter().chain(trials);
        let ask = ask.min().map(|at| at.max(self.not_before));
        let next = ask.into_iter().chain(state.table.next_loss()).min();
        // Nobody to ask: only a change brings somebody.
        next.unwrap_or(now + OPEN_AGAIN)
    }

    /// Takes over the overlay's peers, if they are others than before.
    fn follow(&mut self) {
        let nodes = self.sources.overlay.borrow_and_update().nodes.clone();
        if !Arc::ptr_eq(&nodes, &self.nodes) {
            self.nodes = nodes;
            self.follow_facts();
        }
    }

    fn follow_facts(&mut self) {
        let facts = self.sources.facts.borrow_and_update().facts.clone();
        let state = self.sources.node.borrow().state.clone();
        let mtu = state.map_or(0, |state| state.tunnel_mtu);
        let own = self.nodes.iter().find(|node| node.local);
        self.own = own.map_or(Vec::new(), |own| {
            own.pod_cidrs.iter().copied().map(first_host).collect()
        });
        self.own_end = own.and_then(|own| {
            let own = facts.as_ref()?.nodes.get(&own.name)?;
            own.tunnel_address(Ipv6Addr::UNSPECIFIED.into())
        });
        let ready = |name: &str| {
            let node = facts.as_ref()?.nodes.get(name)?;
            // A list that was written by hand says nothing of kubelets.
            (node.registered != 0).then_some(node.ready)
        };
        let target = |node: &NodeReport| -> Option<(Name, Target)> {
            let target = Target {
                gateway: node.gateway?,
                tunnel: node.tunnel?,
                ready: ready(&node.name),
            };
            Some((node.name.as_str().into(), target))
        };
        let (now, nodes) = (Instant::now(), self.nodes.iter());
        let targets: BTreeMap<_, _> = nodes.filter_map(target).collect();
        self.probe.state().table.follow(now, mtu, targets);
        if let Some(facts) = &facts {
            for trials in &mut self.trials {
                let targets = trials.kind.targets(&self.nodes, &self.own, facts);
                trials.follow(now, &targets);
            }
        }
    }

    fn tell_whom_packets_reach(&mut self) {
        let mut changed = false;
        for trials in &mut self.trials {
            changed |= trials.has_changed();
        }
        if !changed {
            return;
        }
        let of = |kind: Kind| {
            let mut trials = self.trials.iter();
            trials
                .find(|trials| trials.kind == kind)
                .map(Trials::reached)
        };
        let reach = Reach {
            natively: of(Kind::Natively).unwrap_or_default(),
            without_checksum: of(Kind::WithoutChecksum),
        };
        self.sources.reached.send_if_modified(|before| {
            let changes = **before != reach;
            if changes {
                *before = reach.into();
            }
            changes
        });
    }

    fn take_answers(&mut self) -> bool {
        let mut more = false;
        for family in &self.sockets {
            let Some(echo) = &family.echo else {
                continue;
            };
            let mut state = self.probe.state();
            let metrics = &self.sources.metrics;
            more |= echo.drain(&mut self.buffer, |from, number, length| {
                let now = Instant::now();
                if let Some(kind) = Kind::of(number) {
                    for trials in self.trials.iter_mut().filter(|trials| trials.kind == kind) {
                        trials.answered(now, from, number);
                    }
                } else if let Some(took) = state.table.answered(now, from, number, length) {
                    metrics.peer_probe_answered(took);
                }
            });
        }
        more
    }

    /// Asks whose turn it is, if it is anybody's.
    fn ask_next(&mut self, now: Instant) -> bool {
        let of_table = self.probe.state().table.next_ask();
        let trials = self.trials.iter_mut();
        let first = trials.filter_map(|trials| Some((trials.next()?, trials)));
        let first = first.min_by_key(|(at, _)| *at);
        if let Some((at, trials)) = first
            && of_table.is_none_or(|of| at < of)
        {
            let request = trials.ask(now);
            if let Some(request) = request {
                let asked = match request.kind {
                    Kind::Natively => self.ask_natively(now, &request),
                    Kind::WithoutChecksum => self.ask_without_checksum(now, &request),
                };
                // It is not answered.
                if let Err(why) = asked {
                    debug!("cannot ask {} {:?}: {why}", request.gateway, request.kind);
                }
            }
            return request.is_some();
        }
        let ask = self.probe.state().table.ask(now);
        if let Some(ask) = &ask {
            self.ask(ask);
        }
        ask.is_some()
    }

    /// Asks so that it gets there without a tunnel or not at all.
    fn ask_natively(&mut self, now: Instant, request: &Request) -> Result<(), String> {
        let datapath = self.sources.natively.as_ref().ok_or("it is off")?;
        let mark = datapath.mark_of_requests().unwrap_or_else(|error| {
            let to = request.gateway;
            warn!("cannot ask {to} without a tunnel: {}", Chain(&error));
            None
        });
        let mark = mark.ok_or("no program would see to it")?;
        let echo = self.socket(now, request.gateway).ok_or(NO_SOCKET)?;
        let asked = echo.ask_marked(mark, request.gateway, request.number);
        asked.map_err(|error| error.to_string())
    }

    /// Asks in a tunnel as packets of pods are in it that go there past the stack.
    fn ask_without_checksum(&mut self, now: Instant, request: &Request) -> Result<(), String> {
        let tunnel = self.sources.without_checksum.ok_or("it is off")?;
        let (Some(IpAddr::V6(own)), IpAddr::V6(node)) = (self.own_end, request.tunnel) else {
            return Err("not both nodes have an IPv6 address".into());
        };
        let echo = self.socket(now, request.gateway).ok_or(NO_SOCKET)?;
        let from = echo.source();
        let icmp = echo.request(request.gateway, request.number);
        let icmp = icmp.map_err(|error| error.to_string())?;
        let socket = match self.without_checksum.take() {
            Some(socket) if socket.source() == own => socket,
            _ => WithoutChecksum::open(own).map_err(|error| error.to_string())?,
        };
        let asked = socket.ask(node, tunnel, (from, request.gateway), icmp);
        match asked {
            // Another one is opened the next time.
            Err(NotSent::Refused(error)) => Err(error.to_string()),
            asked => {
                self.without_checksum = Some(socket);
                asked.map_err(|error| error.to_string())
            }
        }
    }

    fn ask(&mut self, ask: &Ask) {
        let now = Instant::now();
        let sent = match self.socket(now, ask.gateway) {
            Some(echo) => {
                let length = ask.packet.map_or(wire::LEAST, |packet| echo.length(packet));
                echo.ask(ask.gateway, ask.number, length).map(|()| length)
            }
            None => Err(NotSent::Later),
        };
        let mut state = self.probe.state();
        match sent {
            Ok(length) => {
                state.table.sent(ask, length);
                state.refusal = None;
            }
            Err(NotSent::Later | NotSent::TooLarge) => state.table.withdraw(now, ask),
            // It counts as lost when its time is over: nothing gets to the peer from here.
            Err(NotSent::Refused(error)) => {
                state.refusal = Some(error.to_string());
                drop(state);
                *self.family(ask.gateway) = Family::default();
            }
        }
    }

    fn family(&mut self, of: IpAddr) -> &mut Family {
        &mut self.sockets[usize::from(of.is_ipv6())]
    }

    /// The socket for a peer's family, opened if need be.
    fn socket(&mut self, now: Instant, peer: IpAddr) -> Option<&Echo> {
        let same_family = |own: &&IpAddr| own.is_ipv4() == peer.is_ipv4();
        let source = *self.own.iter().find(same_family)?;
        let (device, nonce) = (self.sources.device, self.nonce);
        let family = self.family(peer);
        let is_usable = family.echo.as_ref().is_some_and(|e| e.source() == source);
        if !is_usable {
            if family.again.is_some_and(|again| now < again) {
                return None;
            }
            *family = Family {
                echo: None,
                again: Some(now + OPEN_AGAIN),
            };
            match Echo::open(source, device, nonce) {
                Ok(echo) => {
                    family.echo = Some(echo);
                    self.opened(None);
                }
                Err(error) => self.opened(Some(not_opened(&error, source))),
            }
        }
        self.family(peer).echo.as_ref()
    }

    fn opened(&self, problem: Option<String>) {
        let mut state = self.probe.state();
        if let Some(problem) = &problem
            && state.problem.as_ref() != Some(problem)
        {
            warn!("other nodes are not asked whether they answer: {problem}");
        }
        state.problem = problem;
    }
}

fn not_opened(error: &io::Error, source: IpAddr) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "net.ipv4.ping_group_range has no group of the agent: run `sinabroctl prepare` as root, or add group 0 to it".into()
        }
        _ => format!("no echo can be asked for from {source}: {error}"),
    }
}

/// Waits until there may be something to read; for ever if there is no socket, or too much to read.
async fn readable(family: &Family, flooded: bool) {
    match &family.echo {
        Some(echo) if !flooded => echo.readable().await,
        _ => pending().await,
    }
}
