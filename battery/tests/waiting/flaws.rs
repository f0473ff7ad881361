//! That the battery sees what it is there to see: connections with a relay in the middle that
//! does something wrong. And that it sees nothing where there is nothing to see.

use sinabro_battery::{
    self as battery, Between, Class, Connect, Listener, Outcome, Row, SocketOption, compare,
};
use sinabro_netlink::{Conn, NetNs, link};
use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    sync::mpsc,
    thread,
    time::Duration,
};

/// A network namespace of the test's own with loopback.
fn fresh() -> NetNs {
    let netns = NetNs::create().unwrap();
    let mut conn = Conn::in_netns(&netns).unwrap();
    let lo = conn.link_by_name("lo").unwrap().index;
    conn.execute(link::set_up(lo)).unwrap();
    netns
}

/// What a relay does to what it passes on.
#[derive(Clone, Copy)]
enum Flaw {
    /// Later bytes come first.
    Reorders,
    /// Takes whatever is sent, whether or not the other end reads.
    Hoards,
    /// What comes last before the end is not passed on.
    Forgets,
}

/// Connections with a relay in the middle.
struct Relayed {
    between: Between,
    flaw: Flaw,
}

impl Connect for Relayed {
    fn listen(&self, options: &[SocketOption]) -> io::Result<Listener> {
        self.between.listen(options)
    }

    fn connect(&self, to: SocketAddr, options: &[SocketOption]) -> io::Result<OwnedFd> {
        let onward = TcpStream::from(self.between.connect(to, &[])?);
        let relay = self.between.listen(&[])?;
        let client = self.between.connect(relay.address, options)?;
        let (back, _) = TcpListener::from(relay.socket).accept()?;
        for (from, to) in [(&back, &onward), (&onward, &back)] {
            pass_on(from.try_clone()?, to.try_clone()?, self.flaw);
        }
        Ok(client)
    }

    fn patience(&self) -> Duration {
        self.between.patience()
    }
}

/// Until either end has enough.
fn pass_on(mut from: TcpStream, mut to: TcpStream, flaw: Flaw) {
    // Room for one piece, or for all.
    let (bounded, pieces) = mpsc::sync_channel::<Vec<u8>>(match flaw {
        Flaw::Hoards => 1 << 20,
        Flaw::Reorders | Flaw::Forgets => 0,
    });
    thread::spawn(move || {
        let mut piece = vec![0; 4096];
        while let Ok(len @ 1..) = from.read(&mut piece) {
            let mut piece = piece[..len].to_vec();
            if matches!(flaw, Flaw::Reorders) {
                piece.reverse();
            }
            if bounded.send(piece).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        let mut pieces = pieces.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            let is_forgotten = matches!(flaw, Flaw::Forgets) && pieces.peek().is_none();
            if is_forgotten || to.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}

/// Some rows, seen through a relay.
fn through(flaw: Flaw, is_wanted: impl Fn(&Row) -> bool) -> Vec<Outcome> {
    let rows: Vec<&'static Row> = battery::rows().filter(|row| is_wanted(row)).collect();
    let here = fresh();
    // At addresses of their own, as both begin with the same port.
    let between = |last| {
        let address = Ipv4Addr::new(127, 0, 0, last).into();
        let between = Between::new(here.clone(), here.clone(), address);
        between.patient(Duration::from_secs(3))
    };
    let relayed = Relayed {
        between: between(2),
        flaw,
    };
    let outcomes = compare(&rows, &between(1), &relayed, 4).unwrap();
    println!("{}", battery::table(&outcomes));
    outcomes
}

fn differ(outcomes: &[Outcome], class: Class) -> (usize, usize) {
    let of_class = outcomes.iter().filter(|outcome| outcome.row.class == class);
    let differ = of_class.clone().filter(|outcome| !outcome.passed());
    (differ.count(), of_class.count())
}

/// About order and back-pressure.
fn about_bytes(row: &Row) -> bool {
    row.quick && row.class != Class::Behaviour
}

#[test]
fn the_end_of_what_was_sent_is_missed() {
    let outcomes = through(Flaw::Forgets, |row| row.id == "close-after-data");
    let passed: Vec<_> = outcomes.iter().map(Outcome::passed).collect();
    assert_eq!(passed, [false], "{outcomes:?}");
}

#[test]
fn every_row_about_order_notices_bytes_in_another_order() {
    let outcomes = through(Flaw::Reorders, about_bytes);
    let (differ, all) = differ(&outcomes, Class::Order);
    assert!(all > 2 && differ == all, "{differ} of {all}");
}

#[test]
fn every_row_about_back_pressure_notices_a_hoard_and_none_about_order_does() {
    let outcomes = through(Flaw::Hoards, about_bytes);
    let (count, all) = differ(&outcomes, Class::BackPressure);
    assert!(all > 1 && count == all, "{count} of {all}");
    assert_eq!(differ(&outcomes, Class::Order).0, 0);
}

#[test]
fn rows_see_the_same_of_plain_connections_each_time() {
    let rows: Vec<_> = battery::rows().collect();
    let here = fresh();
    for loopback in ["127.0.0.1", "::1"] {
        let connect = Between::new(here.clone(), here.clone(), loopback.parse().unwrap());
        // The machine may be busy with other tests.
        let connect = connect.patient(Duration::from_secs(5));
        for outcome in compare(&rows, &connect, &connect, 8).unwrap() {
            assert!(outcome.passed(), "{outcome:?}");
            assert!(!outcome.plain.contains("cannot"), "{outcome:?}");
        }
    }
}
