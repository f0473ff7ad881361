//! Packets in parts of which those behind come in before the first, which alone says whose they are.

use super::{
    ends::{End, Ends, next_id, payload},
    fragments::{ORDERS, worlds},
    kit::{FAMILIES, World, eth0, far, far_router},
};
use sinabro_lab::{
    amount::amount,
    traffic::{
        PATIENCE, bind,
        fragment::cut,
        icmp,
        packet::{Datagram, echo_reply, inject},
        readable,
    },
    wait::meet,
};
use sinabro_netlink::sysctl;
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

/// As much as one part of either family has room for.
const PART: usize = 1448;

/// Backwards, the first one last, and then in random orders.
fn in_order(order: u32, parts: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut parts = parts.to_vec();
    match order {
        0 => parts.reverse(),
        1 => parts.rotate_left(1),
        seed => parts = shuffled(&parts, seed),
    }
    parts
}

fn shuffled<T: Clone>(items: &[T], seed: u32) -> Vec<T> {
    // SplitMix64, of which each place takes one number.
    let number = |at: usize| {
        let mut z = (u64::from(seed) << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let mut places: Vec<_> = (0..items.len()).collect();
    places.sort_by_key(|at| number(*at));
    places.into_iter().map(|at| items[at].clone()).collect()
}

/// The stack keeps what came before its first, too, for half a minute (net.ipv4.ipfrag_time), and where it tracks connections
/// puts pods' packets together itself, until there are 4 MB of both. So much room that nothing is lost for that.
fn with_room(world: &World) {
    let limits: [&[&str]; 3] = [
        &["net", "ipv4", "ipfrag_high_thresh"],
        &["net", "ipv6", "ip6frag_high_thresh"],
        &["net", "netfilter", "nf_conntrack_frag6_high_thresh"],
    ];
    for limit in limits {
        let set = || Ok(sysctl::write(limit, "268435456")?);
        world.node().namespace().run(set).unwrap();
    }
}

#[test]
fn large_answers_arrive_in_any_order() {
    for (world, tracked) in worlds() {
        with_room(&world);
        for (family, in_family) in FAMILIES.iter().enumerate() {
            let Ends { pod, far } = Ends::new(&world, 1, family);
            let payload = payload(1, 60_000);
            for order in 0..amount(8, 200) {
                let parts = cut(&far.frame(&payload), next_id(), PART).unwrap();
                far.inject(&in_order(order, &parts));
                let what = format!("order {order}, {tracked}, {in_family}");
                assert!(pod.hears_up_to(&payload, &what).is_empty(), "{what}");
            }
        }
    }
}

#[test]
fn large_pings_are_answered_in_any_order() {
    for (world, tracked) in worlds() {
        world
            .beyond
            .run(|| {
                sysctl::write(&["net", "ipv4", "icmp_echo_ignore_all"], "1")?;
                Ok(sysctl::write(
                    &["net", "ipv6", "icmp", "echo_ignore_all"],
                    "1",
                )?)
            })
            .unwrap();
        for (far, in_family) in far().into_iter().zip(FAMILIES) {
            let ear = ear(&world, far);
            for order in 0..4 {
                let over = AtomicBool::new(false);
                thread::scope(|scope| {
                    scope.spawn(|| {
                        while !over.load(Ordering::Relaxed) {
                            answer(&world, &ear, far, order);
                        }
                    });
                    let heard = icmp::ping_large(world.pod(1).place(), far, 30_000);
                    over.store(true, Ordering::Relaxed);
                    let what = format!("order {order}, {tracked}, {in_family}");
                    heard.unwrap_or_else(|error| panic!("{what}: {error:#}"));
                });
            }
        }
    }
}

/// Where the far host hears echo requests.
fn ear(world: &World, far: IpAddr) -> Socket {
    let (domain, protocol) = match far {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
    };
    let socket = world
        .beyond
        .run(|| Ok(Socket::new(domain, Type::RAW, Some(protocol))?));
    socket.unwrap()
}

/// Answers in the place of the far host's kernel, if it is asked something in a little while.
fn answer(world: &World, ear: &Socket, far: IpAddr, order: u32) {
    if !readable(ear, Instant::now() + Duration::from_millis(10)).unwrap() {
        return;
    }
    let mut buffer = vec![std::mem::MaybeUninit::uninit(); 1 << 16];
    let (len, from) = ear.recv_from(&mut buffer).unwrap();
    // SAFETY: so many bytes were written.
    let heard: Vec<u8> = buffer[..len]
        .iter()
        .map(|b| unsafe { b.assume_init() })
        .collect();
    let asked = &heard[if far.is_ipv4() { 20 } else { 0 }..];
    if asked[0] != if far.is_ipv4() { 8 } else { 128 } {
        return;
    }
    let macs = [far_router(world), eth0(&world.beyond).mac];
    let to = from.as_socket().unwrap().ip();
    let frame = echo_reply(macs, (far, to), asked).unwrap();
    let parts = cut(&frame, next_id(), PART).unwrap();
    let frames = in_order(order, &parts);
    inject(&world.beyond, eth0(&world.beyond), &frames).unwrap();
}

/// What nobody will ever send the first of takes nobody's room but that of older ones. (A kernel that tracks
/// connections keeps such parts itself, and has no room for others then.)
#[test]
fn strays_keep_no_answer_out() {
    let world = World::with(1, &[], &[]);
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let Ends { pod, far } = Ends::new(&world, 1, family);
        let frame = far.frame(&payload(0, 3000));
        let stray = || cut(&frame, next_id(), 1208).unwrap().swap_remove(1);
        let strays = |many: u32| (0..many).map(|_| stray()).collect::<Vec<_>>();
        far.inject(&strays(5000));
        for order in 0..amount(10, 100) {
            let payload = payload(order as usize, 60_000);
            let parts = cut(&far.frame(&payload), next_id(), PART).unwrap();
            let frames = in_order(order, &parts);
            let frames = frames.into_iter().flat_map(|frame| {
                let mut frames = strays(10);
                frames.push(frame);
                frames
            });
            far.inject(&frames.collect::<Vec<_>>());
            let what = format!("order {order}, {in_family}");
            assert!(pod.hears_up_to(&payload, &what).is_empty(), "{what}");
        }
    }
}

#[test]
fn the_nodes_own_arrive_with_the_node_in_any_order() {
    for (world, tracked) in worlds() {
        for (family, in_family) in FAMILIES.iter().enumerate() {
            // So that the node lends its address, and one id is that of a pod's packet before.
            let Ends { pod, far } = Ends::new(&world, 1, family);
            let own = world.own()[family];
            let socket = world.node().place().run(|| bind::udp((own, 7000)));
            let socket = socket.unwrap();
            for (seed, order) in ORDERS.iter().enumerate() {
                let (id, what) = (next_id(), format!("{order:?}, {tracked}, {in_family}"));
                let said = payload(seed, 3000);
                let frame = frame_to(&world, &far, SocketAddr::new(own, 7000), &said);
                if seed % 2 == 0 {
                    far.inject(&cut(&far.frame(&said), id, 1208).unwrap());
                    assert!(pod.hears_up_to(&said, &what).is_empty(), "{what}");
                    let parts = cut(&frame, id, 1208).unwrap();
                    far.inject(&parts);
                } else {
                    let parts = cut(&frame, id, 1208).unwrap();
                    far.inject(&order.map(|at| parts[at].clone()));
                }
                assert!(
                    readable(&socket, Instant::now() + PATIENCE).unwrap(),
                    "{what}"
                );
                let mut heard = vec![0; 1 << 16];
                let (len, _) = socket.recv_from(&mut heard).unwrap();
                assert!(heard[..len] == said, "{what}");
            }
        }
    }
}

/// What the far end sends to a socket that is not the pod's.
fn frame_to(world: &World, far: &End, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let datagram = Datagram {
        src_mac: eth0(&world.beyond).mac,
        dst_mac: far_router(world),
        src: far.socket.local_addr().unwrap().ip(),
        dst: to.ip(),
        dst_port: to.port(),
        payload,
        may_be_cut: true,
    };
    datagram.frame().unwrap()
}

/// All parts of packets to two pods, one among the other.
#[test]
fn parts_of_several_pods_are_not_mixed_up() {
    // Of both pods and twice, no more parts than the kernel takes of others between two of one packet
    // (net.ipv4.ipfrag_max_dist).
    const PACKETS: usize = 5;
    for (world, tracked) in worlds() {
        with_room(&world);
        for (family, in_family) in FAMILIES.iter().enumerate() {
            let one = Ends::new(&world, 1, family);
            let other = one.beside(&world, 2);
            for seed in 0..amount(10, 500) {
                let what = format!("seed {seed}, {tracked}, {in_family}");
                let said = |ends: usize| {
                    let packets = (0..PACKETS).map(move |number| (ends * PACKETS + number, 3000));
                    packets.map(|(number, len)| payload(number, len))
                };
                let mut frames = Vec::new();
                for (number, ends) in [&one, &other].into_iter().enumerate() {
                    for said in said(number) {
                        frames.extend(cut(&ends.far.frame(&said), next_id(), 1208).unwrap());
                    }
                }
                one.far.inject(&shuffled(&frames, seed));
                for (number, ends) in [&one, &other].into_iter().enumerate() {
                    ends.far.inject(&[ends.far.frame(b"the end")]);
                    let mut heard = ends.pod.hears_up_to(b"the end", &what);
                    let mut sent: Vec<_> = said(number).collect();
                    heard.sort();
                    sent.sort();
                    assert!(heard == sent, "{what}: {} of {PACKETS}", heard.len());
                }
            }
        }
    }
}

/// Both parts of a packet at the same moment, by two processors.
#[test]
fn two_processors_lose_no_part() {
    const AT_ONCE: u32 = 50;
    let world = World::with(1, &[], &[]);
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let Ends { pod, far } = Ends::new(&world, 1, family);
        for round in 0..amount(20, 1000) {
            let what = format!("round {round}, {in_family}");
            let said: Vec<_> = (0..AT_ONCE).map(|at| payload(at as usize, 2000)).collect();
            let cut = |said: &Vec<u8>| cut(&far.frame(said), next_id(), 1208).unwrap();
            let parts: Vec<_> = said.iter().map(cut).collect();
            let arrived = AtomicU32::new(0);
            let send = |part: usize| {
                for (number, parts) in parts.iter().enumerate() {
                    meet(&arrived, 2 * (number as u32 + 1));
                    far.inject(&parts[part..=part]);
                }
            };
            thread::scope(|scope| {
                scope.spawn(|| send(0));
                scope.spawn(|| send(1));
            });
            far.inject(&[far.frame(b"the end")]);
            let mut heard = pod.hears_up_to(b"the end", &what);
            let mut sent = said;
            heard.sort();
            sent.sort();
            assert!(heard == sent, "{what}: {} of {AT_ONCE}", heard.len());
        }
    }
}
