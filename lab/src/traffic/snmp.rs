//! What the stack of a place's network counts by itself (RFC 4293), of both families.

use crate::Place;
use anyhow::{Context as _, Result};
use std::fs;

/// Packets that it has handed on.
pub fn forwarded(place: &Place) -> Result<u64> {
    both(place, "ForwDatagrams", "Ip6OutForwDatagrams")
}

/// Packets that it has taken for its own, by family.
pub fn delivered(place: &Place) -> Result<[u64; 2]> {
    Ok([
        sum(place, &["InDelivers"], &[])?,
        sum(place, &[], &["Ip6InDelivers"])?,
    ])
}

/// Fragments that it has made.
pub fn fragments(place: &Place) -> Result<u64> {
    both(place, "FragCreates", "Ip6FragCreates")
}

/// What it said or heard of packets that did not fit, and what it made of them.
pub fn misfits(place: &Place) -> Result<u64> {
    sum(
        place,
        &["FragFails", "FragCreates"],
        &["Ip6FragFails", "Ip6FragCreates", "Ip6InTooBigErrors"],
    )
}

/// What came with a checksum that is not right, of TCP and UDP.
pub fn damaged(place: &Place) -> Result<u64> {
    let [text, of_v6] = place.run(|| {
        let read = |file| fs::read_to_string(format!("/proc/thread-self/net/{file}"));
        Ok([read("snmp")?, read("snmp6")?])
    })?;
    // TCP's is of both families.
    let of_groups = ["Tcp", "Udp"].map(|group| field(&text, group, "InCsumErrors"));
    let counts = of_groups
        .into_iter()
        .chain([field6(&of_v6, "Udp6InCsumErrors")]);
    let counts = counts.map(|count| count.context("no InCsumErrors in /proc/net/snmp"));
    counts.sum()
}

/// Segments that TCP's sockets in it have discarded themselves, as whoever reads was late: they are sent again, and the network
/// has lost none.
pub fn discarded(place: &Place) -> Result<u64> {
    const COUNTERS: [&str; 6] = [
        "RcvPruned",
        "OfoPruned",
        "TCPBacklogDrop",
        "TCPOFODrop",
        "TCPZeroWindowDrop",
        "TCPRcvQDrop",
    ];
    of_tcp(place, &COUNTERS)
}

/// Segments that TCP's sockets in it have sent again since the last acknowledgement was late (RFC 8985 §7), on a busy machine for
/// no other reason.
pub fn probes(place: &Place) -> Result<u64> {
    of_tcp(place, &["TCPLossProbes"])
}

/// Packets that have come with a mark of congestion (RFC 3168 §5).
pub fn congested(place: &Place) -> Result<u64> {
    let of_v6 = sum(place, &[], &["Ip6InCEPkts"])?;
    Ok(extended(place, "IpExt", &["InCEPkts"])? + of_v6)
}

fn of_tcp(place: &Place, counters: &[&str]) -> Result<u64> {
    extended(place, "TcpExt", counters)
}

fn extended(place: &Place, group: &str, counters: &[&str]) -> Result<u64> {
    let text = place.run(|| Ok(fs::read_to_string("/proc/thread-self/net/netstat")?))?;
    let counts = counters.iter().map(|name| {
        field(&text, group, name).with_context(|| format!("no {name} in /proc/net/netstat"))
    });
    counts.sum()
}

fn both(place: &Place, v4: &str, v6: &str) -> Result<u64> {
    sum(place, &[v4], &[v6])
}

fn sum(place: &Place, v4: &[&str], v6: &[&str]) -> Result<u64> {
    let [of_v4, of_v6] = place.run(|| {
        let read = |file| fs::read_to_string(format!("/proc/thread-self/net/{file}"));
        Ok([read("snmp")?, read("snmp6")?])
    })?;
    let of_v4 = v4.iter().map(|name| {
        field(&of_v4, "Ip", name).with_context(|| format!("no {name} in /proc/net/snmp"))
    });
    let of_v6 = v6
        .iter()
        .map(|name| field6(&of_v6, name).with_context(|| format!("no {name} in /proc/net/snmp6")));
    of_v4.chain(of_v6).sum()
}

/// A field of a group such as `Ip`: a line of names, and one of values.
fn field(text: &str, group: &str, name: &str) -> Option<u64> {
    let of_group = |line| str::strip_prefix(line, group)?.strip_prefix(": ");
    let mut lines = text.lines().filter_map(of_group);
    let at = lines.next()?.split(' ').position(|field| field == name)?;
    lines.next()?.split(' ').nth(at)?.parse().ok()
}

fn field6(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_packets_are_read() {
        let text = "Ip: Forwarding DefaultTTL ForwDatagrams\nIp: 1 64 77\nIcmp: A\nIcmp: 5\n";
        assert_eq!(field(text, "Ip", "ForwDatagrams"), Some(77));
        assert_eq!(field(text, "Icmp", "A"), Some(5));
        assert_eq!(field(text, "Ip", "InReceives"), None);
        assert_eq!(field("Ip: ForwDatagrams\n", "Ip", "ForwDatagrams"), None);
        let text = "Ip6InReceives    \t3\nIp6OutForwDatagrams             \t42\n";
        assert_eq!(field6(text, "Ip6OutForwDatagrams"), Some(42));
        assert_eq!(field6(text, "Ip6OutRequests"), None);
    }
}
