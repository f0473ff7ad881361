//! Two processors at the same connections, or one and the agent.

use super::*;
use std::{
    hint,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Has two threads begin at the same moment: a barrier wakes one of them when the other has done all that is to be seen here.
#[derive(Default)]
struct Start(AtomicUsize);

impl Start {
    fn wait(&self, round: usize) {
        let all = 2 * (round + 1);
        let mut looked = 0;
        self.0.fetch_add(1, Ordering::AcqRel);
        while self.0.load(Ordering::Acquire) < all {
            hint::spin_loop();
            looked += 1;
            // There may be one processor.
            if looked % 10_000 == 0 {
                thread::yield_now();
            }
        }
    }
}

/// Opens a connection of the first pod and closes it, so long ago that its port may be another's. Its alias's key.
fn is_long_over(w: &World, from: u16, to: (IpAddr, u16)) -> Tuple {
    let send = |flags| w.sent(&packet::tcp((w.a.v4, from), to, flags, b""));
    let node = (NODE_IP, send(SYN).ports.0);
    w.received(&packet::tcp(to, node, SYN | ACK, b""));
    send(FIN | ACK);
    w.received(&packet::tcp(to, node, FIN | ACK, b""));
    let key = Tuple {
        src: to.0.into(),
        dst: node.0.into(),
        src_port: to.1.to_be_bytes(),
        dst_port: node.1.to_be_bytes(),
        proto: TCP,
        pad: [0; 3],
    };
    let mut all = open::<Tuple, Alias>("ALIASES");
    let mut alias = all.get(&key, 0).unwrap();
    assert_ne!(alias.reusable_ns, 0);
    alias.reusable_ns = 1;
    all.insert(key, alias, 0).unwrap();
    key
}

/// There is one port.
fn scarce(w: &World) {
    let mut config = kit::node_config();
    (config.nat_port_min, config.nat_port_max) = (61000, 61000);
    w.datapath.set_node_config(config).unwrap();
}

#[test]
fn who_loses_a_port_of_a_closed_connection_leaves_it_as_it_was() {
    world(|w| {
        scarce(&w);
        let key = is_long_over(&w, 1, (FAR, 80));
        let with_takers = |takers| {
            let mut all = open::<Tuple, Alias>("ALIASES");
            let mut alias = all.get(&key, 0).unwrap();
            alias.takers = takers;
            all.insert(key, alias, 0).unwrap();
        };
        let takers = || open::<Tuple, Alias>("ALIASES").get(&key, 0).unwrap().takers;
        let syn = packet::tcp((w.b.v4, 2), (FAR, 80), SYN, b"");
        // Another processor wants it at this moment.
        with_takers(1);
        w.dropped("uplink_out", &syn, DropReason::NatPortsExhausted);
        assert_eq!(takers(), 1);
        // So did its owner, whose next connection has another port, if there is one.
        let again = packet::tcp((w.a.v4, 1), (FAR, 80), SYN, b"");
        w.dropped("uplink_out", &again, DropReason::NatPortsExhausted);
        assert_eq!(takers(), 1);
        // It has found these, and does not take it either.
        with_takers(0);
        assert_eq!(w.sent(&syn).ports.0, 61000);
        check_table();
    });
}

#[test]
fn of_two_pods_that_want_the_port_of_a_closed_connection_one_has_it() {
    const ROUNDS: u16 = 4000;
    world_with(&DatapathConfig::default(), |w| {
        scarce(&w);
        let ends = || (1000..1000 + ROUNDS).map(|port| (FAR, port));
        for to in ends() {
            is_long_over(&w, 1, to);
        }
        assert_eq!(table().len(), usize::from(ROUNDS));

        let start = Start::default();
        let run = |pod: IpAddr| -> Vec<i32> {
            let frames = ends().map(|to| World::frame(&packet::tcp((pod, 2), to, SYN, b"")));
            let frames: Vec<_> = frames.collect();
            let verdicts = frames.iter().enumerate().map(|(round, frame)| {
                start.wait(round);
                w.forward(frame).0
            });
            verdicts.collect()
        };
        let (a, b) = thread::scope(|scope| {
            let other = scope.spawn(|| run(w.b.v4));
            (run(w.a.v4), other.join().unwrap())
        });
        for (to, verdicts) in ends().zip(a.into_iter().zip(b)) {
            let answer = packet::tcp(to, (NODE_IP, 61000), SYN | ACK, b"");
            let has = |pod: IpAddr| {
                let back = w.received(&answer);
                assert_eq!((back.dst, back.ports.1), (pod, 2), "{to:?}");
            };
            match verdicts {
                (PASS, DROP) => has(w.a.v4),
                (DROP, PASS) => has(w.b.v4),
                both => panic!("{to:?}: {both:?}"),
            }
        }
        // Nothing is left of those whose ports were taken over.
        let of_first = 1u16.to_be_bytes();
        let old = table().into_keys();
        let old = old.filter(|key| [key.low_port, key.high_port].contains(&of_first));
        assert_eq!((old.count(), table().len()), (0, usize::from(ROUNDS)));
        check_table();
    });
}

/// A packet of a connection that is over begins it again with the same port, while the sweep removes first the record and
/// then the alias.
#[test]
fn a_sweep_beside_packets_leaves_no_connection_without_its_way_back() {
    const ROUNDS: usize = 300;
    world(|w| {
        let mut flows = Vec::new();
        for port in 4000..4032 {
            for (proto, to) in [(TCP, 80), (UDP, 5353)] {
                for pod in [w.a.v4, w.b.v4] {
                    flows.push((pod, port, make(proto, (pod, port), (FAR, to))));
                }
            }
        }
        let answered = || {
            let mut outside = HashSet::new();
            for (pod, port, ip) in &flows {
                let seen = w.sent(ip);
                assert!(outside.insert((seen.proto, seen.ports.0)));
                let back = w.received(&reply_to(&seen));
                assert_eq!((back.dst, back.ports.1), (*pod, *port));
            }
        };
        answered();
        let (barrier, mut removed) = (Barrier::new(2), 0);
        for _ in 0..ROUNDS {
            age(200);
            removed += thread::scope(|scope| {
                let sweep = scope.spawn(|| {
                    barrier.wait();
                    w.sweep_at(0)
                });
                barrier.wait();
                for (_, _, ip) in &flows {
                    w.sent(ip);
                }
                sweep.join().unwrap()
            });
            // What the one before has met half-way is mended by the next.
            w.sweep_at(0);
            answered();
        }
        let all = (ROUNDS * flows.len()) as u64;
        println!("the sweep was first at {removed} of {all}");
        // Two looks at the aliases, at each eighth sweep.
        (0..17).for_each(|_| {
            w.sweep_at(0);
        });
        check_table();
    });
}
