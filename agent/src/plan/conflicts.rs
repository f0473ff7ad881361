//! Nodes that claim the same: who has it, and what is left of the others.
//!
//! Nothing here is decided by a node's name alone, and nobody loses more than what is contested:
//!
//! - **one address, two nodes**: the machine that has it now has it. A node that is ready comes
//!   before one that is not, then the one that registered last: an address that is given to a new
//!   machine is still in the Node object of the old one until somebody deletes that;
//! - **ranges that overlap, and addresses inside ranges**: whoever registered first keeps what it
//!   has. There are pods in a range, and a newcomer must not take anybody off the network by what
//!   it says of itself.
//!
//! This node itself comes first in all of it: what another claims of its own changes nothing here,
//! and [`contests`] says what the others will make of it. All others are judged alike by every
//! node of the cluster.

use super::facts::{Facts, Node, NodeProblem, overlap};
use ipnet::IpNet;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

/// What the plan may use.
#[derive(Debug, Default)]
pub struct Usable {
    /// The node itself, then the others as they registered; each with what is its own alone.
    pub nodes: Vec<Node>,
    /// What is wrong with a node's entry. It may still be among `nodes`, with the rest of it.
    pub problems: BTreeMap<String, Vec<NodeProblem>>,
}

/// Sorts the nodes' claims, with `first` (the node itself) before all others.
pub fn usable(facts: &Facts, first: &str) -> Usable {
    let unreadable = facts.unreadable.iter();
    let mut problems: BTreeMap<_, Vec<_>> = unreadable
        .map(|(name, why)| (name.clone(), vec![NodeProblem::Unreadable(why.clone())]))
        .collect();
    let mut sound = Vec::with_capacity(facts.nodes.len());
    for node in facts.nodes.values() {
        match node.check() {
            Ok(()) => sound.push(node),
            Err(problem) => problems.entry(node.name.clone()).or_default().push(problem),
        }
    }
    let holders = holders(&sound, Some(first));
    sound.sort_by_key(|node| (node.name != first, node.seniority()));

    let mut claims = Claims::default();
    let mut nodes = Vec::with_capacity(sound.len());
    for node in sound {
        let mut lost = Vec::new();
        let mut rest = node.clone();
        rest.addresses.retain(|address| {
            let holder = holders[address];
            let fault = match holder.name == node.name {
                true => claims
                    .around(*address)
                    .map(|(cidr, of)| NodeProblem::InsidePods(*address, cidr, of.to_owned())),
                false => Some(NodeProblem::DuplicateAddress(*address, holder.name.clone())),
            };
            let keeps = fault.is_none();
            lost.extend(fault);
            keeps
        });
        rest.pod_cidrs.retain(|cidr| {
            let fault = claims.fault(*cidr);
            let keeps = fault.is_none();
            lost.extend(fault);
            keeps
        });
        claims.add(node, &rest);
        if !lost.is_empty() {
            problems.insert(node.name.clone(), lost);
        }
        if !rest.addresses.is_empty() {
            nodes.push(rest);
        }
    }
    Usable { nodes, problems }
}

/// What of this node others claim as well, and who has it for the rest of the cluster.
pub fn contests(facts: &Facts, own: &str) -> Vec<Contest> {
    let Some(node) = facts.nodes.get(own) else {
        return Vec::new();
    };
    let mine = |other: &&Node| {
        let others = &other.addresses;
        other.name == own
            || others
                .iter()
                .any(|address| node.addresses.contains(address))
    };
    let rivals: Vec<&Node> = facts.nodes.values().filter(mine).collect();
    let holders = holders(&rivals, None);
    let rivals = rivals.iter().filter(|rival| rival.name != own);
    rivals
        .flat_map(|rival| {
            let both = node.addresses.iter();
            let both = both.filter(|address| rival.addresses.contains(address));
            both.map(|&address| Contest {
                address,
                with: rival.name.clone(),
                with_ready: rival.ready,
                lost: holders[&address].name != own,
            })
        })
        .collect()
}

/// An address of this node that another Node has, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contest {
    pub address: IpAddr,
    pub with: String,
    pub with_ready: bool,
    /// Other nodes send to the other one.
    pub lost: bool,
}

/// Who has each address.
fn holders<'a>(nodes: &[&'a Node], first: Option<&str>) -> HashMap<IpAddr, &'a Node> {
    let rank = |node: &Node| {
        let own = first == Some(node.name.as_str());
        // Of two that registered at once, the first by name: any rule that all have.
        (own, node.ready, node.registered, Reverse(node.name.clone()))
    };
    let mut holders: HashMap<IpAddr, &Node> = HashMap::with_capacity(nodes.len());
    for node in nodes {
        for address in &node.addresses {
            let holder = holders.entry(*address).or_insert(node);
            if holder.name != node.name && rank(holder) < rank(node) {
                *holder = node;
            }
        }
    }
    holders
}

/// What nodes have so far. Their ranges do not overlap, so one that holds an address is the last
/// that begins at or before it.
#[derive(Default)]
struct Claims<'a> {
    addresses: BTreeMap<IpAddr, &'a str>,
    /// By their first address.
    ranges: BTreeMap<IpAddr, (IpNet, &'a str)>,
}

impl<'a> Claims<'a> {
    fn add(&mut self, node: &'a Node, rest: &Node) {
        let name = node.name.as_str();
        self.addresses
            .extend(rest.addresses.iter().map(|&address| (address, name)));
        let ranges = rest.pod_cidrs.iter();
        self.ranges
            .extend(ranges.map(|&cidr| (cidr.network(), (cidr, name))));
    }

    /// The range that holds an address.
    fn around(&self, address: IpAddr) -> Option<(IpNet, &'a str)> {
        let (_, &(cidr, name)) = self.ranges.range(..=address).next_back()?;
        cidr.contains(&address).then_some((cidr, name))
    }

    /// Why a range cannot be had.
    fn fault(&self, cidr: IpNet) -> Option<NodeProblem> {
        let all = cidr.network()..=cidr.broadcast();
        let within = self.ranges.range(all.clone()).map(|(_, range)| *range);
        let mut ranges = within.chain(self.around(cidr.network()));
        if let Some((other, name)) = ranges.find(|(other, _)| overlap(cidr, *other)) {
            return Some(NodeProblem::Overlaps(cidr, other, name.to_owned()));
        }
        let (&address, name) = self.addresses.range(all).next()?;
        Some(NodeProblem::HoldsNode(cidr, address, (*name).to_owned()))
    }
}
