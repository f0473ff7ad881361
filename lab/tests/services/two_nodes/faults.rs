//! Services that change all the time, under agents that are killed, and one that is as large as they become.

use super::*;
use sinabro_common::api::{Request, Response, ServiceReport};
use sinabro_lab::amount::amount;
use std::sync::atomic::AtomicU32;

/// Of the Service that changes.
const RESTLESS: [&str; 2] = ["10.96.0.20", "fd00:10:96::20"];
const OTHER_TARGET: u16 = 8081;
/// Of the large one.
const LARGE: &str = "10.96.0.30";
const FIRST_PORT: u16 = 10_000;

/// Another Service's objects, with a slice for each port of these endpoints.
pub fn objects(name: &str, vips: &[&str], endpoints: &[SocketAddr]) -> String {
    let mut text = format!(
        "
---
kind: Service
metadata: {{namespace: lab, name: {name}}}
spec:
  clusterIP: '{}'
  clusterIPs: [{}]
  ports: [{{name: tcp, protocol: TCP, port: {PORT}}}, {{name: udp, protocol: UDP, port: {PORT}}}]
",
        vips[0],
        vips.iter()
            .map(|vip| format!("'{vip}'"))
            .collect::<Vec<_>>()
            .join(", ")
    );
    for (at, endpoint) in endpoints.iter().enumerate() {
        let family = if endpoint.is_ipv4() { "IPv4" } else { "IPv6" };
        let (address, port) = (endpoint.ip(), endpoint.port());
        text += &format!(
            "---
kind: EndpointSlice
metadata: {{namespace: lab, name: {name}-{at}, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: {family}
ports: [{{name: tcp, protocol: TCP, port: {port}}}, {{name: udp, protocol: UDP, port: {port}}}]
endpoints: [{{addresses: ['{address}'], conditions: {{ready: true}}}}]
"
        );
    }
    text
}

/// What a node's agent says of a Service.
pub fn report(node: &Node, name: &str) -> anyhow::Result<ServiceReport> {
    let only = Some(format!("lab/{name}"));
    match node.ask(Request::Services { after: None, only })? {
        Response::Services(mut page) => Ok(page.services.remove(0)),
        other => anyhow::bail!("{other:?}"),
    }
}

/// Entries of each map that somebody has, but for those that rest.
fn taken(node: &Node) -> Vec<(String, u64)> {
    match node.ask(Request::Metrics).unwrap() {
        Response::Metrics(metrics) => {
            let maps = metrics.services.unwrap().maps.into_iter();
            maps.map(|map| (map.map, map.taken - map.resting)).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// How many changes in a row: some thousand, with SINABRO_THOROUGH ten thousand in about a minute.
fn changes() -> usize {
    amount(1_000, 10_000) as usize
}

/// Both nodes' Services: the one that never changes, and one that leads to some of the servers, at least one.
struct Restless {
    world: World,
    /// By ports of its own: a client's port has one connection with an endpoint at a time, whatever Services led there.
    _serving: Vec<Server>,
}

impl Restless {
    fn new() -> Self {
        let world = World::new();
        let start = |pod: &Pod| {
            let at = pod
                .addresses()
                .map(|address| SocketAddr::new(address, OTHER_TARGET));
            at.map(|at| Server::start(pod.place(), at))
        };
        let _serving = world.servers.iter().flat_map(start).collect();
        let restless = Self { world, _serving };
        restless.lead(0);
        for node in restless.world.lab.nodes() {
            restless.follows(node, 0);
        }
        restless
    }

    /// Where it leads to at that step.
    fn targets(&self, step: usize) -> BTreeSet<SocketAddr> {
        let servers = &self.world.servers;
        let chosen = match step % 3 {
            0 => &servers[..1],
            1 => &servers[..],
            _ => &servers[1..],
        };
        let addresses = chosen.iter().flat_map(Pod::addresses);
        addresses
            .map(|address| SocketAddr::new(address, OTHER_TARGET))
            .collect()
    }

    fn lead(&self, step: usize) {
        let targets: Vec<_> = self.targets(step).into_iter().collect();
        let all: Vec<_> = self.world.servers.iter().collect();
        write(
            &self.world.lab,
            &(web(&all) + &objects("restless", &RESTLESS, &targets)),
        );
    }

    fn follows(&self, node: &Node, step: usize) {
        let followed = wait_for("the last change to be followed", || {
            let sets = report(node, "restless")?
                .ports
                .into_iter()
                .flat_map(|port| port.sets);
            let now: BTreeSet<_> = sets.flat_map(|set| set.endpoints).collect();
            anyhow::ensure!(now == self.targets(step), "{now:?}");
            Ok(Some(()))
        });
        followed.unwrap();
    }

    /// Asks by both Services from everywhere for as long as the changes are made, and meanwhile does something with
    /// the nodes, until which is done they go on.
    fn endure(&self, meanwhile: impl Fn() + Sync) {
        let before: Vec<_> = self.world.lab.nodes().iter().map(taken).collect();
        let (over, asked) = (AtomicBool::new(false), AtomicU32::new(0));
        let mut step = 0;
        thread::scope(|scope| {
            let (over, asked) = (&over, &asked);
            let mut askers = Vec::new();
            for (name, place) in self.world.askers() {
                askers.push(scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        for vip in VIPS.iter().chain(&RESTLESS) {
                            let to = SocketAddr::new(vip.parse().unwrap(), PORT);
                            is_served(&self.world, &name, place, to);
                            asked.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }));
            }
            let busy = scope.spawn(&meanwhile);
            // A multiple of the three, so that the end is as the beginning.
            while step < changes() || step % 3 != 0 || !busy.is_finished() {
                if askers.iter().any(|asker| asker.is_finished()) {
                    break;
                }
                step += 1;
                self.lead(step);
                thread::sleep(Duration::from_millis(5));
            }
            over.store(true, Ordering::Relaxed);
        });
        assert!(
            asked.into_inner() > 100,
            "nobody noticed because nobody asked"
        );
        for (node, before) in self.world.lab.nodes().iter().zip(before) {
            self.follows(node, step);
            let left = wait_for("what was let go to be free again", || {
                let now = taken(node);
                anyhow::ensure!(now == before, "{now:?}, and before the changes {before:?}");
                Ok(Some(()))
            });
            left.unwrap();
        }
    }
}

#[test]
fn a_service_that_changes_all_the_time_harms_nobody() {
    Restless::new().endure(|| {});
}

#[test]
fn agents_that_are_killed_while_services_change_harm_nobody() {
    let restless = Restless::new();
    restless.endure(|| {
        // At other moments of a change each time.
        for round in 0..3 {
            thread::sleep(Duration::from_micros(200_000 + 1_700 * round));
            let nodes = restless.world.lab.nodes();
            for node in nodes {
                node.kill_agent().unwrap();
                node.start_agent_with(&SERVICES_FLAGS).unwrap();
            }
            for node in nodes {
                node.wait_ready().unwrap();
            }
        }
    });
}

#[test]
fn a_thousand_endpoints_are_all_used_and_all_told() {
    const COUNT: u16 = 1_000;
    let world = World::new();
    let server = &world.servers[0];
    let address = server.addresses()[0];
    let all: Vec<_> = (FIRST_PORT..FIRST_PORT + COUNT)
        .map(|port| SocketAddr::new(address, port))
        .collect();
    let listeners = server.place().run(|| {
        let listeners = all.iter().map(TcpListener::bind);
        Ok(listeners.collect::<io::Result<Vec<_>>>()?)
    });
    // What was accepted by the kernel is enough to know who was asked.
    let listeners = listeners.unwrap();
    listeners
        .iter()
        .for_each(|listener| listener.set_nonblocking(true).unwrap());
    let met = |from: &Place, connects: usize| {
        let streams: Vec<_> = (0..connects)
            .map(|_| open(from, SocketAddr::new(LARGE.parse().unwrap(), PORT)).unwrap())
            .collect();
        let mut met = BTreeSet::new();
        let mut accepted = 0;
        for (listener, at) in listeners.iter().zip(&all) {
            while listener.accept().is_ok() {
                accepted += 1;
                met.insert(*at);
            }
        }
        assert_eq!(accepted, streams.len());
        met
    };
    let lead = |endpoints: &[SocketAddr]| {
        write(
            &world.lab,
            &(web(&[]) + &objects("large", &[LARGE], endpoints)),
        );
        for node in world.lab.nodes() {
            wait_for("the endpoints to be led to", || {
                let report = report(node, "large")?;
                let counts: Vec<_> = report
                    .ports
                    .iter()
                    .flat_map(|port| &port.sets)
                    .map(|set| set.count)
                    .collect();
                anyhow::ensure!(counts == [endpoints.len() as u32; 2], "{counts:?}");
                Ok(Some(()))
            })
            .unwrap();
        }
    };
    lead(&all);
    for (name, place) in world.askers() {
        // Of a thousand, 135 are missed by two thousand who choose by chance; 200 never.
        let met = met(place, 2 * usize::from(COUNT));
        assert!(met.len() > 800, "{name}: {}", met.len());
    }
    let (gone, left) = all.split_at(400);
    lead(left);
    for (name, place) in world.askers() {
        let met = met(place, 1_000);
        assert!(
            met.is_disjoint(&gone.iter().copied().collect()),
            "{name}: one that is gone was asked"
        );
    }
}
