//! Sockets of a node that are bound to one of its addresses, and pods of another node: real agents, real traffic.

use sinabro_lab::{
    Binaries, Lab, Lifetime, Place, Pod,
    node::{Node, SERVICES_FLAGS, pod_cidrs},
    traffic::{PATIENCE, any, bind, errors, icmp, readable},
};
use socket2::{Domain, Socket, Type};
use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket},
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
/// Nobody listens there.
const CLOSED: u16 = 8081;
/// More than many segments.
const LARGE: usize = 400_000;

/// Two nodes; a pod of the second one serves.
struct World {
    // Before the pod's network goes.
    _serving: Vec<Server>,
    lab: Lab,
    server: Pod,
}

impl World {
    fn new(flags: &[&str]) -> Self {
        let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
        for node in lab.nodes() {
            node.write_services("").unwrap();
            node.start_agent_with(flags).unwrap();
        }
        for node in lab.nodes() {
            node.wait_ready().unwrap();
        }
        let server = lab.node(2).add_pod("server").unwrap();
        let addresses = server.addresses();
        Self {
            _serving: addresses.map(|at| Server::start(server.place(), at)).into(),
            lab,
            server,
        }
    }

    /// Where the client is.
    fn node(&self) -> &Node {
        self.lab.node(1)
    }

    /// Has a Service lead to the server, and waits until it does.
    fn publish(&self) {
        let [v4, v6] = VIPS;
        let mut text = format!(
            "kind: Service
metadata: {{namespace: lab, name: web}}
spec:
  clusterIP: {v4}
  clusterIPs: ['{v4}', '{v6}']
  ports:
  - {{name: tcp, protocol: TCP, port: {PORT}}}
  - {{name: udp, protocol: UDP, port: {PORT}}}
"
        );
        for (family, at) in ["IPv4", "IPv6"].iter().zip(self.server.addresses()) {
            text += &format!(
                "---
kind: EndpointSlice
metadata: {{namespace: lab, name: web-{family}, labels: {{kubernetes.io/service-name: web}}}}
addressType: {family}
ports:
- {{name: tcp, protocol: TCP, port: {TARGET}}}
- {{name: udp, protocol: UDP, port: {TARGET}}}
endpoints:
- {{addresses: ['{at}'], conditions: {{ready: true}}}}
"
            );
        }
        self.node().write_services(&text).unwrap();
        let ends = self
            .server
            .addresses()
            .map(|at| SocketAddr::new(at, TARGET));
        let leads = |said: &str| ends.iter().all(|end| said.contains(&end.to_string()));
        self.node().wait_for_service("lab/web", leads).unwrap();
    }

    /// Asks the pod at this address in every way, by a socket that is bound to this one, and demands whom it sees.
    fn asks(&self, from: IpAddr, to: SocketAddr, is_expected: impl Fn(IpAddr) -> bool) {
        let place = self.node().place();
        for (how, asked) in [
            ("TCP", by_tcp(place, from, to, 5)),
            ("much TCP", by_tcp(place, from, to, LARGE)),
            ("UDP", by_udp(place, from, to, 5)),
            ("UDP in parts", by_udp(place, from, to, 3000)),
        ] {
            match asked {
                Ok(seen) if is_expected(seen) => {}
                other => self.fail(&format!("{how} from {from} to {to}: {other:?}")),
            }
        }
    }

    /// The same of what has no ports, and of errors.
    fn pings(&self, from: IpAddr, to: IpAddr) {
        if let Err(error) = icmp::ping_from(self.node().place(), from, to) {
            self.fail(&format!("{error:#}"));
        }
        let bound = || {
            let socket = UdpSocket::bind((from, 0))?;
            errors::keep(&socket, from.is_ipv4())?;
            socket.connect((to, CLOSED))?;
            Ok(socket)
        };
        let socket = self.node().place().run(bound).unwrap();
        socket.send(b"hello").unwrap();
        match errors::error(&socket, Instant::now() + PATIENCE) {
            Ok(heard) if heard.is_closed_port() && heard.from == to => {}
            other => self.fail(&format!("closed port of {to} from {from}: {other:?}")),
        }
    }

    fn fail(&self, what: &str) -> ! {
        let nodes = self.lab.nodes();
        let drops = nodes.iter().map(|node| node.ctl(&["drops"]).unwrap());
        let drops: Vec<_> = drops
            .map(|out| String::from_utf8_lossy(&out.stdout).into_owned())
            .collect();
        let logs = nodes.iter().map(Node::log).collect::<Vec<_>>();
        panic!("{what}\n{}\n{}", drops.join("\n"), logs.join("\n---\n"))
    }
}

/// Says whom it hears, and how much.
struct Server {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    fn start(place: &Place, address: IpAddr) -> Self {
        let at = SocketAddr::new(address, TARGET);
        let sockets = place.run(|| Ok((bind::tcp(at)?, bind::udp(at)?)));
        let (listener, socket) = sockets.unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, also_stopped) = (stop.clone(), stop.clone());
        let soon = || Instant::now() + Duration::from_millis(200);
        let streams = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if readable(&listener, soon()).unwrap() {
                    let (stream, from) = listener.accept().unwrap();
                    thread::spawn(move || tell(stream, from));
                }
            }
        });
        let datagrams = thread::spawn(move || {
            let mut heard = vec![0; 65_536];
            while !also_stopped.load(Ordering::Relaxed) {
                if readable(&socket, soon()).unwrap()
                    && let Ok((len, from)) = socket.recv_from(&mut heard)
                {
                    let _ = socket.send_to(&said(from, len), from);
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

fn tell(mut stream: TcpStream, from: SocketAddr) {
    let mut heard = Vec::new();
    if stream.read_to_end(&mut heard).is_ok() {
        let _ = stream.write_all(&said(from, heard.len()));
    }
}

/// An answer, as long as the question.
fn said(from: SocketAddr, len: usize) -> Vec<u8> {
    let mut said = format!("{} {len} ", from.ip()).into_bytes();
    said.resize(said.len().max(len), b'x');
    said
}

/// Whom the server has heard; it must have heard all, and be heard as long.
fn heard(said: &[u8], sent: usize) -> io::Result<IpAddr> {
    let text = String::from_utf8_lossy(said);
    let mut words = text.split(' ');
    let from = words.next().and_then(|from| from.parse().ok());
    let len = words.next().and_then(|len| len.parse::<usize>().ok());
    match (from, len) {
        (Some(from), Some(len)) if sent == len && said.len() >= sent => Ok(from),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

fn connect(place: &Place, from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let connect = || {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.bind(&SocketAddr::new(from, 0).into())?;
        Ok(socket
            .connect_timeout(&to.into(), PATIENCE)
            .map(|()| TcpStream::from(socket)))
    };
    let stream = place.run(connect).unwrap()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn by_tcp(place: &Place, from: IpAddr, to: SocketAddr, len: usize) -> io::Result<IpAddr> {
    let mut stream = connect(place, from, to)?;
    stream.write_all(&vec![b'x'; len])?;
    stream.shutdown(Shutdown::Write)?;
    let mut said = Vec::new();
    stream.read_to_end(&mut said)?;
    heard(&said, len)
}

fn by_udp(place: &Place, from: IpAddr, to: SocketAddr, len: usize) -> io::Result<IpAddr> {
    let socket = place.run(|| Ok(UdpSocket::bind((from, 0))?)).unwrap();
    socket.connect(to)?;
    // A datagram may be lost.
    for _ in 0..4 {
        socket.send(&vec![b'x'; len])?;
        if readable(&socket, Instant::now() + Duration::from_secs(2)).map_err(io::Error::other)? {
            let mut said = vec![0; 65_536];
            let got = socket.recv(&mut said)?;
            return heard(&said[..got], len);
        }
    }
    Err(ErrorKind::TimedOut.into())
}

/// Whether an address is one of the first node's inside of the overlay.
fn is_of_overlay(seen: IpAddr) -> bool {
    pod_cidrs(1).iter().any(|range| range.contains(&seen))
}

#[test]
fn a_socket_that_is_bound_to_the_nodes_address_reaches_pods_and_services_of_other_nodes() {
    let world = World::new(&SERVICES_FLAGS);
    world.publish();
    for (family, node) in world.node().addresses().into_iter().enumerate() {
        let pod = world.server.addresses()[family];
        for to in [
            SocketAddr::new(pod, TARGET),
            SocketAddr::new(VIPS[family].parse().unwrap(), PORT),
        ] {
            for from in [any(pod), node] {
                world.asks(from, to, is_of_overlay);
            }
        }
        world.pings(node, pod);
        // The pod sees no other node's address.
        let place = world.node().place();
        let seen = icmp::ping_seen(place, world.server.place(), pod).unwrap();
        assert!(is_of_overlay(seen), "{seen}");
    }
}

#[test]
fn it_reaches_pods_where_others_translate_services() {
    let world = World::new(&[]);
    for (node, pod) in world
        .node()
        .addresses()
        .into_iter()
        .zip(world.server.addresses())
    {
        for from in [any(pod), node] {
            world.asks(from, SocketAddr::new(pod, TARGET), is_of_overlay);
        }
        world.pings(node, pod);
    }
}

/// Answers to an address that pods reach under their own come past the tunnel, and so may what the socket sends be one.
#[test]
fn what_pods_reach_untranslated_speaks_and_answers_by_its_own_address() {
    let world = World::new(&["--masquerade-ipv6=off"]);
    let (node, pod) = (world.node().addresses()[1], world.server.addresses()[1]);
    world.asks(node, SocketAddr::new(pod, TARGET), |seen| seen == node);
    world.pings(node, pod);
    let _server = Server::start(world.node().place(), node);
    let at = SocketAddr::new(node, TARGET);
    for asked in [
        by_tcp(world.server.place(), pod, at, LARGE),
        by_udp(world.server.place(), pod, at, 5),
    ] {
        match asked {
            Ok(seen) if seen == pod => {}
            other => world.fail(&format!("the pod asks {at}: {other:?}")),
        }
    }
}

#[test]
fn a_connection_of_such_a_socket_outlives_both_agents() {
    let world = World::new(&[]);
    let all = world
        .node()
        .addresses()
        .into_iter()
        .zip(world.server.addresses());
    let mut streams: Vec<_> = all
        .cycle()
        .take(8)
        .map(|(node, pod)| {
            connect(world.node().place(), node, SocketAddr::new(pod, TARGET)).unwrap()
        })
        .collect();
    let mut send = || {
        for stream in &mut streams {
            stream.write_all(&[b'x'; 5000]).unwrap();
        }
    };
    send();
    for node in world.lab.nodes() {
        node.kill_agent().unwrap();
    }
    send();
    for node in world.lab.nodes() {
        node.start_agent().unwrap();
        node.wait_ready().unwrap();
    }
    send();
    for (number, stream) in streams.iter_mut().enumerate() {
        stream.shutdown(Shutdown::Write).unwrap();
        let mut said = Vec::new();
        if let Err(error) = stream.read_to_end(&mut said) {
            world.fail(&format!("connection {number}: {error}"));
        }
        assert!(
            is_of_overlay(heard(&said, 15_000).unwrap()),
            "connection {number}"
        );
    }
}
