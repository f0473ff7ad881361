//! Nobody but nodes speaks in tunnels.
//!
//! Each check sends hand-made VXLAN packets (RFC 7348) whose inner source is somebody else's.
//! None may arrive, all must be counted, and an honest datagram between the same pods must
//! arrive after them.

use super::{
    Family, Scene,
    spoof::{await_drops, drops},
};
use crate::{
    Node, Pod,
    place::Place,
    traffic::{PATIENCE, any, packet::Datagram, readable},
};
use anyhow::{Context as _, Result, bail, ensure};
use sinabro_common::{
    abi::{drop::DropReason, node::vxlan_header},
    names,
};
use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Instant,
};

pub const HONEST: &[u8] = b"honest";
pub const FORGED: &[u8] = b"forged";
const PACKETS: usize = 5;

/// A pod's ear, and what a hostile host would whisper into it through a tunnel to its node.
pub struct Ear {
    socket: UdpSocket,
    to: SocketAddr,
    device: [u8; 6],
}

impl Ear {
    pub fn new(node: &Node, pod: &Pod, v4: bool) -> Result<Self> {
        let [first, second] = pod.addresses();
        let address = if first.is_ipv4() == v4 { first } else { second };
        let socket = pod
            .place()
            .run(|| Ok(UdpSocket::bind((any(address), 0))?))?;
        let to = SocketAddr::new(address, socket.local_addr()?.port());
        // The node's tunnel address, and so the device's MAC address.
        let tunnel = node.addresses()[0];
        let device = names::vxlan_mac(tunnel);
        Ok(Self { socket, to, device })
    }

    /// The payload of a UDP datagram to the tunnel port that carries a packet from `source`.
    pub fn forgery(&self, source: IpAddr, payload: &[u8]) -> Result<Vec<u8>> {
        let inner = Datagram {
            // Nothing in it gives the forger away.
            src_mac: names::vxlan_mac(source),
            dst_mac: self.device,
            src: source,
            dst: self.to.ip(),
            dst_port: self.to.port(),
            payload,
            may_be_cut: false,
        };
        Ok([&vxlan_header(names::VXLAN_VNI)[..], &inner.frame()?].concat())
    }

    /// Where it listens.
    pub fn at(&self) -> SocketAddr {
        self.to
    }

    /// What has come so far is not asked about.
    pub fn forget(&self) -> Result<()> {
        let mut buffer = [0; 64];
        while readable(&self.socket, Instant::now())? {
            self.socket.recv_from(&mut buffer)?;
        }
        Ok(())
    }

    /// Sends something to whoever it is.
    pub fn answer(&self, to: SocketAddr) -> Result<()> {
        self.socket.send_to(HONEST, to).context("cannot answer")?;
        Ok(())
    }

    /// Sends an honest datagram from a pod and waits for it; no forged one may come before.
    pub fn hears_only(&self, honest: &Place) -> Result<()> {
        let address = self.to;
        honest.run(|| {
            let socket = UdpSocket::bind((any(address.ip()), 0))?;
            Ok(socket.send_to(HONEST, address)?)
        })?;
        self.hears_honest()
    }

    /// Waits for an honest datagram; no forged one may come before.
    pub fn hears_honest(&self) -> Result<()> {
        let address = self.to;
        let deadline = Instant::now() + PATIENCE;
        let mut buffer = [0; 64];
        loop {
            ensure!(
                readable(&self.socket, deadline)?,
                "the honest datagram did not arrive at {address}"
            );
            let (len, source) = self.socket.recv_from(&mut buffer)?;
            match &buffer[..len] {
                HONEST => return Ok(()),
                heard if heard.starts_with(FORGED) => {
                    bail!("a packet forged as from {source} arrived at {address}")
                }
                _ => {}
            }
        }
    }
}

/// Sends a datagram as any process may; one that is refused on the way out is not sent.
pub fn send(from: &Place, to: SocketAddr, payload: &[u8]) -> Result<()> {
    from.run(|| send_by(&UdpSocket::bind((any(to.ip()), 0))?, to, payload))
}

/// The same by a socket.
pub fn send_by(socket: &UdpSocket, to: SocketAddr, payload: &[u8]) -> Result<()> {
    match socket.send_to(payload, to) {
        // Dropped by a program as it left, or a port that answered that nobody is there.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EPERM | libc::ENOBUFS | libc::ECONNREFUSED)
            ) =>
        {
            Ok(())
        }
        other => other.map(drop).context("cannot send"),
    }
}

/// Whether packets forged as from these sources, sent to a node's tunnel port, are dropped for
/// this reason on that node; how many were.
fn refused(
    scene: &Scene,
    sender: &Place,
    target: IpAddr,
    counted: (&Node, DropReason),
) -> Result<u64> {
    let node = scene.node(2);
    let before = drops(counted.0, counted.1)?;
    let mut sent = 0;
    for family in Family::BOTH {
        let ear = Ear::new(node, scene.pod(2, 1), family == Family::V4)?;
        // Another pod of the receiver's node, and one of the other node.
        for source in [scene.pod(2, 3), scene.pod(1, 3)] {
            let payload = ear.forgery(family.of(source), FORGED)?;
            for _ in 0..PACKETS {
                send(sender, SocketAddr::new(target, names::VXLAN_PORT), &payload)?;
                sent += 1;
            }
        }
        ear.hears_only(scene.pod(1, 1).place())?;
    }
    await_drops(counted.0, counted.1, before, sent)
        .with_context(|| format!("tunnel packets of {} to {target}", sender.name()))
}

pub fn forged_tunnel(scene: &Scene) -> Result<String> {
    let (n1, n2) = (scene.node(1), scene.node(2));
    let reason = DropReason::EncapProhibited;
    let mut dropped = 0;
    for target in n2.addresses() {
        // From another node and on the node itself.
        dropped += refused(scene, scene.pod(1, 1).place(), target, (n1, reason))?;
        dropped += refused(scene, scene.pod(2, 2).place(), target, (n2, reason))?;
    }
    let outside = scene.lab().outside().place();
    let tunnel = n2.addresses()[0];
    let stranger = DropReason::TunnelSource;
    dropped += refused(scene, outside, tunnel, (n2, stranger))?;
    Ok(format!(
        "{dropped} hand-made tunnel packets of pods and of an outside host dropped, honest ones arrive"
    ))
}
