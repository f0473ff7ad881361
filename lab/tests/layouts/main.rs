//! An agent with a table of connections of another size takes the place of one, and gives way to it again, under
//! load: both tables are there beside each other, and programs are swapped. Connections keep their ports, no path
//! stands still, and nothing is left. A table of another layout is carried by the same steps
//! (`datapath/transition/tests` in the agent).
#![allow(clippy::unwrap_used)]

mod stack;

use sinabro_common::{
    api::{MetricsReport, Request, Response},
    fail_point, names,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    checks::Scene,
    traffic::{
        PATIENCE, accept, any, connect,
        path::Path,
        readable,
        unbroken::{Pace, Traffic},
    },
};
use stack::Kept;
use std::{
    env, fs,
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// More than any link takes at once.
const IN_PARTS: usize = 5000;
/// Undisturbed, to be compared with.
const BEFORE: Duration = Duration::from_secs(8);

/// Two meters at once would be in each other's way.
static ALONE: Mutex<()> = Mutex::new(());

fn from(variable: &str) -> Binaries {
    let dir = env::var_os(variable);
    Binaries::at(dir.unwrap_or_else(|| {
        panic!("{variable} is a directory of programs: `cargo xtask test` builds them and sets it")
    }))
    .unwrap()
}

/// Connections that there is room for, as the agent is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Small,
    Large,
}

impl Size {
    fn connections(self) -> u64 {
        match self {
            Self::Small => 100_000,
            Self::Large => 150_000,
        }
    }

    fn flag(self) -> String {
        format!("--connections={}", self.connections())
    }
}

/// IPv4's, IPv6's.
fn outside(scene: &Scene) -> [IpAddr; 2] {
    scene.lab().outside_addresses().unwrap()
}

/// Of both families.
struct HeldPair([Held; 2]);

impl HeldPair {
    fn open(scene: &Scene) -> Self {
        Self(outside(scene).map(|address| Held::open(scene, address)))
    }

    fn goes_on(&mut self, when: &str) {
        for held in &mut self.0 {
            held.goes_on(when);
        }
    }
}

/// A connection and a flow of datagrams from a pod to the outside, and as whom the outside knows them.
struct Held {
    client: TcpStream,
    server: TcpStream,
    asks: UdpSocket,
    answers: UdpSocket,
    known_as: SocketAddr,
    said: u64,
}

impl Held {
    fn open(scene: &Scene, address: IpAddr) -> Self {
        let (pod, outside) = (scene.pod(1, 1).place(), scene.lab().outside().place());
        let bound = outside.run(|| {
            Ok((
                TcpListener::bind((address, 0))?,
                UdpSocket::bind((address, 0))?,
            ))
        });
        let (listener, answers) = bound.unwrap();
        let (tcp, udp) = (
            listener.local_addr().unwrap(),
            answers.local_addr().unwrap(),
        );
        let opened = pod.run(|| {
            let asks = UdpSocket::bind((any(address), 0))?;
            asks.connect(udp)?;
            Ok((connect(tcp)?, asks))
        });
        let (client, asks) = opened.unwrap();
        let (server, _) = accept(&listener, Instant::now() + PATIENCE).unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        let mut held = Self {
            client,
            server,
            known_as: SocketAddr::new(address, 0),
            asks,
            answers,
            said: 0,
        };
        held.known_as = held.datagram();
        let node = scene.node(1).addresses();
        assert!(node.contains(&held.known_as.ip()), "{}", held.known_as);
        held
    }

    /// Both ways; and who the outside thinks that it was.
    fn datagram(&mut self) -> SocketAddr {
        self.said += 1;
        let said = self.said.to_be_bytes();
        self.asks.send(&said).unwrap();
        let deadline = Instant::now() + PATIENCE;
        assert!(readable(&self.answers, deadline).unwrap(), "no datagram");
        let mut heard = [0; 8];
        let (_, from) = self.answers.recv_from(&mut heard).unwrap();
        assert_eq!(heard, said);
        self.answers.send_to(&said, from).unwrap();
        assert!(readable(&self.asks, deadline).unwrap(), "no answer");
        self.asks.recv(&mut heard).unwrap();
        assert_eq!(heard, said);
        from
    }

    /// That what was there before goes on, in both directions, as the same.
    fn goes_on(&mut self, when: &str) {
        assert_eq!(self.datagram(), self.known_as, "{when}");
        let when = format!("{when}, as {}", self.known_as);
        let said = self.said.to_be_bytes();
        for (from, to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            say(from, to, said, &when);
        }
    }
}

/// What one end of a connection says is heard at the other.
fn say(mut from: &TcpStream, mut to: &TcpStream, said: [u8; 8], when: &str) {
    let mut heard = [0; 8];
    from.write_all(&said)
        .and_then(|()| to.read_exact(&mut heard))
        .unwrap_or_else(|error| panic!("{when}: {error}"));
    assert_eq!(heard, said, "{when}");
}

fn pins(node: &Node) -> PathBuf {
    node.namespace().path(names::BPF_DIR)
}

fn metrics(node: &Node) -> MetricsReport {
    match node.ask(Request::Metrics).unwrap() {
        Response::Metrics(metrics) => *metrics,
        other => panic!("no metrics: {other:?}"),
    }
}

/// Exactly one table is there, of the size that the agent was told.
fn only_of(node: &Node, size: Size) {
    let pins = pins(node);
    let list = |dir: &PathBuf| -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
        entries.map(|entry| name(entry).unwrap()).collect()
    };
    let generations = ["v2", "v3"];
    let of_generations = generations.iter().flat_map(|name| list(&pins.join(name)));
    let all: Vec<_> = list(&pins).into_iter().chain(of_generations).collect();
    let next = all.iter().find(|name| name.ends_with("_next"));
    assert_eq!(next, None, "{}", node.log());
    let mut of_generations: Vec<_> = all.iter().filter(|name| name.starts_with('v')).collect();
    of_generations.sort();
    assert_eq!(of_generations, generations);
    assert!(!pins.join("NAT").exists());
    assert_eq!(metrics(node).nat_capacity, size.connections());
}

/// Starts an agent of a size, with more flags.
fn start(node: &Node, size: Size, flags: &[&str]) {
    node.start_agent_with(&[&[size.flag().as_str()], flags].concat())
        .unwrap();
    node.wait_ready().unwrap();
}

fn scene(binaries: &Binaries, size: Size, flags: &[&str]) -> Scene {
    let lab = Lab::new(binaries.clone(), 2, Lifetime::Process).unwrap();
    lab.nodes().iter().for_each(|node| start(node, size, flags));
    Scene::new(lab).unwrap()
}

/// Programs by links where the kernel has them (Linux 6.6), swapped as soon as they are loaded.
#[test]
fn flows_outlive_another_table_and_the_way_back_under_load() {
    there_and_back("auto");
}

/// Programs by filters, each of which is replaced when its interface comes by.
#[test]
fn flows_outlive_another_table_by_filters_under_load() {
    there_and_back("clsact");
}

/// A NodePort, and the one above it.
const NODE_PORT: u16 = 30_080;
const TARGET: u16 = 8080;

/// Has the node's stack lead both to a pod, as kube-proxy's rules do.
fn lead(node: &Node, own: IpAddr, pod: IpAddr) {
    let family = if own.is_ipv4() { "ip" } else { "ip6" };
    let rule = |port| {
        let (from, to) = (NODE_PORT + port, SocketAddr::new(pod, TARGET + port));
        format!("{family} daddr {own} meta l4proto {{ tcp, udp }} th dport {from} dnat to {to}")
    };
    let table = format!(
        "table {family} proxy {{
            chain pre {{ type nat hook prerouting priority dstnat;
                {}
                {}
            }}
        }}",
        rule(0),
        rule(1)
    );
    node.place().command(&["nft", &table]).unwrap();
}

fn there_and_back(mode: &str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let attach = format!("--attach={mode}");
    let flags = [attach.as_str()];
    let scene = scene(&Binaries::find().unwrap(), Size::Small, &flags);
    let node = scene.node(1);
    let mut held = HeldPair::open(&scene);
    let pace = Pace {
        pause: Duration::from_millis(10),
        clients: 1,
    };
    let mut paths = scene.paths().unwrap();
    let (pod, far) = (scene.pod(1, 2).place(), scene.lab().outside().place());
    paths.push(Path::new("outside, IPv6", pod, far, outside(&scene)[1]));
    let own = node.addresses();
    for (family, name) in ["IPv4", "IPv6"].into_iter().enumerate() {
        for (from, who) in [(pod, "pod"), (node.place(), "host")] {
            let path = Path::new(
                &format!("{who}, {name}"),
                from,
                far,
                outside(&scene)[family],
            );
            paths.push(path.with_echoes(IN_PARTS));
        }
        let to_node = format!("outside to the node, {name}");
        paths.push(Path::new(&to_node, far, node.place(), own[family]));
        let served = scene.pod(1, 3);
        let address = served.addresses()[family];
        lead(node, own[family], address);
        let by_port = Path::new(&format!("node port, {name}"), far, served.place(), address);
        let target = SocketAddr::new(own[family], NODE_PORT);
        paths.push(by_port.through(target, TARGET));
    }
    let traffic = Traffic::start(&paths, pace).unwrap();
    traffic.watch(BEFORE);
    for (step, size, killed) in [
        ("given more room", Size::Large, false),
        ("given less room", Size::Small, false),
        ("given more room again", Size::Large, true),
        ("started again", Size::Large, false),
        ("given less room after a kill", Size::Small, true),
    ] {
        traffic.event(&format!("n1 was {step}")).unwrap();
        match killed {
            true => node.kill_agent().unwrap(),
            false => node.stop_agent().unwrap(),
        }
        held.goes_on(&format!("without an agent, before it was {step}"));
        start(node, size, &flags);
        held.goes_on(step);
        // Begun by its programs.
        HeldPair::open(&scene).goes_on(step);
        only_of(node, size);
        traffic.must_flow(step).unwrap();
    }
    println!(
        "{}",
        traffic
            .finish()
            .unwrap_or_else(|error| panic!("{error:?}\n{}", node.log()))
    );
    let log = node.log();
    let broken = log.lines().filter(|line| line.contains("ERROR"));
    assert_eq!(broken.collect::<Vec<_>>(), Vec::<&str>::new());
}

/// Killed between any two steps: the next one goes on, of either size.
#[test]
fn killed_between_two_steps_flows_go_on_with_either_size() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    use Size::{Large, Small};
    let scene = scene(&Binaries::find().unwrap(), Small, &[]);
    let node = scene.node(1);
    let mut held = HeldPair::open(&scene);
    // Which dies and which follows; what follows runs when the next one comes.
    let rounds = [
        (Large, Small),
        (Large, Large),
        (Small, Large),
        (Small, Small),
    ];
    let service = stack::service(&scene);
    let mut kept = Kept::open(&scene, service);
    for point in fail_point::CARRYING {
        for (dies, follows) in rounds {
            let round = format!("killed at {point} towards {dies:?}, then {follows:?}");
            node.stop_agent().unwrap();
            node.start_agent_failing_at(point, &[&dies.flag()]).unwrap();
            let end = node.agent_end().unwrap();
            assert_eq!(end.signal(), Some(9), "{round}: {end}\n{}", node.log());
            let without = format!("{round}: without an agent");
            held.goes_on(&without);
            kept.goes_on(&without);
            // Begun by whichever programs are there.
            let mut late = Kept::open(&scene, service);
            late.goes_on(&without);
            start(node, follows, &[]);
            held.goes_on(&round);
            kept.goes_on(&round);
            // A table of another size takes the pin of the one before. What programs of pods that are not swapped yet note
            // there after a kill, the next agent does not find.
            if ["pods-swapped", "carried-all"].contains(point) {
                late.goes_on(&round);
            }
            only_of(node, follows);
        }
    }
}

/// Many flows that nobody answers, as many as one pod may have.
#[test]
fn a_large_table_is_carried_whole() {
    const FLOWS: u16 = 10_000;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let scene = scene(&Binaries::find().unwrap(), Size::Small, &[]);
    let node = scene.node(1);
    let mut held = HeldPair::open(&scene);
    let sent = scene.pod(1, 2).place().run(|| {
        for address in outside(&scene) {
            let socket = UdpSocket::bind((any(address), 0))?;
            for port in 20_000..20_000 + FLOWS / 2 {
                // Nobody is there, which the outside says by ICMP.
                let _ = socket.send_to(b"x", (address, port));
            }
        }
        Ok(())
    });
    sent.unwrap();
    for size in [Size::Large, Size::Small] {
        node.stop_agent().unwrap();
        start(node, size, &[]);
        held.goes_on("with a large table");
        only_of(node, size);
        let metrics = metrics(node);
        let log = node.log();
        let mut said = log.lines().filter(|line| line.contains("carried over to"));
        let said = said.rfind(|line| line.contains("CONNECTIONS"));
        let said = said.unwrap();
        println!("{} flows: {said}", metrics.nat_flows);
        assert!(
            said.contains("garbage=0") && said.contains("lost=0"),
            "{said}"
        );
        // Half a minute without an answer ends them.
        if size == Size::Large {
            assert!(metrics.nat_flows >= FLOWS.into(), "{}", metrics.nat_flows);
        }
    }
}
