//! Services at sockets. Each test has a cgroup of its own, so that the programs see no other sockets than the test's.

mod connect;
mod datagrams;
mod life;
mod whose;

use crate::{
    acceleration::Cgroup,
    kit::{self, Pod},
};
use nix::sys::utsname::uname;
use sinabro_agent::datapath::{Datapath, DatapathConfig};
use sinabro_common::abi::service::{
    BACKEND_SERVING, Backend, Frontend, FrontendKey, Kind, Set, Slot,
};
use sinabro_lab::Place;
use sinabro_netlink::{Conn, NetNs};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    time::Duration,
};

/// Addresses that are nobody's: what is sent there gets nowhere.
const VIP: &str = "10.96.0.1";
const VIP6: &str = "fd00:96::1";
const OTHER_VIP: &str = "10.96.0.2";
const OTHER_VIP6: &str = "fd00:96::2";

/// Of a socket's wait for what should have come long ago.
const PATIENCE: Duration = Duration::from_secs(10);

const TCP: u8 = 6;
const UDP: u8 = 17;

/// A node, on which Services are translated, with two pods.
struct World {
    config: DatapathConfig,
    /// None while there is no agent.
    datapath: Option<Datapath>,
    a: Pod,
    b: Pod,
    _cgroup: Cgroup,
}

impl World {
    fn datapath(&self) -> &Datapath {
        self.datapath.as_ref().unwrap()
    }

    /// As an agent that starts: loads the programs and makes its pods known again.
    fn start(&mut self, service_sockets: bool) {
        self.datapath = None;
        let datapath = load(&self.config, service_sockets);
        self.a.attach(&datapath);
        self.b.attach(&datapath);
        self.datapath = Some(datapath);
    }

    /// Where clients are, with a name for what fails there: the node, and a pod where the kernel has names for its
    /// namespace.
    fn clients(&self) -> Vec<(&'static str, Place)> {
        let pod = ("a pod", self.a.place.clone());
        [("the node", node())]
            .into_iter()
            .chain(is_numbered().then_some(pod))
            .collect()
    }
}

fn load(config: &DatapathConfig, service_sockets: bool) -> Datapath {
    let config = DatapathConfig {
        service_sockets,
        ..config.clone()
    };
    let datapath = Datapath::load(&config).unwrap();
    switch(&datapath, true);
    let mode = &datapath.modes()["serviceSockets"];
    assert_eq!(mode.starts_with("on, "), service_sockets, "{mode}");
    assert!(!mode.contains("without"), "{mode}");
    datapath
}

/// Has Services be translated, or not.
fn switch(datapath: &Datapath, on: bool) {
    datapath.set_services(on).unwrap();
}

/// Whether the kernel tells the cookies of network namespaces. If not, it is the node's sockets alone.
fn is_numbered() -> bool {
    Conn::new().unwrap().netns_cookie().unwrap().is_some()
}

/// Makes a test in such a world that is about pods.
fn world_of_pods(test: impl FnOnce(World) + Send) {
    match is_numbered() {
        true => world(test),
        false => println!("skipped: the kernel does not number network namespaces"),
    }
}

/// The network of the calling thread.
fn node() -> Place {
    Place::new("node", NetNs::current().unwrap())
}

/// Makes a test in such a world.
fn world(test: impl FnOnce(World) + Send) {
    kit::fresh(|| {
        let cgroup = Cgroup::enter();
        let config = DatapathConfig {
            cgroup: Some(cgroup.path.clone()),
            ..kit::config()
        };
        let datapath = load(&config, true);
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        test(World {
            config,
            datapath: Some(datapath),
            a,
            b,
            _cgroup: cgroup,
        });
    });
}

/// Whether programs may say what a system call returns (Linux 5.18).
fn refuses() -> bool {
    let release = uname().unwrap().release().to_string_lossy().into_owned();
    let mut numbers = release.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap()) >= (5, 18)
}

/// What is in the maps of one Service, which has everything of the same number.
#[derive(Clone)]
struct Service {
    number: u32,
    frontend: SocketAddr,
    proto: u8,
    affinity_seconds: u32,
    flags: u32,
    generation: u32,
}

/// Endpoints that there may be of a test's Service.
const MOST: u32 = 16;

impl Service {
    fn new(number: u32, frontend: SocketAddr, proto: u8) -> Self {
        Self {
            number,
            frontend,
            proto,
            affinity_seconds: 0,
            flags: 0,
            generation: 1,
        }
    }

    fn key(&self) -> FrontendKey {
        FrontendKey {
            addr: self.frontend.ip().into(),
            port: self.frontend.port().to_be_bytes(),
            proto: self.proto,
            pad: 0,
        }
    }

    /// Publishes it; its endpoints have numbers in this order.
    fn lead_to(&self, datapath: &Datapath, endpoints: &[SocketAddr]) {
        for (n, at) in (0..).zip(endpoints) {
            self.put_backend(datapath, n, *at, BACKEND_SERVING);
        }
        let all: Vec<u32> = (0..endpoints.len() as u32).collect();
        self.choose_from(datapath, &all);
        self.put_frontend(datapath);
    }

    fn put_backend(&self, datapath: &Datapath, n: u32, at: SocketAddr, flags: u16) {
        let backend = Backend {
            addr: at.ip().into(),
            port: at.port().to_be_bytes(),
            flags,
            generation: self.generation,
        };
        let services = datapath.services();
        services
            .put_backend(self.number * MOST + n, backend)
            .unwrap();
    }

    /// New connections get these alone, by number.
    fn choose_from(&self, datapath: &Datapath, endpoints: &[u32]) {
        let services = datapath.services();
        let base = self.number * MOST;
        let slots: Vec<Slot> = endpoints
            .iter()
            .map(|n| Slot {
                backend: base + n,
                generation: self.generation,
            })
            .collect();
        services.put_slots(base, &slots).unwrap();
        self.put_set(datapath, Kind::Balance, slots.len() as u32);
    }

    fn put_set(&self, datapath: &Datapath, kind: Kind, count: u32) {
        let set = Set::new(kind, self.number * MOST, count);
        datapath.services().put_set(self.number, set).unwrap();
    }

    fn put_frontend(&self, datapath: &Datapath) {
        let frontend = Frontend {
            inside: self.number,
            outside: self.number,
            service: self.number,
            affinity_seconds: self.affinity_seconds,
            flags: self.flags,
        };
        datapath
            .services()
            .put_frontend(self.key(), frontend)
            .unwrap();
    }
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// Both families' first frontend on this port, with an endpoint in the second pod.
fn both(pod: &Pod, port: u16) -> [(SocketAddr, IpAddr); 2] {
    [(at(VIP, port), pod.v4), (at(VIP6, port), pod.v6)]
}

fn run<T: Send>(place: &Place, f: impl FnOnce() -> T + Send) -> T {
    place.run(|| Ok(f())).unwrap()
}

fn socket(place: &Place, domain: Domain, kind: Type, protocol: Option<Protocol>) -> Socket {
    run(place, || {
        let socket = Socket::new(domain, kind, protocol).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    })
}

fn listen(pod: &Pod, at: IpAddr, port: u16) -> TcpListener {
    let listener = pod.run(|| TcpListener::bind((at, port)).unwrap());
    listener.set_nonblocking(true).unwrap();
    listener
}

fn udp_server(pod: &Pod, at: IpAddr, port: u16) -> UdpSocket {
    let server = pod.run(|| UdpSocket::bind((at, port)).unwrap());
    server.set_nonblocking(true).unwrap();
    server
}

/// Waits until one of these servers has a datagram, and answers it by its number.
fn answer(servers: &[UdpSocket]) -> usize {
    let mut found = None;
    kit::eventually("a datagram", || {
        let mut piece = [0; 64];
        for (n, server) in servers.iter().enumerate() {
            if let Ok((_, from)) = server.recv_from(&mut piece) {
                server.send_to(&[n as u8], from).unwrap();
                found = Some(n);
                return true;
            }
        }
        false
    });
    found.unwrap()
}

fn peer(socket: &Socket) -> SocketAddr {
    socket.peer_addr().unwrap().as_socket().unwrap()
}

/// An address of the other family's sockets.
fn mapped(at: SocketAddr) -> SocketAddr {
    match at.ip() {
        IpAddr::V4(v4) => SocketAddr::new(v4.to_ipv6_mapped().into(), at.port()),
        IpAddr::V6(_) => at,
    }
}

/// Whom the kernel has a socket connected to, whatever the socket is told.
fn real_peer(place: &Place, socket: &Socket) -> SocketAddr {
    // Not by its port, which one to another address may have had.
    let file = format!("/proc/self/fd/{}", socket.as_raw_fd());
    let inode = fs::metadata(file).unwrap().ino().to_string();
    let is_tcp = socket.r#type().unwrap() == Type::STREAM;
    let table = if is_tcp { "tcp" } else { "udp" };
    let lines = run(place, || {
        let read = |suffix| fs::read_to_string(format!("/proc/thread-self/net/{table}{suffix}"));
        read("").unwrap() + &read("6").unwrap()
    });
    let parse = |field: &str| {
        let (address, port) = field.split_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        let words = (0..address.len() / 8)
            .map(|n| u32::from_str_radix(&address[n * 8..n * 8 + 8], 16).unwrap());
        let bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
        let address: IpAddr = match <[u8; 4]>::try_from(bytes.clone()) {
            Ok(v4) => v4.into(),
            Err(_) => <[u8; 16]>::try_from(bytes).ok()?.into(),
        };
        Some(SocketAddr::new(address.to_canonical(), port))
    };
    lines
        .lines()
        .filter_map(|line| {
            // proc_net_tcp: the third is the remote address, the tenth the inode.
            let fields: Vec<_> = line.split_whitespace().collect();
            let is_it = *fields.get(9)? == inode;
            is_it.then(|| parse(fields[2])).flatten()
        })
        .find(|remote| remote.port() != 0)
        .unwrap_or_else(|| at("0.0.0.0", 0))
}
