//! The agent is killed at random moments of 200 concurrent ADDs and DELs, and started again: after as many have
//! ended as chance says.
//!
//! Afterwards: no address is given twice, none has leaked, and every pod that an ADD reported
//! works. SINABRO_SEED=N repeats a run's random choices (the kernel's timing is its own).

use sinabro_lab::{
    Lab, Node, Place, Pod,
    checks::books,
    traffic::{PATIENCE, icmp},
};
use std::{
    env,
    sync::{
        Barrier,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, SystemTime},
};

const ROUNDS: usize = 20;
const ADDS: usize = 100;
const DELS: usize = 100;

/// SplitMix64: enough for choosing moments.
struct Random(u64);

impl Random {
    fn seeded() -> Self {
        let clock = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let seed = match env::var("SINABRO_SEED") {
            Ok(text) => text.parse().expect("SINABRO_SEED is not a number"),
            Err(_) => clock(),
        };
        println!("SINABRO_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Why ADDs failed.
#[derive(Debug, Default)]
struct Failures {
    /// The agent was killed while it served them.
    interrupted: usize,
    met_no_agent: usize,
}

/// What one call of many came to.
enum Outcome {
    Added(Pod),
    NotAdded { id: String, why: String },
    Deleted,
}

#[test]
fn a_killed_agent_loses_nothing_and_leaks_nothing() {
    let mut random = Random::seeded();
    let lab = Lab::for_test(2).unwrap();
    let node = lab.node(1);
    let witness = lab.node(2).add_pod("witness").unwrap();

    let mut live = add_and_delete(node, "start", Vec::new(), &mut Failures::default(), |_| ());
    assert_eq!(
        live.len(),
        ADDS,
        "without a crash every ADD must succeed: {}",
        node.log()
    );

    let mut failures = Failures::default();
    for round in 0..ROUNDS {
        let leaving = live.split_off(live.len().saturating_sub(DELS));
        let before = random.below((ADDS + leaving.len()) as u64) as usize;
        let wait = Duration::from_micros(random.below(5_000));
        let pause = Duration::from_millis(random.below(300));
        let kill = |ended: Receiver<()>| {
            ended.iter().take(before).for_each(drop);
            thread::sleep(wait);
            node.kill_agent().unwrap();
            thread::sleep(pause);
            node.start_agent().unwrap();
            node.wait_ready().unwrap();
        };
        let prefix = format!("r{round}");
        let added = add_and_delete(node, &prefix, leaving, &mut failures, kill);
        live.extend(added);

        // The agent that was started after the kill, as it is: no other one puts things right.
        assert_exact(node, &live, round);
        assert_work(node, &witness, &live, round);
    }
    println!("of {} ADDs: {failures:?}", ROUNDS * ADDS);
    // One that met no agent says nothing about a crash.
    assert!(
        failures.interrupted > 0,
        "no crash ever hit an ADD: the test tests nothing"
    );
}

/// `ADDS` new pods and the end of `leaving`, all at once, with `meanwhile` beside them, which hears of each call
/// that has ended. Returns the pods whose ADD succeeded. A failed ADD is followed by a DEL half the time, as runtimes do
/// and crashed runtimes do not; its sandbox goes in any case.
fn add_and_delete(
    node: &Node,
    prefix: &str,
    leaving: Vec<Pod>,
    failures: &mut Failures,
    meanwhile: impl FnOnce(Receiver<()>) + Send,
) -> Vec<Pod> {
    let new: Vec<(String, Place)> = (0..ADDS)
        .map(|number| {
            let id = format!("{prefix}-{number}");
            let sandbox = node.make_sandbox(&id).unwrap();
            (id, sandbox)
        })
        .collect();
    let start = Barrier::new(new.len() + leaving.len() + 1);
    let (end, ended) = mpsc::channel();
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let start = &start;
        let adds = new.into_iter().map(|(id, sandbox)| {
            let end = end.clone();
            scope.spawn(move || {
                start.wait();
                let (answer, pod) = node.try_add(&id, &sandbox).unwrap();
                // Nobody listens after the kill.
                let _ = end.send(());
                match pod {
                    Some(pod) => Outcome::Added(pod),
                    None => Outcome::NotAdded {
                        why: answer.json.to_string(),
                        id,
                    },
                }
            })
        });
        let dels = leaving.into_iter().map(|pod| {
            let end = end.clone();
            scope.spawn(move || {
                start.wait();
                node.delete_pod(&pod).unwrap();
                let _ = end.send(());
                Outcome::Deleted
            })
        });
        let threads: Vec<_> = adds.chain(dels).collect();
        // Whoever waits for more calls than are left hears that there are none.
        drop(end);
        start.wait();
        meanwhile(ended);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let mut pods = Vec::new();
    for (number, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Outcome::Added(pod) => pods.push(pod),
            Outcome::NotAdded { id, why } => {
                match why.contains("the agent closed the connection") || why.contains("reset by") {
                    true => failures.interrupted += 1,
                    false => failures.met_no_agent += 1,
                }
                println!("ADD {id}: {why}");
                if number % 2 == 0 {
                    node.cni("DEL", &id).unwrap().success().unwrap();
                }
                node.remove_sandbox(&id).unwrap();
            }
            Outcome::Deleted => {}
        }
    }
    pods
}

/// Leases, endpoint records and links are those of the living pods, no more and no fewer.
fn assert_exact(node: &Node, live: &[Pod], round: usize) {
    if let Err(error) = books::exact(node, live) {
        panic!("round {round}: {error:#}\n{}", node.log());
    }
}

/// Every pod that its ADD reported answers its node and a pod of another node.
fn assert_work(node: &Node, witness: &Pod, live: &[Pod], round: usize) {
    for pod in live {
        for address in pod.addresses() {
            for from in [node.place(), witness.place()] {
                if let Err(error) = icmp::ping(from, address, PATIENCE) {
                    panic!("round {round}: pod {}: {error:#}\n{}", pod.id(), node.log());
                }
            }
        }
    }
}
