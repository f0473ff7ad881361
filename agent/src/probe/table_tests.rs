use super::*;
use proptest::prelude::*;
use std::net::Ipv4Addr;

const MTU: u32 = 1450;
const SECOND: Duration = Duration::from_secs(1);

fn gateway(n: u16) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x0af4_0001 + (u32::from(n) << 8)))
}

fn target(n: u16) -> (Name, Target) {
    let target = Target {
        gateway: gateway(n),
        tunnel: IpAddr::V4(Ipv4Addr::from_bits(0xac1e_0000 + u32::from(n))),
        ready: None,
    };
    (format!("n{n}").into(), target)
}

fn targets(count: u16) -> BTreeMap<Name, Target> {
    (1..=count).map(target).collect()
}

/// A network whose peers answer at once, as a test says, and a clock of its own.
struct World {
    table: Table,
    now: Instant,
    /// Requests made of each peer, with their sizes.
    asked: Vec<(IpAddr, Option<u32>)>,
}

impl World {
    fn new(peers: u16) -> Self {
        let now = Instant::now();
        let mut table = Table::default();
        table.follow(now, MTU, targets(peers));
        Self {
            table,
            now,
            asked: Vec::new(),
        }
    }

    /// Lets time pass; `answers` says who answers what.
    fn run(&mut self, time: Duration, answers: impl Fn(&Ask) -> bool) {
        let end = self.now + time;
        loop {
            let next = self.table.next_ask().into_iter();
            let next = next.chain(self.table.next_loss()).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(next);
            self.table.give_up(self.now);
            while let Some(ask) = self.table.ask(self.now) {
                self.asked.push((ask.gateway, ask.packet));
                let length = ask.packet.unwrap_or(24) as usize;
                self.table.sent(&ask, length);
                if answers(&ask) {
                    let took = Duration::from_micros(300);
                    let taken =
                        self.table
                            .answered(self.now + took, ask.gateway, ask.number, length);
                    assert_eq!(taken, Some(took));
                }
            }
        }
    }

    fn report(&self, n: u16) -> PeerProbe {
        let peer = self.table.peer(&format!("n{n}")).unwrap();
        peer.report(self.now)
    }

    fn is_silent(&self, n: u16) -> bool {
        matches!(self.report(n), PeerProbe::Silent { .. })
    }
}

#[test]
fn peers_that_answer_are_asked_every_ten_seconds_and_now_and_then_at_full_size() {
    let mut world = World::new(2);
    assert_eq!(world.report(1), PeerProbe::Unknown);
    world.run(SECOND * 1000, |_| true);
    let whole = PeerProbe::Answers {
        round_trip_microseconds: 300,
    };
    assert_eq!(world.report(1), whole);
    let of_first = |packet: Option<u32>| {
        let asked = world.asked.iter();
        asked
            .filter(|asked| **asked == (gateway(1), packet))
            .count()
    };
    let (small, large) = (of_first(None), of_first(Some(MTU)));
    assert!((80..=135).contains(&small), "{small}");
    assert!((8..=12).contains(&large), "{large}");
}

#[test]
fn one_loss_is_no_silence_and_three_are() {
    let mut world = World::new(1);
    world.run(SECOND * 20, |_| true);
    let lost = std::cell::Cell::new(0);
    world.run(SECOND * 200, |_| {
        lost.set(lost.get() + 1);
        // Two of three.
        lost.get() % 3 == 0
    });
    assert!(!world.is_silent(1));
    // Else the last losses of those would count.
    world.run(SECOND * 20, |_| true);
    let before = world.asked.len();
    world.run(SECOND * 20, |_| false);
    assert!(world.is_silent(1), "{:?}", world.report(1));
    let asked = world.asked[before..].iter();
    let small = asked.filter(|(_, size)| size.is_none()).count();
    assert!(small >= LOSSES as usize, "{small}");
    world.run(SECOND * 60, |_| false);
    let PeerProbe::Silent { seconds } = world.report(1) else {
        panic!("{:?}", world.report(1));
    };
    assert!((60..=80).contains(&seconds), "{seconds}");
    world.run(SECOND * 20, |_| true);
    assert!(!world.is_silent(1));
}

#[test]
fn a_peer_that_never_answered_is_silent_too() {
    let mut world = World::new(3);
    world.run(SECOND * 20, |ask| ask.gateway != gateway(2));
    assert_eq!([1, 2, 3].map(|n| world.is_silent(n)), [false, true, false]);
    let counts = world.table.counts();
    assert_eq!((counts.answering, counts.silent), (2, 1));
}

#[test]
fn only_the_peer_that_was_asked_answers_and_once_and_in_time() {
    let mut world = World::new(2);
    let table = &mut world.table;
    let mut now = world.now + SECOND * 20;
    let ask = table.ask(now).unwrap();
    let other = [gateway(1), gateway(2)]
        .into_iter()
        .find(|g| *g != ask.gateway)
        .unwrap();
    // Not even sent yet.
    assert_eq!(table.answered(now, ask.gateway, ask.number, 24), None);
    table.sent(&ask, 24);
    for (from, number, length) in [
        (other, ask.number, 24),
        (gateway(9), ask.number, 24),
        (ask.gateway, ask.number + 1, 24),
        (ask.gateway, 0, 24),
        (ask.gateway, ask.number, 25),
    ] {
        assert_eq!(table.answered(now, from, number, length), None);
    }
    now += SECOND / 2;
    assert_eq!(
        table.answered(now, ask.gateway, ask.number, 24),
        Some(SECOND / 2)
    );
    assert_eq!(table.answered(now, ask.gateway, ask.number, 24), None);

    let ask = table.ask(now).unwrap();
    table.sent(&ask, 24);
    now += PATIENCE;
    assert_eq!(table.give_up(now), 1);
    // Too late, and the peer is asked again.
    assert_eq!(table.answered(now, ask.gateway, ask.number, 24), None);
    assert!(table.ask(now).is_some());
}

#[test]
fn what_does_not_get_through_for_its_size_is_found_and_over_when_it_does() {
    for passes in [600, 1280, 1350, 1449] {
        let mut world = World::new(2);
        let narrow =
            |ask: &Ask| ask.gateway != gateway(1) || ask.packet.is_none_or(|size| size <= passes);
        world.run(SECOND * 60, narrow);
        let PeerProbe::SmallOnly {
            largest: Some(largest),
            ..
        } = world.report(1)
        else {
            panic!("{:?}", world.report(1));
        };
        assert!(largest <= passes && passes - largest < 8, "{largest}");
        assert!(matches!(world.report(2), PeerProbe::Answers { .. }));
        assert_eq!(world.table.searches, 0);
        world.run(SECOND * 60, |_| true);
        assert!(matches!(world.report(1), PeerProbe::Answers { .. }));
    }
}

#[test]
fn the_size_is_searched_for_with_few_peers_at_a_time() {
    let mut world = World::new(50);
    world.run(SECOND * 120, |ask| {
        ask.packet.is_none_or(|size| size < 1400)
    });
    assert_eq!(world.table.counts().small_only, 50);
    assert_eq!(world.table.searches, 0);
    let known = world
        .table
        .peers()
        .filter(|(_, p)| p.path.largest().is_some());
    let known = known.count();
    assert!((SEARCHES..50).contains(&known), "{known}");
}

#[test]
fn a_silent_peer_is_not_asked_for_large_packets() {
    let mut world = World::new(1);
    world.run(SECOND * 30, |_| true);
    world.run(SECOND * 20, |_| false);
    let before = world.asked.len();
    world.run(SECOND * 300, |_| false);
    assert!(world.asked[before..].iter().all(|(_, size)| size.is_none()));
}

#[test]
fn thousands_are_asked_ten_a_second() {
    let mut world = World::new(5000);
    world.run(SECOND * 1000, |_| true);
    let before = world.asked.len();
    world.run(SECOND * 5000, |_| true);
    let each = (world.asked.len() - before) as f64 / 5000.0;
    assert!((9.5..=12.0).contains(&each), "{each} a second");
    assert_eq!(world.table.counts().answering, 5000);
}

#[test]
fn peers_come_and_go_and_change_places() {
    let mut world = World::new(3);
    world.run(SECOND * 20, |ask| ask.gateway != gateway(2));
    assert!(world.is_silent(2));
    // n2 gets n4's gateway, n4 that of n2, n3 goes.
    let mut others = targets(4);
    others.remove("n3");
    let [second, fourth] = ["n2", "n4"].map(|name| others[name]);
    others.insert("n2".into(), fourth);
    others.insert("n4".into(), second);
    world.table.follow(world.now, MTU, others);
    assert!(world.table.peer("n3").is_none());
    assert_eq!(world.report(2), PeerProbe::Unknown);
    world.run(SECOND * 20, |_| true);
    assert_eq!(world.table.counts().answering, 3);
    world.table.follow(world.now, MTU, BTreeMap::new());
    assert_eq!(world.table.next_ask(), None);
    assert_eq!(world.table.next_loss(), None);
}

#[test]
fn another_mtu_is_asked_for_anew() {
    let mut world = World::new(1);
    world.run(SECOND * 30, |_| true);
    world.table.follow(world.now, 8950, targets(1));
    world.run(SECOND * 60, |ask| {
        ask.packet.is_none_or(|size| size <= 1450)
    });
    assert!(matches!(world.report(1), PeerProbe::SmallOnly { .. }));
}

#[test]
fn what_could_not_be_sent_says_nothing_of_a_peer() {
    let mut world = World::new(1);
    world.run(SECOND * 30, |_| true);
    for _ in 0..10 {
        world.now += SECOND * 15;
        let ask = world.table.ask(world.now).unwrap();
        world.table.withdraw(world.now, &ask);
        world.table.give_up(world.now);
    }
    assert!(matches!(world.report(1), PeerProbe::Answers { .. }));
}

#[derive(Clone, Debug)]
enum Event {
    Wait(u64),
    Ask {
        sent: bool,
    },
    Answer {
        which: usize,
        from: u16,
        length: usize,
    },
    Follow {
        first: u16,
        last: u16,
        mtu: u32,
    },
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..5000u64).prop_map(Event::Wait),
        any::<bool>().prop_map(|sent| Event::Ask { sent }),
        (0..9usize, 0..9u16, 20..30usize).prop_map(|(which, from, length)| Event::Answer {
            which,
            from,
            length
        }),
        (0..8u16, 0..8u16, 1280..1290u32).prop_map(|(first, last, mtu)| Event::Follow {
            first,
            last,
            mtu
        }),
    ]
}

proptest! {
    /// Whatever happens in whichever order, each peer is either to be asked or waited for.
    #[test]
    fn nobody_is_forgotten(events in proptest::collection::vec(event(), 0..200)) {
        let mut table = Table::default();
        let mut now = Instant::now();
        let mut asks: Vec<Ask> = Vec::new();
        for event in events {
            match event {
                Event::Wait(milliseconds) => now += Duration::from_millis(milliseconds),
                Event::Ask { sent } => {
                    if let Some(ask) = table.ask(now) {
                        match sent {
                            true => table.sent(&ask, 24),
                            false => table.withdraw(now, &ask),
                        }
                        asks.push(ask);
                    }
                }
                Event::Answer { which, from, length } => {
                    let number = asks.iter().rev().nth(which).map_or(0, |ask| ask.number);
                    table.answered(now, gateway(from), number, length);
                }
                Event::Follow { first, last, mtu } => {
                    table.follow(now, mtu, (first..last).map(target).collect());
                }
            }
            table.give_up(now);
            prop_assert_eq!(table.due.len() + table.waiting.len(), table.peers.len());
            prop_assert_eq!(table.by_gateway.len(), table.peers.len());
            let searched = table.peers.values().filter(|p| p.path.is_searched()).count();
            prop_assert_eq!(table.searches, searched);
            for (name, peer) in &table.peers {
                let waits = table.waiting.contains(&(peer.due, name.clone()));
                prop_assert_eq!(peer.asked.is_some(), waits);
            }
        }
    }
}
