//! What the kernel allocates in all, as it says of the whole machine: measured with no other test beside it.

use super::{
    super::{World, ask, connect, read_exact, with_timeout, world, world_with},
    BASE, charges, limited, send, sweep, used,
};
use crate::kit::{self, Pod};
use sinabro_common::abi::acceleration::Skip;
use sinabro_netlink::sysctl;
use std::{
    fs,
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    thread,
    time::Duration,
};

/// What the kernel has allocated for itself and cannot give back.
fn unreclaimable() -> i64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("SUnreclaim:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<i64>().unwrap() << 10
}

/// The same, once the kernel has freed what the world before had: namespaces and their sockets go after their last process.
fn settled() -> i64 {
    let mut last = unreclaimable();
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(300));
        let now = unreclaimable();
        if now > last - (1 << 20) {
            return now;
        }
        last = now;
    }
    panic!("the kernel frees memory for half a minute");
}

/// Connections of one pod to a server that reads nothing, of which most are never accepted, each
/// with so many messages of a byte: what they cost the kernel.
fn hoard(w: &World, connections: usize, messages: usize) -> (i64, Vec<TcpStream>, TcpListener) {
    let listener = w.b.run(|| {
        sysctl::write(&["net", "core", "somaxconn"], "16384").unwrap();
        let listener = TcpListener::bind((w.b.v4, 7000)).unwrap();
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 16384) }, 0);
        listener
    });
    let before = settled();
    let clients: Vec<_> = (0..connections)
        .map(|_| w.a.run(|| TcpStream::connect((w.b.v4, 7000)).unwrap()))
        .collect();
    for client in &clients {
        send(client, messages);
    }
    (unreclaimable() - before, clients, listener)
}

/// The system's own processes take and give back memory, too: of several figures the middle one is compared.
const NOISE: i64 = 48 << 20;
const ROUNDS: usize = 3;

#[test]
fn ten_thousand_connections_with_unread_messages_cost_no_more_than_the_pod_may() {
    let pod_limit = 32 << 20;
    let (connections, messages) = (10_000, 200);
    let limited = || limited(pod_limit, 1 << 30);
    let mut costs: [i64; ROUNDS] = std::array::from_fn(|_| {
        let plain = world(true, false, |w| hoard(&w, connections, messages).0);
        let cost = world_with(limited(), true, true, |w| {
            hoard(&w, connections, messages).0
        });
        println!(
            "plain: {} MiB; accelerated: {} MiB",
            plain >> 20,
            cost >> 20
        );
        cost - plain
    });
    costs.sort_unstable();
    assert!(costs[ROUNDS / 2] < pod_limit as i64 + NOISE, "{costs:?}");
    world_with(limited(), true, true, |w| {
        let c = Pod::live(w.datapath(), 7);
        let (_, clients, listener) = hoard(&w, connections, messages);
        let counted = w.counters(&w.a);
        let used = used(&w, w.a.ifindex);
        assert!(used <= pod_limit && used > pod_limit - 2 * BASE, "{used}");
        // Two ends of as many connections as fit.
        let fit = pod_limit / BASE;
        assert!(
            counted.enrolled > fit / 2 - 10 && counted.enrolled <= fit,
            "{fit}"
        );
        assert!(counted.skipped[Skip::PodLimit as usize] > 4000);
        // Others are as before, and what did not fit was sent all the same.
        let (mut client, mut server) = connect(&w.b, w.b.v6, &c, 7001);
        ask(&mut client, &mut server);
        assert_eq!(w.counters(&c).enrolled, 1);
        let (server, _) = listener.accept().unwrap();
        read_exact(&mut with_timeout(server), messages);
        drop((clients, listener, client));
        kit::eventually("the end of all", || {
            sweep(&w);
            charges()
                .iter()
                .all(|(_, charge)| charge.payer == c.ifindex)
        });
    });
}
