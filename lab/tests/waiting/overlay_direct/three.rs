//! Three nodes: what happens to one of them the other two see, and what is between those two does not.

use super::*;
use sinabro_lab::traffic::gaps::Watched;

pub const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];

/// Two nodes, by number from 1, in one direction.
pub type Pair = [usize; 2];

pub const PAIRS: [Pair; 6] = [[1, 2], [2, 1], [1, 3], [3, 1], [2, 3], [3, 2]];

/// What a node says of another.
pub fn said(world: &World<3>, [of, to]: Pair) -> NodeReport {
    let name = world.lab.node(to).name();
    said_of(world.lab.node(of), |said| said.name == name)
}

/// A way from pod to pod, by family.
pub fn path(world: &World<3>, [from, to]: Pair, family: usize) -> Path {
    let [from_pod, to_pod] = [from, to].map(|number| &world.pods[number - 1]);
    let name = format!("n{from} to n{to}, {}", FAMILIES[family]);
    let address = to_pod.addresses()[family];
    Path::new(&name, from_pod.place(), to_pod.place(), address)
}

/// All ways from pod to pod.
pub fn paths(world: &World<3>) -> Vec<Path> {
    let of_pair = |pair| [0, 1].map(|family| path(world, pair, family));
    PAIRS.into_iter().flat_map(of_pair).collect()
}

/// The longest gap of datagrams, and of requests, by a way.
pub fn gaps(watched: &Watched, path: &Path) -> [Duration; 2] {
    ["UDP", "TCP"].map(|kind| watched.gap(&format!("{kind}, {}", path.name)))
}

/// What each pair has counted.
pub fn counted(world: &World<3>) -> [PathCounts; 6] {
    PAIRS.map(|pair| said(world, pair).packets.unwrap_or_default())
}
