//! A TCP of the application's own, which knows of all the ways only the link's MTU and is deaf to ICMP:
//! as a virtual machine's, or a sandbox's.

use super::kit::{
    FAMILIES, by_both_ways, eth0, full_packets, misfits, mtus, next_port, scenes, wires,
};
use anyhow::{Result, anyhow, ensure};
use nix::{
    errno::Errno,
    sys::socket::{setsockopt, sockopt::RcvBufForce},
};
use sinabro_common::names;
use sinabro_lab::{
    Place, Pod,
    checks::Scene,
    lab::UNDERLAY_MTU,
    traffic::{
        self, PATIENCE, any, packet, readable,
        stream::{byte_at, receive, send},
    },
};
use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken},
    socket::tcp,
    time::Instant as Time,
    wire::{HardwareAddress, IpAddress, IpCidr},
};
use socket2::Socket;
use std::{
    io::Read as _,
    net::{IpAddr, SocketAddr, TcpListener},
    process::Command,
    thread,
    time::{Duration, Instant},
};

const BYTES: usize = 4 << 20;
const BUFFER: usize = 1 << 20;
/// The kernel's TCP of a pod leaves these ports alone.
const PORTS: &str = "50000-59999";

/// A pod's interface, frames of one family.
struct Link {
    socket: Socket,
    interface: packet::Interface,
    v6: bool,
    started: Instant,
    /// The largest packet that was sent.
    largest: usize,
}

impl Link {
    fn now(&self) -> Time {
        Time::from_micros(self.started.elapsed().as_micros() as i64)
    }
}

struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0[14..])
    }
}

struct Sending<'a>(&'a mut Link);

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let kind: [u8; 2] = if self.0.v6 {
            [0x86, 0xdd]
        } else {
            [0x08, 0x00]
        };
        let mut frame = [&names::HOST_MAC[..], &self.0.interface.mac, &kind].concat();
        frame.resize(14 + len, 0);
        let result = f(&mut frame[14..]);
        self.0.largest = self.0.largest.max(len);
        match self.0.socket.send(&frame) {
            // A queue is full: as a lost packet.
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {}
            other => assert_eq!(other.unwrap(), frame.len()),
        }
        result
    }
}

impl Device for Link {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _now: Time) -> Option<(Received, Sending<'_>)> {
        // With the kernel's segments, which may be many in one.
        let mut frame = vec![0; 1 << 17];
        let len = (&self.socket).read(&mut frame).ok()?;
        frame.truncate(len);
        (len > 14).then_some((Received(frame), Sending(self)))
    }

    fn transmit(&mut self, _now: Time) -> Option<Sending<'_>> {
        Some(Sending(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.interface.mtu;
        // The kernel leaves them out where a packet stays on the machine.
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}

struct Stack {
    link: Link,
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    local: SocketAddr,
}

impl Stack {
    fn in_pod(pod: &Pod, family: usize) -> Self {
        keep_ports_from_kernel(pod.place());
        let v6 = family == 1;
        let eth0 = eth0(pod.place());
        let protocol = if v6 { 0x86dd } else { 0x0800 };
        let socket = packet::socket(pod.place(), eth0, protocol).unwrap();
        socket.set_nonblocking(true).unwrap();
        // A stack as simple as this takes long to find out that packets were lost.
        setsockopt(&socket, RcvBufForce, &(64 << 20)).unwrap();
        let mut link = Link {
            socket,
            interface: eth0,
            v6,
            started: Instant::now(),
            largest: 0,
        };
        let now = link.now();
        let mut interface = Interface::new(Config::new(HardwareAddress::Ip), &mut link, now);
        let address = pod.addresses()[family];
        interface.update_ip_addrs(|addresses| {
            // Everything is behind the interface.
            addresses
                .push(IpCidr::new(IpAddress::from(address), 0))
                .unwrap();
        });
        let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
        let mut connection = tcp::Socket::new(buffer(), buffer());
        // Whoever has received everything is not run any more.
        connection.set_ack_delay(None);
        let mut sockets = SocketSet::new(Vec::new());
        let handle = sockets.add(connection);
        Self {
            link,
            interface,
            sockets,
            handle,
            local: SocketAddr::new(address, 30_000 + next_port()),
        }
    }

    fn listen(&mut self) {
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.handle);
        socket.listen(self.local).unwrap();
    }

    fn connect(&mut self, to: SocketAddr) {
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.handle);
        let context = self.interface.context();
        socket.connect(context, to, self.local).unwrap();
    }

    /// Runs until so much is done of what is done at each turn.
    fn run(
        &mut self,
        all: usize,
        mut step: impl FnMut(&mut tcp::Socket<'_>, usize) -> Result<usize>,
    ) -> Result<()> {
        let (mut done, mut deadline) = (0, Instant::now() + PATIENCE);
        while done < all {
            let now = self.link.now();
            self.interface.poll(now, &mut self.link, &mut self.sockets);
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.handle);
            let more = step(socket, done)?;
            if more > 0 {
                deadline = Instant::now() + PATIENCE;
            }
            done += more;
            ensure!(
                Instant::now() < deadline,
                "{done} of {all}: {:?}",
                socket.state()
            );
            let pause = self.interface.poll_delay(self.link.now(), &self.sockets);
            let pause = pause.map_or(Duration::from_millis(20), Duration::from);
            if !pause.is_zero() {
                readable(
                    &self.link.socket,
                    Instant::now() + pause.min(Duration::from_millis(20)),
                )?;
            }
        }
        Ok(())
    }

    fn send(&mut self, bytes: usize) -> Result<()> {
        self.run(bytes, |socket, sent| {
            if !socket.may_send() {
                return Ok(0);
            }
            let sent_now = socket.send(|room| {
                let len = room.len().min(bytes - sent);
                let places = room[..len].iter_mut().zip(sent..);
                places.for_each(|(byte, at)| *byte = byte_at(at));
                (len, len)
            });
            sent_now.map_err(|error| anyhow!("cannot send: {error:?}"))
        })?;
        // What was taken is to arrive.
        self.run(1, |socket, _| Ok(usize::from(socket.send_queue() == 0)))
    }

    fn receive(&mut self, bytes: usize) -> Result<()> {
        self.run(bytes, |socket, received| {
            if !socket.can_recv() {
                return Ok(0);
            }
            let right = socket.recv(|heard| {
                let right = heard
                    .iter()
                    .zip(received..)
                    .all(|(byte, at)| *byte == byte_at(at));
                (heard.len(), right.then_some(heard.len()))
            });
            let right = right.map_err(|error| anyhow!("cannot receive: {error:?}"))?;
            right.ok_or_else(|| anyhow!("what arrived after {received} bytes differs"))
        })
    }
}

/// The kernel's TCP, which knows nothing of these connections, would end them.
fn keep_ports_from_kernel(pod: &Place) {
    let rules = format!(
        "table inet lab {{ chain in {{ type filter hook input priority 0; tcp dport {PORTS} drop; }}; }}"
    );
    let loaded = pod
        .run(|| Ok(Command::new("nft").arg(rules).output()?))
        .unwrap();
    assert!(loaded.status.success(), "{loaded:?}");
}

/// Both ways, with the kernel's own TCP at the other end. The largest packet that the stack sent.
fn with_kernel(
    stack: &mut Stack,
    place: &Place,
    address: IpAddr,
    is_client: bool,
) -> Result<usize> {
    thread::scope(|scope| {
        let kernel = if is_client {
            let bound = place.run(|| Ok(TcpListener::bind((any(address), 0))?));
            let listener = bound?;
            stack.connect(SocketAddr::new(address, listener.local_addr()?.port()));
            scope.spawn(move || -> Result<()> {
                let (peer, _) = traffic::accept(&listener, Instant::now() + PATIENCE)?;
                receive(&peer, BYTES)?;
                send(&peer, BYTES, 1 << 16)
            })
        } else {
            stack.listen();
            let to = stack.local;
            scope.spawn(move || -> Result<()> {
                let peer = place.run(|| Ok(traffic::connect(to)?))?;
                receive(&peer, BYTES)?;
                send(&peer, BYTES, 1 << 16)
            })
        };
        let carried = stack.send(BYTES).and_then(|()| stack.receive(BYTES));
        let served = kernel
            .join()
            .map_err(|_| anyhow!("the kernel's end panicked"))?;
        carried.and(served)?;
        Ok(stack.link.largest)
    })
}

#[test]
fn a_stack_that_goes_by_the_links_mtu_sends_no_more_than_the_way_carries() {
    by_both_ways(sends_no_more_than_the_way_carries);
}

fn sends_no_more_than_the_way_carries(scene: &Scene) {
    scene.lab().route_pods_from_outside().unwrap();
    let (pod, near, far) = (scene.pod(1, 1), scene.pod(1, 2), scene.pod(2, 1));
    let (node, outside) = (scene.node(1).place(), scene.lab().outside().place());
    let (mtu, link) = mtus(scene.node(1), pod);
    let wires = wires(scene);
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let outside_address = scene.lab().outside_addresses().unwrap()[family];
        let own = scene.node(1).addresses()[family];
        for (name, place, address, is_client, most) in [
            (
                "same node",
                near.place(),
                near.addresses()[family],
                true,
                link,
            ),
            ("the node", node, own, true, link),
            ("across", far.place(), far.addresses()[family], true, mtu),
            (
                "across, as a server",
                far.place(),
                far.addresses()[family],
                false,
                mtu,
            ),
            (
                "the outside",
                outside,
                outside_address,
                true,
                UNDERLAY_MTU as usize,
            ),
        ] {
            let what = format!("{name}, {in_family}");
            let before = misfits(node);
            let mut stack = Stack::in_pod(pod, family);
            let largest = with_kernel(&mut stack, place, address, is_client)
                .unwrap_or_else(|error| panic!("{what}: {error:#}"));
            assert!(largest <= most && largest > most / 2, "{what}: {largest}");
            assert_eq!(misfits(node), before, "{what}");
            wires.iter().for_each(|wire| {
                full_packets(wire, &what);
            });
        }
    }
}

/// Of the ways between, only this node knows what they carry.
#[test]
fn an_end_with_a_larger_link_is_not_believed() {
    scenes().for_each(|(_, scene)| is_not_believed(&scene));
}

fn is_not_believed(scene: &Scene) {
    let lab = scene.lab();
    lab.route_pods_from_outside().unwrap();
    lab.outside().place().set_mtu("eth0", 9000).unwrap();
    lab.router().place().set_mtu("out0", 9000).unwrap();
    let (pod, outside) = (scene.pod(1, 1), lab.outside().place());
    let wires = wires(scene);
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let address = lab.outside_addresses().unwrap()[family];
        let before = misfits(scene.node(1).place());
        let mut stack = Stack::in_pod(pod, family);
        let largest = with_kernel(&mut stack, outside, address, true)
            .unwrap_or_else(|error| panic!("{in_family}: {error:#}"));
        assert!(largest <= UNDERLAY_MTU as usize, "{in_family}: {largest}");
        assert_eq!(misfits(scene.node(1).place()), before, "{in_family}");
        full_packets(&wires[0], in_family);
    }
}

/// Nobody's kernel sees to it at either end.
#[test]
fn two_such_stacks_on_two_nodes_agree_on_what_the_way_carries() {
    by_both_ways(agree_on_what_the_way_carries);
}

fn agree_on_what_the_way_carries(scene: &Scene) {
    let (pod, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let (mtu, _) = mtus(scene.node(1), pod);
    let nodes = scene.lab().nodes();
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let before: Vec<_> = nodes.iter().map(|node| misfits(node.place())).collect();
        let (mut client, mut server) = (Stack::in_pod(pod, family), Stack::in_pod(far, family));
        server.listen();
        client.connect(server.local);
        thread::scope(|scope| {
            let served = scope.spawn(|| server.receive(BYTES).and_then(|()| server.send(BYTES)));
            client
                .send(BYTES)
                .and_then(|()| client.receive(BYTES))
                .expect(in_family);
            served.join().unwrap().expect(in_family);
        });
        for stack in [client, server] {
            let largest = stack.link.largest;
            assert!(
                largest <= mtu && largest > mtu / 2,
                "{in_family}: {largest}"
            );
        }
        let after: Vec<_> = nodes.iter().map(|node| misfits(node.place())).collect();
        assert_eq!(after, before, "{in_family}");
    }
}
