//! Random streams, both ways at once, over connections that are accelerated from the beginning,
//! or later, or no longer: every byte arrives, in its place.
//!
//! `SINABRO_STREAMS` asks for more connections than a normal run has, `SINABRO_SEED` for those of
//! an earlier run, whose seed each run prints.

mod plan;
mod way;

use super::{World, enrolled, world};
use crate::kit::{self, Pod};
use plan::Plan;
use sinabro_agent::datapath::PodAcceleration;
use sinabro_common::abi::acceleration::{AccelerationCounters, Reason};
use std::{
    env,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};
use way::{BYTES, Random};

/// The seed of this run's plans.
fn seed() -> u64 {
    let seed = match env::var("SINABRO_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("SINABRO_SEED={seed}");
    seed
}

/// How many connections, where a normal run has so many.
fn count(normal: usize) -> usize {
    let asked = env::var("SINABRO_STREAMS").map(|count| count.parse::<usize>().unwrap());
    asked.map_or(normal, |asked| (normal * asked).div_ceil(1000))
}

/// Runs so many connections between the two pods, some at a time, and something else beside them
/// again and again.
fn run(w: &mut World, random: &mut Random, count: usize, meanwhile: impl FnMut(&mut World, u64)) {
    let pods = [w.a.clone(), w.b.clone()];
    run_between(pods, w, random, count, meanwhile);
}

/// The same between two pods or, where they are one, inside it.
fn run_between(
    [a, b]: [Pod; 2],
    w: &mut World,
    random: &mut Random,
    count: usize,
    mut meanwhile: impl FnMut(&mut World, u64),
) {
    const AT_ONCE: usize = 12;
    LazyLock::force(&BYTES);
    // Where a buffer does not hold a few segments, TCP waits for timers.
    let least = if a.ifindex == b.ifindex {
        200_000
    } else {
        8000
    };
    let plans: Vec<Plan> = (0..count).map(|_| Plan::new(random, least)).collect();
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                /// Ends the others' wait if this one panics.
                struct Done<'a>(&'a AtomicUsize, &'a AtomicBool);
                impl Drop for Done<'_> {
                    fn drop(&mut self) {
                        self.1.fetch_or(thread::panicking(), Ordering::Relaxed);
                        self.0.fetch_add(1, Ordering::Relaxed);
                    }
                }
                let _done = Done(&done, &failed);
                while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if failed.load(Ordering::Relaxed) {
                        return;
                    }
                    plan.run(&a, &b);
                }
            });
        }
        while done.load(Ordering::Relaxed) < AT_ONCE {
            meanwhile(w, random.next());
            thread::sleep(Duration::from_millis(random.below(10) as u64));
        }
    });
}

fn redirected_and_passed(w: &World) -> (u64, u64) {
    let counted = w.all_counters();
    println!("{counted:?}");
    (counted.redirected_bytes, counted.passed_bytes.iter().sum())
}

#[test]
fn random_streams_arrive_whole_and_in_order() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        run(&mut w, random, count(600), |_, _| {});
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}

#[test]
fn random_streams_inside_a_pod_arrive_whole_and_in_order() {
    world(true, true, |mut w| {
        let with_loopback = PodAcceleration {
            loopback: true,
            ..w.a.acceleration()
        };
        w.a.attach_with(w.datapath(), Some(with_loopback));
        let random = &mut Random(seed());
        let pods = [w.a.clone(), w.a.clone()];
        run_between(pods, &mut w, random, count(100), |w, luck| {
            if luck & 15 == 0 {
                w.datapath().evict_accelerated(&w.a.addresses()).unwrap();
            }
        });
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}

#[test]
fn random_streams_survive_eviction() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        run(&mut w, random, count(150), |w, luck| {
            let pod = if luck & 1 == 0 { &w.a } else { &w.b };
            let addresses = &pod.addresses()[..1 + (luck >> 1 & 1) as usize];
            w.datapath().evict_accelerated(addresses).unwrap();
        });
        let counted = w.all_counters();
        assert!(counted.redirected_bytes > 1 << 20, "{counted:?}");
        let evicted = counted.passed_bytes[Reason::Evicted as usize];
        assert!(evicted > 1 << 20, "{counted:?}");
    });
}

#[test]
fn random_streams_survive_restarts_of_the_agent() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let (mut before, mut gained) = (0, 0);
        let count = count(200);
        run(&mut w, random, count, |w, _| {
            w.start(true);
            let now = w.all_counters().redirected_bytes;
            gained += u32::from(now > before);
            before = now;
        });
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
        assert!(gained > 0, "nothing was redirected before the end");
        let counted = w.all_counters();
        let seen = counted.enrolled + counted.skipped.iter().sum::<u64>();
        assert_eq!(seen, 2 * count as u64, "somebody always looks");
    });
}

#[test]
fn random_streams_survive_switching_the_acceleration_off_and_on() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let (mut on, mut begun_while_off) = (true, false);
        let count = count(200);
        run(&mut w, random, count, |w, luck| {
            on = !on;
            w.start(on);
            // However slow the machine is, one connection begins while it is off.
            if !on && !begun_while_off {
                Plan::new(&mut Random(luck), 8000).run(&w.a, &w.b);
                begun_while_off = true;
            }
        });
        assert!(begun_while_off);
        w.start(true);
        let (redirected, _) = redirected_and_passed(&w);
        assert!(redirected > 1 << 20, "{redirected}");
        let counted = w.all_counters();
        let seen = counted.enrolled + counted.skipped.iter().sum::<u64>();
        assert!(seen <= 2 * count as u64, "somebody looked while it was off");
    });
}

#[test]
fn random_streams_survive_a_pod_that_changes_its_mind() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let mut redirected = 0;
        run(&mut w, random, count(150), |w, luck| {
            // In between, long enough for connections to begin and to go from socket to socket.
            if luck & 7 != 0 {
                return;
            }
            redirected += w.counters(&w.a).redirected_bytes;
            let wish = |wanted| w.a.attach_with(w.datapath(), wanted);
            // Its counters begin at zero.
            wish(None);
            if luck & 0x30 != 0 {
                thread::sleep(Duration::from_micros(luck >> 32 & 0xfff));
            }
            wish(Some(w.a.acceleration()));
        });
        redirected += w.counters(&w.a).redirected_bytes;
        println!("{redirected}");
        assert!(redirected > 1 << 16, "{redirected}");
    });
}

/// Has held readers go on.
struct Release(Arc<AtomicBool>);

impl Drop for Release {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A connection in the middle of a stream when its pods may be accelerated has data in TCP's
/// queues.
#[test]
fn connections_from_before_stay_plain_and_new_ones_do_not() {
    world(true, false, |mut w| {
        let random = &mut Random(seed());
        let mut plans: Vec<Plan> = (0..8).map(|_| Plan::new(random, 8000)).collect();
        let held = Arc::new(AtomicBool::new(true));
        for way in plans.iter_mut().flat_map(|plan| &mut plan.ways) {
            way.held = held.clone();
            way.len = 4 << 20;
            way.message = 40_000;
            way.piece = 40_000;
            way.reader_pauses = (4, 4000);
        }
        let done = AtomicUsize::new(0);
        let (a, b) = (w.a.clone(), w.b.clone());
        thread::scope(|scope| {
            for plan in &plans {
                scope.spawn(|| {
                    plan.run(&a, &b);
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            // Also if what follows fails: the readers are waited for.
            let release = Release(held);
            kit::eventually("all in the middle", || {
                let counted = w.datapath().pod_counters(w.b.ifindex).unwrap().unwrap();
                counted.tx_bytes + counted.rx_bytes > 16 << 20
            });
            w.b.attach(w.datapath());
            thread::sleep(Duration::from_millis(20));
            assert_eq!(done.load(Ordering::Relaxed), 0);
            drop(release);
            kit::eventually("the first to end", || done.load(Ordering::Relaxed) > 0);
            assert_eq!(enrolled(), []);
            assert_eq!(w.all_counters(), AccelerationCounters::default());
        });
        run(&mut w, random, count(50), |_, _| {});
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}

#[test]
fn random_streams_arrive_where_everybody_waits_for_a_cpu() {
    world(true, true, |mut w| {
        let random = &mut Random(seed());
        let stop = AtomicBool::new(false);
        let busy = 2 * thread::available_parallelism().unwrap().get();
        thread::scope(|scope| {
            for _ in 0..busy {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run(&mut w, random, count(100), |_, _| {});
            }));
            stop.store(true, Ordering::Relaxed);
            result.unwrap();
        });
        let (redirected, passed) = redirected_and_passed(&w);
        assert!(redirected > passed / 20, "{redirected} {passed}");
    });
}
