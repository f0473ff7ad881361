//! Packets in parts, from pods and to them.

use super::{
    ends::{Ends, next_id, payload},
    kit::{FAMILIES, World, far},
};
use sinabro_lab::traffic::{
    fragment::{cut, cut_at},
    icmp, udp,
};
use std::{thread, time::Duration};

/// As it is where the kernel tracks connections, and puts packets together for that, where it does not, and where all that is in
/// one part goes past the stack.
pub fn worlds() -> [(World, &'static str); 3] {
    [
        (World::new(2), "tracked"),
        (World::with(2, &[], &[]), "untracked"),
        (World::direct(2), "direct"),
    ]
}

#[test]
fn large_datagrams_and_pings_pass_both_ways() {
    for (world, _) in worlds() {
        large_packets(&world);
    }
}

fn large_packets(world: &World) {
    let pod = world.pod(1).place();
    for far in far() {
        for size in [2000, 8 << 10, 60_000] {
            udp::echo(pod, &world.beyond, far, size, false).unwrap();
        }
        icmp::ping_large(pod, far, 30_000).unwrap();
    }
}

#[test]
fn parts_leave_in_whichever_order_they_come() {
    for (world, tracked) in worlds() {
        in_orders(&world, tracked, "there", &ORDERS);
    }
}

/// Whose they are that come in before their first nobody knows until it is there: they wait.
#[test]
fn parts_come_in_in_whichever_order_they_come() {
    for (world, tracked) in worlds() {
        in_orders(&world, tracked, "back", &ORDERS);
    }
}

pub const ORDERS: [[usize; 3]; 6] = [
    [0, 1, 2],
    [0, 2, 1],
    [2, 1, 0],
    [1, 0, 2],
    [1, 2, 0],
    [2, 0, 1],
];

fn in_orders(world: &World, tracked: &str, way: &str, orders: &[[usize; 3]]) {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let ends = Ends::new(world, 1, family);
        let way_of = ends.ways().into_iter().find(|(name, ..)| *name == way);
        let (_, from, to) = way_of.unwrap();
        for (number, order) in orders.iter().enumerate() {
            let what = format!("{way}, order {order:?}, {tracked}, {in_family}");
            let payload = payload(number, 3000);
            let parts = cut(&from.frame(&payload), next_id(), 1208).unwrap();
            from.inject(&order.map(|at| parts[at].clone()));
            assert!(to.hears_up_to(&payload, &what).is_empty(), "{what}");
        }
    }
}

/// As the one who sends them has no more ids than a minute's packets.
#[test]
fn the_id_of_one_pods_packet_is_soon_anothers() {
    for (world, tracked) in worlds() {
        for (family, in_family) in FAMILIES.iter().enumerate() {
            let what = format!("{tracked}, {in_family}");
            let one = Ends::new(&world, 1, family);
            let other = one.beside(&world, 2);
            let (id, payload) = (next_id(), payload(0, 3000));
            let send = |ends: &Ends, order: [usize; 3]| {
                let parts = cut(&ends.far.frame(&payload), id, 1208).unwrap();
                ends.far.inject(&order.map(|at| parts[at].clone()));
                assert!(ends.pod.hears_up_to(&payload, &what).is_empty(), "{what}");
            };
            send(&one, [0, 1, 2]);
            // As long as parts that were overtaken are waited for.
            thread::sleep(Duration::from_millis(1100));
            send(&other, [2, 1, 0]);
        }
    }
}

/// Many packets in parts at once, the parts of all one after the other.
#[test]
fn parts_of_many_packets_are_not_mixed_up() {
    for (world, tracked) in worlds() {
        of_many_packets(&world, tracked);
    }
}

fn of_many_packets(world: &World, tracked: &str) {
    // Less than what makes the kernel give a packet up (net.ipv4.ipfrag_max_dist).
    const MANY: usize = 50;
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let ends = Ends::new(world, 1, family);
        for (way, from, to) in ends.ways() {
            let what = format!("{way}, {tracked}, {in_family}");
            let payloads: Vec<_> = (0..MANY).map(|number| payload(number, 2500)).collect();
            let cut = |payload: &Vec<u8>| cut(&from.frame(payload), next_id(), 1208).unwrap();
            let parts: Vec<_> = payloads.iter().map(cut).collect();
            let frames =
                (0..parts[0].len()).flat_map(|at| parts.iter().map(move |p| p[at].clone()));
            from.inject(&frames.collect::<Vec<_>>());
            from.inject(&[from.frame(b"the end")]);
            let mut heard = to.hears_up_to(b"the end", &what);
            let mut sent = payloads;
            heard.sort();
            sent.sort();
            assert_eq!(heard.len(), sent.len(), "{what}");
            assert!(heard == sent, "{what}: other bytes arrived");
        }
    }
}

/// What they are of nobody can tell: they leave as what they will be parts of, and the receiver drops them when the
/// first does not come; and those that come in reach no pod.
#[test]
fn parts_without_the_first_are_no_packet() {
    for (world, tracked) in worlds() {
        without_first(&world, tracked);
    }
}

fn without_first(world: &World, tracked: &str) {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let ends = Ends::new(world, 1, family);
        for (way, from, to) in ends.ways() {
            let what = format!("{way}, {tracked}, {in_family}");
            for _ in 0..10 {
                let parts = cut(&from.frame(&payload(0, 3000)), next_id(), 1208).unwrap();
                from.inject(&parts[1..]);
            }
            from.inject(&[from.frame(b"the end")]);
            assert!(to.hears_up_to(b"the end", &what).is_empty(), "{what}");
        }
    }
}

/// What overlaps is dropped by who puts it together (RFC 5722, RFC 8200 §4.5), and does no harm to others.
#[test]
fn parts_that_overlap_harm_nobody_else() {
    for (world, tracked) in worlds() {
        overlapping(&world, tracked);
    }
}

fn overlapping(world: &World, tracked: &str) {
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let ends = Ends::new(world, 1, family);
        for (way, from, to) in ends.ways() {
            let what = format!("{way}, {tracked}, {in_family}");
            let (bad, good) = (payload(1, 3000), payload(2, 3000));
            let frame = from.frame(&bad);
            let end = bad.len() + 8;
            for _ in 0..50 {
                let ranges = [0..1208, 1200..2000, 800..1608, 2000..end, 1600..end];
                from.inject(&cut_at(&frame, next_id(), &ranges).unwrap());
            }
            from.inject(&cut(&from.frame(&good), next_id(), 1208).unwrap());
            assert!(to.hears_up_to(&good, &what).is_empty(), "{what}");
        }
    }
}
