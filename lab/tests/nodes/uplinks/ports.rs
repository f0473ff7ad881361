//! Ports that are somebody's although no socket has them.

use super::kit::{lab, start};
use sinabro_lab::{
    Place, Pod,
    traffic::{PATIENCE, any, bind, readable},
};
use std::{
    net::{IpAddr, UdpSocket},
    time::Instant,
};

/// The port that a datagram from this one of a pod has outside; its answer comes back.
fn seen(pod: &Pod, outside: &Place, address: IpAddr, port: u16) -> u16 {
    let server = outside.run(|| Ok(UdpSocket::bind((address, 0))?)).unwrap();
    let target = server.local_addr().unwrap();
    let own = (any(address), port);
    let client = pod.place().run(|| bind::udp(own)).unwrap();
    client.send_to(b"question", target).unwrap();
    assert!(readable(&server, Instant::now() + PATIENCE).unwrap());
    let (_, from) = server.recv_from(&mut [0; 16]).unwrap();
    server.send_to(b"answer", from).unwrap();
    assert!(readable(&client, Instant::now() + PATIENCE).unwrap());
    from.port()
}

#[test]
fn a_flow_keeps_its_port_unless_that_is_a_services() {
    for (flags, services) in [(&[][..], true), (&["--node-ports=none"], false)] {
        let lab = lab();
        let (node, outside) = (lab.node(1), lab.outside().place());
        let pod = start(node, &["eth0"], flags);
        for address in lab.outside_addresses().unwrap() {
            let given = |port| seen(&pod, outside, address, port);
            assert_eq!([29_999, 32_768].map(given), [29_999, 32_768]);
            for port in [30_000, 31_500, 32_767] {
                let given = given(port);
                let is_services = (30_000..=32_767).contains(&given);
                assert_eq!(is_services, !services, "{port}: {given}");
            }
        }
    }
}
