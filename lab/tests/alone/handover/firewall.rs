//! Rules of somebody else for packets between pods of two nodes come and go. They are met from one second on, and no connection that they
//! let through notices.

use super::{
    BEFORE, Exchanges, IDLE, OFF, ON, PACE, World,
    beside_proxy::{
        FENCED, FEW, FREE, Idle, SOON, direct, drop_invalid_in, nothing_is_invalid_in, straight,
    },
    must_flow, must_flow_directly, says, vip,
};
use sinabro_lab::traffic::{path::Path, unbroken::Traffic};
use sinabro_lab::{Binaries, Node, node::KERNEL_FLAG};
use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    thread::sleep,
};

/// A table that counts as one of Services, whose rules are no obstacle.
pub(super) const OF_SERVICES: &str = "cni_hostport";

/// Has both nodes drop what is for these ports of pods; no rules without ports.
pub(super) fn firewall(world: &World, ports: &[u16]) {
    for node in world.lab.nodes() {
        drop_at(node, ports);
    }
}

/// The same of one node, in one transaction.
fn drop_at(node: &Node, ports: &[u16]) {
    let table = "table inet theirs";
    let ports: Vec<_> = ports.iter().map(ToString::to_string).collect();
    let chain = format!(
        "{table} {{ chain forward {{
            type filter hook forward priority 0
            tcp dport {{ {} }} drop
        }}; }}",
        ports.join(", ")
    );
    let rules = if ports.is_empty() { "" } else { &chain };
    node.command(&["nft", &format!("{table}; delete {table}; {rules}")])
        .unwrap();
}

/// Whether nothing answers the client's SYN. Nobody listens: what gets there is answered by a reset.
pub(super) fn is_dropped(world: &World, to: SocketAddr) -> bool {
    let connect = || Ok(TcpStream::connect_timeout(&to, SOON));
    let connected = world.client.place().run(connect).unwrap();
    connected.is_err_and(|error| error.kind() == ErrorKind::TimedOut)
}

#[test]
fn a_firewall_is_met_where_services_are_translated_here() {
    let world = World::new();
    drop_invalid_in(&world, OF_SERVICES);
    world.restart(ON);
    world.says("on\n");
    world.is_direct();
    let exchanges = Exchanges::start(&world);
    let paths: Vec<Path> = world.paths().into_iter().chain(straight(&world)).collect();
    let traffic = Traffic::start(&paths, PACE).unwrap();
    traffic.watch(BEFORE);
    let straight = |port| Idle::straight(&world, port);
    let (fenced, closing, closing_late) = (straight(FENCED), straight(FREE), straight(FREE + 1));
    let [mut by_service, mut idle, mut idler] = [1, 20, 20].map(|count| Idle::all(&world, count));
    let ends_idle = Idle::all(&world, 1);
    must_flow_directly(&world, &traffic, "without a firewall");

    for number in ["first", "second"] {
        traffic
            .event(&format!("the agents were restarted, the {number} time"))
            .unwrap();
        world.restart(ON);
        world.is_direct();
        must_flow_directly(&world, &traffic, "with other agents");
    }
    traffic.event("a firewall came").unwrap();
    firewall(&world, &[FENCED, IDLE.1]);
    sleep(SOON);
    for fenced in &fenced {
        assert!(!fenced.gets_through(), "the firewall");
        assert!(is_dropped(&world, fenced.to()), "the firewall");
    }
    for (family, idle) in by_service.iter().enumerate() {
        assert!(!idle.gets_through(), "the firewall");
        assert!(is_dropped(&world, (vip(family), IDLE.0).into()));
    }
    traffic.event("it is about less").unwrap();
    firewall(&world, &[FENCED]);
    let before = direct(&world);
    must_flow(&traffic, "behind a firewall");
    assert!(direct(&world) - before < FEW, "by the stack");
    for closing in closing {
        closing.ends("behind a firewall");
    }
    for idle in ends_idle {
        idle.ends("behind a firewall");
    }
    for idle in &mut by_service {
        idle.hears();
    }
    for idle in idle.iter_mut().chain(&mut by_service) {
        idle.speaks("behind a firewall");
    }
    traffic.event("the agents were killed").unwrap();
    world.kill(ON);
    must_flow(&traffic, "with another agent");
    assert!(is_dropped(&world, fenced[0].to()), "the firewall");
    traffic.event("the firewall went").unwrap();
    firewall(&world, &[]);
    world.is_direct();
    must_flow(&traffic, "without the firewall");
    for fenced in &fenced {
        fenced.hears();
    }
    for closing in closing_late {
        closing.ends("without the firewall");
    }
    for idle in idle.iter_mut().chain(&mut by_service).chain(&mut idler) {
        idle.speaks("without the firewall");
    }
    println!("{}", world.told(exchanges.finish()));
    println!("{}", traffic.finish().unwrap());
    nothing_is_invalid_in(&world, OF_SERVICES);
    // What begins now takes the fast path.
    let traffic = Traffic::start(&paths, PACE).unwrap();
    must_flow_directly(&world, &traffic, "new connections");
}

/// The agent looks for rules when one comes or goes, and twice a minute: in between Services become its own.
#[test]
fn rules_that_are_there_before_services_are_translated_are_met_at_once() {
    let world = World::of(Binaries::find().unwrap(), &format!("{OFF} {KERNEL_FLAG}"));
    world.add_rules();
    let fenced: SocketAddr = (world.servers[1].addresses()[0], FENCED).into();
    let by_service: SocketAddr = (vip(0), IDLE.0).into();
    for to in [fenced, by_service] {
        assert!(!is_dropped(&world, to), "{to}");
    }
    let _by_rules = Idle::all(&world, 1);
    drop_at(world.node(), &[FENCED, IDLE.1]);
    world.restart(ON);
    says(world.node(), "on, kube-proxy has");
    world.remove_rules();
    says(world.node(), "on\n");
    for to in [fenced, by_service] {
        assert!(is_dropped(&world, to), "{to}");
    }
}
