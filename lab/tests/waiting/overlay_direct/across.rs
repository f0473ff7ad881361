//! Clients outside of the cluster come in by the first node for a Service of the second one's pod.

use super::{
    native::{NATIVE, both, in_tunnels, know_each_other, say},
    *,
};
use std::net::IpAddr;

/// Of the Service; on no machine.
pub const OUTSIDE_AT: [&str; 2] = ["198.51.100.21", "2001:db8:51::21"];
/// Of the Service, for pods.
pub const CLUSTER_AT: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
/// Ports of the Service, and of its endpoint.
const PORTS: [u16; 2] = [PORT, PORT + 1];

/// Has what is for the addresses outside be led to the second pod.
pub fn publish(world: &World) {
    let [of_v4, of_v6] = world.pods[1].addresses();
    let [at_v4, at_v6] = OUTSIDE_AT;
    let [in_v4, in_v6] = CLUSTER_AT;
    let ports = PORTS.iter().flat_map(|port| {
        ["TCP", "UDP"].map(|protocol| {
            let name = protocol.to_lowercase();
            format!("{{name: {name}-{port}, protocol: {protocol}, port: {port}}}")
        })
    });
    let ports = ports.collect::<Vec<_>>().join(", ");
    let slice = |family: &str, address: IpAddr| {
        format!(
            "---
kind: EndpointSlice
metadata: {{namespace: lab, name: far-{family}, labels: {{kubernetes.io/service-name: far}}}}
addressType: {family}
ports: [{ports}]
endpoints: [{{addresses: ['{address}'], conditions: {{ready: true}}}}]
"
        )
    };
    let text = format!(
        "kind: Service
metadata: {{namespace: lab, name: far}}
spec:
  type: ClusterIP
  clusterIP: {in_v4}
  clusterIPs: ['{in_v4}', '{in_v6}']
  externalIPs: ['{at_v4}', '{at_v6}']
  ports: [{ports}]
{}{}",
        slice("IPv4", of_v4),
        slice("IPv6", of_v6)
    );
    for node in world.lab.nodes() {
        node.write_services(&text).unwrap();
    }
    let ends = [of_v4, of_v6].map(|at| SocketAddr::new(at, PORT).to_string());
    let leads = |said: &str| ends.iter().all(|end| said.contains(end));
    world
        .lab
        .node(1)
        .wait_for_service("lab/far", leads)
        .unwrap();
}

/// What clients outside ask, and who answers.
pub fn paths(world: &World) -> [Path; 2] {
    let (client, pod) = (world.lab.outside().place(), &world.pods[1]);
    let [v4, v6] = pod.addresses();
    [(OUTSIDE_AT[0], v4), (OUTSIDE_AT[1], v6)].map(|(to, address)| {
        let to = to.parse().unwrap();
        world.lab.lead_from_outside(to, world.lab.node(1)).unwrap();
        let path = Path::new(&format!("by {to}"), client, pod.place(), address);
        path.through(SocketAddr::new(to, PORT), PORT)
    })
}

/// All but what begins and ends connections.
#[test]
fn nodes_without_tunnels_hand_on_past_the_stack_what_clients_outside_have() {
    let world = both(|_| {});
    publish(&world);
    know_each_other(&world);
    let forwarded = || snmp::forwarded(world.lab.node(1).place()).unwrap();
    for path in paths(&world) {
        let before = forwarded();
        let counts = world.counts_of(|| {
            let sent = in_tunnels(&world, || {
                let stream = Stream::open(&path).unwrap();
                stream.carry(stream_len() as usize, 128 << 10).unwrap();
            });
            assert_eq!(sent, 0, "{}", path.name);
        });
        assert!(counts[0].native.sent > 50, "{counts:?}");
        assert!(counts[0].native.received > 50, "{counts:?}");
        let by_the_stack = forwarded() - before;
        println!("{}: {by_the_stack} by the stack, {counts:?}", path.name);
        assert!(by_the_stack < 10, "{}: {by_the_stack}", path.name);
    }
}

/// The stack and the programs take turns with one connection.
#[test]
fn clients_outside_have_no_gap_when_ways_change_under_load() {
    let world = both(|_| {});
    publish(&world);
    let n1 = world.lab.node(1);
    let pace = Pace {
        pause: Duration::from_millis(10),
        clients: 1,
    };
    let traffic = Traffic::start(&paths(&world), pace).unwrap();
    traffic.watch(BEFORE_EVENTS);
    // Packets that the node's stack forwards meanwhile.
    let by_the_stack = |what: &str, act: &dyn Fn()| {
        traffic.event(what).unwrap();
        act();
        traffic.watch(PHASE);
        let before = snmp::forwarded(n1.place()).unwrap();
        traffic.watch(PHASE);
        traffic.must_flow(what).unwrap();
        snmp::forwarded(n1.place()).unwrap() - before
    };
    let restart = |flags: &[&str]| {
        n1.kill_agent().unwrap();
        start(n1, flags);
        n1.wait_ready().unwrap();
    };
    let few = by_the_stack("nothing happened", &|| {});
    let all = by_the_stack("the node is told to leave it to the stack", &|| {
        // The new name would have it send in tunnels, too.
        restart(&[NATIVE, "--forwarding=kernel"]);
    });
    assert!(all > 4 * few, "{few} and {all}");
    let again = by_the_stack("it may again", &|| restart(&[NATIVE]));
    assert!(all > 4 * again, "{all} and {again}");
    let tunnels = by_the_stack("the other one takes tunnels alone", &|| {
        say(&world.lab, [true, false]);
    });
    assert!(tunnels > 4 * few, "{few} and {tunnels}");
    println!("by the stack: {few}, {all}, {again}, {tunnels}");
    println!("{}", traffic.finish().unwrap());
}
