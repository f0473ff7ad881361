//! Two ends that heard from each other, whose frames the tests make themselves.

use super::kit::{World, eth0, far, far_router};
use nix::sys::socket::{setsockopt, sockopt};
use sinabro_common::names;
use sinabro_lab::{
    Place,
    traffic::{
        PATIENCE, bind,
        packet::{Datagram, Interface, SRC_PORT, inject},
        readable,
    },
};
use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Instant,
};

/// A pod's socket and the far host's, which have heard from each other, and how frames go from one to
/// the other.
pub struct Ends {
    pub pod: End,
    pub far: End,
}

pub struct End {
    pub place: Place,
    interface: Interface,
    pub socket: UdpSocket,
    router: [u8; 6],
    /// The other, as this one knows it.
    other: SocketAddr,
}

impl Ends {
    pub fn new(world: &World, pod: usize, family: usize) -> Self {
        Self::with(world, pod, bind(&world.beyond, far()[family]))
    }

    /// Of another pod, which speaks to the same socket.
    pub fn beside(&self, world: &World, pod: usize) -> Self {
        Self::with(world, pod, self.far.socket.try_clone().unwrap())
    }

    fn with(world: &World, pod: usize, far_socket: UdpSocket) -> Self {
        let pod = world.pod(pod);
        let far = far_socket.local_addr().unwrap().ip();
        let family = usize::from(far.is_ipv6());
        let pod_socket = bind(pod.place(), pod.addresses()[family]);
        let other = SocketAddr::new(far, SRC_PORT);
        pod_socket.send_to(b"here I am", other).unwrap();
        assert!(readable(&far_socket, Instant::now() + PATIENCE).unwrap());
        let (_, from) = far_socket.recv_from(&mut [0; 64]).unwrap();
        assert_eq!(from.ip(), world.own()[family]);
        Self {
            pod: End {
                place: pod.place().clone(),
                interface: eth0(pod.place()),
                socket: pod_socket,
                router: names::HOST_MAC,
                other,
            },
            far: End {
                place: world.beyond.clone(),
                interface: eth0(&world.beyond),
                socket: far_socket,
                router: far_router(world),
                other: from,
            },
        }
    }

    /// Both ways.
    pub fn ways(&self) -> [(&str, &End, &End); 2] {
        [
            ("there", &self.pod, &self.far),
            ("back", &self.far, &self.pod),
        ]
    }
}

impl End {
    pub fn frame(&self, payload: &[u8]) -> Vec<u8> {
        let datagram = Datagram {
            src_mac: self.interface.mac,
            dst_mac: self.router,
            src: self.socket.local_addr().unwrap().ip(),
            dst: self.other.ip(),
            dst_port: self.other.port(),
            payload,
            may_be_cut: true,
        };
        datagram.frame().unwrap()
    }

    pub fn inject(&self, frames: &[Vec<u8>]) {
        inject(&self.place, self.interface, frames).unwrap();
    }

    /// Everything that arrives up to that datagram.
    pub fn hears_up_to(&self, last: &[u8], what: &str) -> Vec<Vec<u8>> {
        let mut heard = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(
                readable(&self.socket, deadline).unwrap(),
                "{what}: {} datagrams arrived, and not the last",
                heard.len()
            );
            let mut buffer = vec![0; 1 << 16];
            let (len, from) = self.socket.recv_from(&mut buffer).unwrap();
            assert_eq!(from, self.other, "{what}");
            buffer.truncate(len);
            if buffer == last {
                return heard;
            }
            heard.push(buffer);
        }
    }
}

fn bind(place: &Place, address: IpAddr) -> UdpSocket {
    /// Of datagrams that are read once all of them were sent.
    const BUFFER: usize = 8 << 20;
    let bound = place.run(|| {
        let socket = bind::udp((address, SRC_PORT))?;
        setsockopt(&socket, sockopt::RcvBufForce, &BUFFER)?;
        Ok(socket)
    });
    bound.unwrap()
}

/// Bytes that are different in each datagram, and at each place of it.
pub fn payload(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| ((seed + 1) * 31 + at * 7 + at / 251) as u8)
        .collect()
}

/// Ids by which no two packets of a test are taken for one.
pub fn next_id() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0x100);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
