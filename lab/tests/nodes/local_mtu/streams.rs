//! What the kernel's own TCP makes of it: large segments on the node, the way's everywhere else, and
//! nothing that has to be cut or sent again.

use super::kit::{
    FAMILIES, TCP_HEADERS, by_both_ways, full_packets, misfits, mtus, overlay_gateways, wires,
};
use sinabro_lab::{
    checks::Scene,
    traffic::{path::Path, stream::Stream},
    wait::PATIENCE,
};
use std::time::Duration;

const BYTES: usize = 1 << 20;
/// What is lost for its size is lost each time. On a busy machine, where much is sent needlessly, one segment too many may count as
/// lost, by chance.
const TRIES: usize = 3;
const A_WHILE: Duration = Duration::from_secs(5);
/// Timestamps (RFC 7323), which every segment has.
const OPTIONS: usize = 12;

/// How far a way leads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// It stays on its node.
    Node,
    /// At least one direction has a tunnel.
    Tunnel,
    Beyond,
}

fn ways(scene: &Scene, family: usize) -> Vec<(Path, Reach)> {
    use Reach::{Beyond, Node, Tunnel};
    let (pod, near, far) = (scene.pod(1, 1), scene.pod(1, 2), scene.pod(2, 1));
    let (node, outside) = (scene.node(1).place(), scene.lab().outside().place());
    let name = |way: &str| format!("{way}, {}", FAMILIES[family]);
    let of = |pod: &sinabro_lab::Pod| pod.addresses()[family];
    let own = scene.node(1).addresses()[family];
    let gateway = overlay_gateways(1)[family];
    let outside_address = scene.lab().outside_addresses().unwrap()[family];
    let way = |way: &str, from, to, address| Path::new(&name(way), from, to, address);
    let mut ways = vec![
        (way("same node", pod.place(), near.place(), of(near)), Node),
        (way("pod to node", pod.place(), node, own), Node),
        (way("node to pod", node, pod.place(), of(pod)), Node),
        (way("pod to its gateway", pod.place(), node, gateway), Node),
        (way("across", pod.place(), far.place(), of(far)), Tunnel),
        (way("node to far pod", node, far.place(), of(far)), Tunnel),
        (way("far pod to node", far.place(), node, own), Beyond),
        (
            way("to the outside", pod.place(), outside, outside_address),
            Beyond,
        ),
    ];
    if family == 1 {
        ways.push((
            way("from the outside", outside, pod.place(), of(pod)),
            Beyond,
        ));
    }
    ways
}

#[test]
fn segments_are_as_large_as_the_link_on_the_node_and_as_the_way_beyond() {
    by_both_ways(segments_are_as_large_as_their_ways);
}

fn segments_are_as_large_as_their_ways(scene: &Scene) {
    scene.lab().route_pods_from_outside().unwrap();
    let (mtu, link) = mtus(scene.node(1), scene.pod(1, 1));
    let wires = wires(scene);
    let nodes = scene.lab().nodes();
    for (family, headers) in TCP_HEADERS.into_iter().enumerate() {
        for (path, reach) in ways(scene, family) {
            let name = &path.name;
            let before: Vec<_> = nodes.iter().map(|node| misfits(node.place())).collect();
            let carry = |patience| {
                let stream = Stream::open(&path).unwrap();
                for write in [700, 16 << 10, 128 << 10] {
                    stream.carry(BYTES, write).unwrap();
                }
                for said in stream.said().unwrap() {
                    let most = |mtu: usize| mtu - headers - OPTIONS;
                    match reach {
                        // TCP sends no more at once than half of the other end's window
                        // (tcp_bound_to_half_wnd).
                        Reach::Node => {
                            let sizes = 16_000..=most(link);
                            assert!(sizes.contains(&said.mss), "{name}: {said:?}");
                        }
                        _ => assert_eq!(said.mss, most(mtu), "{name}"),
                    }
                }
                let full: u32 = wires.iter().map(|wire| full_packets(wire, name)).sum();
                // A look at the counters: they see what is as large as can be.
                assert!(
                    reach != Reach::Tunnel || full as usize > BYTES / mtu,
                    "{name}: {full}"
                );
                stream.must_have_lost_nothing_within(patience)
            };
            let lost_nothing = (1..TRIES).any(|_| carry(A_WHILE).is_ok());
            if !lost_nothing {
                carry(PATIENCE).unwrap();
            }
            let after: Vec<_> = nodes.iter().map(|node| misfits(node.place())).collect();
            assert_eq!(after, before, "{name}: a packet did not fit");
        }
    }
}
