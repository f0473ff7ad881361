//! Nodes of an earlier state of the project beside kube-proxy are upgraded, one after the other: connections by Services and by pods' own
//! addresses go on, while the other node runs either state.

use super::{
    BEFORE, Exchanges, OFF, PACE, World,
    beside_proxy::{FREE, Idle, drop_invalid, nothing_is_invalid, straight},
    must_flow, must_flow_directly, start_agent,
};
use crate::upgrade_since_release::earlier;
use sinabro_lab::{
    Binaries,
    traffic::{path::Path, unbroken::Traffic},
};

/// Of each family.
const MANY: usize = 250;

#[test]
fn an_upgrade_beside_kube_proxy_since_release_is_not_noticed_at_the_servers_node_first() {
    upgraded([2, 1]);
}

#[test]
fn an_upgrade_beside_kube_proxy_since_release_is_not_noticed_at_the_clients_node_first_nightly() {
    upgraded([1, 2]);
}

/// The nodes are upgraded in this order.
fn upgraded(order: [usize; 2]) {
    let world = World::of(earlier(), OFF);
    world.add_rules();
    drop_invalid(&world);
    let exchanges = Exchanges::start(&world);
    let paths: Vec<Path> = world.paths().into_iter().chain(straight(&world)).collect();
    let traffic = Traffic::start(&paths, PACE).unwrap();
    traffic.watch(BEFORE);
    let mut idle = Idle::all(&world, MANY);
    let mut straight = (0..2).map(|number| Idle::straight(&world, FREE + number));
    for number in order {
        let node = world.lab.node(number);
        let event = format!("{} was upgraded", node.name());
        traffic.event(&event).unwrap();
        node.stop_agent().unwrap();
        node.set_binaries(Binaries::find().unwrap());
        start_agent(node, OFF);
        node.wait_ready().unwrap();
        node.wait_for_direct_overlay().unwrap();
        must_flow(&traffic, &event);
        for idle in &mut idle {
            idle.speaks(&event);
        }
        for closing in straight.next().into_iter().flatten() {
            closing.ends(&event);
        }
    }
    must_flow_directly(&world, &traffic, "with both upgraded");
    for idle in idle {
        idle.ends("with both upgraded");
    }
    println!("{}", world.told(exchanges.finish()));
    println!("{}", traffic.finish().unwrap());
    nothing_is_invalid(&world);
}
