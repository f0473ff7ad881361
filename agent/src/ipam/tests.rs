use super::*;
use proptest::prelude::*;
use std::{collections::VecDeque, fs, sync::Arc, thread};

fn owner(n: usize) -> Owner {
    Owner {
        container_id: format!("c{n}"),
        ifname: "eth0".into(),
    }
}

fn request(n: usize) -> LeaseRequest {
    LeaseRequest {
        owner: owner(n),
        network: "pods".into(),
        netns: format!("/run/netns/c{n}"),
        pod: PodRef::default(),
        mac: None,
        addresses: Vec::new(),
    }
}

fn wanting(n: usize, addresses: &[&str]) -> LeaseRequest {
    LeaseRequest {
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        ..request(n)
    }
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn open(dir: &Path, cidrs: &[&str]) -> Allocator {
    let allocator = Allocator::open(dir).unwrap();
    allocator.set_ranges(&nets(cidrs)).unwrap();
    allocator
}

fn texts(addresses: &[IpAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

const DUAL: &[&str] = &["10.0.0.0/29", "fd00::/64"];

#[test]
fn an_owner_gets_one_address_of_each_family_and_keeps_them() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), DUAL);
    let first = allocator.allocate(&request(1)).unwrap();
    assert_eq!(texts(&first), ["10.0.0.2", "fd00::2"]);
    assert_eq!(allocator.allocate(&request(1)).unwrap(), first);
    assert_eq!(
        texts(&allocator.allocate(&request(2)).unwrap()),
        ["10.0.0.3", "fd00::3"]
    );
    drop(allocator);
    assert_eq!(open(dir.path(), DUAL).allocate(&request(1)).unwrap(), first);
}

#[test]
fn released_addresses_return_last() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), &["10.0.0.0/29"]);
    for n in 0..3 {
        allocator.allocate(&request(n)).unwrap();
    }
    allocator.release(&owner(1)).unwrap();
    allocator.release(&owner(0)).unwrap();
    let allocator = open(dir.path(), &["10.0.0.0/29"]);
    let next: Vec<_> = (3..7)
        .map(|n| texts(&allocator.allocate(&request(n)).unwrap())[0].clone())
        .collect();
    assert_eq!(next, ["10.0.0.5", "10.0.0.6", "10.0.0.3", "10.0.0.2"]);
    let full = allocator.allocate(&request(9)).unwrap_err().to_string();
    assert_eq!(full, "pod range 10.0.0.0/29 is full");
}

/// Each file is a page of memory, and a range of IPv6 has room for 65,534 of them.
#[test]
fn of_released_addresses_the_newest_are_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let range: &[&str] = &["fd00::/64"];
    let files = || fs::read_dir(dir.path().join("released")).unwrap().count();
    let all = RELEASED_FILES + 50;
    let allocator = open(dir.path(), range);
    for n in 0..all {
        allocator.allocate(&request(n)).unwrap();
        allocator.release(&owner(n)).unwrap();
        assert!(files() <= RELEASED_FILES);
    }
    // In one life of the agent the order is as ever.
    let next = allocator.allocate(&request(0)).unwrap();
    assert_eq!(
        next[0],
        format!("fd00::{:x}", all + 2).parse::<IpAddr>().unwrap()
    );
    drop(allocator);
    // In the next what was forgotten comes first, and what was released last is given last.
    let allocator = open(dir.path(), range);
    let next = allocator.allocate(&request(1)).unwrap();
    assert_eq!(texts(&next), ["fd00::2"]);
    // As an agent of before left it.
    for n in 0..RELEASED_FILES {
        fs::write(dir.path().join(format!("released/fd00::1:{:x}", n + 1)), "").unwrap();
    }
    drop(allocator);
    let _allocator = open(dir.path(), range);
    assert_eq!(files(), RELEASED_FILES);
}

#[test]
fn one_full_family_leases_nothing_of_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), &["10.0.0.0/24", "fd00::/126"]);
    allocator.allocate(&request(1)).unwrap();
    allocator.allocate(&request(2)).unwrap();
    let error = allocator.allocate(&request(3)).unwrap_err();
    assert!(error.to_string().contains("fd00::/126 is full"), "{error}");
    assert!(!dir.path().join("leases/10.0.0.4").exists());
    // The address that could not be used was never given out: it is still the next.
    allocator.release(&owner(1)).unwrap();
    assert_eq!(
        texts(&allocator.allocate(&request(3)).unwrap()),
        ["10.0.0.4", "fd00::2"]
    );
}

#[test]
fn ranges_of_a_family_are_used_in_turn() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), &["10.0.0.0/30", "10.1.0.0/30"]);
    let a: Vec<_> = (0..2)
        .flat_map(|n| texts(&allocator.allocate(&request(n)).unwrap()))
        .collect();
    assert_eq!(a, ["10.0.0.2", "10.1.0.2"]);
    let error = allocator.allocate(&request(2)).unwrap_err().to_string();
    assert_eq!(error, "pod range 10.0.0.0/30, 10.1.0.0/30 is full");
}

#[test]
fn requested_addresses_are_given_or_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), DUAL);
    let got = allocator
        .allocate(&wanting(1, &["fd00::abcd:1", "10.0.0.5"]))
        .unwrap();
    assert_eq!(texts(&got), ["10.0.0.5", "fd00::abcd:1"]);
    for (n, addresses, part) in [
        (2, vec!["10.0.0.5"], "taken by c1/eth0"),
        (2, vec!["10.0.0.1"], "node's own"),
        (2, vec!["10.0.0.7"], "broadcast"),
        (
            2,
            vec!["10.9.0.7"],
            "outside the node's ranges 10.0.0.0/29, fd00::/64",
        ),
        (2, vec!["10.0.0.2", "10.0.0.3"], "of one family"),
        (1, vec!["10.0.0.2"], "c1/eth0 has 10.0.0.5 already"),
    ] {
        let error = allocator
            .allocate(&wanting(n, &addresses))
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
    }
    // The refused ones left nothing behind.
    assert_eq!(allocator.leases().len(), 2);
    assert_eq!(fs::read_dir(dir.path().join("leases")).unwrap().count(), 2);
    // The walk passes over what was asked for.
    let walked: Vec<_> = (3..6)
        .map(|n| texts(&allocator.allocate(&request(n)).unwrap())[0].clone())
        .collect();
    assert_eq!(walked, ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
}

#[test]
fn a_bad_lease_file_costs_exactly_its_address() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), &["10.0.0.0/29"]));
    let file = dir.path().join("leases/10.0.0.3");
    fs::write(&file, "{\"address\":\"10.").unwrap();
    let allocator = open(dir.path(), &["10.0.0.0/29"]);
    let got: Vec<_> = (0..4)
        .map(|n| texts(&allocator.allocate(&request(n)).unwrap())[0].clone())
        .collect();
    assert_eq!(got, ["10.0.0.2", "10.0.0.4", "10.0.0.5", "10.0.0.6"]);
    assert!(allocator.allocate(&request(9)).is_err());
    let problems = allocator.problems();
    assert!(
        problems.len() == 1 && problems[0].contains(file.to_str().unwrap()),
        "{problems:?}"
    );
    // It can be asked for only once somebody has removed the file.
    assert!(allocator.allocate(&wanting(9, &["10.0.0.3"])).is_err());
    allocator.recheck();
    assert!(file.exists() && allocator.problems().len() == 1);
    fs::remove_file(&file).unwrap();
    allocator.recheck();
    assert!(allocator.problems().is_empty());
    assert_eq!(
        texts(&allocator.allocate(&request(9)).unwrap()),
        ["10.0.0.3"]
    );
}

#[test]
fn leases_outside_new_ranges_stay_until_released() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), &["10.0.0.0/29"]);
    let old = allocator.allocate(&request(1)).unwrap();
    let outside = allocator.set_ranges(&nets(&["10.1.0.0/29"])).unwrap();
    assert_eq!(outside, old);
    assert_eq!(allocator.allocate(&request(1)).unwrap(), old);
    assert_eq!(allocator.release(&owner(1)).unwrap(), old);
    for n in 2..7 {
        assert!(texts(&allocator.allocate(&request(n)).unwrap())[0].starts_with("10.1.0."));
    }
    // The old range's released address does not come back.
    assert!(allocator.allocate(&request(8)).is_err());
}

#[test]
fn bad_ranges_leave_the_good_ones() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), DUAL);
    assert!(
        allocator
            .set_ranges(&nets(&["10.0.0.0/8", "10.1.0.0/16"]))
            .is_err()
    );
    assert_eq!(
        texts(&allocator.allocate(&request(1)).unwrap()),
        ["10.0.0.2", "fd00::2"]
    );
    let empty = Allocator::open(tempfile::tempdir().unwrap().path()).unwrap();
    assert!(matches!(
        empty.allocate(&request(1)),
        Err(IpamError::NoRange)
    ));
}

#[test]
fn a_missing_lease_of_a_live_pod_is_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = open(dir.path(), DUAL);
    let address = "10.0.0.2".parse().unwrap();
    allocator.reclaim(&request(1), address).unwrap();
    allocator.reclaim(&request(1), address).unwrap();
    assert!(allocator.reclaim(&request(2), address).is_err());
    assert_eq!(
        texts(&allocator.allocate(&request(2)).unwrap())[0],
        "10.0.0.3"
    );
}

#[test]
fn fifty_at_once_get_fifty_pairs() {
    let dir = tempfile::tempdir().unwrap();
    let allocator = Arc::new(open(dir.path(), &["10.0.0.0/24", "fd00::/64"]));
    let threads: Vec<_> = (0..50)
        .map(|n| {
            let allocator = allocator.clone();
            thread::spawn(move || allocator.allocate(&request(n)).unwrap())
        })
        .collect();
    let all: BTreeSet<_> = threads
        .into_iter()
        .flat_map(|t| t.join().unwrap())
        .collect();
    assert_eq!(all.len(), 100);
}

/// Two indexes that know nothing of each other, as in two processes.
#[test]
fn two_processes_never_give_one_address_twice() {
    let dir = tempfile::tempdir().unwrap();
    let agents = [
        open(dir.path(), &["10.0.0.0/26"]),
        open(dir.path(), &["10.0.0.0/26"]),
    ];
    let taken = Mutex::new(BTreeMap::<IpAddr, usize>::new());
    thread::scope(|scope| {
        for (side, agent) in agents.iter().enumerate() {
            let taken = &taken;
            scope.spawn(move || {
                for round in 0..300 {
                    let n = side * 1000 + round;
                    let Ok(got) = agent.allocate(&request(n)) else {
                        continue;
                    };
                    let before = taken.lock().unwrap().insert(got[0], n);
                    assert_eq!(before, None, "{} was given to {n} as well", got[0]);
                    if round % 3 != 0 {
                        // Out of the books before it is free, as a pod is before its lease.
                        taken.lock().unwrap().remove(&got[0]);
                        assert_eq!(agent.release(&owner(n)).unwrap(), got);
                    }
                }
            });
        }
    });
    // Everything either side left is on disk, and no more than fits.
    let leases = open(dir.path(), &["10.0.0.0/26"]).leases();
    assert_eq!(leases.len(), taken.lock().unwrap().len());
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(usize),
    Want(usize, u8),
    Release(usize),
    /// The agent is dropped without further ado; a temporary file may be left.
    Crash(bool),
    /// The agent died between leasing a released address again and forgetting its release.
    CrashInCommit,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0usize..9).prop_map(Step::Allocate),
        1 => (0usize..9, 0u8..9).prop_map(|(n, a)| Step::Want(n, a)),
        4 => (0usize..9).prop_map(Step::Release),
        1 => any::<bool>().prop_map(Step::Crash),
        1 => Just(Step::CrashInCommit),
    ]
}

/// What the allocator promises, in the plainest form.
#[derive(Default)]
struct Model {
    leases: BTreeMap<u8, usize>,
    used: BTreeSet<u8>,
    released: VecDeque<u8>,
}

impl Model {
    fn next(&self) -> Option<u8> {
        let fresh = (2..=6).find(|a| !self.used.contains(a));
        fresh.or_else(|| self.released.front().copied())
    }

    fn take(&mut self, address: u8, n: usize) {
        self.leases.insert(address, n);
        self.used.insert(address);
        self.released.retain(|a| *a != address);
    }

    fn of(&self, n: usize) -> Option<u8> {
        self.leases.iter().find(|(_, o)| **o == n).map(|(a, _)| *a)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_history_matches_the_model(steps in proptest::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let cidr = &["10.0.0.0/29"];
        let mut allocator = open(dir.path(), cidr);
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Allocate(n) => {
                    let expected = model.of(n).or_else(|| model.next());
                    let got = allocator.allocate(&request(n)).ok();
                    prop_assert_eq!(got.map(|a| texts(&a)), expected.map(|a| vec![format!("10.0.0.{a}")]));
                    if let Some(address) = expected {
                        model.take(address, n);
                    }
                }
                Step::Want(n, address) => {
                    let text = format!("10.0.0.{address}");
                    let got = allocator.allocate(&wanting(n, &[&text])).is_ok();
                    let has = model.of(n);
                    let free = (2..=6).contains(&address) && !model.leases.contains_key(&address);
                    prop_assert_eq!(got, has == Some(address) || (has.is_none() && free));
                    if got {
                        model.take(address, n);
                    }
                }
                Step::Release(n) => {
                    let freed = allocator.release(&owner(n)).unwrap();
                    prop_assert_eq!(freed.len(), usize::from(model.of(n).is_some()));
                    if let Some(address) = model.of(n) {
                        model.leases.remove(&address);
                        model.released.push_back(address);
                    }
                }
                Step::Crash(in_claim) => {
                    drop(allocator);
                    if in_claim {
                        fs::write(dir.path().join("leases/.tmp-1-0"), "{").unwrap();
                    }
                    allocator = open(dir.path(), cidr);
                }
                Step::CrashInCommit => {
                    drop(allocator);
                    for address in model.leases.keys() {
                        fs::write(dir.path().join(format!("released/10.0.0.{address}")), "").unwrap();
                    }
                    allocator = open(dir.path(), cidr);
                }
            }
            // Nothing lost, nothing given twice.
            let leases = allocator.leases();
            let found: BTreeMap<_, _> = leases.into_iter().map(|l| (l.address.to_string(), l.owner)).collect();
            let expected: BTreeMap<_, _> = model.leases.iter().map(|(a, n)| (format!("10.0.0.{a}"), owner(*n))).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
