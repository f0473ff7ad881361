//! A Service whose endpoints are a pod of each node, without anybody else who would translate its addresses.

use super::{Family, Scene};
use crate::{
    Lab, Place, Pod,
    node::SERVICES_FLAGS,
    traffic::{any, bind, connect, readable, uninterrupted},
};
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Addresses of no machine.
const ADDRESSES: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
/// Each check has a port of its own, of the Service and of the servers: they may run beside one another.
const PORTS: [(u16, u16); 3] = [(80, 8080), (81, 8081), (82, 8082)];
/// The last one's at each node's addresses, for both protocols.
const NODE_PORT: u16 = 30_082;
/// Of two endpoints one is missed by chance once in 2^39 times.
const ATTEMPTS: usize = 40;
const LOOK: Duration = Duration::from_millis(20);
const ANSWER: Duration = Duration::from_secs(5);

/// Starts the agents of a lab with [`SERVICES_FLAGS`], and waits until they are ready.
///
/// # Errors
/// If a file cannot be written, or an agent does not come up.
pub fn start(lab: &Lab) -> Result<()> {
    publish(lab, &[])?;
    for node in lab.nodes() {
        node.start_agent_with(&SERVICES_FLAGS)?;
    }
    for node in lab.nodes() {
        node.wait_ready()?;
    }
    Ok(())
}

/// Writes the nodes' files: one Service, led to these pods.
pub(super) fn publish(lab: &Lab, pods: &[&Pod]) -> Result<()> {
    let ports = |line: &dyn Fn(&str, (u16, u16)) -> String| -> String {
        let each = ["tcp", "udp"]
            .into_iter()
            .flat_map(|name| PORTS.map(|port| line(name, port)));
        each.collect()
    };
    let [v4, v6] = ADDRESSES;
    let mut text = format!(
        "kind: Service\nmetadata: {{namespace: lab, name: web}}\nspec:\n  type: NodePort\n  \
         clusterIP: {v4}\n  clusterIPs: ['{v4}', '{v6}']\n  ports:\n"
    );
    text += &ports(&|name, (port, _)| {
        let protocol = name.to_uppercase();
        let node_port = match port == PORTS[2].0 {
            true => format!(", nodePort: {NODE_PORT}"),
            false => String::new(),
        };
        format!("  - {{name: {name}{port}, protocol: {protocol}, port: {port}{node_port}}}\n")
    });
    for (family, kind) in [(Family::V4, "IPv4"), (Family::V6, "IPv6")] {
        let endpoints: Vec<String> = pods
            .iter()
            .map(|pod| {
                format!(
                    "{{addresses: ['{}'], conditions: {{ready: true}}}}",
                    family.of(pod)
                )
            })
            .collect();
        text += &format!(
            "---\nkind: EndpointSlice\nmetadata:\n  namespace: lab\n  name: web-{kind}\n  \
             labels: {{kubernetes.io/service-name: web}}\naddressType: {kind}\n\
             endpoints: [{}]\nports:\n",
            endpoints.join(", ")
        );
        text += &ports(&|name, (port, target)| {
            let protocol = name.to_uppercase();
            format!("- {{name: {name}{port}, protocol: {protocol}, port: {target}}}\n")
        });
    }
    for node in lab.nodes() {
        node.write_services(&text)?;
    }
    Ok(())
}

/// The pods that the Service leads to.
pub(super) fn endpoints(pods: &[Vec<Pod>]) -> Vec<&Pod> {
    pods.iter().filter_map(|pods| pods.get(1)).collect()
}

/// Pods that are endpoints themselves are left out: they would hear of themselves by their gateway.
pub fn service_from_pod(scene: &Scene) -> Result<String> {
    let (port, target) = PORTS[0];
    let clients = [scene.pod(1, 1), scene.pod(2, 1)].map(|pod| Client {
        place: pod.place(),
        seen_as: Some(pod.addresses()),
        services: at_cluster_addresses(port),
    });
    let asked = asked(scene, target, &clients)?;
    Ok(format!("{asked}, seen as the pod"))
}

pub fn service_from_node(scene: &Scene) -> Result<String> {
    for node in scene.lab().nodes() {
        let status = node.status()?;
        let mode = status.modes.get("serviceSockets");
        let mode = mode.with_context(|| format!("{} translates no Services", node.name()))?;
        // Where it is only not wanted there is no reason.
        if let Some(why) = mode.strip_prefix("off: ") {
            return Ok(format!("not on this machine: {why}"));
        }
    }
    let (port, target) = PORTS[1];
    let nodes = scene.lab().nodes().iter();
    let nodes: Vec<_> = nodes
        .map(|node| Client {
            place: node.place(),
            seen_as: None,
            services: at_cluster_addresses(port),
        })
        .collect();
    asked(scene, target, &nodes)
}

/// By each node's node port: an endpoint of another node sees the node by which the client came.
pub fn service_from_outside(scene: &Scene) -> Result<String> {
    let at_node_port = |address: &IpAddr| SocketAddr::new(*address, NODE_PORT);
    let nodes = scene.lab().nodes().iter();
    let clients: Vec<_> = nodes
        .map(|node| Client {
            place: scene.lab().outside().place(),
            seen_as: None,
            services: node.addresses().iter().map(at_node_port).collect(),
        })
        .collect();
    let asked = asked(scene, PORTS[2].1, &clients)?;
    Ok(format!("{asked}, by each node's port {NODE_PORT}"))
}

/// Who asks.
struct Client<'a> {
    place: &'a Place,
    /// How each endpoint has to see it, if that is the same for all.
    seen_as: Option<[IpAddr; 2]>,
    /// Of either family, or of both.
    services: Vec<SocketAddr>,
}

fn at_cluster_addresses(port: u16) -> Vec<SocketAddr> {
    let parsed = ADDRESSES.iter().filter_map(|text| text.parse().ok());
    parsed
        .map(|address| SocketAddr::new(address, port))
        .collect()
}

/// Has all of these ask until each endpoint has answered, by TCP and UDP, of both families; who asks must hear of no
/// other address than the Service's, and the endpoints of no other than the client's.
fn asked(scene: &Scene, target: u16, clients: &[Client<'_>]) -> Result<String> {
    let pods = endpoints(&scene.pods);
    let last = SocketAddr::new(pods[pods.len() - 1].v6(), target).to_string();
    for node in scene.lab().nodes() {
        node.wait_for_service("lab/web", |said| said.contains(&last))?;
    }
    let servers = (pods
        .iter()
        .flat_map(|pod| pod.addresses().map(|own| (pod, own))))
    .map(|(pod, own)| Server::bind(pod.place(), SocketAddr::new(own, target)))
    .collect::<Result<Vec<_>>>()?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let serving: Vec<_> = servers
            .iter()
            .map(|server| scope.spawn(|| server.serve(&done)))
            .collect();
        let outcome = clients.iter().try_for_each(|client| -> Result<()> {
            let place = client.place;
            for &service in &client.services {
                let family = match service {
                    SocketAddr::V4(_) => Family::V4,
                    SocketAddr::V6(_) => Family::V6,
                };
                let expected: BTreeSet<IpAddr> = pods.iter().map(|pod| family.of(pod)).collect();
                let own = client.seen_as.map(|own| family.pick(&own)).transpose()?;
                for ask in [by_tcp, by_udp] {
                    all_answer(place, ask, service, &expected, own)
                        .with_context(|| format!("{} asks {service}", place.name()))?;
                }
            }
            Ok(())
        });
        done.store(true, Ordering::Relaxed);
        for server in serving {
            server.join().map_err(|_| anyhow!("a server panicked"))??;
        }
        outcome
    })?;
    let ids: Vec<&str> = pods.iter().map(|pod| pod.id()).collect();
    Ok(format!(
        "TCP, UDP, v4 and v6, answered by {}",
        ids.join(" and ")
    ))
}

/// Asks once, under an address: the endpoint's own, and that of the client as the endpoint sees it.
type Ask = fn(SocketAddr) -> Result<(IpAddr, IpAddr)>;

fn all_answer(
    place: &Place,
    ask: Ask,
    service: SocketAddr,
    expected: &BTreeSet<IpAddr>,
    own: Option<IpAddr>,
) -> Result<()> {
    let mut met = BTreeSet::new();
    for _ in 0..ATTEMPTS {
        let (endpoint, seen) = place.run(|| ask(service))?;
        ensure!(
            own.is_none_or(|own| own == seen),
            "{endpoint} saw {seen} instead of {own:?}"
        );
        met.insert(endpoint);
        if met == *expected {
            return Ok(());
        }
    }
    bail!("answered by {met:?} instead of {expected:?}")
}

fn by_tcp(service: SocketAddr) -> Result<(IpAddr, IpAddr)> {
    let mut stream = connect(service)?;
    let peer = stream.peer_addr()?;
    ensure!(peer == service, "the connection is to {peer}");
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    parse(&answer)
}

fn by_udp(service: SocketAddr) -> Result<(IpAddr, IpAddr)> {
    let socket = UdpSocket::bind((any(service.ip()), 0))?;
    socket.send_to(b"who?", service)?;
    ensure!(
        readable(&socket, Instant::now() + ANSWER)?,
        "no answer by UDP"
    );
    let mut answer = [0; 128];
    let (len, from) = socket.recv_from(&mut answer)?;
    ensure!(from == service, "the answer is from {from}");
    parse(&String::from_utf8_lossy(&answer[..len]))
}

fn parse(answer: &str) -> Result<(IpAddr, IpAddr)> {
    let (own, seen) = answer
        .split_once(' ')
        .with_context(|| format!("the answer is `{answer}`"))?;
    Ok((own.parse()?, seen.parse()?))
}

/// Says its own address and the client's to whoever connects or sends.
struct Server {
    own: IpAddr,
    listener: TcpListener,
    socket: UdpSocket,
}

impl Server {
    fn bind(place: &Place, at: SocketAddr) -> Result<Self> {
        place.run(|| {
            let listener = bind::tcp(at)?;
            listener.set_nonblocking(true)?;
            let socket = bind::udp(at)?;
            socket.set_read_timeout(Some(LOOK))?;
            Ok(Self {
                own: at.ip(),
                listener,
                socket,
            })
        })
    }

    fn serve(&self, done: &AtomicBool) -> Result<()> {
        let answer = |client: SocketAddr| format!("{} {}", self.own, client.ip());
        while !done.load(Ordering::Relaxed) {
            if let Ok((mut stream, client)) = self.listener.accept() {
                stream.write_all(answer(client).as_bytes())?;
            }
            if let Ok((_, client)) = uninterrupted(|| self.socket.recv_from(&mut [0; 16])) {
                self.socket.send_to(answer(client).as_bytes(), client)?;
            }
        }
        Ok(())
    }
}
