//! Random plans on real maps, read between any two stores as a program reads them.

use super::{
    backends::at,
    keys::{flags, key},
    roles,
    room::REST,
    *,
};
use crate::{
    datapath::ClientPrefix,
    plan::services::{FrontendKind, FrontendPlan, PortPlan, SetPlan, Sets, maglev},
};
use proptest::{collection::vec, prelude::*};
use sinabro_common::abi::service::{
    BACKEND_DRAINING, BACKEND_SERVING, Backend, FRONTEND_GUARDED, Slot,
};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    net::IpAddr,
    rc::Rc,
    time::Duration,
};

/// What becomes of a client's new connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    NotOurs,
    Refused,
    Dropped,
    OneOf(BTreeSet<SocketAddr>),
    /// Whether a certain client may use it at all.
    LetIn(bool),
}

/// Whom it is asked of whether they are let in.
const CLIENTS: [&str; 4] = ["10.1.0.1", "10.2.0.1", "192.0.2.77", "fd00::1"];
const SIDES: usize = 2 + CLIENTS.len();

/// For clients inside and outside; and which clients are let in.
type Sides = [Fate; SIDES];

/// By frontend.
type Fates = BTreeMap<FrontendKey, Sides>;

/// Looks at the maps before each store, and lets only so many of them happen.
#[derive(Default)]
struct Eye {
    allowed: RefCell<BTreeMap<FrontendKey, BTreeSet<Sides>>>,
    slow: RefCell<Vec<Slow>>,
    stores: Cell<u64>,
    /// Later ones do not happen: the agent was killed.
    last: Cell<Option<u64>>,
    random: Cell<u64>,
    /// By id and generation: who had it.
    had: RefCell<BTreeMap<(u32, u32), (SocketAddr, u8)>>,
    /// By id and generation: the number of the port whose sets led to it.
    numbers: RefCell<BTreeMap<(u32, u32), u32>>,
}

/// A program that is interrupted between any two of its steps.
struct Slow {
    frontend: Frontend,
    side: usize,
    set: Option<Set>,
    slot: Option<Slot>,
    /// What it may find, by all that was so since it began.
    may: BTreeSet<SocketAddr>,
    key: FrontendKey,
}

struct Watched {
    maps: Rc<crate::datapath::Services>,
    eye: Rc<Eye>,
}

impl Tables for Watched {
    fn maps(&self) -> &crate::datapath::Services {
        &self.maps
    }

    /// Short ones that are no less than the number of endpoints.
    fn table_length(&self, endpoints: usize) -> Option<u32> {
        [3, 7]
            .into_iter()
            .find(|&length| length as usize >= endpoints)
    }

    fn wait_for_programs(&self) -> bool {
        self.eye.wait()
    }

    fn put_frontends(
        &self,
        keys: &[FrontendKey],
        frontends: &[Frontend],
    ) -> (usize, Result<(), DatapathError>) {
        for (at, (key, frontend)) in keys.iter().zip(frontends).enumerate() {
            if self.before_store()
                && let Err(error) = self.maps.put_frontend(*key, *frontend)
            {
                return (at, Err(error));
            }
        }
        (keys.len(), Ok(()))
    }

    fn remove_frontend(&self, key: &FrontendKey) -> Result<(), DatapathError> {
        match self.before_store() {
            true => self.maps.remove_frontend(key),
            false => Ok(()),
        }
    }

    fn source_room(&self) -> u32 {
        SOURCE_ROOM
    }

    fn put_source(&self, number: u32, clients: &ClientPrefix) -> Result<(), DatapathError> {
        match self.before_store() {
            true => self.maps.put_source(number, clients),
            false => Ok(()),
        }
    }

    fn remove_source(&self, number: u32, clients: &ClientPrefix) -> Result<(), DatapathError> {
        match self.before_store() {
            true => self.maps.remove_source(number, clients),
            false => Ok(()),
        }
    }

    fn put_set(&self, index: u32, set: Set) {
        if self.before_store() {
            self.maps.put_set(index, set).unwrap();
        }
    }

    fn put_slots(&self, base: u32, slots: &[Slot]) {
        for (index, slot) in (base..).zip(slots) {
            if self.before_store() {
                self.maps.put_slots(index, &[*slot]).unwrap();
            }
        }
    }

    fn put_backend(&self, id: u32, backend: Backend) {
        if self.before_store() {
            self.maps.put_backend(id, backend).unwrap();
        }
    }
}

impl Eye {
    fn random(&self, below: usize) -> usize {
        // An LCG of Knuth's.
        let next = self.random.get();
        let next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.random.set(next);
        (next >> 33) as usize % below
    }

    /// Lets slow programs end, or not.
    fn wait(&self) -> bool {
        let is_done = self.random(2) == 0;
        if is_done {
            self.slow.borrow_mut().clear();
        }
        is_done
    }
}

/// Where a set leads, as a program sees it.
fn fate(maps: &crate::datapath::Services, index: u32, proto: u8) -> Fate {
    let set = maps.set(index).unwrap();
    match set.kind() {
        Kind::Refuse => Fate::Refused,
        Kind::Drop => Fate::Dropped,
        Kind::Balance => {
            let slots = set.base()..set.base() + set.count();
            let endpoint = |slot| {
                let slot = maps.slot(slot).unwrap();
                let backend = maps.backend(slot.backend).unwrap();
                assert_eq!(backend.generation, slot.generation, "{backend:?}");
                assert_eq!(backend.proto(), proto, "{backend:?}");
                assert!(is_in_set(&backend), "{backend:?}");
                at(&backend)
            };
            Fate::OneOf(slots.map(endpoint).collect())
        }
    }
}

fn is_in_set(backend: &Backend) -> bool {
    backend.flags & (BACKEND_SERVING | BACKEND_DRAINING) == BACKEND_SERVING
}

fn fates(maps: &crate::datapath::Services) -> Fates {
    let sources = maps.sources().unwrap();
    let all = maps.frontends().unwrap().into_iter();
    all.map(|(key, value)| {
        let [inside, outside] = [value.inside, value.outside].map(|set| fate(maps, set, key.proto));
        let let_in = |client: &str| {
            let mut ranges = sources
                .iter()
                .filter(|(number, _)| *number == value.service);
            let client: IpAddr = client.parse().unwrap();
            value.flags & FRONTEND_GUARDED == 0
                // No such packet is possible.
                || client.is_ipv4() != key.addr.as_v4().is_some()
                || ranges.any(|(_, range)| {
                    let net = crate::datapath::net_of_prefix(range).unwrap();
                    net.contains(&client)
                })
        };
        (key, sides(inside, outside, let_in))
    })
    .collect()
}

fn sides(inside: Fate, outside: Fate, let_in: impl Fn(&str) -> bool) -> Sides {
    let [a, b, c, d] = CLIENTS.map(|client| Fate::LetIn(let_in(client)));
    [inside, outside, a, b, c, d]
}

const NOT_OURS: Sides = [const { Fate::NotOurs }; SIDES];

impl Watched {
    /// Whether there is one.
    fn before_store(&self) -> bool {
        let eye = &self.eye;
        if eye.last.get().is_some_and(|last| eye.stores.get() >= last) {
            return false;
        }
        self.look();
        eye.stores.set(eye.stores.get() + 1);
        true
    }

    fn look(&self) {
        let found = fates(&self.maps);
        let allowed = self.eye.allowed.borrow();
        for (key, fate) in &found {
            let allowed = allowed.get(key);
            // A client is on one side.
            let is_said = |side: usize| {
                let mut said = allowed.into_iter().flatten();
                said.any(|said| said[side] == fate[side])
            };
            assert!(
                (0..SIDES).all(is_said),
                "{key:?} leads to {fate:?}, allowed is {allowed:?}"
            );
        }
        for (key, allowed) in allowed.iter() {
            assert!(
                found.contains_key(key) || allowed.contains(&NOT_OURS),
                "{key:?} is gone, allowed is {allowed:?}"
            );
        }
        self.slow_step(&allowed);
        for id in 0..room().backends {
            let backend = self.maps.backend(id).unwrap();
            if backend.flags & BACKEND_SERVING != 0 {
                let who = (at(&backend), backend.proto());
                let mut had = self.eye.had.borrow_mut();
                let first = *had.entry((id, backend.generation)).or_insert(who);
                assert_eq!(first, who, "of one number and generation");
            }
        }
    }

    fn slow_step(&self, allowed: &BTreeMap<FrontendKey, BTreeSet<Sides>>) {
        let random = |below: usize| self.eye.random(below);
        let mut slow = self.eye.slow.borrow_mut();
        let may = |key: &FrontendKey, side: usize| -> BTreeSet<SocketAddr> {
            let fates = allowed.get(key).into_iter().flatten();
            let endpoints = fates.filter_map(|fates| match &fates[side] {
                Fate::OneOf(endpoints) => Some(endpoints.clone()),
                _ => None,
            });
            endpoints.flatten().collect()
        };
        slow.retain_mut(|program| {
            program.may.extend(may(&program.key, program.side));
            if random(3) > 0 {
                return true;
            }
            let index = [program.frontend.inside, program.frontend.outside][program.side];
            match (program.set, program.slot) {
                (None, _) => program.set = Some(self.maps.set(index).unwrap()),
                (Some(set), None) if set.kind() == Kind::Balance => {
                    let slot = set.base() + random(set.count() as usize) as u32;
                    program.slot = Some(self.maps.slot(slot).unwrap());
                }
                (Some(_), None) => return false,
                (Some(_), Some(slot)) => {
                    let backend = self.maps.backend(slot.backend).unwrap();
                    assert_eq!(backend.generation, slot.generation);
                    assert!(
                        program.may.contains(&at(&backend)),
                        "{:?} of {:?}",
                        at(&backend),
                        program.may
                    );
                    return false;
                }
            }
            true
        });
        let all = self.maps.frontends().unwrap();
        if !all.is_empty() && slow.len() < 4 {
            let (key, frontend) = all[random(all.len())];
            let side = random(2);
            slow.push(Slow {
                frontend,
                side,
                set: None,
                slot: None,
                may: may(&key, side),
                key,
            });
        }
    }
}

/// What a plan says of each of its frontends.
fn planned(plan: &ServicePlan) -> Fates {
    let fate = |plan: &SetPlan| match plan {
        SetPlan::Refuse => Fate::Refused,
        SetPlan::Drop => Fate::Dropped,
        SetPlan::Balance(endpoints) | SetPlan::Consistent(endpoints) => {
            Fate::OneOf(endpoints.clone())
        }
    };
    let of_port = plan.ports.values().flat_map(|port| {
        port.frontends.iter().map(move |frontend| {
            let sets = &port.sets[usize::from(frontend.at.is_ipv6())];
            let ranges = plan.source_ranges.iter();
            let mut ranges = ranges.filter(|range| range.addr().is_ipv4() == frontend.at.is_ipv4());
            let ranges: Vec<_> = ranges.by_ref().collect();
            let let_in = |client: &str| {
                let client: IpAddr = client.parse().unwrap();
                frontend.kind != FrontendKind::LoadBalancer
                    || client.is_ipv4() != frontend.at.is_ipv4()
                    || ranges.is_empty()
                    || ranges
                        .iter()
                        .any(|range| range.contains(&client) || range.prefix_len() == 0)
            };
            let [inside, outside] = sets.of(frontend.kind).map(fate);
            (
                key(port.protocol, frontend.at),
                sides(inside, outside, let_in),
            )
        })
    });
    let addresses = plan.addresses.iter().map(|address| {
        (
            FrontendKey::address((*address).into()),
            sides(Fate::Refused, Fate::Refused, |_| true),
        )
    });
    of_port.chain(addresses).collect()
}

struct World {
    publisher: Option<Publisher<Watched>>,
    maps: Rc<crate::datapath::Services>,
    eye: Rc<Eye>,
    now: Instant,
    /// What was asked for last, and what of that is so.
    wanted: BTreeMap<ServiceName, Option<ServicePlan>>,
    applied: BTreeMap<ServiceName, ServicePlan>,
}

/// For ranges of clients.
const SOURCE_ROOM: u32 = 5;

fn room() -> ServiceRoom {
    ServiceRoom {
        frontends: 24,
        sets: 16,
        slots: 40,
        backends: 32,
    }
}

impl World {
    fn new() -> Self {
        let maps = Rc::new(crate::datapath::Services::apart(&room()).unwrap());
        let mut world = Self {
            publisher: None,
            maps,
            eye: Rc::default(),
            now: Instant::now(),
            wanted: BTreeMap::new(),
            applied: BTreeMap::new(),
        };
        world.restore();
        world.publisher().complete(Instant::now()).unwrap();
        world
    }

    fn publisher(&mut self) -> &mut Publisher<Watched> {
        self.publisher.as_mut().unwrap()
    }

    /// Ends the publisher, and begins another with what it left.
    fn restore(&mut self) {
        self.publisher = None;
        self.eye.last.set(None);
        self.eye.slow.borrow_mut().clear();
        let tables = Watched {
            maps: self.maps.clone(),
            eye: self.eye.clone(),
        };
        let before = fates(&self.maps);
        self.allow(&before);
        self.publisher = Some(Publisher::restore(tables).unwrap());
        assert_eq!(fates(&self.maps), before);
    }

    fn applied_fates(&self) -> Fates {
        self.applied.values().flat_map(planned).collect()
    }

    /// From now on each frontend is as it is, or as somebody wants it.
    fn allow(&self, now: &Fates) {
        let mut allowed: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for (key, fate) in now {
            allowed.entry(*key).or_default().insert(fate.clone());
        }
        for (name, wanted) in &self.wanted {
            if wanted.as_ref() == self.applied.get(name) {
                continue;
            }
            for (key, fate) in wanted.iter().flat_map(planned) {
                let allowed = allowed.entry(key).or_default();
                allowed.insert(fate);
                if !now.contains_key(&key) {
                    allowed.insert(NOT_OURS);
                }
            }
            // What it had and does not want may go.
            for key in self
                .applied
                .get(name)
                .iter()
                .flat_map(|plan| planned(plan))
                .map(|(key, _)| key)
            {
                if !wanted
                    .iter()
                    .flat_map(planned)
                    .any(|(other, _)| other == key)
                {
                    allowed.entry(key).or_default().insert(NOT_OURS);
                }
            }
        }
        self.eye.allowed.replace(allowed);
    }

    /// Applies, and checks that all is as it was said to be.
    fn change(&mut self, changes: Vec<(ServiceName, Option<ServicePlan>)>) {
        self.wanted.extend(changes.iter().cloned());
        self.allow(&self.applied_fates());
        let now = self.now;
        let changes = changes.iter().map(|(name, plan)| (name, plan.as_ref()));
        self.publisher().apply_all(now, changes);
        self.retry();
        self.settle();
    }

    /// Applies again what waits, as whoever has the plans does.
    fn retry(&mut self) {
        let (now, wanted) = (self.now, self.wanted.clone());
        let publisher = self.publisher();
        let waiting = publisher.waiting_names();
        let again = waiting
            .iter()
            .map(|name| (name, wanted.get(name).and_then(Option::as_ref)));
        publisher.apply_all(now, again);
    }

    fn settle(&mut self) {
        let publisher = self.publisher.as_ref().unwrap();
        publisher.tables.look();
        let waiting: BTreeMap<_, _> = publisher.waiting().collect();
        for (name, plan) in &self.wanted {
            match plan {
                Some(plan) if is_without_table(waiting.get(name)) => {
                    let plan = plan.by_chance().unwrap();
                    self.applied.insert(name.clone(), plan);
                }
                _ if waiting.contains_key(name) => {}
                Some(plan) => drop(self.applied.insert(name.clone(), plan.clone())),
                None => drop(self.applied.remove(name)),
            }
        }
        self.check();
        let now = self.applied_fates();
        self.allow(&now);
    }

    /// What is there is what was applied, to the last bit.
    fn check(&self) {
        assert_eq!(fates(&self.maps), self.applied_fates());
        let all: HashMap<_, _> = self.maps.frontends().unwrap().into_iter().collect();
        let mut numbers = HashSet::new();
        // With the number of the port that has them.
        let (mut in_sets, mut others) = (BTreeSet::new(), BTreeSet::new());
        for plan in self.applied.values() {
            for port in plan.ports.values() {
                let of_port = port
                    .frontends
                    .iter()
                    .map(|frontend| all[&key(port.protocol, frontend.at)]);
                let of_port: Vec<_> = of_port.collect();
                let number = of_port.first().map(|frontend| frontend.service);
                for (frontend, planned) in of_port.iter().zip(&port.frontends) {
                    assert_eq!(Some(frontend.service), number);
                    assert_eq!(frontend.flags, flags(plan, port, planned));
                    assert_eq!(frontend.affinity_seconds, port.affinity_seconds);
                }
                assert!(number.is_none_or(|number| number != 0 && numbers.insert(number)));
                for (frontend, planned) in of_port.iter().zip(&port.frontends) {
                    let sets = &port.sets[usize::from(planned.at.is_ipv6())];
                    let [_, outside] = sets.of(planned.kind);
                    self.check_table(frontend.outside, outside);
                }
                for frontend in &port.frontends {
                    let sets = &port.sets[usize::from(frontend.at.is_ipv6())];
                    let all = roles::of(sets);
                    for (role, set) in all.iter().enumerate() {
                        let of = |at: &SocketAddr| (number.unwrap(), (*at, port.protocol.number()));
                        if let Some(endpoints) = set.endpoints() {
                            let used = roles::of_kind(frontend.kind).contains(&role);
                            let into = if used { &mut in_sets } else { &mut others };
                            into.extend(endpoints.iter().map(of));
                        }
                        others.extend(sets.draining.iter().map(of));
                    }
                }
            }
        }
        for (number, _) in self.maps.sources().unwrap() {
            assert!(numbers.contains(&number), "{number} is nobody's");
        }
        let number_of = self.numbers_of_ids(&all);
        let backends = &self.publisher.as_ref().unwrap().backends;
        for id in 0..room().backends {
            let backend = self.maps.backend(id).unwrap();
            let who = (at(&backend), backend.proto());
            let mut had = self.eye.numbers.borrow_mut();
            if is_in_set(&backend) {
                let number = number_of[&id];
                let first = *had.entry((id, backend.generation)).or_insert(number);
                assert_eq!(first, number, "{who:?} was another port's");
                let of = (number, who);
                assert!(in_sets.remove(&of), "{of:?} is in no set, or has two ids");
            } else if backend.flags & BACKEND_SERVING != 0 {
                let had = match backends.is_anybodys(id) {
                    true => None,
                    false => had.get(&(id, backend.generation)),
                };
                let is_of = |(number, other): &(u32, _)| {
                    *other == who && had.is_none_or(|had| had == number)
                };
                assert!(others.iter().any(is_of), "{who:?} is nobody's");
            }
        }
        assert!(in_sets.is_empty(), "{in_sets:?} do not serve");
    }

    /// To which port each id belongs that a set leads to: to one alone.
    fn numbers_of_ids(&self, frontends: &HashMap<FrontendKey, Frontend>) -> HashMap<u32, u32> {
        let mut numbers = HashMap::new();
        for frontend in frontends.values() {
            for set in [frontend.inside, frontend.outside] {
                let set = self.maps.set(set).unwrap();
                for slot in set.base()..set.base() + set.count() {
                    let id = self.maps.slot(slot).unwrap().backend;
                    let number = *numbers.entry(id).or_insert(frontend.service);
                    assert_eq!(number, frontend.service, "{id} is of two ports");
                }
            }
        }
        numbers
    }

    /// Whether each client has the endpoint that all nodes say it has.
    fn check_table(&self, set: u32, plan: &SetPlan) {
        let SetPlan::Consistent(endpoints) = plan else {
            return;
        };
        let set = self.maps.set(set).unwrap();
        let all: Vec<_> = endpoints.iter().copied().collect();
        let slots = set.base()..set.base() + set.count();
        let has = |slot| {
            let slot = self.maps.slot(slot).unwrap();
            at(&self.maps.backend(slot.backend).unwrap())
        };
        let wanted = maglev::table(endpoints, set.count()).into_iter();
        let wanted: Vec<_> = wanted.map(|who| all[who as usize]).collect();
        assert_eq!(slots.map(has).collect::<Vec<_>>(), wanted);
        assert!([3, 7].contains(&set.count()), "{}", set.count());
    }

    /// A new agent, which hears of all Services again.
    fn restart(&mut self) {
        self.restore();
        let present = fates(&self.maps);
        let wanted: Vec<_> = self.wanted.clone().into_iter().collect();
        let before = self.eye.stores.get();
        let was_clean = wanted
            .iter()
            .all(|(name, plan)| plan.as_ref() == self.applied.get(name));
        // It knows of no Service that is gone.
        let known = wanted
            .iter()
            .filter_map(|(name, plan)| Some((name, Some(plan.as_ref()?))));
        let mut allowed = self.eye.allowed.borrow().clone();
        for key in present.keys() {
            let wants = |plan: &ServicePlan| planned(plan).contains_key(key);
            if !wanted
                .iter()
                .any(|(_, plan)| plan.as_ref().is_some_and(wants))
            {
                allowed.entry(*key).or_default().insert(NOT_OURS);
            }
        }
        // Whoever comes first gets what two want.
        for (_, plan) in &wanted {
            for (key, fate) in plan.iter().flat_map(planned) {
                let allowed = allowed.entry(key).or_default();
                allowed.insert(fate);
                allowed.insert(NOT_OURS);
            }
        }
        if !was_clean {
            self.eye.allowed.replace(allowed);
        }
        let now = self.now;
        let publisher = self.publisher.as_mut().unwrap();
        publisher.apply_all(now, known);
        publisher.complete(now).unwrap();
        self.retry();
        if was_clean {
            assert_eq!(
                self.eye.stores.get(),
                before,
                "nothing changed, and something was written"
            );
        }
        // What has no room now may be as it was, or out. It is given up.
        loop {
            let publisher = self.publisher.as_mut().unwrap();
            let waiting = publisher.waiting();
            let waiting = waiting.filter(|(_, error)| !is_without_table(Some(error)));
            let waiting: Vec<_> = waiting.map(|(name, _)| name.clone()).collect();
            if waiting.is_empty() {
                break;
            }
            let mut allowed: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
            for (key, fate) in fates(&self.maps) {
                allowed.entry(key).or_default().extend([fate, NOT_OURS]);
            }
            for (key, fate) in self.wanted.values().flatten().flat_map(planned) {
                allowed.entry(key).or_default().extend([fate, NOT_OURS]);
            }
            self.eye.allowed.replace(allowed);
            publisher.apply_all(now, waiting.iter().map(|name| (name, None)));
            self.wanted
                .extend(waiting.into_iter().map(|name| (name, None)));
        }
        let wanted = self.wanted.clone().into_iter();
        self.applied = wanted
            .filter_map(|(name, plan)| Some((name, plan?)))
            .collect();
        self.settle();
    }
}

/// Whether it is published, but for a table.
fn is_without_table(error: Option<&&ServiceError>) -> bool {
    matches!(error, Some(ServiceError::NoTable { .. }))
}

fn name(at: usize) -> ServiceName {
    ServiceName::new("test", &format!("s{at}"))
}

fn endpoint() -> impl Strategy<Value = SocketAddr> {
    (1..9u8, 80..82u16).prop_map(|(host, port)| ([10, 244, 0, host], port).into())
}

fn set() -> impl Strategy<Value = SetPlan> {
    prop_oneof![
        1 => Just(SetPlan::Refuse),
        1 => Just(SetPlan::Drop),
        6 => proptest::collection::btree_set(endpoint(), 1..5).prop_map(SetPlan::Balance),
    ]
}

fn sets() -> impl Strategy<Value = Sets> {
    let draining = proptest::collection::btree_set(endpoint(), 0..3);
    (set(), set(), set(), 0..4u8, any::<bool>(), draining).prop_map(
        |(internal, cluster, external, alike, is_consistent, draining)| {
            let (cluster, external) = match alike {
                0 => (internal.clone(), internal.clone()),
                1 => (internal.clone(), external),
                2 => (cluster.clone(), cluster),
                _ => (cluster, external),
            };
            let external = match external {
                SetPlan::Balance(endpoints) if is_consistent => SetPlan::Consistent(endpoints),
                other => other,
            };
            Sets {
                internal,
                cluster,
                external,
                draining,
            }
        },
    )
}

/// IPv6 as IPv4 would be, one to one.
fn in_ipv6(sets: &Sets) -> Sets {
    let of = |at: &SocketAddr| match at.ip() {
        IpAddr::V4(v4) => {
            let [.., host] = v4.octets();
            let ip: IpAddr = format!("fd00::{host}").parse().unwrap();
            SocketAddr::new(ip, at.port())
        }
        IpAddr::V6(_) => *at,
    };
    let set = |plan: &SetPlan| match plan {
        SetPlan::Balance(endpoints) => SetPlan::Balance(endpoints.iter().map(of).collect()),
        SetPlan::Consistent(endpoints) => SetPlan::Consistent(endpoints.iter().map(of).collect()),
        other => other.clone(),
    };
    Sets {
        internal: set(&sets.internal),
        cluster: set(&sets.cluster),
        external: set(&sets.external),
        draining: sets.draining.iter().map(of).collect(),
    }
}

/// The Service's own address, and now and then one that others want, too.
fn plan(service: usize) -> impl Strategy<Value = ServicePlan> {
    let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)];
    let port = (protocol, sets(), any::<[bool; 6]>(), 0..2u32);
    let ranges = [
        "10.1.0.0/16",
        "10.0.0.0/8",
        "192.0.2.0/24",
        "fd00::/8",
        "2001:db8::/32",
        "0.0.0.0/0",
    ];
    let ranges = proptest::sample::subsequence(ranges.to_vec(), 0..3);
    (vec(port, 1..3), ranges).prop_map(move |(ports, ranges)| {
        let own: IpAddr = [10, 96, 0, service as u8].into();
        let own6: IpAddr = format!("fd00:96::{service}").parse().unwrap();
        let mut plan = ServicePlan {
            source_ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            ..ServicePlan::default()
        };
        for (
            at,
            (protocol, sets, [cluster, cluster6, external, shared, nodes, balanced], affinity),
        ) in ports.into_iter().enumerate()
        {
            let port = 80 + at as u16;
            let mut frontends = BTreeSet::new();
            let mut add = |is: bool, kind, ip: IpAddr| {
                let at = SocketAddr::new(ip, port);
                if is {
                    frontends.insert(FrontendPlan { kind, at });
                }
            };
            add(cluster, FrontendKind::ClusterIp, own);
            add(cluster6, FrontendKind::ClusterIp, own6);
            add(
                external,
                FrontendKind::ExternalIp,
                [192, 0, 2, service as u8].into(),
            );
            add(
                shared && external,
                FrontendKind::LoadBalancer,
                [198, 51, 100, 1].into(),
            );
            for ip in [
                format!("203.0.113.{service}"),
                format!("2001:db8::{service}"),
            ] {
                add(balanced, FrontendKind::LoadBalancer, ip.parse().unwrap());
            }
            // Node ports are of one range for all Services.
            let node_port = 30_000 + 10 * service as u16 + at as u16;
            for ip in [[127, 0, 0, 1], [192, 0, 2, 100]] {
                let at = SocketAddr::new(ip.into(), node_port);
                let kind = FrontendKind::NodePort;
                if nodes {
                    frontends.insert(FrontendPlan { kind, at });
                }
            }
            if cluster {
                plan.addresses.insert(own);
            }
            let port = PortPlan {
                protocol,
                frontends,
                sets: [sets.clone(), in_ipv6(&sets)],
                affinity_seconds: affinity * 10_800,
            };
            plan.ports.insert(format!("p{at}"), port);
        }
        plan
    })
}

#[derive(Clone, Debug)]
enum Step {
    Change(Vec<(usize, Option<ServicePlan>)>),
    Wait(u64),
    Restart,
    /// The agent is killed after so many stores of a change.
    Kill(u64, Vec<(usize, Option<ServicePlan>)>),
}

fn changes() -> impl Strategy<Value = Vec<(usize, Option<ServicePlan>)>> {
    let one = (1..5usize).prop_flat_map(|service| {
        (
            Just(service),
            proptest::option::weighted(0.8, plan(service)),
        )
    });
    vec(one, 1..4).prop_map(|changes| {
        let once: BTreeMap<_, _> = changes.into_iter().collect();
        once.into_iter().collect()
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => changes().prop_map(Step::Change),
        3 => (0..8u64).prop_map(Step::Wait),
        1 => Just(Step::Restart),
        2 => (0..30u64, changes()).prop_map(|(stores, changes)| Step::Kill(stores, changes)),
    ]
}

fn named(changes: Vec<(usize, Option<ServicePlan>)>) -> Vec<(ServiceName, Option<ServicePlan>)> {
    let named = changes.into_iter().map(|(at, plan)| (name(at), plan));
    named.collect()
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_reader_finds_what_was_never_said(steps in vec(step(), 1..30), seed in any::<u64>()) {
        let mut world = World::new();
        world.eye.random.set(seed);
        for step in steps {
            match step {
                Step::Change(changes) => world.change(named(changes)),
                Step::Wait(seconds) => {
                    world.now += Duration::from_secs(seconds);
                    // No program runs that long.
                    world.eye.slow.borrow_mut().clear();
                    world.retry();
                    world.settle();
                }
                Step::Restart => world.restart(),
                Step::Kill(stores, changes) => {
                    let changes = named(changes);
                    world.wanted.extend(changes.iter().cloned());
                    world.allow(&world.applied_fates());
                    world.eye.last.set(Some(world.eye.stores.get() + stores));
                    let now = world.now;
                    let publisher = world.publisher();
                    publisher.apply_all(now, changes.iter().map(|(name, plan)| (name, plan.as_ref())));
                    publisher.tables.look();
                    world.restart();
                }
            }
        }
        // Everything comes back.
        let all: Vec<_> = world.wanted.keys().cloned().map(|name| (name, None)).collect();
        world.change(all);
        let usage = world.publisher().usage();
        prop_assert_eq!((usage.services, usage.waiting, usage.endpoints), (0, 0, 0));
        for (map, taken, resting, _) in usage.maps {
            prop_assert_eq!(taken, resting, "{}", map);
        }
        world.now += REST;
        let now = world.now;
        let publisher = world.publisher();
        prop_assert_eq!(publisher.slots.take(now, room().slots), Some(0));
        prop_assert!(publisher.numbers.is_empty() && publisher.owners.len() == 0);
        prop_assert_eq!(publisher.tables.maps.sources().unwrap(), []);
        let sets: Vec<_> = (1..room().sets).map(|_| publisher.sets.take(now)).collect();
        prop_assert!(sets.iter().all(Option::is_some), "{:?}", sets);
        prop_assert!(publisher.set_refs[1..].iter().all(|refs| *refs == 0));
    }
}
