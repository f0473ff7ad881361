//! Ways that packets take, and traffic on them.

use super::counted::maps_of;
use anyhow::{Context as _, Result};
use sinabro_common::api::TcpAcceleration;
use sinabro_lab::{
    Lab, Node, Place, Pod,
    node::{KERNEL_FLAG, SERVICES_FLAGS},
    traffic::{brief::brief, round_trips::round_trips, seat::Ends},
};
use sinabro_netlink::route::Route;
use std::{collections::BTreeSet, fmt, net::IpAddr, time::Duration};

#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// To a pod of the same node.
    Near,
    /// To a pod of the other node, in tunnels.
    Far,
    /// To a host outside: masquerade, for IPv4.
    Outside,
    /// To a pod of the same node, from socket to socket.
    Accelerated,
    /// The same in connections of one request each.
    AcceleratedBrief,
}

#[derive(Clone, Copy, Debug)]
pub struct Path {
    way: Way,
    v6: bool,
}

impl Path {
    pub fn all() -> Vec<Self> {
        let ways = [
            Way::Near,
            Way::Far,
            Way::Outside,
            Way::Accelerated,
            Way::AcceleratedBrief,
        ];
        let both = |way| [false, true].map(|v6| Self { way, v6 });
        ways.into_iter().flat_map(both).collect()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::Near => "same node",
            Way::Far => "across nodes",
            Way::Outside => "to outside",
            Way::Accelerated => "accelerated",
            Way::AcceleratedBrief => "accelerated, connections",
        };
        write!(f, "{way}, IPv{}", if self.v6 { 6 } else { 4 })
    }
}

/// Bytes of a request, and of a response.
const SIZE: usize = 64;
/// Threads at each end of short connections.
const THREADS: usize = 4;

/// Two nodes with the programs of one subject, and pods on them.
pub struct Scene<'a> {
    nodes: [&'a Node; 2],
    client: Pod,
    near: Pod,
    far: Pod,
    fast: [Pod; 2],
    outside: (Place, [IpAddr; 2]),
    maps: BTreeSet<u32>,
    past_the_stack: bool,
}

impl<'a> Scene<'a> {
    /// On the node of this number and on the next one; packets go past the nodes' stacks, or not.
    pub fn make(lab: &'a Lab, number: usize, past_the_stack: bool) -> Result<Self> {
        let nodes = [lab.node(number), lab.node(number + 1)];
        let mut maps = BTreeSet::new();
        for node in nodes {
            start(node, past_the_stack)?;
            let pid = node.agent_pid().context("the agent has ended")?;
            maps.extend(maps_of(pid)?);
            way_back(lab, node)?;
        }
        let [node, other] = nodes;
        let fast = |id: &str| node.add_pod_wishing(id, TcpAcceleration::Enabled);
        Ok(Self {
            nodes,
            client: node.add_pod("client")?,
            near: node.add_pod("near")?,
            far: other.add_pod("far")?,
            fast: [fast("fast-client")?, fast("fast-server")?],
            outside: (lab.outside().place().clone(), lab.outside_addresses()?),
            maps,
            past_the_stack,
        })
    }

    /// Programs loaded anew, as by an agent that is replaced: where in memory the kernel puts one
    /// changes what it costs by a tenth and more, until it is loaded again.
    pub fn load_anew(&self) -> Result<()> {
        for node in self.nodes {
            node.stop_agent()?;
            start(node, self.past_the_stack)?;
        }
        Ok(())
    }

    /// Of the agents of both nodes; they are pinned, later agents have the same.
    pub fn maps(&self) -> &BTreeSet<u32> {
        &self.maps
    }

    pub fn send(&self, path: &Path, time: Duration) -> Result<()> {
        let pod = |pod: &Pod| (pod.place().clone(), pod.addresses());
        let (client, (server, addresses)) = match path.way {
            Way::Near => (&self.client, pod(&self.near)),
            Way::Far => (&self.client, pod(&self.far)),
            Way::Outside => (&self.client, self.outside.clone()),
            Way::Accelerated | Way::AcceleratedBrief => (&self.fast[0], pod(&self.fast[1])),
        };
        let address = addresses[usize::from(path.v6)];
        let ends = Ends::apart(client.place(), &server, address)?;
        let listener = ends.listen(0)?;
        match path.way {
            Way::AcceleratedBrief => brief(ends, &listener, THREADS, 0, time),
            _ => round_trips(ends, &listener, SIZE, 1, time),
        }
        .with_context(|| path.to_string())?;
        Ok(())
    }
}

fn start(node: &Node, past_the_stack: bool) -> Result<()> {
    let mut flags = vec!["--tcp-acceleration=opt-in"];
    if past_the_stack {
        // None, but ours to translate.
        node.write_services("{kind: List, items: []}\n")?;
        flags.extend(SERVICES_FLAGS);
    } else {
        flags.push(KERNEL_FLAG);
    }
    node.start_agent_with(&flags)?;
    node.wait_ready()?;
    match past_the_stack {
        true => node.wait_for_way("direct"),
        false => Ok(()),
    }
}

/// Pods' IPv6 is not masqueraded: the way back to them, which a user's routers know.
fn way_back(lab: &Lab, node: &Node) -> Result<()> {
    let entry = node.entry();
    let v6 = |address: &IpAddr| address.is_ipv6();
    let via = entry.addresses.into_iter().find(v6);
    let via = via.context("a node without IPv6")?;
    for range in entry.pod_cidrs.into_iter().filter(|r| v6(&r.addr())) {
        let (router, outside) = (lab.router().place(), lab.outside().place());
        let bridge = router.index("br0")?;
        let route = Route::to(range).via(via).dev(bridge).add();
        router.conn()?.execute(route)?;
        let gateway: IpAddr = "2001:db8:2::1".parse()?;
        let uplink = outside.index("eth0")?;
        let route = Route::to(range).via(gateway).dev(uplink).add();
        outside.conn()?.execute(route)?;
    }
    Ok(())
}
