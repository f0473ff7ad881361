//! Pods of one node whose links have an MTU of their own, beside such that have one for everything, and
//! beside loopback inside one pod, which is what the kernel's TCP reaches without any link.
//!
//! All are plain: nothing is accelerated.

use super::scene::{End, Subject, Way, end};
use crate::bench::figures::OURS;
use anyhow::{Result, ensure};
use sinabro_common::api::{LocalMtuWish, TcpAcceleration};
use sinabro_lab::{
    Lab, Node, Pod,
    traffic::{
        datagrams::{datagrams, headers},
        seat::Ends,
        snmp,
        tcp::segment_size,
    },
};
use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::Duration,
};

const OFF: &str = "local-mtu off";
const LOOPBACK: &str = "loopback";

/// Bytes of a new connection's segments, at least, where the link's MTU is all that counts: they are no
/// more than half of the window, which is 64 KB at first.
const LARGE: u32 = 30_000;
/// Bytes of a datagram that such a link takes whole.
const DATAGRAM: usize = 60 << 10;

/// `earlier` is a commit and the number of the node that has its programs.
pub fn subjects(lab: &Lab, earlier: Option<(&str, usize)>) -> Result<Vec<Subject>> {
    let make = |name: &str, ends: [End<'_>; 2], large| {
        let mut subject = Subject::new(name, Way::LocalMtu, ends);
        subject.large = large;
        subject
    };
    let auto = pair(lab.node(1), "auto", None)?;
    let ours = make(OURS, auto.each_ref().map(end), Some(true));
    if let Some((commit, number)) = earlier {
        let theirs = pair(lab.node(number), "earlier", None)?;
        let theirs = make(commit, theirs.each_ref().map(end), None);
        return Ok(vec![ours, theirs]);
    }
    let off = pair(lab.node(1), "off", Some(LocalMtuWish::Off))?;
    // One that ADD has treated as it always did.
    let [_, pod] = &off;
    let itself = (
        pod.place(),
        [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
    );
    Ok(vec![
        ours,
        make(OFF, off.each_ref().map(end), Some(false)),
        make(LOOPBACK, [itself, itself], Some(true)),
    ])
}

/// Two pods of a node.
fn pair(node: &Node, name: &str, wish: Option<LocalMtuWish>) -> Result<[Pod; 2]> {
    let plain = TcpAcceleration::Disabled.as_str();
    let mut args = vec![("SINABRO_TCP_ACCELERATION", plain)];
    args.extend(wish.map(|wish| ("SINABRO_LOCAL_MTU", wish.as_str())));
    let pod = |role: &str| node.add_pod_with(&format!("{name}-{role}"), &args);
    Ok([pod("client")?, pod("server")?])
}

/// An error if segments and datagrams are not as large as the link, or are although they must not be.
pub fn verify(ends: Ends<'_>, large: bool) -> Result<()> {
    let segment = segment_size(ends)?;
    ensure!(
        (segment >= LARGE) == large,
        "TCP to {} has segments of {segment} bytes",
        ends.address
    );
    let before = snmp::fragments(ends.client.place)?;
    let size = DATAGRAM + headers(ends.address);
    let sent = datagrams(ends, size, Duration::from_millis(20))?.sent;
    let fragments = snmp::fragments(ends.client.place)?.saturating_sub(before);
    ensure!(
        (fragments == 0) == large,
        "{fragments} fragments were made of {sent} datagrams of {DATAGRAM} bytes to {}",
        ends.address
    );
    Ok(())
}
