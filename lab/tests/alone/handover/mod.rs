//! Services pass from kube-proxy to the agent and back while connections and exchanges of datagrams are going on: none
//! is reset, no answer is lost, no path stands still. With rules as kube-proxy makes them in nftables.

mod beside_proxy;
mod firewall;
mod modes;
mod release;

use anyhow::{Context as _, Result, ensure};
use beside_proxy::{FREE, Idle, direct, drop_invalid, nothing_is_invalid};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod, confinement,
    traffic::{
        PATIENCE, any, bind,
        path::Path,
        readable,
        unbroken::{Pace, Traffic},
    },
    wait::wait_within,
};
use sinabro_netlink::{conntrack::Conntrack, sysctl};
use std::{
    collections::BTreeSet,
    fmt::Write as _,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// What is over is forgotten while the test lasts, by us and by netfilter.
const FLAGS: [&str; 3] = [
    "--services-file=/run/lab/services.yaml",
    "--connection-udp-timeout=5s",
    "--connection-udp-timeout-stream=5s",
];
const ON: &str = "--service-proxy=on";
const OFF: &str = "--service-proxy=off";

/// On no machine.
const VIPS: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
/// Of the Service that leads to both servers.
const BOTH: u16 = 53;
const TARGET: u16 = 5353;
/// Of the Service of connections on which nothing is said for long, and where it leads: to the second server.
const IDLE: (u16, u16) = (900, 9000);
/// The first of those that lead to one each, and where.
const FIRST: (u16, u16) = (1000, 8000);

const BEFORE: Duration = Duration::from_secs(5);
/// Packets by the fast path while traffic goes on it for [`PHASE`].
const MANY: u64 = 1000;
const PHASE: Duration = Duration::from_secs(3);
const PACE: Pace = Pace {
    pause: Duration::from_millis(10),
    clients: 1,
};

/// Two nodes, a client on the first, a server on each.
struct World {
    lab: Lab,
    client: Pod,
    servers: [Pod; 2],
    _echoes: Vec<Echo>,
}

fn vip(family: usize) -> IpAddr {
    VIPS[family].parse().unwrap()
}

impl World {
    fn new() -> Self {
        Self::of(Binaries::find().unwrap(), OFF)
    }

    /// With these programs, and this setting at first.
    fn of(binaries: Binaries, setting: &str) -> Self {
        let lab = Lab::new(binaries, 2, Lifetime::Process).unwrap();
        for node in lab.nodes() {
            let prepared = node.ctl(&["prepare"]).unwrap();
            assert!(prepared.status.success(), "{prepared:?}");
            let forget = || -> Result<()> {
                for name in [
                    "nf_conntrack_udp_timeout",
                    "nf_conntrack_udp_timeout_stream",
                ] {
                    sysctl::write(&["net", "netfilter", name], "4")?;
                }
                Ok(())
            };
            node.place().run(forget).unwrap();
            node.write_services("{kind: List, items: []}\n").unwrap();
            start_agent(node, setting);
        }
        for node in lab.nodes() {
            node.wait_ready().unwrap();
        }
        let client = lab.node(1).add_pod("client").unwrap();
        let servers = [1, 2].map(|node| lab.node(node).add_pod(&format!("server{node}")).unwrap());
        let echoes = servers.iter().flat_map(|pod| {
            pod.addresses()
                .map(|address| Echo::start(pod.place(), SocketAddr::new(address, TARGET)))
        });
        let world = Self {
            _echoes: echoes.collect(),
            lab,
            client,
            servers,
        };
        for node in world.lab.nodes() {
            node.write_services(&world.services()).unwrap();
        }
        world
    }

    fn node(&self) -> &Node {
        self.lab.node(1)
    }

    /// Who sends: a pod's packets, and the node's sockets.
    fn senders(&self) -> [(&'static str, &Place); 2] {
        [("pod", self.client.place()), ("node", self.node().place())]
    }

    /// Packets between nodes take the fast path.
    fn is_direct(&self) {
        for node in self.lab.nodes() {
            node.wait_for_direct_overlay().unwrap();
        }
    }

    /// One Service's port for each sender, server and family; the meter has the next one.
    fn paths(&self) -> Vec<Path> {
        let mut paths = Vec::new();
        for (sender, from) in self.senders() {
            for (way, server) in ["same node", "across nodes"].iter().zip(&self.servers) {
                for (family, address) in server.addresses().into_iter().enumerate() {
                    let (port, target) = ports(paths.len());
                    let name = format!("{sender}, {way}, {}", VIPS[family]);
                    let path = Path::new(&name, from, server.place(), address);
                    paths.push(path.through(SocketAddr::new(vip(family), port), target));
                }
            }
        }
        paths
    }

    /// Every frontend's port with its endpoints, of each family.
    fn leads(&self) -> Vec<(SocketAddr, Vec<SocketAddr>)> {
        let mut leads = Vec::new();
        for family in 0..2 {
            let both = self.servers.each_ref().map(|pod| pod.addresses()[family]);
            let both = both.map(|address| SocketAddr::new(address, TARGET));
            leads.push((SocketAddr::new(vip(family), BOTH), both.to_vec()));
            let idle = SocketAddr::new(both[1].ip(), IDLE.1);
            leads.push((SocketAddr::new(vip(family), IDLE.0), vec![idle]));
        }
        for (number, path) in self.paths().iter().enumerate() {
            let (port, target) = ports(number);
            let family = usize::from(path.address.is_ipv6());
            for next in 0..2 {
                let frontend = SocketAddr::new(vip(family), port + next);
                leads.push((frontend, vec![SocketAddr::new(path.address, target + next)]));
            }
        }
        leads
    }

    /// As the API has it: a Service for each family, a slice for each of its ports.
    fn services(&self) -> String {
        let (mut text, mut ports) = (String::new(), [String::new(), String::new()]);
        for (frontend, endpoints) in self.leads() {
            let (port, target) = (frontend.port(), endpoints[0].port());
            let (family, name) = match frontend {
                SocketAddr::V4(_) => (0, "IPv4"),
                SocketAddr::V6(_) => (1, "IPv6"),
            };
            let endpoints = endpoints.iter().map(|endpoint| {
                let ip = endpoint.ip();
                format!("{{addresses: ['{ip}'], conditions: {{ready: true}}}}")
            });
            let endpoints = endpoints.collect::<Vec<_>>().join(", ");
            let both = |at: u16| {
                let of = |name: &str, proto: &str| {
                    format!("{{name: {name}{port}, protocol: {proto}, port: {at}}}")
                };
                format!("{}, {}", of("t", "TCP"), of("u", "UDP"))
            };
            write!(ports[family], "{}, ", both(port)).unwrap();
            write!(
                text,
                "---
kind: EndpointSlice
metadata: {{namespace: lab, name: {name}-{port}, labels: {{kubernetes.io/service-name: web-{name}}}}}
addressType: {name}
ports: [{}]
endpoints: [{endpoints}]
",
                both(target)
            )
            .unwrap();
        }
        for (family, (name, ports)) in ["IPv4", "IPv6"].iter().zip(ports).enumerate() {
            let ip = vip(family);
            write!(
                text,
                "---
kind: Service
metadata: {{namespace: lab, name: web-{name}}}
spec: {{type: ClusterIP, clusterIP: '{ip}', clusterIPs: ['{ip}'], ports: [{ports}]}}
"
            )
            .unwrap();
        }
        text
    }

    /// What kube-proxy writes.
    fn add_rules(&self) {
        for node in self.lab.nodes() {
            let mut rules = String::new();
            for (family, pods) in [("ip", "10.244.0.0/16"), ("ip6", "fd00:10:244::/48")] {
                rules += &table(family, pods, &self.leads());
            }
            node.command(&["nft", &rules]).unwrap();
        }
    }

    fn remove_rules(&self) {
        for node in self.lab.nodes() {
            node.command(&[
                "nft",
                "delete table ip kube-proxy; delete table ip6 kube-proxy",
            ])
            .unwrap();
        }
    }

    /// As users change the setting.
    fn restart(&self, setting: &str) {
        for node in self.lab.nodes() {
            node.stop_agent().unwrap();
            start_agent(node, setting);
            node.wait_ready().unwrap();
        }
    }

    /// Agents are killed, and come back with this setting.
    fn kill(&self, setting: &str) {
        for node in self.lab.nodes() {
            node.kill_agent().unwrap();
            start_agent(node, setting);
            node.wait_ready().unwrap();
        }
    }

    /// Connections that sockets have with a server, under a Service's address.
    fn held(&self) -> Vec<(TcpStream, SocketAddr)> {
        let mut held = Vec::new();
        for (_, place) in self.senders() {
            for family in 0..2 {
                let to = SocketAddr::new(vip(family), BOTH);
                let stream = place.run(|| Ok(TcpStream::connect_timeout(&to, PATIENCE)?));
                held.push((stream.unwrap(), to));
            }
        }
        held
    }

    /// An error is told with what was dropped meanwhile.
    fn told(&self, outcome: Result<String>) -> String {
        outcome.unwrap_or_else(|error| {
            let nodes = self.lab.nodes().iter();
            let drops = nodes.map(|node| {
                let said = node.ctl(&["drops"]).map(|said| said.stdout);
                String::from_utf8_lossy(&said.unwrap_or_default()).into_owned()
            });
            let drops: Vec<_> = drops.collect();
            panic!("{error:#}\n{}", drops.join("\n"))
        })
    }

    /// Waits until every agent says a line that begins so.
    fn says(&self, beginning: &str) -> Vec<String> {
        let nodes = self.lab.nodes().iter();
        nodes.map(|node| says(node, beginning)).collect()
    }

    /// Whose a connection is that begins now: whether netfilter translates it.
    fn is_by_rules(&self, place: &Place, family: usize) -> bool {
        let to = SocketAddr::new(vip(family), BOTH);
        let local = place
            .run(|| {
                let socket = UdpSocket::bind((any(to.ip()), 0))?;
                exchange(&socket, to, 0)?;
                Ok(socket.local_addr()?)
            })
            .unwrap();
        let flows = self
            .node()
            .place()
            .run(|| Ok(Conntrack::new()?.translated()?));
        flows
            .unwrap()
            .iter()
            .any(|flow| flow.client.port() == local.port() && flow.to == to)
    }
}

/// Of a sender's service: frontend's and server's.
fn ports(number: usize) -> (u16, u16) {
    let offset = 10 * number as u16;
    (FIRST.0 + offset, FIRST.1 + offset)
}

fn table(family: &str, pods: &str, leads: &[(SocketAddr, Vec<SocketAddr>)]) -> String {
    let (mut chains, mut elements) = (String::new(), Vec::new());
    for (number, (frontend, endpoints)) in leads.iter().enumerate() {
        if frontend.is_ipv4() != (family == "ip") {
            continue;
        }
        let mut verdicts = Vec::new();
        for (at, endpoint) in endpoints.iter().enumerate() {
            let name = format!("endpoint-{number}-{at}");
            writeln!(
                chains,
                "chain {name} {{\n meta l4proto {{ tcp, udp }} dnat to {endpoint}\n }}"
            )
            .unwrap();
            verdicts.push(format!("{at} : goto {name}"));
        }
        writeln!(
            chains,
            "chain service-{number} {{\n numgen random mod {} vmap {{ {} }}\n }}",
            endpoints.len(),
            verdicts.join(", ")
        )
        .unwrap();
        for proto in ["tcp", "udp"] {
            elements.push(format!(
                "{} . {proto} . {} : goto service-{number}",
                frontend.ip(),
                frontend.port()
            ));
        }
    }
    let address = if family == "ip" {
        "ipv4_addr"
    } else {
        "ipv6_addr"
    };
    let elements = elements.join(", ");
    format!(
        "table {family} kube-proxy {{
            {chains}
            map service-ips {{
                type {address} . inet_proto . inet_service : verdict
                elements = {{ {elements} }}
            }}
            chain services {{
                {family} daddr . meta l4proto . th dport vmap @service-ips
            }}
            chain nat-prerouting {{
                type nat hook prerouting priority dstnat
                jump services
            }}
            chain nat-output {{
                type nat hook output priority -100
                {family} saddr != {pods} {family} daddr {vip} meta mark set mark or 0x4000
                jump services
            }}
            chain nat-postrouting {{
                type nat hook postrouting priority srcnat
                mark 0x4000 masquerade fully-random
            }}
        }}
        ",
        vip = VIPS[usize::from(family == "ip6")],
    )
}

fn start_agent(node: &Node, setting: &str) {
    let flags: Vec<&str> = setting.split(' ').chain(FLAGS).collect();
    node.start_confined_agent(&flags, &confinement::AGENT)
        .unwrap();
}

fn says(node: &Node, beginning: &str) -> String {
    let mut last = String::new();
    let said = wait_within(Duration::from_secs(100), "the agent to say it", || {
        last = node.status()?.modes["serviceProxy"].clone();
        let line = format!("{last}\n");
        Ok(line.starts_with(beginning).then(|| last.clone()))
    });
    said.unwrap_or_else(|error| {
        panic!(
            "{}: `{last}`, not `{beginning}`: {error:#}\n{}",
            node.name(),
            node.log()
        )
    })
}

/// Answers a datagram by who it is, which port it was asked from, and what it was asked.
struct Echo {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// Nobody accepts what comes.
    _listener: TcpListener,
}

impl Echo {
    fn start(place: &Place, at: SocketAddr) -> Self {
        let bind = || Ok((bind::udp(at)?, bind::tcp(at)?));
        let (socket, listener) = place.run(bind).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut heard = [0; 64];
            while !stopped.load(Ordering::Relaxed) {
                if readable(&socket, Instant::now() + Duration::from_millis(200)).unwrap() {
                    let (len, from) = socket.recv_from(&mut heard).unwrap();
                    let number = String::from_utf8_lossy(&heard[..len]).into_owned();
                    let said = format!("{} {} {number}", at.ip(), from.port());
                    let _ = socket.send_to(said.as_bytes(), from);
                }
            }
        });
        Self {
            stop,
            thread: Some(thread),
            _listener: listener,
        }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One question and its answer: who answered, and from which port it was asked.
fn exchange(socket: &UdpSocket, to: SocketAddr, number: u64) -> Result<(IpAddr, u16)> {
    socket.send_to(number.to_string().as_bytes(), to)?;
    let mut heard = [0; 128];
    let arrived = readable(socket, Instant::now() + Duration::from_secs(1))?;
    ensure!(arrived, "question {number} to {to} got no answer");
    let (len, from) = socket.recv_from(&mut heard)?;
    ensure!(from == to, "{to} was asked, {from} answered");
    let text = String::from_utf8_lossy(&heard[..len]).into_owned();
    let mut words = text.split(' ');
    let (server, port, of) = (words.next(), words.next(), words.next());
    ensure!(
        of == Some(&number.to_string()),
        "question {number} was answered by `{text}`"
    );
    Ok((server.unwrap().parse()?, port.unwrap().parse()?))
}

/// Who answered, and how long one took at most.
type Answered = (BTreeSet<IpAddr>, Duration);

/// Sockets that are not connected ask on and on: each must be answered every time, by the same server, which sees the
/// same port.
struct Exchanges {
    stop: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<Answered>>>,
}

impl Exchanges {
    fn start(world: &World) -> Self {
        let (stop, asked) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let mut threads = Vec::new();
        for (sender, place) in world.senders() {
            for number in 0..16 {
                let to = SocketAddr::new(vip(number % 2), BOTH);
                let bind = || Ok(UdpSocket::bind((any(to.ip()), 0))?);
                let socket = place.run(bind).unwrap();
                let (stop, asked) = (stop.clone(), asked.clone());
                let run = move || ask_on(sender, &socket, to, &stop, &asked);
                threads.push(thread::spawn(run));
            }
        }
        Self {
            stop,
            asked,
            threads,
        }
    }

    /// All ends well; how many questions there were, and how long one took at most.
    fn finish(self) -> Result<String> {
        self.stop.store(true, Ordering::Relaxed);
        let (mut met, mut longest) = (BTreeSet::new(), Duration::ZERO);
        for thread in self.threads {
            let (servers, took) = thread.join().unwrap()?;
            met.extend(servers);
            longest = longest.max(took);
        }
        ensure!(met.len() == 4, "only {met:?} were asked");
        Ok(format!(
            "{} questions answered, the slowest in {longest:?}",
            self.asked.load(Ordering::Relaxed)
        ))
    }
}

fn ask_on(
    sender: &'static str,
    socket: &UdpSocket,
    to: SocketAddr,
    stop: &AtomicBool,
    asked: &AtomicU64,
) -> Result<Answered> {
    let (mut first, mut longest) = (None, Duration::ZERO);
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let began = Instant::now();
        let answered = exchange(socket, to, number).context(sender)?;
        longest = longest.max(began.elapsed());
        asked.fetch_add(1, Ordering::Relaxed);
        let first = *first.get_or_insert(answered);
        ensure!(
            first == answered,
            "{sender}: {answered:?} answered question {number}, {first:?} those before"
        );
        thread::sleep(Duration::from_millis(20));
    }
    let met = first.map(|(server, _)| server);
    Ok((met.into_iter().collect(), longest))
}

fn must_flow(traffic: &Traffic, when: &str) {
    traffic.watch(PHASE);
    traffic.must_flow(when).unwrap();
}

#[test]
fn services_pass_from_kube_proxy_and_back_unnoticed() {
    let world = World::new();
    world.add_rules();
    drop_invalid(&world);
    world.is_direct();
    let (traffic, exchanges) = start(&world);
    let mut idle = Idle::all(&world, 2);
    let [closing, closing_late] = [0, 1].map(|number| Idle::straight(&world, FREE + number));
    traffic.event("Services were turned on").unwrap();
    world.restart(ON);
    println!("{}", says(world.node(), "on, kube-proxy has"));
    world.is_direct();
    must_flow_directly(&world, &traffic, "with Services on");
    are_whole(&mut idle, closing, "with Services on");
    for (sender, place) in world.senders() {
        for family in 0..2 {
            assert!(!world.is_by_rules(place, family), "{sender}, new");
        }
    }
    // Killed in the middle of it, and brought back.
    traffic.event("the agents were killed").unwrap();
    world.kill(ON);
    says(world.node(), "on, kube-proxy has");
    must_flow(&traffic, "with another agent");
    are_whole(&mut idle, closing_late, "with another agent");
    drop(idle);
    println!("{}", world.told(exchanges.finish()));
    println!("{}", traffic.finish().unwrap());
    nothing_is_invalid(&world);
    println!("{:?}", world.says("on, nothing needs kube-proxy's rules"));

    world.remove_rules();
    world.says("on\n");
    let (traffic, exchanges) = start(&world);
    let held = world.held();
    let (mut idle, closing) = (Idle::all(&world, 2), Idle::straight(&world, FREE));
    traffic.event("kube-proxy's rules came back").unwrap();
    world.add_rules();
    drop_invalid(&world);
    traffic.event("Services were turned off").unwrap();
    world.restart(OFF);
    println!("{}", says(world.node(), "off, "));
    world.is_direct();
    must_flow_directly(&world, &traffic, "with Services off");
    are_whole(&mut idle, closing, "with Services off");
    drop(idle);
    for (sender, place) in world.senders() {
        for family in 0..2 {
            assert!(world.is_by_rules(place, family), "{sender}, new");
        }
    }
    println!("{}", world.told(exchanges.finish()));
    println!("{}", traffic.finish().unwrap());
    nothing_is_invalid(&world);
    println!("{:?}", world.says("off\n"));
    // Nothing of it is left but names, which stay over another agent.
    world.restart(OFF);
    world.says("off\n");
    for (stream, to) in held {
        assert_eq!(stream.peer_addr().unwrap(), to);
    }
}

/// By the fast path.
fn must_flow_directly(world: &World, traffic: &Traffic, when: &str) {
    let before = direct(world);
    must_flow(traffic, when);
    assert!(direct(world) - before > MANY, "by the stack {when}");
}

/// Connections on which nothing was said since something changed: some are used, and some end by a FIN.
fn are_whole(idle: &mut [Idle], closing: Vec<Idle>, when: &str) {
    for closing in closing {
        closing.ends(when);
    }
    for idle in idle {
        idle.speaks(when);
    }
}

fn start(world: &World) -> (Traffic, Exchanges) {
    let exchanges = Exchanges::start(world);
    let traffic = Traffic::start(&world.paths(), PACE).unwrap();
    traffic.watch(BEFORE);
    (traffic, exchanges)
}
