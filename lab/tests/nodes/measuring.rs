//! The traffic that benchmarks measure is what it says.

use anyhow::Result;
use nix::{sched::sched_getaffinity, unistd::Pid};
use sinabro_lab::{
    Place,
    traffic::{
        brief::brief,
        datagrams::datagrams,
        one_way::{one_way, streams},
        round_trips::{latency, round_trips},
        seat::Ends,
    },
};
use sinabro_netlink::NetNs;
use std::{net::Ipv4Addr, thread, time::Duration};

const TIME: Duration = Duration::from_millis(100);

/// Over this machine's loopback.
fn with_ends(f: impl FnOnce(Ends<'_>) -> Result<()>) -> Result<()> {
    let place = Place::new("here", NetNs::open("/proc/self/ns/net")?);
    f(Ends::apart(&place, &place, Ipv4Addr::LOCALHOST.into())?)
}

#[test]
fn an_end_and_its_threads_stay_on_their_cpu() -> Result<()> {
    with_ends(|ends| {
        let here = || sched_getaffinity(Pid::from_raw(0));
        let (own, inherited) = ends
            .server
            .run(|| Ok((here()?, thread::scope(|s| s.spawn(here).join().unwrap())?)))?;
        for cpus in [own, inherited] {
            assert!(cpus.is_set(ends.server.cpu)?);
            let count = (0..nix::sched::CpuSet::count()).filter(|cpu| cpus.is_set(*cpu).unwrap());
            assert_eq!(count.count(), 1);
        }
        Ok(())
    })
}

#[test]
fn every_kind_of_traffic_counts_what_arrived() -> Result<()> {
    with_ends(|ends| {
        let listener = ends.listen(0)?;
        for message in [1, 100_000] {
            let measured = one_way(ends, &listener, message, TIME)?;
            assert!(measured.count > 0 && measured.cpu > Duration::ZERO);
            assert_eq!(measured.count % message as u64, 0);
        }
        let measured = streams(ends, &listener, 8, 100_000, TIME)?;
        assert!(measured.count >= 800_000 && measured.time > Duration::ZERO);
        // More than the sockets' buffers hold, both ways, over connections of one thread.
        for (size, connections) in [(1, 1), (64 << 10, 1), (1, 16), (1 << 20, 16)] {
            let measured = round_trips(ends, &listener, size, connections, TIME)?;
            assert!(measured.count >= connections as u64);
        }
        let measured = brief(ends, &listener, 4, 10, TIME)?;
        assert!(measured.count > 0);
        for size in [64, 1400] {
            let measured = datagrams(ends, size, TIME)?;
            assert!(measured.received.count > 0 && measured.received.count <= measured.sent);
        }
        let latency = latency(ends, 100)?;
        assert!(latency.percentile(50.0) <= latency.percentile(99.0));
        assert!(latency.percentile(0.0) > Duration::ZERO);
        Ok(())
    })
}
