//! The connection against a kernel that answers whatever a test wants.
//!
//! The kernel's part is played by the other end of a SEQPACKET socket pair: it keeps datagrams
//! apart as netlink does, and ignores the address they are sent to.

use super::*;
use crate::addr::Addr;
use crate::fdb::Fdb;
use crate::neigh::Neigh;
use crate::route::{Route, RouteFilter};
use crate::wire::tests::{frame, refusal};
use crate::{Family, Link, link};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, IntoRawFd};

/// How many requests stay open, and the outcomes, after the datagrams were taken as answers.
pub(crate) fn answers(
    first: u32,
    requests: Vec<Request>,
    datagrams: &[Vec<u8>],
) -> (usize, Vec<Option<Result<Vec<u8>>>>) {
    let mut batch = Batch::new(first, requests, &mut Vec::new());
    for datagram in datagrams {
        batch.take(datagram);
    }
    let outcomes = batch.entries.into_iter().map(|(_, outcome)| outcome);
    (batch.open, outcomes.collect())
}

/// Runs `test` on a connection whose requests are answered by the datagrams that `kernel` makes
/// of the request's sequence number and how many requests there were before.
fn with_kernel<T>(
    kernel: impl Fn(u32, usize) -> Vec<Vec<u8>> + Send,
    test: impl FnOnce(&mut Conn) -> T,
) -> T {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )
    .unwrap();
    setsockopt(&ours, ReceiveTimeout, &TimeVal::new(30, 0)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut theirs = File::from(theirs);
            let mut request = vec![0; 1 << 16];
            let mut before = 0;
            loop {
                let length = theirs.read(&mut request).unwrap();
                if length == 0 {
                    return;
                }
                let seq = wire::u32_at(&request[..length], 8).unwrap();
                for answer in kernel(seq, before) {
                    // Fails if the test was content with less.
                    let _ = theirs.write(&answer);
                }
                before += 1;
            }
        });
        let mut conn = Conn {
            // SAFETY: the descriptor is open and nobody else's any more.
            socket: unsafe { Socket::from_raw_fd(ours.into_raw_fd()) },
            seq: 7,
            datagram: Vec::new(),
        };
        test(&mut conn)
    })
}

const NEWLINK: i32 = libc::RTM_NEWLINK as i32;

fn a_link(name: &str, flags: i32, seq: u32) -> Vec<u8> {
    let mut body = vec![0; 16];
    let length = 4 + name.len() as u16;
    body.extend(length.to_ne_bytes());
    body.extend(libc::IFLA_IFNAME.to_ne_bytes());
    body.extend(name.as_bytes());
    body.resize(wire::align(body.len()), 0);
    frame(NEWLINK, flags, seq, &body)
}

fn done(flags: i32, seq: u32, errno: i32) -> Vec<u8> {
    frame(libc::NLMSG_DONE, flags, seq, &(-errno).to_ne_bytes())
}

fn ack(seq: u32, errno: i32) -> Vec<u8> {
    frame(libc::NLMSG_ERROR, 0, seq, &refusal(errno, &[], &[]))
}

fn names(links: Result<Vec<Link>>) -> Vec<String> {
    links.unwrap().into_iter().map(|link| link.name).collect()
}

#[test]
fn a_dump_that_was_interrupted_is_begun_anew_and_its_first_part_forgotten() {
    let interrupted = libc::NLM_F_DUMP_INTR;
    for broken in [
        (interrupted, 0, 0),
        (0, interrupted, 0),
        (0, 0, libc::EINTR),
    ] {
        let kernel = move |seq, before| {
            let (first, last, errno) = if before < 3 { broken } else { (0, 0, 0) };
            vec![
                a_link(&format!("try{before}"), first, seq),
                done(last, seq, errno),
            ]
        };
        with_kernel(kernel, |conn| assert_eq!(names(conn.links()), ["try3"]));
    }
}

#[test]
fn a_dump_that_never_comes_whole_is_given_up() {
    let kernel = |seq, before| {
        assert!(before < DUMP_TRIES);
        vec![done(libc::NLM_F_DUMP_INTR, seq, 0)]
    };
    with_kernel(kernel, |conn| {
        assert!(matches!(conn.links(), Err(Error::Interrupted { .. })));
    });
}

#[test]
fn a_dump_in_many_parts_is_one_list_and_answers_to_others_are_passed_over() {
    let kernel = |seq: u32, _| {
        let mut both = a_link("one", 0, seq);
        both.extend(a_link("two", 0, seq));
        vec![
            done(0, seq - 1, 0),
            a_link("stale", libc::NLM_F_DUMP_INTR, seq - 1),
            both,
            frame(libc::NLMSG_NOOP, 0, seq, &[]),
            a_link("three", 0, seq),
            done(0, seq, 0),
        ]
    };
    with_kernel(kernel, |conn| {
        assert_eq!(names(conn.links()), ["one", "two", "three"]);
    });
}

#[test]
fn a_dump_s_end_may_carry_an_errno_or_nothing() {
    let kernel = |seq, before| match before {
        0 => vec![a_link("one", 0, seq), done(0, seq, libc::EPERM)],
        1 => vec![ack(seq, libc::EOPNOTSUPP)],
        _ => vec![a_link("one", 0, seq), frame(libc::NLMSG_DONE, 0, seq, &[])],
    };
    with_kernel(kernel, |conn| {
        assert!(matches!(conn.links(), Err(Error::Permission(_))));
        assert!(matches!(conn.links(), Err(Error::NotSupported(_))));
        assert_eq!(names(conn.links()), ["one"]);
    });
}

#[test]
fn what_an_old_kernel_does_not_filter_is_filtered_here() {
    // Before 4.20 a dump takes no heed of the link that it is asked for.
    let ours = "10.0.0.1/32".parse().unwrap();
    let kernel = move |seq, before| {
        let listing = |kind: u16, of: &dyn Fn(u32) -> Request| {
            let objects = [3, 4].map(|link| {
                let request = of(link);
                frame(kind.into(), 0, seq, request.body_for_test())
            });
            objects.into_iter().chain([done(0, seq, 0)]).collect()
        };
        let (ip, mac) = ([10, 0, 0, 1].into(), [2; 6]);
        match before {
            0 => listing(libc::RTM_NEWADDR, &|link| Addr::new(link, ours).add()),
            1 => listing(libc::RTM_NEWNEIGH, &|link| Neigh::new(link, ip, mac).add()),
            2 => listing(libc::RTM_NEWNEIGH, &|link| Fdb { link, mac, dst: ip }.add()),
            _ => listing(libc::RTM_NEWROUTE, &|link| {
                let route = Route::to(ours)
                    .dev(link)
                    .table(link + 100)
                    .protocol(link as u8);
                route.add()
            }),
        }
    };
    with_kernel(kernel, |conn| {
        let addrs = conn.addrs(Some(4)).unwrap();
        assert_eq!(addrs.iter().map(|addr| addr.link).collect::<Vec<_>>(), [4]);
        let neighs = conn.neighs(4).unwrap();
        assert_eq!(
            neighs.iter().map(|neigh| neigh.link).collect::<Vec<_>>(),
            [4]
        );
        let entries = conn.fdb(4).unwrap();
        assert_eq!(
            entries.iter().map(|entry| entry.link).collect::<Vec<_>>(),
            [4]
        );
        for filter in [
            RouteFilter {
                oif: Some(4),
                ..RouteFilter::default()
            },
            RouteFilter {
                table: Some(104),
                ..RouteFilter::default()
            },
            RouteFilter {
                protocol: Some(4),
                ..RouteFilter::default()
            },
        ] {
            let routes = conn.routes(&filter).unwrap();
            assert_eq!(
                routes.iter().map(|route| route.oif).collect::<Vec<_>>(),
                [Some(4)]
            );
        }
        let v6 = RouteFilter {
            family: Some(Family::V6),
            ..RouteFilter::default()
        };
        assert_eq!(conn.routes(&v6).unwrap(), []);
    });
}

#[test]
fn an_object_that_makes_no_sense_is_told_and_the_next_dump_works() {
    let kernel = |seq, before| {
        let mut answers = vec![a_link("one", 0, seq), done(0, seq, 0)];
        if before == 0 {
            answers.insert(0, frame(NEWLINK, 0, seq, &[1, 2, 3]));
        }
        answers
    };
    with_kernel(kernel, |conn| {
        assert!(matches!(conn.links(), Err(Error::Malformed { .. })));
        assert_eq!(names(conn.links()), ["one"]);
    });
}

#[test]
fn answers_of_any_size_are_read_whole() {
    let name = "x".repeat(60_000);
    let kernel = |seq, _| {
        let mut long = a_link(&name, 0, seq);
        long.extend(a_link(&name, 0, seq));
        vec![long, done(0, seq, 0)]
    };
    with_kernel(kernel, |conn| {
        assert_eq!(names(conn.links()), [name.as_str(), name.as_str()]);
    });
}

#[test]
fn requests_without_an_answer_time_out_each_by_its_name() {
    with_kernel(
        |seq, _| vec![ack(seq, 0)],
        |conn| {
            // Long enough for the first answer even on a busy machine.
            setsockopt(&conn.socket, ReceiveTimeout, &TimeVal::new(1, 0)).unwrap();
            let outcomes = conn.execute_each([link::set_up(1), link::set_mtu(2, 1400)]);
            assert!(outcomes[0].is_ok());
            let Err(Error::Timeout { what }) = &outcomes[1] else {
                panic!("{:?}", outcomes[1]);
            };
            assert_eq!(what, "set MTU of link #2 to 1400");
            // The answer to come is the next request's own.
            conn.execute(link::set_up(3)).unwrap();
        },
    );
}

#[test]
fn answers_in_any_order_and_twice_find_their_requests() {
    let kernel = |seq, _| {
        let mut last = ack(seq + 2, libc::EEXIST);
        last.extend(ack(seq + 2, 0));
        vec![last, ack(seq, libc::ENODEV), ack(seq + 1, 0)]
    };
    with_kernel(kernel, |conn| {
        let outcomes = conn.execute_each([link::set_up(1), link::set_up(2), link::set_up(3)]);
        assert!(
            matches!(
                outcomes[..],
                [Err(Error::NotFound(_)), Ok(()), Err(Error::Exists(_))]
            ),
            "{outcomes:?}"
        );
    });
}

#[test]
fn sequence_numbers_may_wrap_within_a_batch() {
    let kernel = |seq: u32, _| vec![ack(seq, 0), ack(seq.wrapping_add(1), libc::EBUSY)];
    with_kernel(kernel, |conn| {
        conn.seq = u32::MAX;
        let outcomes = conn.execute_each([link::set_up(1), link::set_up(2)]);
        assert!(
            matches!(outcomes[..], [Ok(()), Err(Error::Busy(_))]),
            "{outcomes:?}"
        );
        assert_eq!(conn.seq, 1);
    });
}
