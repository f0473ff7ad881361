//! Agents and plugins of an earlier state of the project give way to the present ones, to the
//! earlier ones again and to the present ones for good, under load: with the leases, records, maps
//! and programs that each finds, whoever left them.
//!
//! `cargo xtask test` builds the earlier state from git's history and says where it is.

use sinabro_common::api::{EndpointReport, LeaseReport, Owner, Request, Response, TcpAcceleration};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Pod,
    checks::{Scene, acceleration::round_trips},
    traffic::{
        PATIENCE, accept, connect,
        packet::interface,
        path::Path,
        stream::Stream,
        tcp, udp,
        unbroken::{Pace, Traffic},
    },
    wait::eventually,
};
use std::{
    collections::BTreeMap,
    env,
    io::{Read as _, Write as _},
    net::{IpAddr, TcpListener, TcpStream},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Between blocks of a stream.
const PAUSE: Duration = Duration::from_millis(10);
/// Undisturbed, to be compared with.
const BEFORE: Duration = Duration::from_secs(8);
const ACCELERATED: &str = "--tcp-acceleration=opt-in";

pub(crate) fn earlier() -> Binaries {
    let dir = env::var_os("SINABRO_EARLIER_DIR");
    Binaries::at(dir.expect(
        "SINABRO_EARLIER_DIR is the directory of an earlier state's programs: `cargo xtask test` \
         builds them and sets it, if there is git's history",
    ))
    .unwrap()
}

const EXCHANGES: u64 = 500;

/// Within a node, accelerated and not, across nodes, and out through the masquerade.
fn start(scene: &Scene, accelerated: &[Pod; 2]) -> Traffic {
    let mut paths = scene.paths().unwrap();
    let [client, server] = accelerated;
    for (family, address) in ["IPv4", "IPv6"].iter().zip(server.addresses()) {
        let name = format!("accelerated, {family}");
        paths.push(Path::new(&name, client.place(), server.place(), address));
    }
    let pace = Pace {
        pause: PAUSE,
        clients: 1,
    };
    let traffic = Traffic::start(&paths, pace).unwrap();
    traffic.watch(BEFORE);
    traffic
}

/// The agent, whatever its state, is asked by the present `sinabroctl`'s messages.
fn leases(node: &Node) -> BTreeMap<IpAddr, (Owner, bool)> {
    let Response::Ipam(report) = node.ask(Request::Ipam).unwrap() else {
        panic!("no report of leases");
    };
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let leases = report.leases.into_iter();
    let kept = |lease: LeaseReport| (lease.address, (lease.owner, lease.active));
    leases.map(kept).collect()
}

/// What must not change of an endpoint.
fn endpoints(node: &Node) -> BTreeMap<String, (String, Vec<IpAddr>, Option<TcpAcceleration>)> {
    let Response::Endpoints(endpoints) = node.ask(Request::Endpoints).unwrap() else {
        panic!("no report of endpoints");
    };
    let kept = |endpoint: EndpointReport| {
        let fixed = (
            endpoint.link,
            endpoint.addresses,
            endpoint.acceleration_wish,
        );
        (endpoint.owner.container_id, fixed)
    };
    endpoints.into_iter().map(kept).collect()
}

/// A connection that is there all the time and says something only when it is asked to.
struct Held {
    pods: [Pod; 2],
    client: TcpStream,
    server: TcpStream,
}

impl Held {
    fn open(pods: [Pod; 2]) -> Self {
        let listener = pods[1]
            .place()
            .run(|| Ok(TcpListener::bind((pods[1].v4(), 0))?));
        let listener = listener.unwrap();
        let target = listener.local_addr().unwrap();
        let client = pods[0].place().run(|| Ok(connect(target)?)).unwrap();
        let (server, _) = accept(&listener, Instant::now() + PATIENCE).unwrap();
        Self {
            pods,
            client,
            server,
        }
    }

    /// Packets on the client's link for some hundred exchanges, each with bytes of its own.
    fn packets(&mut self, node: &Node) -> u64 {
        let sent = || node.endpoint(&self.pods[0]).unwrap().unwrap().tx_packets;
        let before = sent();
        for number in 0..EXCHANGES {
            let (asked, mut heard) = (number.to_le_bytes(), [0; 8]);
            for (from, to) in [(&self.client, &self.server), (&self.server, &self.client)] {
                let (mut from, mut to) = (from, to);
                from.write_all(&asked).unwrap();
                to.read_exact(&mut heard).unwrap();
                assert_eq!(heard, asked);
            }
        }
        sent() - before
    }
}

/// Programs by links where the kernel has them (Linux 6.6), which are swapped in place.
#[test]
fn an_upgrade_and_its_reversal_break_nothing() {
    there_and_back("auto");
}

/// Programs by filters, as on older kernels: a filter is found by its program's name.
#[test]
fn filters_are_exchanged_without_a_gap() {
    there_and_back("clsact");
}

/// Pods of before keep the link that they have; it is as large as that of those that come.
#[test]
fn pods_with_links_of_before_and_of_now_reach_each_other() {
    let lab = Lab::new(earlier(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let old = ["old-a", "old-b"].map(|id| node.add_pod(id).unwrap());
    let carry = |stream: &Stream| stream.carry(1 << 20, 16 << 10).unwrap();
    let between = |from: &Pod, to: &Pod| -> Vec<_> {
        let name = format!("{} to {}", from.id(), to.id());
        let path = |address: &IpAddr| Path::new(&name, from.place(), to.place(), *address);
        to.addresses().iter().map(path).collect()
    };
    let held: Vec<_> = between(&old[0], &old[1])
        .iter()
        .map(|path| Stream::open(path).unwrap())
        .collect();
    held.iter().for_each(carry);

    node.stop_agent().unwrap();
    node.set_binaries(Binaries::find().unwrap());
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let new = ["new-a", "new-b"].map(|id| node.add_pod(id).unwrap());
    held.iter().for_each(carry);
    let mtu = |pod: &Pod| interface(pod.place(), "eth0").unwrap().mtu;
    assert!(old.iter().chain(&new).all(|pod| mtu(pod) == 65_535));
    let pods = [&old[0], &old[1], &new[0], &new[1]];
    for (from, to) in pods.iter().flat_map(|from| pods.map(|to| (*from, to))) {
        if from.id() == to.id() {
            continue;
        }
        for path in between(from, to) {
            let stream = Stream::open(&path).unwrap();
            carry(&stream);
            for said in stream.said().unwrap() {
                // TCP sends no more at once than half of the other end's window.
                assert!(said.mss > 16_000, "{}: {said:?}", path.name);
            }
            udp::echo(from.place(), to.place(), path.address, 8 << 10, false).unwrap();
        }
    }
    for pod in pods {
        let answer = node.check_pod(pod).unwrap();
        assert!(answer.ok(), "{}: {answer:?}", pod.id());
    }
}

/// Two meters at once would be in each other's way.
static ALONE: Mutex<()> = Mutex::new(());

fn there_and_back(mode: &str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let attach = format!("--attach={mode}");
    let flags = [ACCELERATED, attach.as_str()];
    let (before, now) = (earlier(), Binaries::find().unwrap());
    let lab = Lab::new(before.clone(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.start_agent_with(&flags).unwrap();
        node.wait_ready().unwrap();
    }
    let scene = Scene::new(lab).unwrap();
    let node = scene.node(1);
    let wishing = |id: &str| node.add_pod_wishing(id, TcpAcceleration::Enabled).unwrap();
    let accelerated = [wishing("fast-a"), wishing("fast-b")];
    let bypasses = |[client, server]: &[Pod; 2]| {
        let round_trips = round_trips(node, client, server).unwrap();
        round_trips.bypass().unwrap()
    };
    let mut held = Held::open(["held-a", "held-b"].map(wishing));
    assert!(held.packets(node) < EXCHANGES / 10, "{}", node.log());
    let mut came_before = wishing("came-before");
    let traffic = start(&scene, &accelerated);
    traffic.must_flow("before").unwrap();

    let steps = [
        ("upgraded", &now),
        ("taken back", &before),
        ("upgraded again", &now),
    ];
    for (step, binaries) in steps {
        for node in scene.lab().nodes() {
            let (leases_before, endpoints_before) = (leases(node), endpoints(node));
            let event = format!("the agent of {} was {step}", node.name());
            traffic.event(&event).unwrap();
            // As the kubelet ends it: asked first, at once if it does not listen.
            match node.name() {
                "n1" => node.stop_agent().unwrap(),
                _ => node.kill_agent().unwrap(),
            }
            traffic
                .must_flow(&format!("without an agent, {step}"))
                .unwrap();
            // The plugin that comes with the next agent is there before it serves.
            node.set_binaries(binaries.clone());
            node.start_agent_with(&flags).unwrap();
            node.wait_ready().unwrap();
            traffic
                .must_flow(&format!("{step}, {}", node.name()))
                .unwrap();
            assert_eq!(leases(node), leases_before, "{step}: {}", node.log());
            assert_eq!(endpoints(node), endpoints_before, "{step}: {}", node.log());
        }
        // A pod that came with the other agent: it is as it should be, reached, and goes.
        let answer = node.check_pod(&came_before).unwrap();
        assert!(answer.ok(), "{step}: {answer:?}");
        let late = wishing(&format!("late-{step}").replace(' ', "-"));
        for (client, server) in [(&late, &came_before), (&came_before, &late)] {
            if !bypasses(&[client.clone(), server.clone()]) {
                let says = |noun| node.ctl(&[noun]).map(|o| String::from_utf8(o.stdout));
                let says = ["status", "acceleration"].map(says);
                panic!("not accelerated, {step}: {says:#?}\n{}", node.log());
            }
        }
        let packets = held.packets(node);
        assert!(
            packets < EXCHANGES / 10,
            "{packets} packets, {step}: {}",
            node.log()
        );
        for address in late.addresses() {
            let from = scene.pod(2, 2).place();
            tcp::transfer(from, late.place(), address, 100_000).unwrap();
        }
        let freed = came_before.addresses();
        node.delete_pod(&came_before).unwrap();
        // An address is free once the link is gone.
        eventually("the addresses of a deleted pod to be free", || {
            let left = leases(node);
            freed.iter().all(|address| !left.contains_key(address))
        });
        came_before = late;
    }
    println!(
        "{}",
        traffic.finish().unwrap_or_else(|error| {
            for node in scene.lab().nodes() {
                let drops = node.ctl(&["drops"]).map(|o| String::from_utf8(o.stdout));
                println!("{}: {drops:#?}\n{}", node.name(), node.log());
            }
            panic!("{error:?}")
        })
    );
    for node in scene.lab().nodes() {
        let log = node.log();
        let broken = log.lines().filter(|line| line.contains("ERROR"));
        assert_eq!(broken.collect::<Vec<_>>(), Vec::<&str>::new());
    }
}
