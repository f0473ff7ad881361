//! Addresses: two nodes with the same, ranges that are nearly full, pods outside of them.

use super::trouble;
use crate::{
    endpoint::Endpoints,
    plan::{Facts, conflicts::contests},
};
use ipnet::IpNet;
use sinabro_common::api::{PodRef, Trouble};
use std::net::IpAddr;

/// Share of a range that is taken when it counts as nearly full, in percent.
const NEARLY_FULL: u64 = 90;
/// Pods named in one text.
const NAMED: usize = 5;

/// Addresses of this node that another Node has, too.
pub fn contested(facts: &Facts, own: &str) -> Vec<Trouble> {
    let contests = contests(facts, own).into_iter();
    let texts = contests.map(|contest| {
        let with = &contest.with;
        let taken = match contest.lost {
            true => format!("the other nodes send to {with}"),
            false => "the other nodes send to this one".into(),
        };
        let next = match contest.with_ready {
            true => "give one of them another address".into(),
            false => format!("if its machine is gone, run `kubectl delete node {with}`"),
        };
        let address = contest.address;
        format!("address {address} of this node is also that of node {with}; {taken}: {next}")
    });
    texts
        .map(|text| trouble("AddressContested", text))
        .collect()
}

/// Ranges that will soon have no address for a pod.
pub fn nearly_full(endpoints: &Endpoints) -> Vec<Trouble> {
    let ranges = endpoints.ipam.usage().into_iter();
    let full = ranges.filter(|range| range.leased * 100 >= range.capacity * NEARLY_FULL);
    full.map(|range| {
        trouble(
            "AddressRangeNearlyFull",
            format!(
                "{} of {} addresses of pod range {} are taken: lower the kubelet's maxPods, or give nodes larger ranges (--node-cidr-mask-size of the controller manager)",
                range.leased, range.capacity, range.cidr
            ),
        )
    })
    .collect()
}

/// Pods whose addresses are of no range of this node: it was registered again with another, and
/// what they have may by now be another node's.
pub fn outside(endpoints: &Endpoints, ranges: &[IpNet]) -> Vec<Trouble> {
    let leases = endpoints.ipam.leases();
    let mut outside = leases
        .iter()
        .filter(|lease| !ranges.iter().any(|cidr| cidr.contains(&lease.address)))
        .map(|lease| named(&lease.pod, lease.address))
        .collect::<Vec<_>>();
    if outside.is_empty() {
        return Vec::new();
    }
    let count = outside.len();
    outside.truncate(NAMED);
    let more = match count - outside.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let text = format!(
        "{count} addresses of pods are outside of this node's pod ranges and may by now be another node's: delete these pods, so that they get others: {}{more}",
        outside.join(", ")
    );
    vec![trouble("AddressOutsideRange", text)]
}

fn named(pod: &PodRef, address: IpAddr) -> String {
    match pod.name.is_empty() {
        true => address.to_string(),
        false => format!("{}/{} ({address})", pod.namespace, pod.name),
    }
}
