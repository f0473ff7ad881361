//! Connections that are over make way for new ones, whether there is an agent or not.

use super::{
    room::{ROOM, fill, is_answered, is_closed},
    *,
};
use aya::maps::Queue;
use sinabro_agent::datapath::ConnectionLimits;
use sinabro_common::abi::connection::{ALL_SHARES, Finished, MAX_FINISHED, Share};

fn queue() -> Queue<MapData, Finished> {
    let data = MapData::from_pin(format!("{}/v2/FINISHED", names::BPF_DIR)).unwrap();
    Map::Queue(data).try_into().unwrap()
}

/// All that wait to make way, which do no more.
fn taken_out() -> Vec<Finished> {
    let mut queue = queue();
    std::iter::from_fn(|| queue.pop(0).ok()).collect()
}

fn put_in(all: impl IntoIterator<Item = Finished>) {
    let mut queue = queue();
    all.into_iter()
        .for_each(|finished| queue.push(finished, 0).unwrap());
}

/// All that wait to make way, with other times.
fn with_times(times: impl Fn(&mut Finished)) -> usize {
    let mut all = taken_out();
    all.iter_mut().for_each(times);
    let count = all.len();
    put_in(all);
    count
}

/// However long the test takes.
pub fn put_off() -> usize {
    with_times(|finished| {
        finished.ended_ns = monotonic_ns();
        finished.from_ns = u64::MAX;
    })
}

/// They are over for so long.
pub fn since(seconds: f64) -> usize {
    age(seconds.ceil() as u64 + 1);
    let age_ns = (seconds * SECOND as f64) as u64;
    with_times(|finished| {
        let pause = match finished.key.proto {
            TCP => SECOND,
            _ => 3 * SECOND,
        };
        finished.ended_ns = monotonic_ns() - age_ns;
        finished.from_ns = finished.ended_ns + pause;
    })
}

fn config(limits: ConnectionLimits) -> DatapathConfig {
    DatapathConfig {
        connections: Some(ROOM),
        connection_limits: limits,
        ..kit::config()
    }
}

fn shares(payer: u32) -> (u64, u64) {
    let share = open::<u32, Share>("SHARES").get(&payer, 0).unwrap();
    (share.connections, share.refused)
}

/// A pod that asked silent hosts until its share of unanswered connections was full begins others once these are over, without an
/// agent; not while its hosts may still answer.
#[test]
fn what_nobody_answered_in_time_makes_way_without_an_agent() {
    let config = DatapathConfig {
        connections: Some(1024),
        ..kit::config()
    };
    world_with(&config, |w| {
        for proto in [UDP, TCP, ICMP] {
            let ask = |number: u16| {
                let (v4, v6) = (
                    number.is_multiple_of(2),
                    u16::from(number.is_multiple_of(2)),
                );
                let (pod, far) = if v4 {
                    (w.a.v4, FAR)
                } else {
                    (w.a.v6, "2001:db8::9".parse().unwrap())
                };
                let id = 1000 + number + v6;
                let ip = match proto {
                    ICMP => packet::icmp(pod, far, if v4 { 8 } else { 128 }, id),
                    _ => make(proto, (pod, id), (far, 80)),
                };
                w.out(&ip).0 == PASS
            };
            let begun = (0..).take_while(|number| ask(*number)).count() as u16;
            assert!(begun > 40, "{proto}: {begun}");
            assert!(!ask(begun + 1), "{proto}: at once");
            age(20);
            assert!(!ask(begun + 1), "{proto}: too soon");
            age(120);
            // One that is over is found by chance, so whoever asks again gets through. Of those that have places, some two thirds of
            // the second half, fewer than half are asked for.
            for round in 1..4 {
                for number in 0..begun / 6 {
                    let number = round * 5000 + number;
                    assert!((0..16).any(|_| ask(number)), "{proto}: round {round}");
                }
                age(140);
            }
            check_table();
            w.sweep_at(1000);
            assert_eq!(table().len(), 0);
        }
    });
}

/// A pod that has all that it may have, of what is over, but for one connection that is open. `after`: seconds.
fn what_is_over_makes_way(
    limits: ConnectionLimits,
    after: f64,
    does: fn(&World, IpAddr, u16) -> bool,
) {
    world_with(&config(limits), |w| {
        let open = make(TCP, (w.a.v4, 1), (FAR, 80));
        let of_open = w.sent(&open);
        w.received(&reply_to(&of_open));
        assert!(does(&w, w.b.v4, 1));
        let done = fill(&w, does);
        let (connections, refused) = shares(w.a.ifindex);
        assert_eq!((connections, refused), (done + 1, 1));
        let one_more = make(TCP, (w.a.v4, 3000), (FAR, 80));
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        assert!(since(after - 0.2) as u64 > done / 3);
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        assert_eq!(table().len() as u64, done + 2);

        since(after + 0.1);
        for port in 3000..3008 {
            w.sent(&make(TCP, (w.a.v4, port), (FAR, 80)));
        }
        // Nobody counted those that got in, and what is open is not touched, nor the other pod's.
        assert_eq!(shares(w.a.ifindex).1, 3);
        assert_eq!(w.received(&reply_to(&of_open)).dst, w.a.v4);
        let all = table();
        assert!(all.len() as u64 <= done + 3, "{}", all.len());
        assert_eq!(shares(ALL_SHARES).0, all.len() as u64);
        let of = |payer| {
            all.values()
                .filter(move |found| found.payer == payer)
                .count()
        };
        assert_eq!(
            (of(w.a.ifindex) as u64, of(w.b.ifindex)),
            (shares(w.a.ifindex).0, 1)
        );
        check_table();
    });
}

#[test]
fn closed_connections_make_way_after_a_second() {
    what_is_over_makes_way(ConnectionLimits::default(), 1.0, is_closed);
}

#[test]
fn questions_that_have_their_answers_make_way_after_three() {
    what_is_over_makes_way(ConnectionLimits::default(), 3.0, is_answered);
}

#[test]
fn echoes_that_have_their_answers_make_way_after_three() {
    what_is_over_makes_way(ConnectionLimits::default(), 3.0, |w, pod, port| {
        let (verdict, out) = w.out(&make(ICMP, (pod, port), (FAR, 0)));
        if verdict == PASS {
            w.received(&reply_to(&see(&out)));
        }
        verdict == PASS
    });
}

#[test]
fn what_is_over_makes_way_where_the_settings_say_how_many_a_pod_has() {
    let limits = ConnectionLimits {
        per_pod: 40,
        ..ConnectionLimits::default()
    };
    what_is_over_makes_way(limits, 1.0, is_closed);
}

#[test]
fn what_is_reset_makes_way() {
    what_is_over_makes_way(ConnectionLimits::default(), 1.0, |w, pod, port| {
        let (verdict, out) = w.out(&make(TCP, (pod, port), (FAR, 80)));
        if verdict == PASS {
            w.received(&reply_to(&see(&out)));
            w.sent(&packet::tcp((pod, port), (FAR, 80), RST, b""));
        }
        verdict == PASS
    });
}

/// To another pod go the places of closed connections, and not those of datagrams, of which nobody knows for certain.
#[test]
fn only_what_is_certainly_over_makes_way_for_others() {
    for (does, makes_way) in [
        (is_closed as fn(&World, IpAddr, u16) -> bool, true),
        (is_answered, false),
    ] {
        world_with(&config(ConnectionLimits::default()), |w| {
            let done = fill(&w, does);
            let opens = |port| {
                let (verdict, out) = w.out(&make(UDP, (w.b.v4, port), (FAR, 9)));
                if verdict == PASS {
                    w.received(&reply_to(&see(&out)));
                    // A stream of them, which stays.
                    let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
                    for (key, mut record) in table() {
                        if record.payer == w.b.ifindex {
                            record.began_ns -= 9 * SECOND;
                            records.insert(key, record, 0).unwrap();
                        }
                    }
                }
                verdict == PASS
            };
            let others = (1..ROOM as u16).take_while(|port| opens(*port)).count();
            assert!((40..60).contains(&others), "{others}");
            since(4.0);
            assert_eq!(opens(3000), makes_way);
            let of_a = |found: &&Connection| found.payer == w.a.ifindex;
            let left = table().values().filter(of_a).count() as u64;
            assert_eq!(left < done, makes_way, "{left} of {done}");
            check_table();
        });
    }
}

/// From the same port a pod has begun another one since.
#[test]
fn what_began_again_stays() {
    world_with(&config(ConnectionLimits::default()), |w| {
        fill(&w, is_closed);
        let last = with_times(|_| {}) as u16;
        // Those that wait are the last ones: each begins again, and the first half is closed again, too.
        let noted: Vec<u16> = (1000..1000 + ROOM as u16)
            .rev()
            .filter(|port| {
                table()
                    .keys()
                    .any(|key| [key.low_port, key.high_port].contains(&port.to_be_bytes()))
            })
            .take(last.into())
            .collect();
        since(1.1);
        let again = |port: u16| {
            w.received(&reply_to(&w.sent(&make(TCP, (w.a.v4, port), (FAR, 80)))));
            w.sent(&packet::tcp((w.a.v4, port), (FAR, 80), ACK, b""));
        };
        let (closed, open) = noted.split_at(noted.len() / 2);
        open.iter().for_each(|port| again(*port));
        for port in closed {
            assert!(is_closed(&w, w.a.v4, *port));
        }
        let before = table();
        let one_more = make(TCP, (w.a.v4, 3000), (FAR, 80));
        for _ in 0..last {
            assert_eq!(w.out(&one_more).0, DROP);
        }
        assert_eq!(
            table().keys().collect::<HashSet<_>>(),
            before.keys().collect()
        );
        check_table();
    });
}

/// What was a question with its answer has become a stream, or is asked again.
#[test]
fn datagrams_that_went_on_stay() {
    let last = |change: fn(&mut Connection)| {
        let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
        for (key, mut record) in table() {
            change(&mut record);
            records.insert(key, record, 0).unwrap();
        }
    };
    let stream: fn(&mut Connection) = |record| record.began_ns -= 3 * SECOND;
    let asked_again = |record: &mut Connection| {
        record.last_seen_ns = monotonic_ns() - 26 * SECOND / 10;
        record.began_ns = record.last_seen_ns - 19 * SECOND / 10;
    };
    for (change, stays) in [(stream, true), (asked_again, true), (|_| {}, false)] {
        world_with(&config(ConnectionLimits::default()), |w| {
            let done = fill(&w, is_answered);
            since(4.0);
            last(change);
            let one_more = make(TCP, (w.a.v4, 3000), (FAR, 80));
            assert_eq!(w.out(&one_more).0 == DROP, stays);
            assert_eq!(table().len() as u64 == done, stays);
            check_table();
        });
    }
}

/// It has a cost, which is nobody's where there is room.
#[test]
fn nothing_is_noted_while_there_is_room() {
    world_with(&config(ConnectionLimits::default()), |w| {
        for port in 1000..1060 {
            assert!(is_closed(&w, w.a.v4, port));
            assert!(is_answered(&w, w.a.v4, port));
            let noted = put_off();
            assert_eq!(
                noted != 0,
                table().len() > ROOM as usize / 3,
                "{}",
                table().len()
            );
            if noted != 0 {
                return;
            }
        }
        panic!("never");
    });
}

/// Of a pod that has few, too.
#[test]
fn once_the_table_is_nearly_full_everybodys_are_noted() {
    world_with(&config(ConnectionLimits::default()), |w| {
        let c = Pod::silent(&w.datapath, 7);
        let opens = |pod: IpAddr, port: u16| {
            let syn = make(TCP, (pod, port), (FAR, 80));
            let (verdict, out) = w.out(&syn);
            if verdict == PASS {
                w.received(&reply_to(&see(&out)));
                w.sent(&packet::tcp((pod, port), (FAR, 80), ACK, b""));
            }
            verdict == PASS
        };
        assert!(is_closed(&w, c.v4, 1));
        for pod in [w.a.v4, w.b.v4] {
            (1000..1000 + ROOM as u16)
                .take_while(|port| opens(pod, *port))
                .count();
        }
        assert_eq!(put_off(), 0);
        assert!(is_closed(&w, c.v4, 2));
        assert!(table().len() as u32 > ROOM / 4 * 3);
        assert_ne!(put_off(), 0);
    });
}

/// Whoever takes the port over removes it.
#[test]
fn what_is_just_being_taken_over_is_left_to_who_does() {
    world_with(&config(ConnectionLimits::default()), |w| {
        let done = fill(&w, is_closed);
        since(1.1);
        let with_takers = |takers| {
            let mut all = open::<Tuple, Alias>("ALIASES");
            for (key, mut alias) in aliases() {
                alias.takers = takers;
                all.insert(key, alias, 0).unwrap();
            }
        };
        let one_more = make(TCP, (w.a.v4, 3000), (FAR, 80));
        let noted = taken_out();
        put_in(noted.clone());
        with_takers(1);
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        assert!(aliases().values().all(|alias| alias.takers == 1));
        assert_eq!(table().len() as u64, done);
        with_takers(0);
        put_in(noted);
        w.sent(&one_more);
        check_table();
    });
}

/// Two processors want room at the same time.
#[test]
fn what_is_over_makes_way_once() {
    const EACH: u16 = 150;
    let config = DatapathConfig {
        connections: Some(10 * ROOM),
        ..kit::config()
    };
    world_with(&config, |w| {
        let ports = 1000..1000 + 10 * ROOM as u16;
        let done = ports
            .take_while(|port| is_closed(&w, w.a.v4, *port))
            .count();
        since(1.1);
        let refused = std::thread::scope(|scope| {
            let threads = [10_000, 20_000].map(|first| {
                let w = &w;
                scope.spawn(move || {
                    let ports = first..first + EACH;
                    ports.filter(|port| !is_closed(w, w.a.v4, *port)).count()
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(refused, [0, 0], "of {done}");
        let all = table().len() as u64;
        assert_eq!((shares(w.a.ifindex).0, shares(ALL_SHARES).0), (all, all));
        check_table();
    });
}

/// They are in nobody's way then.
#[test]
fn what_the_agent_ended_is_passed_by() {
    world_with(&config(ConnectionLimits::default()), |w| {
        let done = fill(&w, is_closed);
        let noted = with_times(|finished| finished.from_ns = monotonic_ns() + SECOND);
        assert!(noted > 10);
        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(with_times(|_| {}), noted, "their time has not come");
        assert_eq!(w.sweep_at(2), done);
        assert_eq!(with_times(|_| {}), 0);
        // They were to make way later, and had no time to: some that somebody else ended are passed by at once.
        fill(&w, is_closed);
        since(1.1);
        let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
        let all = taken_out();
        for finished in &all[..8] {
            let _ = records.remove(&finished.key);
        }
        put_in(all);
        w.sent(&make(TCP, (w.a.v4, 3000), (FAR, 80)));
        assert_eq!(taken_out().len(), noted - 12);
    });
}

/// Whatever is in the queue.
#[test]
fn what_means_nothing_is_passed_by() {
    world_with(&config(ConnectionLimits::default()), |w| {
        let done = fill(&w, is_closed);
        let noted = since(2.0);
        let all = taken_out();
        let mut queue = queue();
        let nobodys = |byte: u8| {
            // SAFETY: any bytes are one.
            let mut garbage: Finished =
                unsafe { core::mem::transmute([byte; size_of::<Finished>()]) };
            garbage.from_ns = 0;
            garbage
        };
        for finished in all {
            for byte in [0, 0xff] {
                queue.push(nobodys(byte), 0).unwrap();
            }
            queue.push(finished, 0).unwrap();
            queue.push(finished, 0).unwrap();
        }
        // Each of those who are refused otherwise passes four by.
        for port in 3000..3000 + 4 * noted as u16 {
            is_closed(&w, w.a.v4, port);
        }
        with_times(|finished| assert!(finished.from_ns > monotonic_ns() - SECOND));
        assert!(table().len() as u64 <= done + 1);
        check_table();
        taken_out();
        w.sweep_at(2);
        // The queue is full of others': what closes has the first one's place, and all go on.
        for _ in 0..MAX_FINISHED {
            queue.push(nobodys(7), 0).unwrap();
        }
        assert!(queue.push(nobodys(7), 0).is_err());
        assert!(fill(&w, is_closed) > 0);
        let of_pod = std::cell::Cell::new(0);
        let all = with_times(|finished| {
            let is_garbage = finished.key == nobodys(7).key;
            of_pod.set(of_pod.get() + usize::from(!is_garbage));
        });
        assert_eq!(all, MAX_FINISHED as usize);
        assert!(of_pod.get() > ROOM as usize / 10, "{}", of_pod.get());
        check_table();
    });
}
