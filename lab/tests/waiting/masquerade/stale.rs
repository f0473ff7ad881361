//! A port that was used for a Service is used for the pod behind it, and the other way round: what the node
//! remembers of the one must not be taken for the other. With rules as kube-proxy has them.

use super::kit::{FAMILIES, World};
use sinabro_lab::{
    Node, Place, Pod,
    amount::amount,
    traffic::{
        PATIENCE, accept, bind, connect,
        crowd::{Crowd, Kind},
        udp,
    },
};
use socket2::{Domain, Socket, Type};
use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// Addresses of Services, on no machine.
const SERVICE: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
/// Which any client uses.
const PORT: u16 = 45_000;

#[derive(Clone, Copy, Debug)]
enum Proxy {
    Iptables,
    Nftables,
}

impl Proxy {
    const BOTH: [Self; 2] = [Self::Iptables, Self::Nftables];

    /// Has the node send what is for a Service to a server, and drop what belongs to nothing known.
    fn serve(self, node: &Node, service: SocketAddr, server: SocketAddr) {
        match self {
            Self::Iptables => {
                let tool = if service.is_ipv4() {
                    "iptables"
                } else {
                    "ip6tables"
                };
                let (address, port) = (service.ip().to_string(), service.port().to_string());
                let server = server.to_string();
                for protocol in ["tcp", "udp"] {
                    let rule = [
                        tool,
                        "-w",
                        "-t",
                        "nat",
                        "-A",
                        "PREROUTING",
                        "-p",
                        protocol,
                        "-d",
                        &address,
                        "--dport",
                        &port,
                        "-j",
                        "DNAT",
                        "--to-destination",
                        &server,
                    ];
                    node.place().command(&rule).unwrap();
                }
                let invalid = [
                    tool,
                    "-w",
                    "-A",
                    "FORWARD",
                    "-m",
                    "conntrack",
                    "--ctstate",
                    "INVALID",
                    "-j",
                    "DROP",
                ];
                node.place().command(&invalid).unwrap();
            }
            Self::Nftables => {
                let family = if service.is_ipv4() { "ip" } else { "ip6" };
                let (address, port) = (service.ip(), service.port());
                let rules = format!(
                    "table {family} services {{
                        chain pre {{ type nat hook prerouting priority dstnat;
                            {family} daddr {address} meta l4proto {{ tcp, udp }} th dport {port} dnat to {server}
                        }}
                        chain forward {{ type filter hook forward priority filter;
                            ct state invalid drop
                        }}
                    }}"
                );
                node.place().command(&["nft", &rules]).unwrap();
            }
        }
    }
}

/// Clients' pod, server's pod, and a Service that leads to it.
struct Served {
    proxy: Proxy,
    world: World,
    service: SocketAddr,
    server: SocketAddr,
}

impl Served {
    fn by(proxy: Proxy, family: usize) -> Self {
        // Room for all that two pods have at once, and as much again that their shares leave free.
        let room = format!("--connections={}", amount(131_072, 400_000));
        let world = World::with(3, &[], &[&room]);
        let service = SocketAddr::new(SERVICE[family].parse().unwrap(), 80);
        let server = SocketAddr::new(world.pod(2).addresses()[family], 8080);
        proxy.serve(world.node(), service, server);
        Self {
            proxy,
            world,
            service,
            server,
        }
    }

    fn pods(&self) -> [&Pod; 2] {
        [self.world.pod(1), self.world.pod(2)]
    }

    fn listen(&self) -> TcpListener {
        let listen = || bind::tcp(self.server);
        self.pods()[1].place().run(listen).unwrap()
    }
}

/// Side by side: one of them lasts an hour.
fn all(test: impl Fn(&Served, &str) + Sync) {
    let test = &test;
    thread::scope(|scope| {
        for proxy in Proxy::BOTH {
            for (family, in_family) in FAMILIES.iter().enumerate() {
                let how = format!("{proxy:?}, {in_family}");
                scope.spawn(move || test(&Served::by(proxy, family), &how));
            }
        }
    });
}

/// Connects from a given port.
fn connect_from(place: &Place, port: u16, to: SocketAddr) -> std::io::Result<TcpStream> {
    let opened = place.run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        let any = sinabro_lab::traffic::any(to.ip());
        bind::freed(|| socket.bind(&SocketAddr::new(any, port).into()))?;
        Ok(socket)
    });
    let socket = opened.unwrap();
    socket.connect_timeout(&to.into(), PATIENCE)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A connection from [`PORT`] that says something both ways and ends by RST.
fn visit(pod: &Pod, listener: &TcpListener, to: SocketAddr, what: &str) {
    let client = connect_from(pod.place(), PORT, to);
    let client = client.unwrap_or_else(|error| panic!("{what}: {error}"));
    let (mut server, _) = accept(listener, Instant::now() + PATIENCE).unwrap();
    let mut heard = [0; 8];
    for (from, to) in [(0, 1), (1, 0)] {
        let mut ends = [&client, &server];
        ends[from].write_all(b"question").unwrap();
        let read = ends[to].read_exact(&mut heard);
        read.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    socket2::SockRef::from(&client)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(client);
    // The end has arrived before the port is used again.
    let end = server.read(&mut heard).unwrap_err();
    assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset, "{what}");
}

#[test]
fn a_port_serves_a_service_and_its_server_by_turns() {
    all(|served, how| {
        let listener = served.listen();
        for round in 0..4 {
            for (name, to) in [("Service", served.service), ("server", served.server)] {
                let what = format!("{how}, round {round}, to the {name}");
                visit(served.pods()[0], &listener, to, &what);
            }
        }
    });
}

/// The same by datagrams, whose ends nobody sees.
#[test]
fn a_port_asks_a_service_and_its_server_by_turns() {
    use std::net::UdpSocket;
    all(|served, how| {
        let [client, server] = served.pods();
        let server = server.place().run(|| bind::udp(served.server)).unwrap();
        let any = sinabro_lab::traffic::any(served.server.ip());
        let client = client.place().run(|| bind::udp((any, PORT))).unwrap();
        for round in 0..4 {
            for to in [served.service, served.server] {
                let what = format!("{how}, round {round}, to {to}");
                let mut heard = [0; 64];
                let mut next = |socket: &UdpSocket| {
                    let deadline = Instant::now() + PATIENCE;
                    let arrived = sinabro_lab::traffic::readable(socket, deadline).unwrap();
                    assert!(arrived, "{what}");
                    socket.recv_from(&mut heard).unwrap().1
                };
                client.send_to(b"question", to).unwrap();
                let from = next(&server);
                server.send_to(b"response", from).unwrap();
                assert_eq!(next(&client), to, "{what}");
            }
        }
    });
}

/// A connection of which nothing is heard while many others come and go: then the server speaks first.
#[test]
fn a_server_speaks_first_after_long_silence() {
    all(|served, how| {
        let [pod, server] = served.pods();
        let listener = served.listen();
        let opened = pod.place().run(|| Ok(connect(served.service)?));
        let mut client = opened.unwrap();
        let (mut idle, _) = accept(&listener, Instant::now() + PATIENCE).unwrap();
        let family = usize::from(served.service.is_ipv6());
        // By the Service, and directly; nothing of them is left to be looked at.
        let clients = [1, 3].map(|number| served.world.pod(number));
        let clients = clients.map(|pod| (pod.place(), pod.addresses()[family]));
        let (by_service, directly) = (amount(250, 25_000) as u16, amount(50, 5_000) as u16);
        for kind in [Kind::Datagrams, Kind::Connections] {
            for (ports, target) in [
                (2_000..2_000 + by_service, served.service),
                (27_000..27_000 + directly, served.server),
            ] {
                let (place, at) = (server.place(), served.server);
                let mut crowd = Crowd::new(kind, &clients, place, at, target).unwrap();
                crowd.open(ports, 0).unwrap();
            }
        }
        thread::sleep(Duration::from_secs(amount(0, 3_600).into()));
        idle.write_all(b"still here?").unwrap();
        let mut heard = [0; 11];
        client
            .read_exact(&mut heard)
            .unwrap_or_else(|error| panic!("{how}: {error}"));
        client.write_all(b"yes").unwrap();
        idle.read_exact(&mut heard[..3])
            .unwrap_or_else(|error| panic!("{how}: {error}"));
    });
}

/// Whatever the size of the server's link, and so the way on which they are in parts.
#[test]
fn datagrams_in_parts_reach_a_service_of_the_same_node() {
    all(|served, _| {
        let [client, server] = served.pods();
        let (node, service) = (served.world.node(), served.service);
        let small = node
            .add_pod_with("small", &[("SINABRO_LOCAL_MTU", "off")])
            .unwrap();
        let family = usize::from(service.is_ipv6());
        let other = SocketAddr::new(service.ip(), 81);
        let at = SocketAddr::new(small.addresses()[family], 8080);
        served.proxy.serve(node, other, at);
        for (server, at, service) in [(server, served.server, service), (&small, at, other)] {
            let (from, to) = (client.place(), server.place());
            udp::echo_through(from, to, at, service, &[2_000, 8 << 10, 60_000]).unwrap();
        }
    });
}
