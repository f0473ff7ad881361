//! Services at pods' links, on single packets and with traffic.

mod choice;
mod endings;
mod model;
mod outside;
mod refusals;
mod room;
mod straight;
mod traffic;
mod unallocated;
mod ways;

use crate::{
    kit::{self, Pod},
    packet::{self, ACK, FIN, Ip, RST, SCTP, SYN, TCP, UDP, see},
    run::{DROP, PASS, Programs, REDIRECT},
    uplink_hooks::{aliases, check_table, set_source, table},
};
use sinabro_agent::datapath::{Datapath, DatapathConfig, monotonic_ns};
use sinabro_common::{
    abi::{
        drop::DropReason,
        service::{BACKEND_SERVING, Backend, Frontend, FrontendKey, Kind, Set, Slot},
    },
    names::HOST_MAC,
};
use std::{collections::HashSet, net::IpAddr};

type At = (IpAddr, u16);

const PROTOCOLS: [u8; 3] = [TCP, UDP, SCTP];
const SECOND: u64 = 1_000_000_000;

struct World {
    datapath: Datapath,
    programs: Programs,
    a: Pod,
    b: Pod,
}

fn world<T: Send>(test: impl FnOnce(World) -> T + Send) -> T {
    world_with(&kit::config(), test)
}

fn world_with<T: Send>(config: &DatapathConfig, test: impl FnOnce(World) -> T + Send) -> T {
    let config = config.clone();
    kit::fresh(move || {
        let datapath = kit::load_with(&config);
        let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
        let world = World {
            programs: Programs::of(&datapath),
            datapath,
            a,
            b,
        };
        turn(&world.datapath, true);
        test(world)
    })
}

/// Whether Services are translated.
fn turn(datapath: &Datapath, on: bool) {
    datapath.set_services(on).unwrap();
}

fn address(like: IpAddr, v4: &str, v6: &str) -> IpAddr {
    let text = if like.is_ipv4() { v4 } else { v6 };
    text.parse().unwrap()
}

/// A Service's address.
fn vip(like: IpAddr) -> IpAddr {
    address(like, "10.96.0.10", "fd00:96::10")
}

/// A pod of another node.
fn far(like: IpAddr, n: u8) -> IpAddr {
    address(like, &format!("10.1.7.{n}"), &format!("fd00:1:7::{n:x}"))
}

/// Fresh endpoints of other nodes.
fn endpoints(like: IpAddr, count: u8) -> Vec<At> {
    (1..=count)
        .map(|n| (far(like, n), 8000 + u16::from(n)))
        .collect()
}

/// A Service's port, by a number that gives it ids and slots of its own.
pub struct Service<'a> {
    datapath: &'a Datapath,
    number: u32,
    proto: u8,
}

const IDS: u32 = 64;

impl Service<'_> {
    fn backend(&self, id: u32, at: At, flags: u16, generation: u32) {
        let backend = Backend {
            addr: at.0.into(),
            port: at.1.to_be_bytes(),
            flags,
            generation,
        };
        let services = self.datapath.services();
        services
            .put_backend(self.number * IDS + id, backend.with_proto(self.proto))
            .unwrap();
    }

    fn slots(&self, generation: u32, ids: impl IntoIterator<Item = u32>) -> u32 {
        let base = self.number * IDS;
        let slot = |id| Slot {
            backend: base + id,
            generation,
        };
        let slots: Vec<_> = ids.into_iter().map(slot).collect();
        self.datapath.services().put_slots(base, &slots).unwrap();
        slots.len() as u32
    }

    /// Chooses from these, all of which are of this generation.
    fn balance(&self, endpoints: &[At], generation: u32) {
        for (id, at) in (0..).zip(endpoints) {
            self.backend(id, *at, BACKEND_SERVING, generation);
        }
        let count = self.slots(generation, 0..endpoints.len() as u32);
        self.set(Kind::Balance, count);
    }

    fn set(&self, kind: Kind, count: u32) {
        let set = Set::new(kind, self.number * IDS, count);
        self.datapath.services().put_set(self.number, set).unwrap();
    }

    fn frontend(&self, at: At, affinity_seconds: u32) {
        let frontend = Frontend {
            inside: self.number,
            outside: self.number,
            service: self.number,
            affinity_seconds,
            flags: 0,
        };
        let services = self.datapath.services();
        services.put_frontend(self.key(at), frontend).unwrap();
        services
            .put_frontend(FrontendKey::address(at.0.into()), frontend)
            .unwrap();
    }

    fn key(&self, at: At) -> FrontendKey {
        FrontendKey {
            addr: at.0.into(),
            port: at.1.to_be_bytes(),
            proto: self.proto,
            pad: 0,
        }
    }
}

/// What begins a connection of a protocol, or the next packet of one.
fn make(proto: u8, src: At, dst: At, flags: u8) -> Ip {
    match proto {
        TCP => packet::tcp(src, dst, flags, b"hello"),
        UDP => packet::udp(src, dst, b"hello"),
        _ => packet::sctp(src, dst, b"hello"),
    }
}

/// A Service at [`vip`] port 80 with these endpoints.
pub fn publish<'a>(
    datapath: &'a Datapath,
    number: u32,
    proto: u8,
    endpoints: &[At],
) -> (Service<'a>, At) {
    let service = Service {
        datapath,
        number,
        proto,
    };
    let at = (vip(endpoints[0].0), 80);
    service.balance(endpoints, 1);
    service.frontend(at, 0);
    (service, at)
}

impl World {
    fn service(&self, number: u32, proto: u8) -> Service<'_> {
        Service {
            datapath: &self.datapath,
            number,
            proto,
        }
    }

    fn publish(&self, number: u32, proto: u8, endpoints: &[At]) -> (Service<'_>, At) {
        publish(&self.datapath, number, proto, endpoints)
    }

    fn sent_by(&self, pod: &Pod, ip: &Ip) -> (i32, Vec<u8>) {
        let frame = frame_from(pod, ip);
        self.programs.run("pod_out", pod.ifindex, &frame)
    }

    fn to_pod(&self, pod: &Pod, ip: &Ip) -> (i32, Vec<u8>) {
        let frame = frame_to(pod, ip);
        self.programs.run("pod_in", pod.ifindex, &frame)
    }

    /// What pod a sends goes to the stack, as this.
    fn leaves_as(&self, sent: &Ip, expected: &Ip) {
        let (verdict, out) = self.sent_by(&self.a, sent);
        assert_eq!(verdict, PASS, "{:?}", self.datapath.drops());
        assert_eq!(out, frame_from(&self.a, expected));
    }

    /// What comes to pod a gets there as this.
    fn arrives_as(&self, sent: &Ip, expected: &Ip) {
        let (verdict, out) = self.to_pod(&self.a, sent);
        assert_eq!(verdict, PASS, "{:?}", self.datapath.drops());
        assert_eq!(out, frame_to(&self.a, expected));
    }

    /// Where pod a's packet goes.
    fn goes_to(&self, ip: &Ip) -> At {
        let (verdict, out) = self.sent_by(&self.a, ip);
        assert_eq!(verdict, PASS, "{:?}", self.datapath.drops());
        let seen = see(&out);
        assert_eq!(seen.src, ip.src);
        (seen.dst, seen.ports.1)
    }

    fn dropped(&self, ip: &Ip, reason: DropReason) {
        let before = kit::dropped(&self.datapath, reason);
        let (verdict, _) = self.sent_by(&self.a, ip);
        assert_eq!(verdict, DROP, "{reason:?}");
        assert_eq!(
            kit::dropped(&self.datapath, reason) - before,
            1,
            "{reason:?}: {:?}",
            self.datapath.drops()
        );
    }

    fn sweep_at(&self, seconds: u64) -> u64 {
        let at = monotonic_ns() + seconds * SECOND;
        self.datapath.sweep(at).unwrap()
    }

    /// Addresses of pod a.
    fn clients(&self) -> [IpAddr; 2] {
        [self.a.v4, self.a.v6]
    }
}

fn frame_from(pod: &Pod, ip: &Ip) -> Vec<u8> {
    packet::eth(HOST_MAC, pod.mac, ip.kind(), &ip.bytes())
}

fn frame_to(pod: &Pod, ip: &Ip) -> Vec<u8> {
    packet::eth(pod.mac, HOST_MAC, ip.kind(), &ip.bytes())
}
