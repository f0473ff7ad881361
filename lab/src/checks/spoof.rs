//! A pod speaks for itself alone.
//!
//! Each check injects frames that differ from an honest one in a single field. The honest one
//! must arrive, so that the check cannot pass because nothing arrives at all.

use super::{Family, Scene};
use crate::{
    Node, Pod,
    cni::IFNAME,
    traffic::{
        PATIENCE, any,
        packet::{Datagram, Interface, arp_claim, inject, interface},
        readable,
    },
    wait::wait_for,
};
use anyhow::{Context as _, Result, bail, ensure};
use sinabro_common::{
    abi::drop::DropReason,
    api::{Request, Response},
    names,
};
use std::{
    net::{IpAddr, UdpSocket},
    time::Instant,
};

const HONEST: &[u8] = b"honest";
const SPOOFED: &[u8] = b"spoofed";
const FRAMES: usize = 5;

pub fn spoofed_address(scene: &Scene) -> Result<String> {
    let mut dropped = 0;
    for family in Family::BOTH {
        let foreign = match family {
            Family::V4 => ["10.244.1.250", "198.51.100.7"],
            Family::V6 => ["fd00:10:244:1::fa", "2001:db8:51::7"],
        };
        let mut sources: Vec<IpAddr> = foreign
            .iter()
            .map(|text| text.parse())
            .collect::<Result<_, _>>()?;
        // Another pod's address, on this node and on another.
        sources.push(family.of(scene.pod(1, 3)));
        sources.push(family.of(scene.pod(2, 3)));
        for receiver in [scene.pod(1, 2), scene.pod(2, 1)] {
            dropped += silenced(scene, receiver, family, DropReason::SourceAddr, |honest| {
                sources
                    .iter()
                    .map(|src| Datagram {
                        src: *src,
                        ..honest
                    })
                    .collect()
            })?;
        }
    }
    Ok(format!(
        "{dropped} frames with a foreign address dropped, honest ones arrive"
    ))
}

pub fn spoofed_mac(scene: &Scene) -> Result<String> {
    let mut dropped = 0;
    for family in Family::BOTH {
        for receiver in [scene.pod(1, 2), scene.pod(2, 1)] {
            dropped += silenced(scene, receiver, family, DropReason::SourceMac, |honest| {
                let foreign = [0x0a, 0x58, 0xde, 0xad, 0xbe, 0xef];
                vec![Datagram {
                    src_mac: foreign,
                    ..honest
                }]
            })?;
        }
    }
    Ok(format!(
        "{dropped} frames with a foreign MAC dropped, honest ones arrive"
    ))
}

pub fn spoofed_arp(scene: &Scene) -> Result<String> {
    let pod = scene.pod(1, 1);
    let interface = interface(pod.place(), IFNAME)?;
    let IpAddr::V4(other) = scene.pod(1, 3).v4() else {
        bail!("not an IPv4 address");
    };
    let node = scene.node(1);
    let before = drops(node, DropReason::SourceAddr)?;
    inject(
        pod.place(),
        interface,
        &vec![arp_claim(interface.mac, other); FRAMES],
    )?;
    let dropped = await_drops(node, DropReason::SourceAddr, before, FRAMES as u64)?;
    Ok(format!(
        "{dropped} ARP claims to another pod's address dropped"
    ))
}

/// Injects spoofed frames and an honest one on pod 1 of node 1; only the latter may arrive, and
/// the drops must be counted under their reason.
fn silenced<'a>(
    scene: &Scene,
    receiver: &Pod,
    family: Family,
    reason: DropReason,
    spoof: impl FnOnce(Datagram<'a>) -> Vec<Datagram<'a>>,
) -> Result<u64> {
    let (sender, node) = (scene.pod(1, 1), scene.node(1));
    let interface: Interface = interface(sender.place(), IFNAME)?;
    let address = family.of(receiver);
    let ear = receiver
        .place()
        .run(|| Ok(UdpSocket::bind((any(address), 0))?))?;
    let honest = Datagram {
        src_mac: interface.mac,
        dst_mac: names::HOST_MAC,
        src: family.of(sender),
        dst: address,
        dst_port: ear.local_addr()?.port(),
        payload: HONEST,
        may_be_cut: false,
    };
    let before = drops(node, reason)?;
    let mut frames = Vec::new();
    for datagram in spoof(Datagram {
        payload: SPOOFED,
        ..honest
    }) {
        frames.extend(vec![datagram.frame()?; FRAMES]);
    }
    let sent = frames.len() as u64;
    // Last, on the same queue: once it is here, the others would be, too.
    frames.push(honest.frame()?);
    inject(sender.place(), interface, &frames)?;

    let deadline = Instant::now() + PATIENCE;
    let mut buffer = [0; 64];
    loop {
        ensure!(
            readable(&ear, deadline)?,
            "the honest frame did not arrive at {address}"
        );
        let (len, source) = ear.recv_from(&mut buffer)?;
        match &buffer[..len] {
            HONEST => break,
            SPOOFED => bail!("a frame spoofed as {source} arrived at {address}"),
            _ => {}
        }
    }
    await_drops(node, reason, before, sent).with_context(|| format!("spoofed frames to {address}"))
}

/// Waits until a drop counter has grown by at least `want`; says by how much.
pub fn await_drops(node: &Node, reason: DropReason, before: u64, want: u64) -> Result<u64> {
    wait_for("spoofed frames to be counted", || {
        let grown = drops(node, reason)?.saturating_sub(before);
        ensure!(
            grown >= want,
            "{grown} of {want} frames were counted as {}",
            reason.label()
        );
        Ok(Some(want))
    })
}

pub fn drops(node: &Node, reason: DropReason) -> Result<u64> {
    match node.ask(Request::Metrics)? {
        Response::Metrics(metrics) => Ok(metrics
            .drops
            .iter()
            .find(|drop| drop.number == reason as u32)
            .map_or(0, |drop| drop.packets)),
        other => bail!("unexpected answer {other:?}"),
    }
}
