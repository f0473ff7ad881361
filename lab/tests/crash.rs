//! The agent is killed at random moments of 200 concurrent ADDs and DELs, and started again.
//!
//! Afterwards: no address is given twice, none has leaked, and every pod that an ADD reported
//! works. SINABRO_SEED=N repeats a run's random choices (the kernel's timing is its own).
#![allow(clippy::unwrap_used)]

use anyhow::ensure;
use sinabro_common::{
    api::{Request, Response},
    names,
};
use sinabro_lab::{
    Lab, Node, Place, Pod,
    cni::IFNAME,
    traffic::{PATIENCE, icmp},
    wait::{eventually, wait_for},
};
use std::{
    collections::BTreeSet,
    env, fs,
    net::IpAddr,
    sync::Barrier,
    thread,
    time::{Duration, Instant, SystemTime},
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

    let started = Instant::now();
    let mut live = add_and_delete(node, "start", Vec::new(), || ());
    assert_eq!(
        live.len(),
        ADDS,
        "without a crash every ADD must succeed: {}",
        node.log()
    );
    let usual = started.elapsed();

    let mut failed_adds = 0;
    for round in 0..ROUNDS {
        let wait = Duration::from_micros(random.below(usual.as_micros() as u64 * 3 / 2));
        let pause = Duration::from_millis(random.below(300));
        let leaving = live.split_off(live.len().saturating_sub(DELS));
        let added = add_and_delete(node, &format!("r{round}"), leaving, || {
            thread::sleep(wait);
            node.kill_agent().unwrap();
            thread::sleep(pause);
            node.start_agent().unwrap();
            node.wait_ready().unwrap();
        });
        failed_adds += ADDS - added.len();
        live.extend(added);

        // A DEL may have queued itself just after the agent looked: the next start, as the next
        // minute, looks again.
        await_links(node, &live);
        node.stop_agent().unwrap();
        node.start_agent().unwrap();
        node.wait_ready().unwrap();
        assert_exact(node, &live, round);
        assert_work(node, &witness, &live, round);
    }
    println!("{failed_adds} of {} ADDs met no agent", ROUNDS * ADDS);
    assert!(
        failed_adds > 0,
        "no crash ever hit an ADD: the test tests nothing"
    );
}

/// `ADDS` new pods and the end of `leaving`, all at once, with `meanwhile` beside them. Returns
/// the pods whose ADD succeeded. A failed ADD is followed by a DEL half the time, as runtimes do
/// and crashed runtimes do not; its sandbox goes in any case.
fn add_and_delete(
    node: &Node,
    prefix: &str,
    leaving: Vec<Pod>,
    meanwhile: impl FnOnce() + Send,
) -> Vec<Pod> {
    let new: Vec<(String, Place)> = (0..ADDS)
        .map(|number| {
            let id = format!("{prefix}-{number}");
            let sandbox = node.make_sandbox(&id).unwrap();
            (id, sandbox)
        })
        .collect();
    let start = Barrier::new(new.len() + leaving.len() + 1);
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let start = &start;
        let adds = new.into_iter().map(|(id, sandbox)| {
            scope.spawn(move || {
                start.wait();
                let (answer, pod) = node.try_add(&id, &sandbox).unwrap();
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
            scope.spawn(move || {
                start.wait();
                node.delete_pod(&pod).unwrap();
                Outcome::Deleted
            })
        });
        let threads: Vec<_> = adds.chain(dels).collect();
        start.wait();
        meanwhile();
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

/// Waits until the kernel has taken the links of removed sandboxes away.
fn await_links(node: &Node, live: &[Pod]) {
    let wanted = live_links(live);
    eventually("the links of removed sandboxes to be gone", || {
        links(node).is_subset(&wanted)
    });
}

/// Leases, endpoint records and links are those of the living pods, no more and no fewer.
fn assert_exact(node: &Node, live: &[Pod], round: usize) {
    let addresses: Vec<IpAddr> = live.iter().flat_map(Pod::addresses).collect();
    let unique: BTreeSet<IpAddr> = addresses.iter().copied().collect();
    assert_eq!(
        unique.len(),
        addresses.len(),
        "round {round}: an address was given twice"
    );

    let endpoints: BTreeSet<String> = live_links(live)
        .into_iter()
        .map(|link| format!("{link}.json"))
        .collect();
    let leases: BTreeSet<String> = unique.iter().map(ToString::to_string).collect();
    let exact = wait_for("exactly the living pods to be known", || {
        let differences = [
            difference("lease", &files(node, names::LEASES_DIR), &leases),
            difference("record", &files(node, names::ENDPOINTS_DIR), &endpoints),
            difference(
                "queued delete",
                &files(node, names::DELETES_DIR),
                &BTreeSet::new(),
            ),
            difference("link", &links(node), &live_links(live)),
        ]
        .concat();
        ensure!(differences.is_empty(), "{}", differences.join("\n"));
        Ok(Some(()))
    });
    if let Err(error) = exact {
        panic!("round {round}: {error:#}\n{}", node.log());
    }
    match node.ask(Request::Endpoints).unwrap() {
        Response::Endpoints(known) => assert_eq!(known.len(), live.len(), "round {round}"),
        other => panic!("{other:?}"),
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

fn difference(what: &str, found: &BTreeSet<String>, wanted: &BTreeSet<String>) -> Vec<String> {
    let leaked = found
        .difference(wanted)
        .map(|name| format!("{what} {name} leaked"));
    let lost = wanted
        .difference(found)
        .map(|name| format!("{what} {name} is lost"));
    leaked.chain(lost).collect()
}

fn live_links(live: &[Pod]) -> BTreeSet<String> {
    live.iter()
        .map(|pod| names::pod_link(pod.id(), IFNAME))
        .collect()
}

fn links(node: &Node) -> BTreeSet<String> {
    let links = node.netlink().unwrap().links().unwrap();
    links
        .into_iter()
        .map(|link| link.name)
        .filter(|name| names::is_pod_link(name))
        .collect()
}

fn files(node: &Node, dir: &str) -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir(node.state(dir)) else {
        return BTreeSet::new();
    };
    entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}
