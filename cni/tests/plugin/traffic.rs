//! Packets through the kernel: the pod and the node reach each other.

use crate::node::{HOST_V4, HOST_V6, Node, Pod};
use sinabro_lab::{Place, wait::PATIENCE};
use std::net::{IpAddr, UdpSocket};

/// A socket that waits for what has yet to arrive.
pub fn socket(place: &Place, address: IpAddr) -> UdpSocket {
    let bind = || Ok(UdpSocket::bind((address, 0))?);
    let socket = place.run(bind).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// A datagram there, seen to come from the right address, and one back.
fn exchange(from: &UdpSocket, to: &UdpSocket) {
    let mut buffer = [0; 2000];
    from.send_to(b"there", to.local_addr().unwrap()).unwrap();
    let (len, source) = to.recv_from(&mut buffer).unwrap();
    assert_eq!(
        (&buffer[..len], source),
        (&b"there"[..], from.local_addr().unwrap())
    );
    to.send_to(b"and back", source).unwrap();
    let (len, source) = from.recv_from(&mut buffer).unwrap();
    assert_eq!(
        (&buffer[..len], source),
        (&b"and back"[..], to.local_addr().unwrap())
    );
}

/// Both families, begun from both ends.
pub fn flows(node: &Node, pod: &Pod, addresses: [&str; 2]) {
    for (host, address) in [HOST_V4, HOST_V6].into_iter().zip(addresses) {
        let outer = socket(&node.place, host.parse().unwrap());
        let inner = socket(&pod.place, address.parse().unwrap());
        exchange(&inner, &outer);
        exchange(&outer, &inner);
    }
}

/// What an ADD's result says the pod's addresses are.
pub fn addresses(result: &serde_json::Value) -> [String; 2] {
    [0, 1].map(|i| {
        let cidr = result["ips"][i]["address"].as_str().unwrap();
        cidr.split('/').next().unwrap().to_owned()
    })
}

#[test]
fn pod_and_node_reach_each_other() {
    let (node, pod) = (Node::new(), Pod::new());
    let result = node.call("ADD", &pod).run().result();
    let [v4, v6] = addresses(&result);
    flows(&node, &pod, [&v4, &v6]);
}
