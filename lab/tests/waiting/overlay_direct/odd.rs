//! What the stack has its part in between two nodes, by every way: options and extension headers, packets whose hops end on the way,
//! errors, and a next hop that does not answer. What comes of it by the kernel's way is what has to come of it by the others.

use super::{
    native::{Flags, NATIVE, settled, shared},
    *,
};
use nix::errno::Errno;
use sinabro_lab::traffic::{
    any,
    capture::{Capture, Direction},
    errors, packet, readable,
    trace::{Mode, trace},
};
use std::{
    fmt::Debug,
    net::{TcpListener, UdpSocket},
    ops::Deref,
    os::fd::AsRawFd as _,
    thread,
    time::Instant,
};

/// The kernel's way first, by which the others are judged.
const WAYS: [&[&str]; 3] = [&[KERNEL], &[], &[NATIVE]];
const ETH: usize = 14;
const PATIENT: Duration = Duration::from_secs(15);

/// The same of every way, as the kernel's has it.
fn alike<W: Deref<Target = World>, T: PartialEq + Debug>(
    world: impl Fn(Flags) -> W,
    look: impl Fn(&World, &str) -> T,
) {
    let mut expected = None;
    for flags in WAYS {
        let world = world([flags; 2]);
        let seen = look(&world, &format!("{flags:?}"));
        match &expected {
            None => expected = Some(seen),
            Some(expected) => assert_eq!(&seen, expected, "{flags:?}"),
        }
    }
}

/// For what changes something there.
fn own(flags: Flags) -> Box<World> {
    Box::new(settled(flags))
}

/// An option of a socket's of any length.
fn set(socket: &UdpSocket, (level, option): (i32, i32), bytes: &[u8]) {
    // SAFETY: the option's bytes and their length are given.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            bytes.as_ptr().cast(),
            bytes.len() as libc::socklen_t,
        )
    };
    Errno::result(set).unwrap();
}

/// Sockets of two pods, each connected to the other.
fn pair(world: &World, family: usize) -> [UdpSocket; 2] {
    let sockets = [0, 1].map(|at| {
        let pod = &world.pods[at];
        let bind = || Ok(UdpSocket::bind((pod.addresses()[family], 0))?);
        pod.place().run(bind).unwrap()
    });
    let addresses = [0, 1].map(|at| sockets[at].local_addr().unwrap());
    for (at, socket) in sockets.iter().enumerate() {
        socket.connect(addresses[1 - at]).unwrap();
    }
    sockets
}

/// What of a frame's IP header is options, with the numbers in them that are times made zero; of IPv6 the headers between it and UDP.
fn options(frame: &[u8]) -> Option<Vec<u8>> {
    const UDP: u8 = 17;
    const TIMES: u8 = 68;
    let packet = frame.get(ETH..)?;
    match [frame[12], frame[13]] {
        [0x08, 0x00] if packet[9] == UDP => {
            let mut options = packet[20..usize::from(packet[0] & 15) * 4].to_vec();
            if options.first() == Some(&TIMES) {
                options[4..].fill(0);
            }
            Some(options)
        }
        [0x86, 0xdd] => {
            let (mut kind, mut at) = (packet[6], 40);
            while matches!(kind, 0 | 60) {
                (kind, at) = (packet[at], at + usize::from(packet[at + 1]) * 8 + 8);
            }
            (kind == UDP).then(|| packet[40..at].to_vec())
        }
        _ => None,
    }
}

/// Routes that are recorded and times that are noted on the way (RFC 791 §3.1), and headers for each hop and for the destination
/// (RFC 8200 §4.3, §4.6), of options that say nothing.
#[test]
fn options_arrive_with_what_was_written_on_the_way() {
    let record = [[7, 39, 4].as_slice(), &[0; 37]].concat();
    let times = [[68, 36, 5, 0].as_slice(), &[0; 32]].concat();
    let padding = [0, 0, 1, 4, 0, 0, 0, 0].to_vec();
    let all = [
        (0, libc::IPPROTO_IP, libc::IP_OPTIONS, record),
        (0, libc::IPPROTO_IP, libc::IP_OPTIONS, times),
        (1, libc::IPPROTO_IPV6, libc::IPV6_HOPOPTS, padding.clone()),
        (1, libc::IPPROTO_IPV6, libc::IPV6_DSTOPTS, padding),
    ];
    alike(shared, |world, what| {
        let mut seen = Vec::new();
        for (family, level, option, bytes) in &all {
            let sockets = pair(world, *family);
            for (from, to) in [(0, 1), (1, 0)] {
                set(&sockets[from], (*level, *option), bytes);
                let place = world.pods[to].place();
                let eth0 = packet::interface(place, "eth0").unwrap();
                let capture = Capture::start(place, eth0).unwrap();
                sockets[from].send(b"with options").unwrap();
                let came = readable(&sockets[to], Instant::now() + PATIENT).unwrap();
                assert!(came, "{what}, {option}");
                let mut buffer = [0; 64];
                let len = sockets[to].recv(&mut buffer).unwrap();
                assert_eq!(&buffer[..len], b"with options");
                let frames = capture.frames().unwrap().into_iter();
                let incoming = frames.filter(|(direction, _)| *direction == Direction::In);
                let options: Vec<_> = incoming.filter_map(|(_, frame)| options(&frame)).collect();
                assert!(!options[0].is_empty(), "{what}: {options:?}");
                seen.push(options);
            }
        }
        seen
    });
}

/// Whose hops end at the first node or at the second, and what comes of one more.
#[test]
fn every_hop_between_two_pods_is_named() {
    alike(shared, |world, what| {
        let [one, two] = &world.pods;
        let mut seen = Vec::new();
        for address in two.addresses() {
            for mode in Mode::ALL {
                let hops = trace(one.place(), mode, SocketAddr::new(address, 33_434)).unwrap();
                assert_eq!(hops.len(), 3, "{what}, {mode:?}: {hops:?}");
                seen.push(hops);
            }
        }
        seen
    });
}

#[test]
fn a_closed_port_of_another_nodes_pod_is_heard_of() {
    for flags in WAYS {
        let world = shared([flags; 2]);
        let [one, two] = &world.pods;
        for (from, to) in [(one, two), (two, one)] {
            for address in to.addresses() {
                let closed = SocketAddr::new(address, 33_434);
                let heard = errors::of_closed_port(from.place(), closed, b"anybody?").unwrap();
                assert!(heard.is_closed_port() && heard.from == address, "{heard:?}");
                assert_eq!(heard.quoted, b"anybody?");
                // One that keeps no errors is told by the next call.
                let client = from.place().run(|| Ok(UdpSocket::bind((any(address), 0))?));
                let client = client.unwrap();
                client.connect(closed).unwrap();
                client.set_read_timeout(Some(PATIENT)).unwrap();
                client.send(b"anybody?").unwrap();
                let refused = client.recv(&mut [0]).unwrap_err();
                assert_eq!(
                    refused.raw_os_error(),
                    Some(libc::ECONNREFUSED),
                    "{refused}"
                );
                let refused = tcp::connects(from.place(), closed).unwrap_err();
                assert!(format!("{refused:#}").contains("refused"), "{refused:#}");
            }
        }
    }
}

/// Has the second node answer nobody who asks for its MAC address, nor ask for one.
fn silence(world: &World, is_silent: bool) {
    let rules = match is_silent {
        true => {
            "table netdev silence { chain in { type filter hook ingress device to-n2 priority 0;
                ether type arp drop; icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } drop; }; }"
        }
        false => "delete table netdev silence",
    };
    world.lab.router().place().command(&["nft", rules]).unwrap();
}

fn forget(node: &Node) {
    node.command(&["ip", "neigh", "flush", "dev", "eth0"])
        .unwrap();
}

/// While nobody answers for the next hop: what a pod that asks hears, by UDP, for longer than the kernel asks for (three times, a
/// second each). Then a connection that it began meanwhile, and all that it sends, arrive.
#[test]
fn a_next_hop_that_does_not_answer_is_waited_for() {
    alike(own, |world, what| {
        let [one, two] = &world.pods;
        let n1 = world.lab.node(1);
        exchange(world);
        let mut all = Vec::new();
        for (family, address) in two.addresses().into_iter().enumerate() {
            let [client, server] = pair(world, family);
            errors::keep(&client, address.is_ipv4()).unwrap();
            let listen = || Ok(TcpListener::bind((address, 0))?);
            let listener = two.place().run(listen).unwrap();
            let target = listener.local_addr().unwrap();
            silence(world, true);
            forget(n1);
            let connection = thread::scope(|scope| {
                let connects = scope.spawn(|| tcp::connects(one.place(), target));
                let mut heard = Vec::new();
                let until = Instant::now() + Duration::from_secs(5);
                let mut sent = 0u32;
                while Instant::now() < until {
                    // An error of one before is told by the call.
                    if let Err(error) = client.send(&sent.to_be_bytes()) {
                        heard.push(error.raw_os_error());
                    }
                    sent += 1;
                    match errors::pending(&client) {
                        Ok(None) => {}
                        Ok(Some(error)) => {
                            heard.push(Some(i32::from(error.kind) << 8 | i32::from(error.code)))
                        }
                        Err(_) => heard.push(None),
                    }
                    thread::sleep(Duration::from_millis(50));
                }
                let mut arrived = 0;
                server.set_nonblocking(true).unwrap();
                while server.recv(&mut [0; 4]).is_ok() {
                    arrived += 1;
                }
                assert_eq!(arrived, 0, "{what}: of {sent}");
                silence(world, false);
                heard.dedup();
                all.push(heard);
                connects.join().unwrap()
            });
            connection.unwrap_or_else(|error| panic!("{what}, {address}: {error:#}"));
            eventually("what is sent to arrive", || {
                let _ = client.send(b"back");
                thread::sleep(Duration::from_millis(20));
                server.recv(&mut [0; 4]).is_ok()
            });
        }
        // And by the same way as before.
        for counts in world.counts_of(|| exchange(world)) {
            let by = match what.contains(KERNEL) {
                true => counts.kernel,
                false if what.contains(NATIVE) => counts.native,
                false => counts.direct,
            };
            assert!(is_both_ways(by), "{what}: {counts:?}");
            let all = [counts.direct, counts.native, counts.kernel];
            assert_eq!(
                all.into_iter().filter(|by| *by != NOTHING).count(),
                1,
                "{what}: {counts:?}"
            );
        }
        all
    });
}
