//! TCP between pods from socket to socket. Each test has a cgroup of its own, so that the
//! programs see no other sockets than the test's.
//!
//! A blocking read of an enrolled socket that is woken for another reason than data, for example
//! for room to write, returns EAGAIN (tcp_bpf_recvmsg, net/ipv4/tcp_bpf.c). The readers here try
//! again: what they look at is the bytes.

mod basics;
mod learning;
mod life;
mod memory;
mod open;
mod pressure;
mod safety;
mod streams;
mod unfit;

use crate::kit::{self, Pod};
use aya::maps::{HashMap, Map, MapData, SockHash};
use sinabro_agent::datapath::{Datapath, DatapathConfig};
use sinabro_common::{
    abi::acceleration::{AccelerationCounters, ConnectionKey, Enrolled, ServerKey, Traffic},
    names,
};
use sinabro_lab::residue::run;
use socket2::{Domain, Socket, Type};
use std::{
    collections::HashSet,
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU16, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Below the test's own cgroup; the calling thread is in it, and threads that it starts.
pub struct Cgroup {
    pub path: PathBuf,
    parent: PathBuf,
}

impl Cgroup {
    pub fn enter() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts
            .lines()
            .find(|line| line.contains(" - cgroup2 "))
            .and_then(|line| line.split(' ').nth(4))
            .unwrap();
        let own = fs::read_to_string("/proc/thread-self/cgroup").unwrap();
        let own = own
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))
            .unwrap();
        let parent = Path::new(mount).join(own);
        let name = format!(
            "sinabro-test{}-{}-{}",
            run::in_name(),
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        );
        let path = parent.join(name);
        fs::create_dir(&path).unwrap();
        let cgroup = Self { path, parent };
        fs::write(cgroup.path.join("cgroup.type"), "threaded").unwrap();
        fs::write(cgroup.path.join("cgroup.threads"), "0").unwrap();
        cgroup
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        fs::write(self.parent.join("cgroup.threads"), "0").unwrap();
        // Threads that have ended are counted for a moment longer.
        kit::eventually("an empty cgroup", || fs::remove_dir(&self.path).is_ok());
    }
}

/// A node with two pods, and what it takes to load its data path again.
struct World {
    config: DatapathConfig,
    /// None while there is no agent.
    datapath: Option<Datapath>,
    a: Pod,
    b: Pod,
}

impl World {
    fn datapath(&self) -> &Datapath {
        self.datapath.as_ref().unwrap()
    }

    /// As an agent that starts: loads the programs and makes its pods known again.
    fn start(&mut self, acceleration: bool) {
        // What runs already goes first.
        self.datapath = None;
        let datapath = load(&self.config, acceleration);
        self.a.attach(&datapath);
        self.b.attach(&datapath);
        self.datapath = Some(datapath);
    }

    fn counters(&self, pod: &Pod) -> AccelerationCounters {
        self.datapath()
            .acceleration_counters(pod.ifindex)
            .unwrap()
            .unwrap()
    }

    /// Of both pods.
    fn all_counters(&self) -> AccelerationCounters {
        let mut sum = self.counters(&self.a);
        sum += self.counters(&self.b);
        sum
    }
}

fn load(config: &DatapathConfig, acceleration: bool) -> Datapath {
    let config = DatapathConfig {
        acceleration,
        ..config.clone()
    };
    let datapath = kit::load_with(&config);
    let mode = &datapath.modes()["tcpAcceleration"];
    assert_eq!(mode.starts_with("on"), acceleration, "{mode}");
    datapath
}

/// A node whose acceleration is attached or not, with two pods of which the second's connections
/// may be accelerated or not.
fn world<T: Send + Default>(
    attached: bool,
    wanted: bool,
    test: impl FnOnce(World) -> T + Send,
) -> T {
    world_with(kit::config(), attached, wanted, test)
}

/// As [`world`], of a node that is configured otherwise.
fn world_with<T: Send + Default>(
    config: DatapathConfig,
    attached: bool,
    wanted: bool,
    test: impl FnOnce(World) -> T + Send,
) -> T {
    kit::fresh(|| {
        if kit::skipped() {
            return T::default();
        }
        let cgroup = Cgroup::enter();
        let config = DatapathConfig {
            cgroup: Some(cgroup.path.clone()),
            ..config
        };
        let datapath = load(&config, attached);
        let (a, b) = (Pod::live(&datapath, 5), Pod::new(6));
        b.attach_with(&datapath, wanted.then(|| b.acceleration()));
        test(World {
            config,
            datapath: Some(datapath),
            a,
            b,
        })
    })
}

/// The enrolled sockets; none if there is no such map.
fn enrolled() -> Vec<(ConnectionKey, Enrolled)> {
    let path = Path::new(names::BPF_DIR).join("ENROLLED");
    if !path.exists() {
        return Vec::new();
    }
    let map: HashMap<_, ConnectionKey, Enrolled> = Map::HashMap(MapData::from_pin(path).unwrap())
        .try_into()
        .unwrap();
    map.iter().collect::<Result<_, _>>().unwrap()
}

/// How many sockets there are in the map of sockets.
fn sockets() -> usize {
    let path = Path::new(names::BPF_DIR).join("SOCKETS");
    let map: SockHash<_, u64> = Map::SockHash(MapData::from_pin(path).unwrap())
        .try_into()
        .unwrap();
    map.keys().collect::<Result<Vec<_>, _>>().unwrap().len()
}

/// What is remembered of servers.
fn traffic() -> Vec<(ServerKey, Traffic)> {
    let path = Path::new(names::BPF_DIR).join("SERVER_TRAFFIC");
    let map: HashMap<_, ServerKey, Traffic> = Map::LruHashMap(MapData::from_pin(path).unwrap())
        .try_into()
        .unwrap();
    map.iter().collect::<Result<_, _>>().unwrap()
}

/// The ends of enrolled sockets that are at this address.
fn enrolled_at(address: IpAddr) -> usize {
    let at = |(key, _): &(ConnectionKey, Enrolled)| key.local == address.into();
    enrolled().iter().filter(|entry| at(entry)).count()
}

/// A socket of a pod, bound; port zero is any.
fn bound(pod: &Pod, at: IpAddr, port: u16) -> Socket {
    pod.run(|| {
        let address = SocketAddr::from((at, port));
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&address.into()).unwrap();
        socket
    })
}

/// setsockopt(2), of what the crates do not have.
fn set(socket: &impl AsRawFd, level: i32, name: i32, value: &[u8]) -> std::io::Result<()> {
    // SAFETY: the slice's own length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as u32,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

fn with_timeout(stream: TcpStream) -> TcpStream {
    let timeout = Some(Duration::from_secs(20));
    stream.set_read_timeout(timeout).unwrap();
    stream
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|n| ((n * 131) >> 5) as u8 ^ seed.wrapping_mul(n as u8))
        .collect()
}

/// A port that no server had before. What a server's connections are like is remembered by its port, and outlives it: of
/// ports that the kernel chooses at random one comes twice sooner than one thinks, and after a stream no connection is
/// enrolled. Below those that it chooses for clients.
fn unknown_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(10_000);
    let port = NEXT.fetch_add(1, Ordering::Relaxed);
    assert!((10_000..30_000).contains(&port), "{port} may be a client's");
    port
}

/// The client's end and the server's; port zero is one that no server had before.
fn connect(server: &Pod, at: IpAddr, client: &Pod, port: u16) -> (TcpStream, TcpStream) {
    let port = match port {
        0 => unknown_port(),
        port => port,
    };
    let listener = server.run(|| TcpListener::bind((at, port)).unwrap());
    let address = listener.local_addr().unwrap();
    let client = client.run(|| TcpStream::connect(address).unwrap());
    let (server, _) = listener.accept().unwrap();
    (with_timeout(client), with_timeout(server))
}

/// The same of a connection whose ends are enrolled.
fn connect_enrolled(w: &World, at: IpAddr) -> (TcpStream, TcpStream) {
    let ends = connect(&w.b, at, &w.a, 0);
    let own: HashSet<u16> = [&ends.0, &ends.1]
        .map(|end| end.local_addr().unwrap().port())
        .into();
    let all = enrolled();
    let is_own = |(key, _): &&(ConnectionKey, Enrolled)| own.contains(&key.local_port);
    assert_eq!(
        all.iter().filter(is_own).count(),
        2,
        "not enrolled: {own:?} of {all:?}, {:?}, {:?}",
        w.all_counters(),
        traffic()
    );
    ends
}

/// Sends in odd pieces from one end to the other until the end, and compares.
fn transfer(mut from: TcpStream, mut to: TcpStream, seed: u8, len: usize) {
    let data = pattern(seed, len);
    let expected = data.clone();
    let sender = thread::spawn(move || {
        let mut rest = &data[..];
        let mut piece = 1;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            from.write_all(now).unwrap();
            rest = later;
            piece = (piece * 7 + 3) % 100_003;
        }
        from.shutdown(Shutdown::Write).unwrap();
        from
    });
    let got = read_to_end(&mut to);
    assert_eq!(got.len(), len);
    assert!(got == expected, "bytes differ");
    drop(sender.join().unwrap());
}

/// Reads, more than once where there is nothing for another reason than time.
fn read(from: &mut TcpStream, into: &mut [u8]) -> usize {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match from.read(into) {
            Ok(len) => return len,
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn read_to_end(from: &mut TcpStream) -> Vec<u8> {
    let mut got = Vec::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        match read(from, &mut piece) {
            0 => return got,
            len => got.extend_from_slice(&piece[..len]),
        }
    }
}

fn read_exact(from: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut got = vec![0; len];
    let mut at = 0;
    while at < len {
        match read(from, &mut got[at..]) {
            0 => panic!("the end after {at} of {len} bytes"),
            more => at += more,
        }
    }
    got
}

/// A question and its answer.
fn ask(client: &mut TcpStream, server: &mut TcpStream) {
    client.write_all(b"ping").unwrap();
    assert_eq!(read_exact(server, 4), b"ping");
    server.write_all(b"pong").unwrap();
    assert_eq!(read_exact(client, 4), b"pong");
}
