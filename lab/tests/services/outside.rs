//! Services for a client that is on no node: real agents, and real traffic that comes in by an uplink.

use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    node::SERVICES_FLAGS,
    traffic::{PATIENCE, any, bind, readable},
};
use std::{
    collections::BTreeSet,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// On no machine; what is for the first of a family is routed to the first node.
pub const EXTERNAL: [[&str; 2]; 2] = [
    ["198.51.100.11", "198.51.100.12"],
    ["2001:db8:51::11", "2001:db8:51::12"],
];
pub const PORT: u16 = 80;
const TARGET: u16 = 8080;
/// More than many segments.
const LARGE: usize = 400_000;

pub struct World {
    pub lab: Lab,
    pub servers: [Pod; 2],
    _serving: Vec<Server>,
}

impl World {
    pub fn new() -> Self {
        Self::with(&SERVICES_FLAGS)
    }

    pub fn with(flags: &[&str]) -> Self {
        let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
        publish(&lab, &[]);
        for node in lab.nodes() {
            node.start_agent_with(flags).unwrap();
        }
        for node in lab.nodes() {
            node.wait_ready().unwrap();
        }
        let pod = |node: usize| lab.node(node).add_pod(&format!("n{node}-server")).unwrap();
        let servers = [pod(1), pod(2)];
        let of_pods = servers.iter().map(|pod| (pod.place(), pod.addresses()));
        let of_nodes = lab.nodes().iter().map(|node| {
            let addresses = node.addresses().try_into().unwrap();
            (node.place(), addresses)
        });
        let serving = of_pods
            .chain(of_nodes)
            .flat_map(|(place, addresses)| addresses.map(|address| Server::start(place, address)))
            .collect();
        route(&lab);
        Self {
            lab,
            servers,
            _serving: serving,
        }
    }

    /// Has the Service lead to these endpoints, one of each family, and waits until it does.
    pub fn lead_to(&self, endpoints: &[[IpAddr; 2]]) {
        self.lead_to_with("", endpoints);
    }

    /// The same with annotations.
    fn lead_to_with(&self, annotations: &str, endpoints: &[[IpAddr; 2]]) {
        publish_with(&self.lab, annotations, endpoints);
        let all: Vec<_> = endpoints.iter().flatten().collect();
        for node in self.lab.nodes() {
            node.wait_for_service("lab/web", |said| {
                let is_there =
                    |at: &&IpAddr| said.contains(&SocketAddr::new(**at, TARGET).to_string());
                let others = self.places().into_iter().flat_map(|(_, at)| at);
                let is_gone = |at: IpAddr| all.contains(&&at) || !is_there(&&at);
                let is_published = said.contains(EXTERNAL[0][0]);
                let led = all.iter().all(is_there) && others.into_iter().all(is_gone);
                is_published && led
            })
            .unwrap();
        }
    }

    /// Where endpoints may be.
    pub fn places(&self) -> [(String, [IpAddr; 2]); 4] {
        let pod = |n: usize| (format!("pod of n{}", n + 1), self.servers[n].addresses());
        let node = |n: usize| {
            let addresses = self.lab.node(n + 1).addresses();
            (format!("node n{}", n + 1), addresses.try_into().unwrap())
        };
        [pod(0), pod(1), node(0), node(1)]
    }

    pub fn fail(&self, what: &str) -> ! {
        let logs = self.lab.nodes().iter().map(Node::log).collect::<Vec<_>>();
        let drops = self.lab.nodes().iter().map(|node| node.ctl(&["drops"]));
        let drops: Vec<_> = drops
            .map(|out| String::from_utf8_lossy(&out.unwrap().stdout).into_owned())
            .collect();
        panic!("{what}\n{}\n{}", drops.join("\n"), logs.join("\n---\n"))
    }
}

/// Has what is outside send each of the Service's addresses to its node.
fn route(lab: &Lab) {
    for family in EXTERNAL {
        for (node, to) in lab.nodes().iter().zip(family) {
            lab.lead_from_outside(to.parse().unwrap(), node).unwrap();
        }
    }
}

fn publish(lab: &Lab, endpoints: &[[IpAddr; 2]]) {
    publish_with(lab, "", endpoints);
}

/// Writes the file of Services of all nodes, at one blow.
fn publish_with(lab: &Lab, annotations: &str, endpoints: &[[IpAddr; 2]]) {
    let external: Vec<_> = EXTERNAL
        .iter()
        .flatten()
        .map(|at| format!("'{at}'"))
        .collect();
    let mut text = format!(
        "kind: Service
metadata: {{namespace: lab, name: web, annotations: {{{annotations}}}}}
spec:
  type: ClusterIP
  clusterIP: 10.96.0.10
  clusterIPs: ['10.96.0.10', 'fd00:10:96::10']
  externalIPs: [{}]
  ports:
  - {{name: tcp, protocol: TCP, port: {PORT}}}
  - {{name: udp, protocol: UDP, port: {PORT}}}
",
        external.join(", ")
    );
    for (family, name) in ["IPv4", "IPv6"].iter().enumerate() {
        let one = |at: &[IpAddr; 2]| {
            format!(
                "- {{addresses: ['{}'], conditions: {{ready: true}}}}\n",
                at[family]
            )
        };
        let endpoints = match endpoints {
            [] => "endpoints: []\n".to_owned(),
            some => format!("endpoints:\n{}", some.iter().map(one).collect::<String>()),
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
    for node in lab.nodes() {
        node.write_services(&text).unwrap();
    }
}

/// Says whom it hears, and how much, at its own address; and in datagrams where that is.
pub struct Server {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    fn start(place: &Place, address: IpAddr) -> Self {
        Self::that_answers(true, place, address)
    }

    /// One that may read datagrams and say nothing.
    pub fn that_answers(answers: bool, place: &Place, address: IpAddr) -> Self {
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
                if readable(&socket, soon()).unwrap() {
                    let Ok((len, from)) = socket.recv_from(&mut heard) else {
                        continue;
                    };
                    if !answers {
                        continue;
                    }
                    // As long as the question.
                    let mut said = format!("{} {len} {address} ", from.ip()).into_bytes();
                    said.resize(said.len().max(len), b'x');
                    let _ = socket.send_to(&said, from);
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
        let mut said = format!("{} {} ", from.ip(), heard.len()).into_bytes();
        said.resize(said.len() + heard.len(), b'x');
        let _ = stream.write_all(&said);
    }
}

/// Whom a server has heard; it must have heard all, and be heard as long.
pub fn heard(said: &[u8], sent: usize) -> io::Result<IpAddr> {
    let text = String::from_utf8_lossy(said);
    let mut words = text.split(' ');
    let from = words.next().and_then(|from| from.parse().ok());
    let len = words.next().and_then(|len| len.parse::<usize>().ok());
    match (from, len) {
        (Some(from), Some(len)) if sent == len && said.len() >= sent => Ok(from),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// A connection on which all that waits for something ends.
pub fn connect(place: &Place, to: SocketAddr) -> TcpStream {
    let stream = place.run(|| Ok(TcpStream::connect_timeout(&to, PATIENCE)?));
    let stream = stream.unwrap_or_else(|error| panic!("{to}: {error:#}"));
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Of what a client says first, and says to the end ([`finish`]).
pub const HALF: [u8; 500] = [b'x'; 500];

/// Says the other half on a connection, and is answered.
pub fn finish(stream: &mut TcpStream) -> io::Result<()> {
    let mut said = Vec::new();
    stream.write_all(&HALF)?;
    stream.shutdown(Shutdown::Write)?;
    stream.read_to_end(&mut said)?;
    heard(&said, 2 * HALF.len()).map(drop)
}

/// Sends so much by a connection; whom the server takes for the client.
pub fn by_tcp(place: &Place, to: SocketAddr, len: usize) -> io::Result<IpAddr> {
    let mut stream = place
        .run(|| Ok(TcpStream::connect_timeout(&to, PATIENCE)))
        .unwrap()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&vec![b'x'; len])?;
    stream.shutdown(Shutdown::Write)?;
    let mut said = Vec::new();
    stream.read_to_end(&mut said)?;
    heard(&said, len)
}

/// The same by a datagram, whose answer must come from whom it was sent to.
fn by_udp(place: &Place, to: SocketAddr, len: usize) -> io::Result<IpAddr> {
    let socket = place
        .run(|| Ok(UdpSocket::bind(SocketAddr::new(any(to.ip()), 0))?))
        .unwrap();
    socket.connect(to)?;
    let mut last = ErrorKind::TimedOut.into();
    // The first may find the way too narrow, which its sender learns then.
    for _ in 0..4 {
        if let Err(error) = socket.send(&vec![b'x'; len]) {
            last = error;
            continue;
        }
        if readable(&socket, Instant::now() + Duration::from_secs(1)).map_err(io::Error::other)? {
            let mut said = vec![0; 65_536];
            match socket.recv(&mut said) {
                Ok(got) => return heard(&said[..got], len),
                Err(error) => last = error,
            }
        }
    }
    Err(last)
}

#[test]
fn a_client_outside_reaches_every_endpoint_by_every_node() {
    let world = World::new();
    let outside = world.lab.outside().place();
    let own = world.lab.outside_addresses().unwrap();
    for (number, (place, endpoint)) in world.places().into_iter().enumerate() {
        world.lead_to(&[endpoint]);
        for (entry, node) in world.lab.nodes().iter().enumerate() {
            let is_here = number % 2 == entry;
            for family in 0..2 {
                let to = SocketAddr::new(EXTERNAL[family][entry].parse().unwrap(), PORT);
                let what = |how: &str| format!("{how} by {} to {place} as {to}", node.name());
                for (how, asked) in [
                    ("TCP", by_tcp(outside, to, 5)),
                    ("much TCP", by_tcp(outside, to, LARGE)),
                    ("UDP", by_udp(outside, to, 5)),
                    ("UDP in parts", by_udp(outside, to, 3000)),
                ] {
                    let seen = match asked {
                        Ok(seen) => seen,
                        Err(error) => world.fail(&format!("{}: {error}", what(how))),
                    };
                    let expected = match is_here {
                        true => seen == own[family],
                        // The node's, by which the answer comes back: inside of the overlay, or out there.
                        false if number < 2 => sinabro_lab::node::pod_cidrs(entry as u8 + 1)
                            .iter()
                            .any(|range| range.contains(&seen)),
                        false => node.addresses().contains(&seen),
                    };
                    if !expected {
                        world.fail(&format!("{}: seen as {seen}", what(how)));
                    }
                }
            }
        }
    }
    // Nobody is there, and that is said at once.
    world.lead_to(&[]);
    for text in EXTERNAL.as_flattened() {
        let to = SocketAddr::new(text.parse().unwrap(), PORT);
        match by_tcp(outside, to, 5) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            other => world.fail(&format!("{to} without endpoints: {other:?}")),
        }
    }
}

#[test]
fn a_connection_from_outside_outlives_its_nodes_agent() {
    let world = World::new();
    world.lead_to(&world.places().map(|(_, at)| at)[..2]);
    let outside = world.lab.outside().place();
    let open = |text: &str| {
        let to = SocketAddr::new(text.parse().unwrap(), PORT);
        let stream = outside.run(|| Ok(TcpStream::connect_timeout(&to, PATIENCE)?));
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    let mut streams: Vec<_> = (0..32)
        .map(|number| open(EXTERNAL[number % 2][number / 2 % 2]))
        .collect();
    let send = |streams: &mut [TcpStream]| {
        for stream in streams {
            stream.write_all(&[b'x'; 5000]).unwrap();
        }
    };
    send(&mut streams);
    for node in world.lab.nodes() {
        node.kill_agent().unwrap();
    }
    send(&mut streams);
    for node in world.lab.nodes() {
        node.start_agent_with(&SERVICES_FLAGS).unwrap();
        node.wait_ready().unwrap();
    }
    send(&mut streams);
    for (number, stream) in streams.iter_mut().enumerate() {
        stream.shutdown(Shutdown::Write).unwrap();
        let mut said = Vec::new();
        if let Err(error) = stream.read_to_end(&mut said) {
            world.fail(&format!("connection {number}: {error}"));
        }
        assert!(heard(&said, 15_000).is_ok(), "connection {number}");
    }
}

/// Which endpoint answers a datagram from this port.
fn who_answers(place: &Place, port: u16, to: SocketAddr) -> io::Result<IpAddr> {
    let from = SocketAddr::new(any(to.ip()), port);
    let socket = place.run(|| bind::udp(from)).unwrap();
    socket.connect(to)?;
    socket.send(b"hello")?;
    if !readable(&socket, Instant::now() + PATIENCE).map_err(io::Error::other)? {
        return Err(ErrorKind::TimedOut.into());
    }
    let mut said = [0; 1000];
    let got = socket.recv(&mut said)?;
    let said = String::from_utf8_lossy(&said[..got]);
    let who = said.split(' ').nth(2).and_then(|who| who.parse().ok());
    who.ok_or(ErrorKind::InvalidData.into())
}

#[test]
fn by_maglev_a_client_has_the_same_endpoint_by_every_node() {
    let world = World::new();
    let outside = world.lab.outside().place();
    let all = world.places().map(|(_, at)| at);
    world.lead_to_with("sinabro.io/service-balancing: maglev", &all);
    let said = world.lab.node(1).ctl(&["services", "lab/web"]).unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("outside (balancing: maglev)"), "{said}");
    for family in 0..2 {
        let ask = |node: usize, port: u16| {
            let to = SocketAddr::new(EXTERNAL[family][node].parse().unwrap(), PORT);
            match who_answers(outside, port, to) {
                Ok(who) => who,
                Err(error) => world.fail(&format!("{to} from port {port}: {error}")),
            }
        };
        let ports = 20_000..20_040;
        let [one, other] = [0, 1]
            .map(|node| -> Vec<IpAddr> { ports.clone().map(|port| ask(node, port)).collect() });
        assert_eq!(one, other);
        let used: BTreeSet<_> = one.into_iter().collect();
        assert_eq!(used, all.iter().map(|at| at[family]).collect());
    }
}
