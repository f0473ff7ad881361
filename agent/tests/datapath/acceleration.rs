//! TCP between pods from socket to socket. Each test has a cgroup of its own, so that the
//! programs see no other sockets than the test's.

use crate::{
    kit::{self, Pod},
    logs,
};
use aya::maps::{HashMap, Map, MapData};
use sinabro_agent::datapath::{Datapath, DatapathConfig};
use sinabro_common::{
    abi::{
        Addr,
        acceleration::{ConnectionKey, Enrolled, MAX_SOCKETS},
    },
    names,
};
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
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
            "sinabro-test-{}-{}",
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

struct World {
    datapath: Datapath,
    a: Pod,
    b: Pod,
}

fn world<T: Send>(attached: bool, wanted: bool, test: impl FnOnce(World) -> T + Send) -> T {
    kit::fresh(|| {
        let cgroup = Cgroup::enter();
        let datapath = Datapath::load(&DatapathConfig {
            acceleration: attached,
            cgroup: Some(cgroup.path.clone()),
            ..kit::config()
        })
        .unwrap();
        let mode = &datapath.modes()["tcpAcceleration"];
        assert_eq!(mode.starts_with("on"), attached, "{mode}");
        datapath.set_node_config(kit::node_config()).unwrap();
        let (a, b) = (Pod::live(&datapath, 5), Pod::new(6));
        b.attach_with(&datapath, wanted.then(|| b.acceleration()));
        test(World { datapath, a, b })
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

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|n| ((n * 131) >> 5) as u8 ^ seed.wrapping_mul(n as u8))
        .collect()
}

fn connect(server: &Pod, at: IpAddr, client: &Pod, port: u16) -> (TcpStream, TcpStream) {
    let listener = server.run(|| TcpListener::bind((at, port)).unwrap());
    let client = client.run(|| TcpStream::connect((at, port)).unwrap());
    let (server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        let timeout = Some(Duration::from_secs(20));
        stream.set_read_timeout(timeout).unwrap();
    }
    (client, server)
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

/// A blocking read of an enrolled socket that is woken for another reason than data, for example
/// for room to write, returns EAGAIN (tcp_bpf_recvmsg, net/ipv4/tcp_bpf.c): the module of the
/// programs names it among the limits. What is looked at here is the bytes.
fn read_to_end(from: &mut TcpStream) -> Vec<u8> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut got = Vec::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        match from.read(&mut piece) {
            Ok(0) => return got,
            Ok(len) => got.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {}
            Err(error) => panic!("{error} after {} bytes", got.len()),
        }
    }
}

#[test]
fn enrolled_connections_carry_every_byte_in_order() {
    world(true, true, |w| {
        for (n, at) in [w.b.v4, w.b.v6].into_iter().enumerate() {
            let (client, server) = connect(&w.b, at, &w.a, 7000 + n as u16);
            assert_eq!(enrolled().len(), 2, "both ends");
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let other = thread::spawn(move || transfer(back.0, back.1, 7, 8 << 20));
            transfer(client, server, 3, 8 << 20);
            other.join().unwrap();
            kit::eventually("forgetting closed sockets", || enrolled().is_empty());
        }
    });
}

#[test]
fn enrolled_data_does_not_pass_the_pods_links() {
    kit::fresh(|| {
        let cgroup = Cgroup::enter();
        let datapath = Datapath::load(&DatapathConfig {
            acceleration: true,
            cgroup: Some(cgroup.path.clone()),
            ..kit::config()
        })
        .unwrap();
        datapath.set_node_config(kit::node_config()).unwrap();
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        let sent = || datapath.pod_counters(a.ifindex).unwrap().unwrap().tx_bytes;
        let before = sent();
        let (mut client, mut server) = connect(&b, b.v4, &a, 7000);
        for n in 0..1000u16 {
            let data = pattern(n as u8, 1000);
            client.write_all(&data).unwrap();
            let mut got = vec![0; 1000];
            server.read_exact(&mut got).unwrap();
            assert_eq!(got, data);
        }
        assert!(sent() - before < 100_000, "{}", sent() - before);
        let counted = datapath.acceleration_counters(a.ifindex).unwrap().unwrap();
        assert_eq!(counted.enrolled, 1);
        assert_eq!(counted.passed_bytes, [0; 6]);
    });
}

#[test]
fn a_full_table_is_said_once_and_connections_go_through_tcp() {
    world(true, true, |w| {
        let path = Path::new(names::BPF_DIR).join("ENROLLED");
        let mut map: HashMap<_, ConnectionKey, Enrolled> =
            Map::HashMap(MapData::from_pin(path).unwrap())
                .try_into()
                .unwrap();
        let filler = |n: u32| ConnectionKey {
            netns: 0,
            pad: 0,
            local: Addr::v4([198, 51, 100, 1]),
            remote: Addr::v4([198, 51, 100, 2]),
            local_port: n as u16,
            remote_port: 9,
        };
        for n in 0..MAX_SOCKETS {
            map.insert(filler(n), Enrolled { cookie: 1, sk: 0 }, 0)
                .unwrap();
        }
        let began = Instant::now();
        // Twenty sockets that are refused.
        for port in 7000..7010 {
            let (client, server) = connect(&w.b, w.b.v4, &w.a, port);
            transfer(client, server, 4, 10_000);
        }
        logs::assert_said_rarely(
            &w.datapath,
            began,
            "WARN tcp acceleration: table of sockets is full, connections between pods go through \
             tcp object=\"sock\"",
        );
    });
}

#[test]
fn nothing_is_enrolled_unless_it_is_wanted() {
    for (attached, wanted) in [(false, true), (true, false)] {
        world(attached, wanted, |w| {
            let (client, server) = connect(&w.b, w.b.v4, &w.a, 7000);
            assert_eq!(enrolled(), []);
            transfer(client, server, 1, 1 << 20);
        });
    }
}

#[test]
fn the_node_and_strangers_are_not_enrolled() {
    world(true, true, |w| {
        let local: IpAddr = Ipv4Addr::new(10, 1, 0, 1).into();
        let listener = TcpListener::bind((local, 7000)).unwrap();
        let client = w.a.run(|| TcpStream::connect((local, 7000)).unwrap());
        let (server, _) = listener.accept().unwrap();
        assert_eq!(enrolled(), []);
        transfer(client, server, 1, 1 << 20);
    });
}

#[test]
fn loopback_flows_with_the_same_four_numbers_never_meet() {
    world(true, true, |w| {
        for loopback in ["127.0.0.1", "::1"] {
            let loopback: IpAddr = loopback.parse().unwrap();
            let call = |pod: &Pod| {
                pod.run(|| {
                    let listener = TcpListener::bind((loopback, 7000)).unwrap();
                    let socket = socket2::Socket::new(
                        socket2::Domain::for_address((loopback, 0).into()),
                        socket2::Type::STREAM,
                        None,
                    )
                    .unwrap();
                    socket
                        .bind(&std::net::SocketAddr::from((loopback, 7001)).into())
                        .unwrap();
                    socket
                        .connect(&std::net::SocketAddr::from((loopback, 7000)).into())
                        .unwrap();
                    (TcpStream::from(socket), listener.accept().unwrap().0)
                })
            };
            let (one, other) = (call(&w.a), call(&w.b));
            assert_eq!(one.0.local_addr().unwrap(), other.0.local_addr().unwrap());
            assert_eq!(one.0.peer_addr().unwrap(), other.0.peer_addr().unwrap());
            assert_eq!(enrolled(), []);
            let parallel = thread::spawn(move || transfer(other.0, other.1, 9, 1 << 20));
            transfer(one.0, one.1, 5, 1 << 20);
            parallel.join().unwrap();
        }
    });
}

#[test]
fn a_restart_keeps_enrolled_connections() {
    kit::fresh(|| {
        let cgroup = Cgroup::enter();
        let config = DatapathConfig {
            acceleration: true,
            cgroup: Some(cgroup.path.clone()),
            ..kit::config()
        };
        let datapath = Datapath::load(&config).unwrap();
        datapath.set_node_config(kit::node_config()).unwrap();
        let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
        let (mut client, mut server) = connect(&b, b.v4, &a, 7000);
        let mut ask = || {
            let mut got = [0; 4];
            client.write_all(b"ping").unwrap();
            server.read_exact(&mut got).unwrap();
            server.write_all(b"pong").unwrap();
            client.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"pong");
        };
        ask();
        drop(datapath);
        ask();
        let datapath = Datapath::load(&config).unwrap();
        ask();
        assert_eq!(enrolled().len(), 2);
        drop(datapath);
        // Turned off: no new ones.
        let _datapath = Datapath::load(&kit::config()).unwrap();
        ask();
        kit::eventually("no more enrolment", || {
            let before = enrolled().len();
            let (client, server) = connect(&b, b.v4, &a, 7001);
            let none = enrolled().len() == before;
            transfer(client, server, 2, 1000);
            none
        });
    });
}
