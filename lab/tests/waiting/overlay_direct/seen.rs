//! What a packet socket sees on the uplinks, as tcpdump does it: VXLAN in both directions, with what pods have sent inside.

use super::*;
use sinabro_common::abi::node::vxlan_header;
use sinabro_lab::traffic::{
    capture::{Capture, Direction},
    packet,
};
use std::net::{IpAddr, UdpSocket};

/// More than it takes for a flow to be remembered (ADR 29).
const DATAGRAMS: u8 = 20;
const ETH: usize = 14;
const UDP: u8 = 17;

/// A packet of UDP.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Datagram {
    from: SocketAddr,
    to: SocketAddr,
    has_checksum: bool,
    payload: Vec<u8>,
}

impl Datagram {
    /// Of a frame, if there is one in it.
    fn read(frame: &[u8]) -> Option<Self> {
        let kind = [*frame.get(12)?, *frame.get(13)?];
        let packet = frame.get(ETH..)?;
        let address = |at: usize, len: usize| -> Option<IpAddr> {
            let bytes = packet.get(at..at + len)?;
            Some(match len {
                4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
                _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
            })
        };
        let (protocol, from, to, udp) = match kind {
            [0x08, 0x00] => (packet.get(9)?, address(12, 4)?, address(16, 4)?, 20),
            [0x86, 0xdd] => (packet.get(6)?, address(8, 16)?, address(24, 16)?, 40),
            _ => return None,
        };
        if *protocol != UDP {
            return None;
        }
        let udp = packet.get(udp..)?;
        let field = |at: usize| Some(u16::from_be_bytes([*udp.get(at)?, *udp.get(at + 1)?]));
        Some(Self {
            from: SocketAddr::new(from, field(0)?),
            to: SocketAddr::new(to, field(2)?),
            has_checksum: field(6)? != 0,
            payload: udp.get(8..field(4)?.into())?.to_vec(),
        })
    }
}

/// What was seen of one flow on a node's uplink: the outer packet, and what is in it.
type Seen = Vec<(Direction, Datagram, Datagram)>;

fn seen(capture: &Capture, pods: &[IpAddr]) -> Seen {
    let mut seen = Vec::new();
    for (direction, frame) in capture.frames().unwrap() {
        let Some(outer) = Datagram::read(&frame) else {
            continue;
        };
        let is_bare = pods.contains(&outer.from.ip()) || pods.contains(&outer.to.ip());
        assert!(!is_bare, "{direction:?} without a tunnel: {outer:?}");
        if outer.to.port() != names::VXLAN_PORT {
            continue;
        }
        let (header, inside) = outer.payload.split_at(8);
        assert_eq!(header, vxlan_header(names::VXLAN_VNI), "{outer:?}");
        let inner = Datagram::read(inside).unwrap_or_else(|| panic!("{outer:?}"));
        seen.push((direction, outer, inner));
    }
    seen
}

/// Numbers there and back, each answered before the next is sent.
fn numbers(client: &UdpSocket, server: &UdpSocket) {
    let mut buffer = [0; 64];
    for number in 0..DATAGRAMS {
        client.send(&payload(number)).unwrap();
        let (len, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(buffer[..len], payload(number));
        server.send_to(&payload(number), from).unwrap();
        let len = client.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..len], payload(number));
    }
}

fn payload(number: u8) -> Vec<u8> {
    (0..=number).collect()
}

fn is_seen(world: &World) {
    let [one, two] = &world.pods;
    let nodes = world.lab.nodes();
    let tunnels = [0, 1].map(|at| nodes[at].addresses()[0]);
    for (own, address) in one.addresses().into_iter().zip(two.addresses()) {
        let captures = [0, 1].map(|at| {
            let place = nodes[at].place();
            let uplink = packet::interface(place, "eth0").unwrap();
            Capture::start(place, uplink).unwrap()
        });
        let path = Path::new("numbers", one.place(), two.place(), address);
        let (client, server) = path.datagrams().unwrap();
        for socket in [&client, &server] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        let ends = [&client, &server].map(|end| end.local_addr().unwrap());
        assert_eq!(ends[0].ip(), own);
        let counts = world.counts_of(|| {
            assert_eq!(world.carried(|| numbers(&client, &server)), [[0, 0]; 2]);
        });
        for counts in counts {
            let PathPackets { sent, received } = counts.direct;
            assert_eq!([sent, received], [u64::from(DATAGRAMS); 2]);
        }
        let [of_first, of_second] = captures
            .each_ref()
            .map(|capture| seen(capture, &[own, address]));
        // By the direction in which the first node sees it: what its pod sent goes out there and comes in at the other.
        for (there, back, at) in [
            (Direction::Out, Direction::In, of_first.clone()),
            (Direction::In, Direction::Out, of_second.clone()),
        ] {
            for (direction, [from, to]) in [(there, [0, 1]), (back, [1, 0])] {
                let of_direction = at.iter().filter(|(of, ..)| *of == direction);
                let of_direction: Vec<_> = of_direction.collect();
                for ((_, outer, inner), number) in of_direction.iter().zip(0..) {
                    assert_eq!(
                        [outer.from.ip(), outer.to.ip()],
                        [tunnels[from], tunnels[to]]
                    );
                    // One path for one flow (RFC 7348 §5).
                    assert_eq!(outer.from, of_direction[0].1.from);
                    assert!(!outer.has_checksum && inner.has_checksum);
                    assert_eq!([inner.from, inner.to], [ends[from], ends[to]]);
                    assert_eq!(inner.payload, payload(number));
                }
                assert_eq!(
                    of_direction.len(),
                    usize::from(DATAGRAMS),
                    "{direction:?} {address}"
                );
            }
        }
        // And nothing in between has another idea of them.
        let packets = |seen: &Seen, direction| -> Vec<_> {
            let of = seen.iter().filter(|(of, ..)| *of == direction);
            of.map(|(_, outer, inner)| (outer.clone(), inner.clone()))
                .collect()
        };
        for (first, second) in [
            (Direction::Out, Direction::In),
            (Direction::In, Direction::Out),
        ] {
            assert_eq!(packets(&of_first, first), packets(&of_second, second));
        }
    }
}

#[test]
fn the_uplink_shows_vxlan_of_what_goes_past_the_stack() {
    is_seen(&native::shared([&[], &[]]));
}

#[test]
fn the_uplink_shows_vxlan_of_what_goes_past_the_stack_over_ipv6() {
    let by_ipv6 = |lab: &Lab| over_ipv6::nodes(lab, [true; 2]);
    is_seen(&World::on(by_ipv6, [&[], &[]]));
}
