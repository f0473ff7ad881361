//! Services on two nodes without any proxy: real agents, which follow a file of Services, and real traffic of pods and
//! of the nodes themselves.

mod faults;
mod members;

use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    node::SERVICES_FLAGS,
    traffic::{PATIENCE, any, bind, readable, uninterrupted},
    wait::wait_for,
};
use socket2::{Domain, Socket, Type};
use std::{
    collections::BTreeSet,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// On no machine.
const VIPS: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
const PORT: u16 = 80;
const TARGET: u16 = 8080;
const NODE_PORT: u16 = 30_080;

/// Both nodes, a client and a server on each.
struct World {
    lab: Lab,
    clients: [Pod; 2],
    servers: [Pod; 2],
    _serving: Vec<Server>,
}

impl World {
    fn new() -> Self {
        let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
        publish(&lab, &[]);
        for node in lab.nodes() {
            node.start_agent_with(&SERVICES_FLAGS).unwrap();
        }
        for node in lab.nodes() {
            node.wait_ready().unwrap();
        }
        let pod =
            |node: usize, role: &str| lab.node(node).add_pod(&format!("n{node}-{role}")).unwrap();
        let clients = [pod(1, "client"), pod(2, "client")];
        let servers = [pod(1, "server"), pod(2, "server")];
        let serving = servers
            .iter()
            .flat_map(|pod| {
                let at = pod
                    .addresses()
                    .map(|address| SocketAddr::new(address, TARGET));
                at.map(|at| Server::start(pod.place(), at))
            })
            .collect();
        let world = Self {
            lab,
            clients,
            servers,
            _serving: serving,
        };
        world.lead_to(&[0, 1]);
        world
    }

    /// Has the Service lead to these servers, and waits until it does.
    fn lead_to(&self, servers: &[usize]) {
        let pods: Vec<&Pod> = servers
            .iter()
            .map(|number| &self.servers[*number])
            .collect();
        publish(&self.lab, &pods);
        let expected: BTreeSet<String> = pods
            .iter()
            .flat_map(|pod| pod.addresses())
            .map(|address| SocketAddr::new(address, TARGET).to_string())
            .collect();
        for node in self.lab.nodes() {
            node.wait_for_service("lab/web", |said| {
                let has = |pod: &Pod| {
                    pod.addresses()
                        .map(|address| said.contains(&SocketAddr::new(address, TARGET).to_string()))
                };
                let are: Vec<bool> = self.servers.iter().flat_map(has).collect();
                let count = are.iter().filter(|is| **is).count();
                let all = expected.iter().all(|endpoint| said.contains(endpoint));
                said.contains(VIPS[0]) && all && count == expected.len()
            })
            .unwrap();
        }
    }

    /// Who may ask: by packets and by sockets, of either node.
    fn askers(&self) -> [(String, &Place); 4] {
        let pods = self
            .clients
            .iter()
            .map(|pod| (pod.id().to_owned(), pod.place()));
        let nodes = self.lab.nodes().iter();
        let nodes = nodes.map(|node| (format!("node {}", node.name()), node.place()));
        let all: Vec<_> = pods.chain(nodes).collect();
        all.try_into().ok().unwrap()
    }

    fn fail(&self, what: &str) -> ! {
        let logs = self.lab.nodes().iter().map(Node::log).collect::<Vec<_>>();
        let drops = self
            .lab
            .nodes()
            .iter()
            .map(|node| node.ctl(&["drops"]).map(|out| out.stdout));
        let drops: Vec<_> = drops
            .map(|out| String::from_utf8_lossy(&out.unwrap_or_default()).into_owned())
            .collect();
        panic!("{what}\n{}\n{}", drops.join("\n"), logs.join("\n---\n"))
    }
}

/// Has all nodes' Service lead to these servers.
fn publish(lab: &Lab, servers: &[&Pod]) {
    write(lab, &web(servers));
}

/// The Service, and where it leads to.
fn web(servers: &[&Pod]) -> String {
    let mut text = format!(
        "kind: Service
metadata: {{namespace: lab, name: web}}
spec:
  type: NodePort
  clusterIP: {v4}
  clusterIPs: ['{v4}', '{v6}']
  ports:
  - {{name: tcp, protocol: TCP, port: {PORT}, nodePort: {NODE_PORT}}}
  - {{name: udp, protocol: UDP, port: {PORT}, nodePort: {NODE_PORT}}}
",
        v4 = VIPS[0],
        v6 = VIPS[1]
    );
    for (family, name) in ["IPv4", "IPv6"].iter().enumerate() {
        let endpoints: String = servers
            .iter()
            .map(|pod| {
                format!(
                    "- {{addresses: ['{}'], conditions: {{ready: true}}}}\n",
                    pod.addresses()[family]
                )
            })
            .collect();
        let endpoints = match endpoints.is_empty() {
            true => "endpoints: []\n".to_owned(),
            false => format!("endpoints:\n{endpoints}"),
        };
        text += &format!(
            "---
kind: EndpointSlice
metadata:
  namespace: lab
  name: web-{family}
  labels: {{kubernetes.io/service-name: web}}
addressType: {name}
ports:
- {{name: tcp, protocol: TCP, port: {TARGET}}}
- {{name: udp, protocol: UDP, port: {TARGET}}}
{endpoints}"
        );
    }
    text
}

/// Writes the file of Services of all nodes, at one blow.
fn write(lab: &Lab, text: &str) {
    for node in lab.nodes() {
        node.write_services(text).unwrap();
    }
}

/// Says its own address to whoever connects or sends.
struct Server {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    fn start(place: &Place, at: SocketAddr) -> Self {
        let address = at.ip();
        let sockets = place.run(|| Ok((bind::tcp(at)?, bind::udp(at)?)));
        let (listener, socket) = sockets.unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, also_stopped) = (stop.clone(), stop.clone());
        let soon = || Instant::now() + Duration::from_millis(200);
        let streams = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if readable(&listener, soon()).unwrap() {
                    let (stream, _) = listener.accept().unwrap();
                    // It ends with its connection.
                    drop(thread::spawn(move || echo(stream, address)));
                }
            }
        });
        let datagrams = thread::spawn(move || {
            let mut heard = vec![0; 65_536];
            while !also_stopped.load(Ordering::Relaxed) {
                if readable(&socket, soon()).unwrap() {
                    let (len, from) = socket.recv_from(&mut heard).unwrap();
                    let said = format!("{address} {len}");
                    let _ = socket.send_to(said.as_bytes(), from);
                }
            }
        });
        Self {
            stop,
            threads: vec![streams, datagrams],
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A line for a line, with the server's address in front.
fn echo(mut stream: TcpStream, address: IpAddr) {
    let mut byte = [0];
    while let Ok(1) = stream.read(&mut byte) {
        if byte[0] == b'\n' && stream.write_all(format!("{address}\n").as_bytes()).is_err() {
            return;
        }
    }
}

fn vip(family: usize) -> SocketAddr {
    SocketAddr::new(VIPS[family].parse().unwrap(), PORT)
}

fn open(place: &Place, to: SocketAddr) -> io::Result<TcpStream> {
    let opened = place.run(|| Ok(TcpStream::connect_timeout(&to, PATIENCE)));
    let stream = opened.unwrap()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Who answers on a connection.
fn ask(stream: &mut TcpStream) -> io::Result<IpAddr> {
    stream.write_all(b"who\n")?;
    let (mut line, mut byte) = (Vec::new(), [0]);
    loop {
        match uninterrupted(|| stream.read(&mut byte))? {
            1 if byte[0] != b'\n' => line.push(byte[0]),
            1 => break,
            _ => return Err(ErrorKind::UnexpectedEof.into()),
        }
    }
    let text = String::from_utf8(line).map_err(io::Error::other)?;
    text.parse().map_err(io::Error::other)
}

/// Sends one datagram of so many bytes from a socket; who answers, and as whom.
fn send(socket: &UdpSocket, to: SocketAddr, len: usize) -> io::Result<(IpAddr, SocketAddr)> {
    socket.send_to(&vec![b'x'; len], to)?;
    if !readable(socket, Instant::now() + PATIENCE).map_err(io::Error::other)? {
        return Err(ErrorKind::TimedOut.into());
    }
    let mut heard = [0; 128];
    let (said, from) = socket.recv_from(&mut heard)?;
    let text = String::from_utf8_lossy(&heard[..said]).into_owned();
    let (server, heard) = text.split_once(' ').unwrap();
    assert_eq!(heard, len.to_string(), "bytes arrived");
    Ok((server.parse().unwrap(), from))
}

#[test]
fn tcp_reaches_every_server_under_the_services_address() {
    let world = World::new();
    for family in 0..2 {
        let servers: BTreeSet<IpAddr> = world
            .servers
            .iter()
            .map(|pod| pod.addresses()[family])
            .collect();
        // The servers are clients, too, and may be led to themselves.
        let own = world
            .servers
            .iter()
            .map(|pod| (pod.id().to_owned(), pod.place()));
        for (name, place) in world.askers().into_iter().chain(own) {
            let mut met = BTreeSet::new();
            for attempt in 0..40 {
                let asked = open(place, vip(family)).and_then(|mut stream| {
                    assert_eq!(stream.peer_addr()?, vip(family), "{name}");
                    let first = ask(&mut stream)?;
                    assert_eq!(
                        ask(&mut stream)?,
                        first,
                        "{name}: one connection, one server"
                    );
                    Ok(first)
                });
                match asked {
                    Ok(server) => met.insert(server),
                    Err(error) => world.fail(&format!(
                        "{name}, attempt {attempt}, {}: {error}",
                        vip(family)
                    )),
                };
            }
            // By chance one of two is missed once in 2^39 times.
            assert_eq!(met, servers, "{name}");
        }
    }
}

#[test]
fn datagrams_are_answered_by_the_services_address() {
    let world = World::new();
    for family in 0..2 {
        let servers: BTreeSet<IpAddr> = world
            .servers
            .iter()
            .map(|pod| pod.addresses()[family])
            .collect();
        for (name, place) in world.askers() {
            let mut met = BTreeSet::new();
            // Of one packet, and in parts.
            for (attempt, len) in [5, 3_000].into_iter().cycle().take(40).enumerate() {
                let any = SocketAddr::new(any(vip(family).ip()), 0);
                let socket = place.run(|| Ok(UdpSocket::bind(any)?)).unwrap();
                match send(&socket, vip(family), len) {
                    Ok((server, from)) => {
                        assert_eq!(from, vip(family), "{name}");
                        met.insert(server);
                    }
                    Err(error) => {
                        world.fail(&format!("{name}, attempt {attempt}, {len} bytes: {error}"))
                    }
                }
            }
            assert_eq!(met, servers, "{name}");
        }
    }
}

/// By the same port, of either node, whole and in parts.
#[test]
fn who_asks_a_server_itself_after_the_service_is_answered_by_it() {
    let world = World::new();
    for family in 0..2 {
        for (name, place) in world.askers() {
            let any = SocketAddr::new(any(vip(family).ip()), 0);
            let socket = place.run(|| Ok(UdpSocket::bind(any)?)).unwrap();
            for (attempt, len) in [5, 3_000].into_iter().cycle().take(8).enumerate() {
                let ask = |to: SocketAddr| match send(&socket, to, len) {
                    Ok((server, from)) => {
                        assert_eq!(from, to, "{name}");
                        server
                    }
                    Err(error) => world.fail(&format!(
                        "{name} asks {to}, attempt {attempt}, {len} bytes: {error}"
                    )),
                };
                let server = ask(vip(family));
                assert_eq!(ask(SocketAddr::new(server, TARGET)), server, "{name}");
            }
        }
    }
}

#[test]
fn who_is_there_stays_and_who_comes_finds_who_is_left() {
    let world = World::new();
    let askers = world.askers();
    let mut streams: Vec<_> = askers
        .iter()
        .flat_map(|(name, place)| {
            (0..20).map(move |number| (name, open(place, vip(number % 2)).unwrap()))
        })
        .collect();
    let before: Vec<IpAddr> = streams
        .iter_mut()
        .map(|(_, stream)| ask(stream).unwrap())
        .collect();
    world.lead_to(&[1]);
    let left: BTreeSet<IpAddr> = world.servers[1].addresses().into();
    for (name, place) in &askers {
        for number in 0..20 {
            let server = open(place, vip(number % 2)).and_then(|mut stream| ask(&mut stream));
            assert!(left.contains(&server.unwrap()), "{name}");
        }
    }
    for node in world.lab.nodes() {
        node.kill_agent().unwrap();
    }
    for (name, place) in &askers {
        let server = open(place, vip(0)).and_then(|mut stream| ask(&mut stream));
        assert!(left.contains(&server.unwrap()), "{name}, without an agent");
    }
    for node in world.lab.nodes() {
        node.start_agent_with(&SERVICES_FLAGS).unwrap();
        node.wait_ready().unwrap();
    }
    for ((name, stream), before) in streams.iter_mut().zip(before) {
        assert_eq!(ask(stream).unwrap(), before, "{name}");
    }
}

#[test]
fn a_service_without_endpoints_and_a_port_without_a_service_refuse() {
    let world = World::new();
    let refused = |what: &str| {
        for (name, place) in world.askers() {
            for family in 0..2 {
                let other = SocketAddr::new(vip(family).ip(), PORT + 1);
                let to = if what == "port" { other } else { vip(family) };
                match open(place, to) {
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                    other => world.fail(&format!("{name}, {what}, {to}: {other:?}")),
                }
            }
        }
    };
    refused("port");
    world.lead_to(&[]);
    refused("no endpoint");
    world.lead_to(&[0]);
    let [(_, client), ..] = world.askers();
    assert!(open(client, vip(0)).is_ok());
}

/// Who is asked by a connection and by a datagram; each has to be a server.
fn is_served(world: &World, name: &str, place: &Place, to: SocketAddr) {
    let servers: BTreeSet<IpAddr> = world.servers.iter().flat_map(Pod::addresses).collect();
    let asked = open(place, to).and_then(|mut stream| {
        assert_eq!(stream.peer_addr()?, to, "{name}");
        ask(&mut stream)
    });
    match asked {
        Ok(server) => assert!(servers.contains(&server), "{name}: {server}"),
        Err(error) => world.fail(&format!("{name}, {to}, TCP: {error}")),
    }
    let any = SocketAddr::new(any(to.ip()), 0);
    let socket = place.run(|| Ok(UdpSocket::bind(any)?)).unwrap();
    match send(&socket, to, 5) {
        Ok((server, from)) => {
            assert_eq!(from, to, "{name}");
            assert!(servers.contains(&server), "{name}: {server}");
        }
        Err(error) => world.fail(&format!("{name}, {to}, UDP: {error}")),
    }
}

/// A socket that is bound so hears at once that it is led nowhere.
fn is_refused_from(node: &Node, bound: SocketAddr, to: SocketAddr) {
    let asked = node.place().run(|| {
        let domain = Domain::for_address(to);
        let stream = Socket::new(domain, Type::STREAM, None)?;
        bind::freed(|| stream.bind(&bound.into()))?;
        let datagrams = bind::udp(bound)?;
        let connected = stream.connect_timeout(&to.into(), PATIENCE);
        Ok([connected, datagrams.send_to(b"x", to).map(drop)])
    });
    for outcome in asked.unwrap() {
        let kind = outcome.expect_err("nobody can answer").kind();
        assert_eq!(kind, ErrorKind::ConnectionRefused, "{bound} to {to}");
    }
}

#[test]
fn a_node_port_is_at_the_nodes_addresses_and_at_loopback_for_the_node_alone() {
    let world = World::new();
    for (at, node) in world.lab.nodes().iter().enumerate() {
        for address in node.addresses() {
            let to = SocketAddr::new(address, NODE_PORT);
            is_served(&world, node.name(), node.place(), to);
            let client = &world.clients[at];
            is_served(&world, client.id(), client.place(), to);
        }
        for address in ["127.0.0.1", "::1"] {
            let to = SocketAddr::new(address.parse().unwrap(), NODE_PORT);
            is_served(&world, node.name(), node.place(), to);
            // From there alone no endpoint could answer.
            for to in [to, vip(usize::from(to.is_ipv6()))] {
                is_refused_from(node, SocketAddr::new(address.parse().unwrap(), 0), to);
            }
            // A pod has an address of its own by that name.
            let pod = world.clients[at].place();
            match open(pod, to) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                other => world.fail(&format!("a pod, {to}: {other:?}")),
            }
            let _listener = pod.run(|| bind::tcp(to)).unwrap();
            let own = open(pod, to).unwrap();
            assert!(own.local_addr().unwrap().ip().is_loopback(), "{own:?}");
        }
    }
}
