//! A port of the node that leads to a pod, and pods that send from the same port of theirs: to the very address and port that
//! somebody outside comes from.

use super::{
    forwarding::host_port,
    kit::{FAMILIES, World, far},
    mapping,
};
use serde_json::json;
use sinabro_lab::{
    Place, Pod, cni,
    traffic::{PATIENCE, accept, bind, readable},
};
use socket2::{Domain, Socket, Type};
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Instant,
};

/// Where the pod that the port leads to listens.
const TARGET: u16 = 8080;
const ROUNDS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Client,
    Pods,
}

/// A port of a node, and the pod that it leads to.
struct Published<'a> {
    world: &'a World,
    port: u16,
    served: &'a Pod,
}

/// The plugin `portmap` has rules that lead the port to the pod, and the agent is told of the port as it is.
#[test]
fn pods_that_send_from_the_number_of_a_host_port_are_not_mixed_up_with_its_clients() {
    const PORT: u16 = 18_080;
    for world in World::by_both_ways(1).chain([World::direct_with(1, &[mapping::FLAG])]) {
        let served = with_host_port(&world, PORT);
        for address in served.addresses() {
            host_port(&world, PORT, SocketAddr::new(address, TARGET));
        }
        Published {
            world: &world,
            port: PORT,
            served: &served,
        }
        .is_told_apart();
    }
}

/// The same of a Service's port that rules as kube-proxy's lead to the pod, of which the agent knows no more than the range.
#[test]
fn nor_with_those_of_kube_proxys_node_ports() {
    const PORT: u16 = 30_081;
    let world = World::new(2);
    let served = world.pod(2);
    for address in served.addresses() {
        host_port(&world, PORT, SocketAddr::new(address, TARGET));
    }
    Published {
        world: &world,
        port: PORT,
        served,
    }
    .is_told_apart();
}

/// The same of a Service's port that the agent leads to the pod.
#[test]
fn pods_that_send_from_the_number_of_a_node_port_are_not_mixed_up_with_its_clients() {
    const PORT: u16 = 30_080;
    let world = World::direct(2);
    let served = world.pod(2);
    publish(&world, PORT, served);
    Published {
        world: &world,
        port: PORT,
        served,
    }
    .is_told_apart();
}

/// Adds a pod as a runtime does that was told of a port of the node.
pub fn with_host_port(world: &World, port: u16) -> Pod {
    let (node, id) = (world.node(), "served");
    let place = node.make_sandbox(id).unwrap();
    let mut config = cni::config();
    // As containerd writes it.
    let mapping = |protocol| json!({"HostPort": port, "ContainerPort": TARGET, "Protocol": protocol, "HostIP": ""});
    config["runtimeConfig"]["portMappings"] = json!(["tcp", "udp"].map(mapping));
    let answer = node.cni_configured("ADD", id, &config).unwrap();
    node.pod_of(id, &place, &answer.success().unwrap()).unwrap()
}

/// Has a Service lead from a port of the node to a pod.
fn publish(world: &World, port: u16, pod: &Pod) {
    let mut text = format!(
        "kind: Service
metadata: {{namespace: lab, name: web}}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  clusterIPs: ['10.96.0.10', 'fd00:10:96::10']
  ports:
  - {{name: tcp, protocol: TCP, port: 80, nodePort: {port}}}
  - {{name: udp, protocol: UDP, port: 80, nodePort: {port}}}
"
    );
    for (name, address) in FAMILIES.iter().zip(pod.addresses()) {
        text += &format!(
            "---
kind: EndpointSlice
metadata: {{namespace: lab, name: web-{name}, labels: {{kubernetes.io/service-name: web}}}}
addressType: {name}
endpoints: [{{addresses: ['{address}'], conditions: {{ready: true}}}}]
ports:
- {{name: tcp, protocol: TCP, port: {TARGET}}}
- {{name: udp, protocol: UDP, port: {TARGET}}}
"
        );
    }
    let node = world.node();
    node.write_services(&text).unwrap();
    let ends = pod.addresses().map(|at| SocketAddr::new(at, TARGET));
    node.wait_for_service("lab/web", |said| {
        ends.iter().all(|end| said.contains(&end.to_string()))
    })
    .unwrap();
}

impl Published<'_> {
    fn is_told_apart(&self) {
        let mut far_port = 5000;
        for (family, name) in FAMILIES.iter().enumerate() {
            for first in [First::Client, First::Pods] {
                let what = format!("{name}, first: {first:?}");
                far_port += 1;
                let far = SocketAddr::new(far()[family], far_port);
                self.connections(far, first, &format!("TCP, {what}"));
                self.datagrams(far, first, &format!("UDP, {what}"));
            }
        }
    }

    /// The port, as clients outside know it.
    fn target(&self, far: SocketAddr) -> SocketAddr {
        SocketAddr::new(self.own(far), self.port)
    }

    /// The node's address of the family.
    fn own(&self, far: SocketAddr) -> IpAddr {
        self.world.own()[usize::from(far.is_ipv6())]
    }

    /// Those that send from the port's number, the one that it leads to among them.
    fn senders(&self) -> [&Pod; 2] {
        [self.world.pod(1), self.served]
    }

    fn address(pod: &Pod, far: SocketAddr) -> IpAddr {
        pod.addresses()[usize::from(far.is_ipv6())]
    }

    /// The far host connects to the port from where it listens itself, which pods connect to from that port of theirs.
    fn connections(&self, far: SocketAddr, first: First, what: &str) {
        let beyond = &self.world.beyond;
        let listener = beyond.run(|| {
            let socket = shared(far)?;
            socket.listen(16)?;
            Ok(TcpListener::from(socket))
        });
        let listener = listener.unwrap();
        let at = SocketAddr::new(Self::address(self.served, far), TARGET);
        let server = self.served.place().run(|| bind::tcp(at));
        let server = server.unwrap();
        let accepted = |listener| {
            let accepted = accept(listener, Instant::now() + PATIENCE);
            accepted.unwrap_or_else(|error| panic!("{what}: {error:#}"))
        };
        let mut pairs = Vec::new();
        let by_port = || {
            let client = connect(beyond, far, self.target(far), what);
            let (served, peer) = accepted(&server);
            assert_eq!(peer, far, "{what}");
            [client, served]
        };
        if first == First::Client {
            pairs.push(by_port());
        }
        for pod in self.senders() {
            let from = SocketAddr::new(Self::address(pod, far), self.port);
            let client = connect(pod.place(), from, far, what);
            let (served, peer) = accepted(&listener);
            self.is_another(peer, what);
            pairs.push([client, served]);
        }
        if first == First::Pods {
            pairs.push(by_port());
        }
        for round in 0..ROUNDS {
            for (number, [one, other]) in pairs.iter().enumerate() {
                for (mut from, mut to) in [(one, other), (other, one)] {
                    let (said, mut heard) = ([round as u8, number as u8], [0; 2]);
                    let carried = from.write_all(&said);
                    let carried = carried.and_then(|()| to.read_exact(&mut heard));
                    carried.unwrap_or_else(|error| panic!("{what}, {number}: {error}"));
                    assert_eq!(heard, said, "{what}, {number}");
                }
            }
        }
    }

    /// One socket of the far host speaks to the port, and is spoken to by pods from that port of theirs.
    fn datagrams(&self, far: SocketAddr, first: First, what: &str) {
        let bind = |place: &Place, at| place.run(|| bind::udp(at)).unwrap();
        let remote = bind(&self.world.beyond, far);
        let at = SocketAddr::new(Self::address(self.served, far), TARGET);
        let server = bind(self.served.place(), at);
        let own = |pod: &Pod| SocketAddr::new(Self::address(pod, far), self.port);
        let senders = self.senders().map(|pod| bind(pod.place(), own(pod)));
        let mut known = [None; 2];
        let says = |from: &UdpSocket, to: SocketAddr, heard_by: &UdpSocket, what: &str| {
            from.send_to(what.as_bytes(), to).unwrap();
            let arrived = readable(heard_by, Instant::now() + PATIENCE).unwrap();
            assert!(arrived, "{what}: nothing");
            let mut heard = [0; 128];
            let (len, peer) = heard_by.recv_from(&mut heard).unwrap();
            assert_eq!(String::from_utf8_lossy(&heard[..len]), what);
            peer
        };
        for round in 0..ROUNDS {
            let by_port = || {
                let what = format!("{what}, to the port, {round}");
                assert_eq!(says(&remote, self.target(far), &server, &what), far);
                assert_eq!(says(&server, far, &remote, &what), self.target(far));
            };
            if first == First::Client {
                by_port();
            }
            for (number, (sender, known)) in senders.iter().zip(&mut known).enumerate() {
                let what = format!("{what}, of pod {number}, {round}");
                let peer = says(sender, far, &remote, &what);
                self.is_another(peer, &what);
                assert_eq!(*known.get_or_insert(peer), peer, "{what}");
                assert_eq!(says(&remote, peer, sender, &what), far);
            }
            if first == First::Pods {
                by_port();
            }
        }
    }

    /// What the far host sees a pod as: the node, by another port.
    fn is_another(&self, peer: SocketAddr, what: &str) {
        let target = self.target(peer);
        assert_eq!(peer.ip(), target.ip(), "{what}");
        assert_ne!(peer.port(), target.port(), "{what}");
    }
}

/// At an address and port that another socket of the machine may have, too.
fn shared(at: SocketAddr) -> anyhow::Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    bind::freed(|| socket.bind(&at.into()))?;
    Ok(socket)
}

fn connect(place: &Place, from: SocketAddr, to: SocketAddr, what: &str) -> TcpStream {
    let connected = place.run(|| {
        let socket = shared(from)?;
        socket.connect_timeout(&to.into(), PATIENCE)?;
        Ok(TcpStream::from(socket))
    });
    let stream = connected.unwrap_or_else(|error| panic!("{what}, {from}: {error:#}"));
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}
