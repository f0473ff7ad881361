//! Flows made by hand: as many at once as there are ports, without a socket for each, and each with an
//! identity that both ends look at.
//!
//! An identity is the client and its port. A datagram carries it; in TCP it is the number of the first
//! byte, which whoever translates the segment leaves alone. The server holds for each address and port
//! that it sees whose that is: two at a time are a mix-up, as is an answer that another flow gets. All
//! of it is driven by the calling thread, so many flows on their way at a time and no more; what is lost
//! on a busy machine is sent again.

use super::{PATIENCE, packet::transport_checksum};
use crate::place::Place;
use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{setsockopt, sockopt},
};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    collections::{HashMap, VecDeque},
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd as _,
    process::Command,
    time::{Duration, Instant},
};

/// Flows that wait for an answer at a time.
const WINDOW: usize = 128;
/// How long an answer is waited for before a packet is sent again.
const AGAIN: Duration = Duration::from_secs(1);
/// A flow of datagrams that is silent for as long may be forgotten, and its port another's: less than the half
/// minute that translations keep what was answered once, unless they are set otherwise.
const FORGOTTEN: Duration = Duration::from_secs(20);
/// Of each socket: more than all that is on its way.
const BUFFER: usize = 8 << 20;

/// The kernel, which knows of no such flows, is to say nothing about them.
const QUIET: &str = "table inet crowd {}; delete table inet crowd; table inet crowd {
    chain out { type filter hook output priority filter;
        tcp flags & rst == rst drop;
        icmp type destination-unreachable drop;
        icmpv6 type destination-unreachable drop;
    }
}";

const SYN: u8 = 0x02;
const SYN_ACK: u8 = 0x12;
const ACK: u8 = 0x10;
const FIN_ACK: u8 = 0x11;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Datagrams,
    Connections,
}

/// A flow: its client's number and port, and how often that port was used before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    client: u8,
    port: u16,
    round: u8,
}

impl Identity {
    fn number(self) -> u32 {
        u32::from(self.round) << 24 | u32::from(self.client) << 16 | u32::from(self.port)
    }

    fn of(number: u32) -> Self {
        let [round, client, high, low] = number.to_be_bytes();
        Self {
            client,
            port: u16::from_be_bytes([high, low]),
            round,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Open,
    Close,
}

/// Clients, and the server that all of them speak to.
pub struct Crowd {
    kind: Kind,
    clients: Vec<End>,
    server: End,
    /// Where the server is, and where clients find it.
    at: SocketAddr,
    target: SocketAddr,
    /// Who is known to the server by which address.
    known: HashMap<SocketAddr, Identity>,
    seen: HashMap<Identity, (SocketAddr, Instant)>,
    /// How long a flow of datagrams is remembered on the way.
    remembered: Duration,
}

struct End {
    name: String,
    socket: Socket,
    address: IpAddr,
}

impl Crowd {
    /// `target` leads to `at`, an address and a port of the server's place that nothing else uses.
    pub fn new(
        kind: Kind,
        clients: &[(&Place, IpAddr)],
        server: &Place,
        at: SocketAddr,
        target: SocketAddr,
    ) -> Result<Self> {
        let end = |(place, address): (&Place, IpAddr)| End::new(kind, place, address);
        ensure!(clients.len() <= 256, "too many clients");
        Ok(Self {
            kind,
            clients: clients
                .iter()
                .map(|client| end(*client))
                .collect::<Result<_>>()?,
            server: end((server, at.ip()))?,
            at,
            target,
            known: HashMap::new(),
            seen: HashMap::new(),
            remembered: FORGOTTEN,
        })
    }

    /// Flows of datagrams that are silent for as long keep their ports, too.
    pub fn remembered_for(self, remembered: Duration) -> Self {
        Self { remembered, ..self }
    }

    /// Begins a flow of each of these ports of every client. All are open at the end; those that are
    /// open already are asked whether they still are.
    pub fn open(&mut self, ports: std::ops::Range<u16>, round: u8) -> Result<()> {
        self.carry(Step::Open, self.flows(ports, round))
    }

    /// Ends these flows in order, the client first. There is nothing to end of datagrams.
    pub fn close(&mut self, ports: std::ops::Range<u16>, round: u8) -> Result<()> {
        match self.kind {
            Kind::Datagrams => {
                self.known.clear();
                self.seen.clear();
                Ok(())
            }
            Kind::Connections => self.carry(Step::Close, self.flows(ports, round)),
        }
    }

    /// Where clients find the server.
    pub fn target(&self) -> SocketAddr {
        self.target
    }

    /// The addresses by which the server knows the flows that are open.
    pub fn known(&self) -> impl Iterator<Item = SocketAddr> {
        self.known.keys().copied()
    }

    fn flows(&self, ports: std::ops::Range<u16>, round: u8) -> VecDeque<Identity> {
        let clients = 0..self.clients.len();
        let flow = |port| {
            clients.clone().map(move |client| Identity {
                client: client as u8,
                port,
                round,
            })
        };
        ports.flat_map(flow).collect()
    }

    /// Takes a step with all of these flows.
    fn carry(&mut self, step: Step, mut left: VecDeque<Identity>) -> Result<()> {
        let all = left.len();
        let mut waiting: HashMap<Identity, Instant> = HashMap::new();
        let mut moved = Instant::now();
        loop {
            while waiting.len() < WINDOW
                && let Some(flow) = left.pop_front()
            {
                self.ask(step, flow)?;
                waiting.insert(flow, Instant::now());
            }
            if waiting.is_empty() {
                return Ok(());
            }
            self.wait()?;
            self.serve()?;
            for flow in self.heard(step)? {
                if waiting.remove(&flow).is_some() {
                    moved = Instant::now();
                }
            }
            if moved.elapsed() > PATIENCE {
                let missing: Vec<_> = waiting.keys().take(3).collect();
                bail!(
                    "{step:?}: {} of {all} flows are without an answer, {missing:?} among them",
                    left.len() + waiting.len()
                );
            }
            let late = waiting
                .iter_mut()
                .filter(|(_, sent)| sent.elapsed() > AGAIN);
            let late: Vec<_> = late
                .map(|(flow, sent)| {
                    *sent = Instant::now();
                    *flow
                })
                .collect();
            for flow in late {
                self.ask(step, flow)?;
            }
        }
    }

    /// Until something arrives, or something is to be sent again.
    fn wait(&self) -> Result<()> {
        let ends = self.clients.iter().chain([&self.server]);
        let mut fds: Vec<_> = ends
            .map(|end| PollFd::new(end.socket.as_fd(), PollFlags::POLLIN))
            .collect();
        match poll(&mut fds, PollTimeout::try_from(AGAIN)?) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("cannot wait for sockets"),
        }
    }

    /// What a flow's client says.
    fn ask(&self, step: Step, flow: Identity) -> Result<()> {
        let number = flow.number();
        let packet = match (self.kind, step) {
            (Kind::Datagrams, _) => datagram(flow.port, self.target.port(), number),
            (_, Step::Open) => segment(flow.port, self.target.port(), SYN, number, 0),
            (_, Step::Close) => {
                let (sequence, acknowledged) = (number.wrapping_add(1), (!number).wrapping_add(1));
                segment(
                    flow.port,
                    self.target.port(),
                    FIN_ACK,
                    sequence,
                    acknowledged,
                )
            }
        };
        self.clients[usize::from(flow.client)].send(self.kind, packet, self.target)
    }

    /// Answers everything that came to the server, which is looked at.
    fn serve(&mut self) -> Result<()> {
        while let Some(packet) = self.server.receive()? {
            if packet.dst.port() != self.at.port() {
                continue;
            }
            let (src, port) = (packet.src, packet.src.port());
            let (number, answer) = match (self.kind, packet.flags) {
                (Kind::Datagrams, _) => {
                    let number = packet.said;
                    (number, Some(datagram(self.at.port(), port, number)))
                }
                (_, SYN) => {
                    let number = packet.sequence;
                    let acknowledged = number.wrapping_add(1);
                    let answer = segment(self.at.port(), port, SYN_ACK, !number, acknowledged);
                    (number, Some(answer))
                }
                (_, FIN_ACK) => {
                    let number = packet.sequence.wrapping_sub(1);
                    let sequence = (!number).wrapping_add(1);
                    let acknowledged = number.wrapping_add(2);
                    let answer = segment(self.at.port(), port, FIN_ACK, sequence, acknowledged);
                    (number, Some(answer))
                }
                // Of what is begun, or of what was ended: whose that was is no longer known.
                _ => (packet.sequence.wrapping_sub(1), None),
            };
            let flow = Identity::of(number);
            if answer.is_some() || self.known.contains_key(&src) {
                self.note(flow, src, packet.flags)?;
            }
            if let Some(answer) = answer {
                self.server.send(self.kind, answer, src)?;
            }
        }
        Ok(())
    }

    /// A flow has one address for as long as it is open, and an address one flow.
    fn note(&mut self, flow: Identity, src: SocketAddr, flags: u8) -> Result<()> {
        if self.kind == Kind::Connections && flags == FIN_ACK {
            let known = self.known.remove(&src);
            ensure!(
                known.is_none_or(|known| known == flow),
                "mixed up: {src} was {known:?} and is ended by {flow:?}"
            );
            self.seen.remove(&flow);
            return Ok(());
        }
        if flags == ACK && self.known.get(&src) != Some(&flow) {
            // The last of an ended one, one higher than the first.
            let before = Identity::of(flow.number().wrapping_sub(1));
            let known = self.known.get(&src);
            ensure!(
                !self.seen.contains_key(&before) || known == Some(&before),
                "mixed up: {src} is {known:?} and is used by {flow:?}"
            );
            return Ok(());
        }
        if let Some(known) = self.known.insert(src, flow)
            && known != flow
        {
            let is_over = self.is_forgotten(known);
            ensure!(is_over, "mixed up: {src} is {known:?} and {flow:?}");
            self.seen.remove(&known);
        }
        let is_over = self.is_forgotten(flow);
        if let Some((seen, _)) = self.seen.insert(flow, (src, Instant::now()))
            && seen != src
        {
            ensure!(is_over, "{flow:?} was {seen} and is {src}");
            self.known.remove(&seen);
        }
        Ok(())
    }

    /// Whether nobody has to remember a flow any more.
    fn is_forgotten(&self, flow: Identity) -> bool {
        let last = self.seen.get(&flow).map(|(_, last)| last.elapsed());
        self.kind == Kind::Datagrams && last.is_some_and(|silent| silent > self.remembered)
    }

    /// The flows whose answers came to their clients.
    fn heard(&self, step: Step) -> Result<Vec<Identity>> {
        let mut heard = Vec::new();
        for (client, end) in self.clients.iter().enumerate() {
            while let Some(packet) = end.receive()? {
                if packet.src != self.target {
                    continue;
                }
                let (number, answer) = match (self.kind, packet.flags) {
                    (Kind::Datagrams, _) => (packet.said, None),
                    (_, SYN_ACK) => {
                        let number = packet.acknowledged.wrapping_sub(1);
                        (
                            number,
                            Some((packet.acknowledged, (!number).wrapping_add(1))),
                        )
                    }
                    (_, FIN_ACK) => {
                        let number = packet.acknowledged.wrapping_sub(2);
                        (
                            number,
                            Some((packet.acknowledged, (!number).wrapping_add(2))),
                        )
                    }
                    (_, flags) => bail!("a client got a segment with flags {flags:#x}"),
                };
                let flow = Identity::of(number);
                ensure!(
                    (usize::from(flow.client), flow.port) == (client, packet.dst.port()),
                    "mixed up: {} of {} got the answer to {flow:?}",
                    packet.dst,
                    end.name
                );
                if let Some((sequence, acknowledged)) = answer {
                    let last = segment(flow.port, self.target.port(), ACK, sequence, acknowledged);
                    end.send(self.kind, last, self.target)?;
                }
                let is_end = packet.flags == FIN_ACK;
                if self.kind == Kind::Datagrams || is_end == (step == Step::Close) {
                    heard.push(flow);
                }
            }
        }
        Ok(heard)
    }
}

/// A packet as it arrived.
struct Packet {
    src: SocketAddr,
    dst: SocketAddr,
    /// Of a datagram.
    said: u32,
    /// Of a segment.
    flags: u8,
    sequence: u32,
    acknowledged: u32,
}

impl End {
    fn new(kind: Kind, place: &Place, address: IpAddr) -> Result<Self> {
        let open = || -> Result<_> {
            let output = Command::new("nft").arg(QUIET).output()?;
            ensure!(output.status.success(), "nft: {output:?}");
            let domain = match address {
                IpAddr::V4(_) => Domain::IPV4,
                IpAddr::V6(_) => Domain::IPV6,
            };
            let protocol = Protocol::from(i32::from(kind.protocol()));
            let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
            setsockopt(&socket, sockopt::RcvBufForce, &BUFFER)?;
            socket.set_nonblocking(true)?;
            socket.bind(&SocketAddr::new(address, 0).into())?;
            Ok(socket)
        };
        let name = place.name().to_string();
        let socket = place
            .run(open)
            .with_context(|| format!("no raw socket for {name}"))?;
        Ok(Self {
            name,
            socket,
            address,
        })
    }

    /// Sends a packet, its checksum put in. What finds no room is lost.
    fn send(&self, kind: Kind, mut packet: Vec<u8>, to: SocketAddr) -> Result<()> {
        let sum_at = kind.checksum_at();
        let sum = match transport_checksum(self.address, to.ip(), kind.protocol(), &packet) {
            0 => 0xffff,
            sum => sum,
        };
        packet[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
        // The port of a raw socket's destination is its protocol, or zero (raw(7)).
        match self
            .socket
            .send_to(&packet, &SocketAddr::new(to.ip(), 0).into())
        {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error).with_context(|| format!("{} cannot send to {to}", self.name)),
        }
    }

    fn receive(&self) -> Result<Option<Packet>> {
        let mut buffer = [0_u8; 2048];
        loop {
            // SAFETY: u8 may be seen as MaybeUninit<u8>; recv_from only writes initialised bytes.
            let room = unsafe {
                &mut *(std::ptr::from_mut(&mut buffer) as *mut [std::mem::MaybeUninit<u8>; 2048])
            };
            let (len, src) = match self.socket.recv_from(room) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error).context("cannot receive"),
            };
            let src = src.as_socket().context("a packet without a source")?;
            if let Some(packet) = read(src.ip(), self.address, &buffer[..len]) {
                return Ok(Some(packet));
            }
        }
    }
}

impl Kind {
    fn protocol(self) -> u8 {
        match self {
            Self::Datagrams => 17,
            Self::Connections => 6,
        }
    }

    fn checksum_at(self) -> usize {
        match self {
            Self::Datagrams => 6,
            Self::Connections => 16,
        }
    }
}

fn datagram(from: u16, to: u16, said: u32) -> Vec<u8> {
    let ports = [from.to_be_bytes(), to.to_be_bytes()].concat();
    [&ports[..], &[0, 12, 0, 0], &said.to_be_bytes()].concat()
}

fn segment(from: u16, to: u16, flags: u8, sequence: u32, acknowledged: u32) -> Vec<u8> {
    let ports = [from.to_be_bytes(), to.to_be_bytes()].concat();
    let numbers = [sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat();
    // Window, checksum, urgent pointer.
    let rest = [5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0];
    [&ports[..], &numbers, &rest].concat()
}

/// Reads what a raw socket got: with IPv4's header, and without IPv6's (raw(7)).
fn read(src: IpAddr, dst: IpAddr, packet: &[u8]) -> Option<Packet> {
    let header = match src {
        IpAddr::V4(_) => usize::from(packet.first()? & 0xf) * 4,
        IpAddr::V6(_) => 0,
    };
    let body = packet.get(header..)?;
    let port = |at: usize| Some(u16::from_be_bytes(body.get(at..at + 2)?.try_into().ok()?));
    let number = |at: usize| Some(u32::from_be_bytes(body.get(at..at + 4)?.try_into().ok()?));
    Some(Packet {
        src: SocketAddr::new(src, port(0)?),
        dst: SocketAddr::new(dst, port(2)?),
        said: number(8)?,
        flags: body.get(13).copied().unwrap_or(0),
        sequence: number(4)?,
        acknowledged: number(8)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two places and a cable between them.
    fn pair() -> [Place; 2] {
        let [a, b] = ["crowd-a", "crowd-b"].map(|name| Place::fresh(name).unwrap());
        let ends = [1, 2].map(|number| ("eth0", [2, 0x1a, 0xb0, 0, 4, number]));
        a.cable(ends[0], 1500, &b, ends[1]).unwrap();
        for (place, last) in [(&a, 1), (&b, 2)] {
            let nets = [format!("198.18.0.{last}/24"), format!("fd00:18::{last}/64")];
            place
                .set_up("eth0", &nets.map(|net| net.parse().unwrap()))
                .unwrap();
        }
        [a, b]
    }

    #[test]
    fn flows_are_opened_ended_and_opened_again() {
        let [a, b] = pair();
        for (client, server) in [("198.18.0.1", "198.18.0.2"), ("fd00:18::1", "fd00:18::2")] {
            let at = SocketAddr::new(server.parse().unwrap(), 9);
            for kind in [Kind::Datagrams, Kind::Connections] {
                let clients = [(&a, client.parse().unwrap())];
                let mut crowd = Crowd::new(kind, &clients, &b, at, at).unwrap();
                for round in 0..2 {
                    crowd.open(2000..2300, round).unwrap();
                    crowd.open(2100..2200, round).unwrap();
                    assert_eq!(crowd.known().count(), 300);
                    crowd.close(2000..2300, round).unwrap();
                    assert_eq!(crowd.known().count(), 0);
                }
            }
        }
    }

    /// What the tests that use it must see: something on the way gives all flows one port.
    #[test]
    fn flows_that_are_mixed_up_are_noticed() {
        let [a, b] = pair();
        let rules = "table ip same { chain out { type filter hook output priority raw;
            udp dport 9 udp sport set 7777; tcp dport 9 tcp sport set 7777; }
        }";
        let output = a
            .run(|| Ok(Command::new("nft").arg(rules).output()?))
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let at = "198.18.0.2:9".parse().unwrap();
        for kind in [Kind::Datagrams, Kind::Connections] {
            let clients = [(&a, "198.18.0.1".parse().unwrap())];
            let mut crowd = Crowd::new(kind, &clients, &b, at, at).unwrap();
            let error = crowd.open(2000..2010, 0).unwrap_err().to_string();
            assert!(
                error.starts_with("mixed up: 198.18.0.1:7777 is "),
                "{error}"
            );
        }
    }
}
