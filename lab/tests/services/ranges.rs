//! Addresses of the Services' ranges that no Service has: an agent that follows a file, and a pod that sends there.

use sinabro_common::api::{Request, Response};
use sinabro_lab::{Binaries, Lab, Lifetime, Node, Pod, node::SERVICES_FLAGS, wait::wait_for};
use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

const RANGES: &str = "kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/16, 'fd00:10:96::/112']}
";
const ADDRESSES: [&str; 2] = ["10.96.0.77", "fd00:10:96::77"];

fn at(family: usize) -> SocketAddr {
    SocketAddr::new(ADDRESSES[family].parse().unwrap(), 80)
}

/// A Service without endpoints, with such labels.
fn service(labels: &str) -> String {
    let [v4, v6] = ADDRESSES;
    format!(
        "---\nkind: Service\nmetadata: {{namespace: lab, name: web, labels: {{{labels}}}}}\n\
         spec: {{clusterIP: {v4}, clusterIPs: [{v4}, '{v6}'], ports: [{{protocol: TCP, port: 80}}]}}\n"
    )
}

/// How many packets were dropped because nobody has their destination.
fn dropped(node: &Node) -> u64 {
    let Response::Metrics(report) = node.ask(Request::Metrics).unwrap() else {
        panic!("no metrics");
    };
    let reasons = report.drops.iter();
    let ours = reasons.filter(|drop| drop.reason == "service_unallocated");
    ours.map(|drop| drop.packets).sum()
}

/// Sends a datagram to each of the addresses; how many were dropped.
fn drops_of(node: &Node, pod: &Pod) -> u64 {
    let before = dropped(node);
    for family in 0..2 {
        let any = sinabro_lab::traffic::any(at(family).ip());
        let send = || Ok(UdpSocket::bind((any, 0))?.send_to(b"x", at(family))?);
        pod.place().run(send).unwrap();
    }
    dropped(node) - before
}

fn wait_for_drops(node: &Node, pod: &Pod, expected: u64) {
    let what = format!("{expected} of two datagrams to be dropped");
    wait_for(
        &what,
        || Ok((drops_of(node, pod) == expected).then_some(())),
    )
    .unwrap();
}

fn connect(pod: &Pod, family: usize) -> ErrorKind {
    let connect = || {
        let patience = Duration::from_millis(500);
        Ok(TcpStream::connect_timeout(&at(family), patience))
    };
    let connected = pod.place().run(connect).unwrap();
    connected.unwrap_err().kind()
}

#[test]
fn what_is_for_an_address_that_no_service_has_is_dropped_while_that_is_certain() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.write_services("{kind: List, items: []}").unwrap();
    node.start_agent_with(&SERVICES_FLAGS).unwrap();
    node.wait_ready().unwrap();
    let pod = node.add_pod("client").unwrap();
    wait_for_drops(node, &pod, 0);

    node.write_services(RANGES).unwrap();
    wait_for_drops(node, &pod, 2);
    let status = node.status().unwrap();
    assert_eq!(
        status.modes["serviceCIDRs"],
        "10.96.0.0/16, fd00:10:96::/112"
    );
    for family in 0..2 {
        assert_eq!(connect(&pod, family), ErrorKind::TimedOut);
    }

    node.write_services(&format!("{RANGES}{}", service("")))
        .unwrap();
    wait_for_drops(node, &pod, 0);
    for family in 0..2 {
        assert_eq!(connect(&pod, family), ErrorKind::ConnectionRefused);
    }
    let others = "service.kubernetes.io/service-proxy-name: other";
    node.write_services(&format!("{RANGES}{}", service(others)))
        .unwrap();
    wait_for("the Service to be another's", || {
        let said = node.ctl(&["services", "lab/web"])?;
        Ok((!said.status.success()).then_some(()))
    })
    .unwrap();
    assert_eq!(drops_of(node, &pod), 0);
    node.write_services(RANGES).unwrap();
    wait_for_drops(node, &pod, 2);

    // Who comes after knows Services first.
    node.kill_agent().unwrap();
    node.write_services(&format!("{RANGES}{}", service("")))
        .unwrap();
    node.start_agent_with(&SERVICES_FLAGS).unwrap();
    node.wait_ready().unwrap();
    wait_for_drops(node, &pod, 0);
    node.write_services(RANGES).unwrap();
    wait_for_drops(node, &pod, 2);
    node.kill_agent().unwrap();
    let off = [&SERVICES_FLAGS[..], &["--service-cidrs=none"]].concat();
    node.start_agent_with(&off).unwrap();
    node.wait_ready().unwrap();
    wait_for_drops(node, &pod, 0);
}
