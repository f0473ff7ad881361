//! The meter catches what it is for: a blackout of 50 ms, with loss and without.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::wait::wait_for;
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use sinabro_netlink::link;
use std::{net::IpAddr, sync::Barrier, time::Instant};

/// Two namespaces whose links meet in a third, which forwards.
struct Bridge {
    middle: Place,
    path: Path,
}

impl Bridge {
    fn new() -> Self {
        let middle = Place::fresh("middle").unwrap();
        let create = sinabro_netlink::bridge::create("br0");
        middle.conn().unwrap().execute(create).unwrap();
        let ends = [1, 2].map(|number: u8| {
            let end = Place::fresh(&format!("end{number}")).unwrap();
            let port = format!("port{number}");
            let near = (port.as_str(), [2, 0x1a, 0xb0, 0, 3, number]);
            let far = ("eth0", [2, 0x1a, 0xb0, 0, 4, number]);
            middle.cable(near, 1500, &end, far).unwrap();
            middle.plug(&port, "br0").unwrap();
            let address = format!("198.18.1.{number}/24").parse().unwrap();
            end.set_up("eth0", &[address]).unwrap();
            end
        });
        let to: IpAddr = "198.18.1.2".parse().unwrap();
        Self {
            middle,
            path: Path::new("over a bridge", &ends[0], &ends[1], to),
        }
    }

    fn set(&self, up: bool) {
        if up {
            return self.middle.plug("port2", "br0").unwrap();
        }
        let port = self.middle.index("port2").unwrap();
        let unplug = link::set_master(port, None);
        self.middle.conn().unwrap().execute(unplug).unwrap();
    }
}

fn watch(during: impl FnOnce(&Bridge)) -> Watched {
    watch_by(1, during)
}

/// By so many flows of each kind.
fn watch_by(flows: usize, during: impl FnOnce(&Bridge)) -> Watched {
    let bridge = Bridge::new();
    let meter = Meter::start(&vec![bridge.path.clone(); flows]).unwrap();
    meter.watch(Duration::from_millis(500));
    meter.event("the test began").unwrap();
    during(&bridge);
    meter.watch(Duration::from_millis(300));
    let watched = meter.finish().unwrap();
    for line in watched.table() {
        println!("{line}");
    }
    watched
}

#[test]
fn undisturbed_traffic_has_no_gap() {
    let told = watch(|_| ()).must_hold().unwrap();
    assert!(told.starts_with("0 of "), "{told}");
}

const ECHOES: &str = "UDP and its echo of 5000 bytes, over a bridge";

/// In parts, on their way there and back.
#[test]
fn echoes_that_are_lost_are_seen() {
    let bridge = Bridge::new();
    let path = bridge.path.clone().with_echoes(5000);
    let meter = Meter::start(&[path]).unwrap();
    meter.watch(Duration::from_millis(500));
    meter.event("the bridge was taken apart").unwrap();
    bridge.set(false);
    // 50 ms of the meter's own time: a machine that stands still meanwhile makes the gap no longer.
    let echoes = meter.flows.iter().find(|flow| flow.name == ECHOES).unwrap();
    let sent = || echoes.state().series.sent();
    let last = sent() + 25;
    wait_for("echoes to be sent in vain", || {
        Ok((sent() >= last).then_some(()))
    })
    .unwrap();
    bridge.set(true);
    meter.watch(Duration::from_millis(300));
    let watched = meter.finish().unwrap();
    let told = format!("{:#}", watched.must_hold().unwrap_err());
    assert!(told.contains("UDP and its echo of 5000 bytes"), "{told}");
    let gap = watched.gap(ECHOES);
    assert!(gap >= Duration::from_millis(40), "{gap:?}");
}

#[test]
fn a_blackout_of_50_ms_is_seen() {
    let watched = watch(|bridge| {
        bridge.set(false);
        thread::sleep(Duration::from_millis(50));
        bridge.set(true);
    });
    let error = format!("{:#}", watched.must_hold().unwrap_err());
    assert!(error.contains("were lost"), "{error}");
    assert!(error.contains("ms after the test began"), "{error}");
    // TCP loses nothing; it must be late.
    let requests = &watched.table()[1];
    assert!(requests.starts_with("TCP, over a bridge"), "{requests}");
    assert!(requests.contains(" 0 lost"), "{requests}");
    assert!(watched.gap("TCP, over a bridge") >= Duration::from_millis(50));
}

/// Takes every processor from whoever runs on it, the meter included.
fn hold_the_machine(time: Duration) {
    let all = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpus: Vec<_> = (0..CpuSet::count())
        .filter(|cpu| all.is_set(*cpu).unwrap())
        .collect();
    let together = Barrier::new(cpus.len());
    thread::scope(|scope| {
        for cpu in cpus {
            let together = &together;
            scope.spawn(move || {
                let mut one = CpuSet::new();
                one.set(cpu).unwrap();
                sched_setaffinity(Pid::from_raw(0), &one).unwrap();
                real_time(2).unwrap();
                together.wait();
                let start = Instant::now();
                while start.elapsed() < time {}
            });
        }
    });
}

#[test]
fn a_machine_that_stands_still_is_not_taken_for_an_outage() {
    // Wherever in a round of messages it happens.
    let watched = watch_by(24, |_| {
        for _ in 0..100 {
            hold_the_machine(Duration::from_millis(15));
            thread::sleep(Duration::from_millis(7));
        }
    });
    let told = watched.must_hold().unwrap();
    assert!(told.starts_with("0 of "), "{told}");
}

#[test]
fn a_stopped_meter_is_not_taken_for_an_outage() {
    assert!(
        Meter::start(&[])
            .unwrap()
            .finish()
            .unwrap()
            .must_hold()
            .is_err()
    );
}

#[test]
fn a_call_that_the_machine_holds_up_is_its_own() {
    let mut absences = Vec::new();
    // One of some: the machine may really hold up any of them.
    let is_told = |_| {
        absences.clear();
        timed(&mut absences, || Ok(())).unwrap();
        !absences.is_empty()
    };
    assert!(!(0..100).all(is_told));
    absences.clear();
    let held = 2 * ALLOWED;
    let before = now().unwrap();
    timed(&mut absences, || {
        // From here on, which is later than what the call is timed from.
        let began = now()?;
        while now()? < began + nanos(held) {}
        Ok(())
    })
    .unwrap();
    assert_eq!(absences.len(), 1);
    assert!(
        absences[0].at >= before && absences[0].length >= held,
        "{absences:?}"
    );
}
