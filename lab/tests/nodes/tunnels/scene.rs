//! Two nodes with pods, by which way their packets go, and flows that are busy when somebody tries to get into them.

use anyhow::Result;
use sinabro_common::{
    abi::drop::DropReason,
    api::{NodeReport, PathCounts, PeerPath, Request, Response},
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    checks::{
        Scene,
        spoof::{await_drops, drops},
        tunnel::{Ear, FORGED, HONEST, send_by},
    },
    node::{KERNEL_FLAG, SERVICES_FLAGS},
    traffic::{
        any, bind, packet,
        seat::{self, Seat},
    },
    wait::eventually,
};
use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    ops::Deref,
};

/// How packets get from the first node to the second one, which is attacked and takes and sends all past its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By the first node's VXLAN device.
    Device,
    /// In tunnels past both stacks.
    Tunnels,
    TunnelsOverIpv6,
    Native,
}

use Way::{Device, Native, TunnelsOverIpv6};

/// More packets than it takes for a flow to be remembered (ADR 29).
const BUSY: usize = 16;
/// So many are forged one after the other, so that they would be a busy flow, too.
const FORGERIES: usize = 12;
/// What is said on a flow while nobody listens.
const BEFORE: &[u8] = b"before";

pub struct World {
    scene: Scene,
    way: Way,
    victims: Vec<Victim>,
}

impl Deref for World {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
    }
}

impl World {
    pub fn new(way: Way) -> Self {
        let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
        for node in lab.nodes() {
            if way == TunnelsOverIpv6 {
                // The first address is the one that tunnels use.
                node.lead_with_ipv6();
            }
            let mut entry = node.entry();
            entry.zero_checksum = way == TunnelsOverIpv6;
            entry.native = way == Native;
            node.set_entry(entry);
        }
        lab.publish().unwrap();
        for (node, number) in lab.nodes().iter().zip(1..) {
            start(way, node, number);
        }
        for node in lab.nodes() {
            node.wait_ready().unwrap();
        }
        let scene = Scene::new(lab).unwrap();
        let sources = [scene.pod(2, 3), scene.pod(1, 3)];
        let of_pod = |pod: &Pod| pod.addresses().map(|at| Victim::new(&scene, pod, at));
        let victims = sources.into_iter().flat_map(of_pod).collect();
        let world = Self {
            victims,
            scene,
            way,
        };
        world.goes_its_way();
        world
    }

    /// Flows to the attacked pod from one of its own node and from one of the other, of both families.
    pub fn victims(&self) -> impl Iterator<Item = &Victim> {
        self.victims.iter()
    }

    pub fn victims_over_ipv4(&self) -> impl Iterator<Item = &Victim> {
        self.victims().filter(|victim| victim.source.is_ipv4())
    }

    /// All that pods of both nodes send each other goes by the way that is attacked.
    fn goes_its_way(&self) {
        let path = match self.way {
            Native => PeerPath::Native,
            _ => PeerPath::Direct { why: None },
        };
        let is_by_device = |number| self.way == Device && number == 1;
        for number in [1, 2] {
            eventually("the way to be known", || {
                let said = other(self.node(number)).path;
                match is_by_device(number) {
                    true => matches!(said, Some(PeerPath::Kernel { .. })),
                    false => said.as_ref() == Some(&path),
                }
            });
        }
        let before = self.counted();
        for victim in self.victims().filter(|victim| !victim.is_local) {
            victim.talks().unwrap();
        }
        let after = self.counted();
        for number in [1, 2] {
            let [before, after] = [before, after].map(|counts| {
                let PathCounts {
                    direct,
                    native,
                    kernel,
                } = counts[number - 1];
                let (way, others) = match self.way {
                    _ if is_by_device(number) => (kernel, [direct, native]),
                    Native => (native, [direct, kernel]),
                    _ => (direct, [native, kernel]),
                };
                (way.sent, way.received, others)
            });
            let busy = BUSY as u64;
            let is_its_way = after.0 >= before.0 + busy && after.1 >= before.1 + busy;
            let way = self.way;
            assert!(is_its_way, "{way:?}, n{number}: {before:?} {after:?}");
            assert_eq!(after.2, before.2, "{way:?}, n{number}");
        }
    }

    /// What each node has counted of the other one.
    fn counted(&self) -> [PathCounts; 2] {
        [1, 2].map(|number| other(self.node(number)).packets.unwrap_or_default())
    }

    /// Packets that are forged to be of a flow that is busy are dropped on that node for that reason, and none is heard. On each
    /// processor, for each remembers flows for itself.
    pub fn stopped(
        &self,
        victim: &Victim,
        attack: &Attack<'_>,
        more: &[u8],
        (node, reason): (&Node, DropReason),
    ) {
        let forge = attack.on(victim, more).unwrap();
        for cpu in seat::two_cpus().unwrap() {
            let before = drops(node, reason).unwrap();
            let stopped = victim
                .is_met_by(&forge, cpu)
                .and_then(|()| victim.ear.hears_honest())
                .and_then(|()| await_drops(node, reason, before, FORGERIES as u64));
            let source = victim.source;
            stopped.unwrap_or_else(|error| panic!("{error:#}: {attack:?} as from {source}"));
        }
    }

    /// Such packets are heard as if they were the flow's.
    pub fn taken(&self, victim: &Victim, attack: &Attack<'_>) {
        let forge = attack.on(victim, b"").unwrap();
        for cpu in seat::two_cpus().unwrap() {
            victim.is_met_by(&forge, cpu).unwrap();
            let error = victim.ear.hears_honest().unwrap_err().to_string();
            assert!(error.contains("forged"), "{error}");
        }
    }
}

fn start(way: Way, node: &Node, number: usize) {
    node.write_services("{kind: List, items: []}\n").unwrap();
    // Requests of agents would be counted, too.
    let mut flags = vec!["--peer-probe=false"];
    match way == Device && number == 1 {
        true => flags.push(KERNEL_FLAG),
        false => flags.extend(SERVICES_FLAGS),
    }
    if way == Native {
        flags.push("--routing=native");
    }
    node.start_agent_with(&flags).unwrap();
}

/// What a node says of the other one.
fn other(node: &Node) -> NodeReport {
    let nodes = match node.ask(Request::Nodes { after: None }).unwrap() {
        Response::Nodes(nodes) => nodes,
        answer => panic!("{answer:?}"),
    };
    nodes.into_iter().find(|said| !said.local).unwrap()
}

/// A flow to a pod of the second node that somebody else's packets are to get into.
pub struct Victim {
    pub ear: Ear,
    pub source: IpAddr,
    /// Whether it is from a pod of the same node.
    pub is_local: bool,
    place: Place,
    socket: UdpSocket,
}

impl Victim {
    fn new(scene: &Scene, pod: &Pod, source: IpAddr) -> Self {
        let ear = Ear::new(scene.node(2), scene.pod(2, 1), source.is_ipv4()).unwrap();
        let place = pod.place().clone();
        let bind = || bind::udp((source, packet::SRC_PORT));
        let socket = place.run(bind).unwrap();
        socket.connect(ear.at()).unwrap();
        Self {
            is_local: scene.pod(2, 3).addresses().contains(&source),
            ear,
            source,
            place,
            socket,
        }
    }

    /// As many packets both ways as make it busy.
    fn talks(&self) -> Result<()> {
        for _ in 0..BUSY {
            self.socket.send(BEFORE)?;
            self.ear.answer(self.socket.local_addr()?)?;
        }
        Ok(())
    }

    /// It is busy, somebody is in the midst of it, and it says something honest at last: all on one processor, so that nothing of it
    /// overtakes another.
    fn is_met_by(&self, forge: &Forge, cpu: usize) -> Result<()> {
        self.ear.forget()?;
        let place = &self.place;
        Seat { place, cpu }.run(|| {
            self.talks()?;
            for _ in 0..FORGERIES {
                forge()?;
                self.socket.send(BEFORE)?;
            }
            self.socket.send(HONEST)?;
            Ok(())
        })
    }
}

/// Sends one packet that is forged.
type Forge = dyn Fn() -> Result<()> + Sync;

/// Who forges packets, and how they get to where they are to be heard.
#[derive(Debug)]
pub enum Attack<'a> {
    /// In a tunnel, to there.
    Tunnel(&'a Place, SocketAddr),
    /// As they are, by a link named `eth0` to who has this MAC address.
    Bare(&'a Place, [u8; 6]),
}

impl Attack<'_> {
    fn on(&self, victim: &Victim, more: &[u8]) -> Result<Box<Forge>> {
        let payload = [FORGED, more].concat();
        Ok(match *self {
            Self::Tunnel(from, to) => {
                let packet = victim.ear.forgery(victim.source, &payload)?;
                let socket = from.run(|| Ok(UdpSocket::bind((any(to.ip()), 0))?))?;
                Box::new(move || send_by(&socket, to, &packet))
            }
            Self::Bare(from, dst_mac) => {
                let link = packet::interface(from, "eth0")?;
                let frame = packet::Datagram {
                    src_mac: link.mac,
                    dst_mac,
                    src: victim.source,
                    dst: victim.ear.at().ip(),
                    dst_port: victim.ear.at().port(),
                    payload: &payload,
                    may_be_cut: false,
                }
                .frame()?;
                let socket = packet::socket(from, link, 0)?;
                Box::new(move || Ok(socket.send(&frame).map(drop)?))
            }
        })
    }
}
