//! Clients of a Service whose endpoint leaves it, and serves in another Service: by every kind of client, and both kinds
//! of datagram sockets.

use super::*;
use faults::{objects, report};

/// Of the other Service, in which the endpoint stays.
const OTHER: [&str; 2] = ["10.96.0.40", "fd00:10:96::40"];
/// How long a client may stay with what left: programs look at a record once a second.
const SOON: Duration = Duration::from_secs(3);

/// A client's socket, which was answered by the endpoint that is about to leave.
struct Client<'w> {
    name: String,
    place: &'w Place,
    socket: UdpSocket,
    to: SocketAddr,
    /// By a connected socket.
    is_connected: bool,
}

impl Client<'_> {
    /// Who answers the next datagram.
    fn ask(&self) -> io::Result<IpAddr> {
        if !self.is_connected {
            let (server, from) = send(&self.socket, self.to, 5)?;
            assert_eq!(from, self.to, "{}", self.name);
            return Ok(server);
        }
        self.socket.send(b"hello")?;
        if !readable(&self.socket, Instant::now() + SOON).map_err(io::Error::other)? {
            return Err(ErrorKind::TimedOut.into());
        }
        let mut heard = [0; 128];
        let said = self.socket.recv(&mut heard)?;
        let text = String::from_utf8_lossy(&heard[..said]).into_owned();
        let (server, _) = text.split_once(' ').unwrap();
        Ok(server.parse().unwrap())
    }

    /// As a process does that hears that its socket is connected no more.
    fn connect(&self) -> io::Result<()> {
        self.place.run(|| Ok(self.socket.connect(self.to))).unwrap()
    }
}

/// Both Services: where each of them leads to.
fn lead(world: &World, web: &[usize], other: &[usize]) {
    lead_with(world, "sessionAffinity: None", web, other);
}

fn lead_with(world: &World, affinity: &str, web: &[usize], other: &[usize]) {
    let pods: Vec<&Pod> = web.iter().map(|at| &world.servers[*at]).collect();
    let others: Vec<SocketAddr> = other
        .iter()
        .flat_map(|at| world.servers[*at].addresses())
        .map(|address| SocketAddr::new(address, TARGET))
        .collect();
    let own = super::web(&pods).replacen("spec:\n", &format!("spec:\n  {affinity}\n"), 1);
    write(&world.lab, &(own + &objects("other", &OTHER, &others)));
    for node in world.lab.nodes() {
        for (name, expected) in [("web", 2 * web.len()), ("other", others.len())] {
            wait_for("both Services to be followed", || {
                let sets = report(node, name)?.ports.into_iter();
                let sets = sets.flat_map(|port| port.sets);
                let now: BTreeSet<SocketAddr> = sets.flat_map(|set| set.endpoints).collect();
                anyhow::ensure!(now.len() == expected, "{name} on {}: {now:?}", node.name());
                Ok(Some(()))
            })
            .unwrap();
        }
    }
}

/// All kinds of clients: pods, the nodes themselves, and one outside by a node port.
fn clients(world: &World) -> Vec<Client<'_>> {
    let mut all = Vec::new();
    for family in 0..2 {
        let inside = world
            .askers()
            .map(|(name, place)| (name, place, vip(family)));
        let entry = world.lab.node(1).addresses()[family];
        let outside = (
            "outside".to_owned(),
            world.lab.outside().place(),
            SocketAddr::new(entry, NODE_PORT),
        );
        for (name, place, to) in inside.into_iter().chain([outside]) {
            for is_connected in [false, true] {
                let bound = SocketAddr::new(any(to.ip()), 0);
                let socket = place.run(|| Ok(UdpSocket::bind(bound)?)).unwrap();
                let client = Client {
                    name: format!("{name} to {to}, connected: {is_connected}"),
                    place,
                    socket,
                    to,
                    is_connected,
                };
                if is_connected {
                    client.connect().unwrap();
                }
                all.push(client);
            }
        }
    }
    all
}

/// Whether the socket's connection is ended for it: it is one of the node's own.
fn is_ended(client: &Client<'_>) -> bool {
    client.is_connected && client.name.starts_with("node")
}

#[test]
fn who_was_led_to_an_endpoint_leaves_it_with_its_service() {
    let world = World::new();
    lead(&world, &[0], &[0]);
    let clients = clients(&world);
    let [gone, left] = [0, 1].map(|at| world.servers[at].addresses());
    for client in &clients {
        match client.ask() {
            Ok(server) if gone.contains(&server) => {}
            other => world.fail(&format!("{}: {other:?}", client.name)),
        }
    }
    // It serves on, in the other Service.
    lead(&world, &[1], &[0]);
    thread::sleep(SOON);
    for client in &clients {
        if is_ended(client) {
            let heard = client.ask().expect_err(&client.name);
            let is_said = heard.raw_os_error() == Some(libc::EDESTADDRREQ);
            assert!(is_said, "{}: {heard}", client.name);
            let why = client
                .socket
                .take_error()
                .unwrap()
                .map(|error| error.kind());
            assert_eq!(why, Some(ErrorKind::ConnectionAborted), "{}", client.name);
            client.connect().unwrap();
        }
        match client.ask() {
            Ok(server) if left.contains(&server) => {}
            other => world.fail(&format!("{} after it left: {other:?}", client.name)),
        }
    }
    // The Service is gone.
    let [v4, v6] = left.map(|at| SocketAddr::new(at, TARGET));
    write(&world.lab, &objects("other", &OTHER, &[v4, v6]));
    for node in world.lab.nodes() {
        wait_for("the Service to be gone", || {
            let said = node.ctl(&["services"])?.stdout;
            Ok((!String::from_utf8(said)?.contains("lab/web")).then_some(()))
        })
        .unwrap();
    }
    thread::sleep(SOON);
    // Refused or not: nobody is asked.
    for client in &clients {
        let _ = client.socket.send_to(b"hello", client.to);
    }
    thread::sleep(Duration::from_secs(1));
    for client in &clients {
        client.socket.set_nonblocking(true).unwrap();
        if let Ok(len) = client.socket.recv(&mut [0; 128]) {
            world.fail(&format!("{}: {len} bytes of nobody's", client.name));
        }
    }
}

/// With session affinity, by new connections.
#[test]
fn affinity_ends_with_the_endpoints_part_in_the_service() {
    let world = World::new();
    let lead = |web: &[usize]| lead_with(&world, "sessionAffinity: ClientIP", web, &[0]);
    let entry = world.lab.node(1).addresses();
    let outside = |family: usize| {
        let to = SocketAddr::new(entry[family], NODE_PORT);
        ("outside".to_owned(), world.lab.outside().place(), to)
    };
    let all: Vec<_> = (0..2)
        .flat_map(|family| {
            let inside = world
                .askers()
                .map(|(name, place)| (name, place, vip(family)));
            inside.into_iter().chain([outside(family)])
        })
        .collect();
    // It stays while it is in the Service, whoever else is.
    for (web, expected) in [(&[0][..], 0), (&[0, 1], 0), (&[1], 1), (&[0, 1], 1)] {
        lead(web);
        let expected = world.servers[expected].addresses();
        for (name, place, to) in &all {
            for _ in 0..8 {
                match open(place, *to).and_then(|mut stream| ask(&mut stream)) {
                    Ok(server) if expected.contains(&server) => {}
                    other => world.fail(&format!("{name} to {to}, endpoints {web:?}: {other:?}")),
                }
            }
        }
    }
}

/// As NodeLocal DNSCache has it: the cluster address is on a link of the node, where a process of the node answers.
#[test]
fn a_cluster_address_that_a_link_of_the_node_has_is_that_links() {
    let world = World::new();
    let node = world.lab.node(1);
    let is_answered_by = |what: &str, expected: &BTreeSet<IpAddr>| {
        let (pod, other) = (&world.clients[0], &world.clients[1]);
        let here = [(pod.id(), pod.place()), (node.name(), node.place())];
        for family in 0..2 {
            for (name, place) in here {
                wait_for(what, || {
                    let bound = SocketAddr::new(any(vip(family).ip()), 0);
                    let socket = place.run(|| Ok(UdpSocket::bind(bound)?))?;
                    let (by, from) = send(&socket, vip(family), 5)?;
                    anyhow::ensure!(from == vip(family), "{name}: from {from}");
                    anyhow::ensure!(expected.contains(&by), "{name}: by {by}");
                    let mut stream = open(place, vip(family))?;
                    let by = ask(&mut stream)?;
                    Ok(expected.contains(&by).then_some(()))
                })
                .unwrap();
            }
            // Another node has no such link.
            is_served(&world, other.id(), other.place(), vip(family));
        }
    };
    let servers: BTreeSet<IpAddr> = world.servers.iter().flat_map(Pod::addresses).collect();
    is_answered_by("an endpoint to answer", &servers);
    // A pair of links, as some kernels have no dummy ones.
    let link = "ip link add nodelocaldns type veth peer name nodelocalpeer";
    for command in [
        link,
        "ip link set nodelocaldns up",
        "ip link set nodelocalpeer up",
    ] {
        let words: Vec<_> = command.split(' ').collect();
        node.place().command(&words).unwrap();
    }
    let own = [0, 1].map(|family| vip(family).ip());
    for address in own {
        let len = if address.is_ipv4() { 32 } else { 128 };
        let net = format!("{address}/{len}");
        let add = ["ip", "addr", "add", &net, "dev", "nodelocaldns", "nodad"];
        let add = if address.is_ipv4() { &add[..6] } else { &add };
        node.place().command(add).unwrap();
    }
    let serving = own.map(|address| Server::start(node.place(), SocketAddr::new(address, PORT)));
    is_answered_by("the link's process to answer", &own.into());
    drop(serving);
    node.place()
        .command(&["ip", "link", "del", "nodelocaldns"])
        .unwrap();
    is_answered_by("an endpoint to answer again", &servers);
}
