//! Everything but the map itself: a table of made records.

use super::*;
use crate::endpoint::{EndpointRecord, pod_names::record};
use proptest::prelude::*;
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            ALL_SHARES, FLAG_APART, FLAG_CLIENT_IS_HIGH, FLAG_INBOUND, FLAG_MAPPED, FLAG_MAPPING,
            FLAG_MASQUERADED, HOST_SHARE, Tuple,
        },
    },
    algo::{
        ct_state::{ACK, FIN, RST, SEEN, SYN},
        lifetime::LIFETIMES,
    },
    api::{ConnectionReport, Mapped, PodRef, StateClass},
};
use std::{
    cell::RefCell,
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

const NOW: u64 = 1_000_000_000_000_000;
const SECOND: u64 = 1_000_000_000;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;

fn addr(text: &str) -> Addr {
    text.parse::<IpAddr>().unwrap().into()
}

/// A connection of a client, who began, that was last seen so long ago.
struct Made {
    from: (&'static str, u16),
    to: (&'static str, u16),
    proto: u8,
    states: (u8, u8),
    idle: u64,
    nat: Option<(&'static str, u16)>,
    payer: u32,
}

impl Default for Made {
    fn default() -> Self {
        Self {
            from: ("10.1.0.5", 4000),
            to: ("192.0.2.9", 443),
            proto: TCP,
            states: (SEEN | SYN | ACK, SEEN | SYN | ACK),
            idle: 1,
            nat: Some(("192.0.2.1", 61000)),
            payer: 5,
        }
    }
}

impl Made {
    fn entry(&self) -> (ConnectionKey, Connection) {
        let sent = Tuple {
            src: addr(self.from.0),
            dst: addr(self.to.0),
            src_port: self.from.1.to_be_bytes(),
            dst_port: self.to.1.to_be_bytes(),
            proto: self.proto,
            pad: [0; 3],
        };
        let (key, high) = sent.key();
        let (client, server) = self.states;
        let flags = match high {
            true => FLAG_CLIENT_IS_HIGH,
            false => 0,
        };
        let record = Connection {
            last_seen_ns: NOW - self.idle * SECOND,
            began_ns: NOW - self.idle * SECOND - 10 * SECOND,
            nat: self.nat.map_or(Addr::UNSPECIFIED, |(nat, _)| addr(nat)),
            nat_port: self.nat.map_or([0; 2], |(_, port)| port.to_be_bytes()),
            states: match high {
                true => [server, client],
                false => [client, server],
            },
            flags: flags
                | match self.nat {
                    Some(_) => FLAG_MASQUERADED,
                    None => FLAG_INBOUND,
                },
            payer: self.payer,
            ..Connection::NONE
        };
        (key, record)
    }
}

struct Records(RefCell<Vec<Option<(ConnectionKey, Connection)>>>);

impl Records {
    fn new(entries: impl IntoIterator<Item = (ConnectionKey, Connection)>) -> Self {
        Self(RefCell::new(entries.into_iter().map(Some).collect()))
    }

    fn left(&self) -> usize {
        self.0.borrow().iter().flatten().count()
    }
}

impl Table for Records {
    fn capacity(&self) -> u32 {
        131_072
    }

    fn limits(&self) -> Result<Limits, DatapathError> {
        Ok(Limits {
            capacity: self.capacity(),
            per_pod: 750,
            embryonic_per_pod: 1000,
            pad: 0,
            lifetimes: LIFETIMES,
        })
    }

    fn shares(&self) -> Result<Vec<(u32, Share)>, DatapathError> {
        let share = Share {
            refused: 7,
            ..Share::default()
        };
        let all = Share {
            connections: 131_072 - 800,
            ..Share::default()
        };
        Ok(vec![
            (5, share),
            (HOST_SHARE, Share::default()),
            (ALL_SHARES, all),
        ])
    }

    fn read(
        &self,
        from: Option<u32>,
        each: &mut dyn FnMut(ConnectionKey, Connection),
    ) -> Result<Option<u32>, DatapathError> {
        let from = from.unwrap_or(0) as usize;
        let len = self.0.borrow().len();
        let to = len.min(from + CONNECTIONS_OF_A_PAGE);
        let some = self.0.borrow()[from.min(to)..to].to_vec();
        some.iter()
            .flatten()
            .for_each(|(key, record)| each(*key, *record));
        Ok((to < len).then_some(to as u32))
    }

    fn remove(&self, key: &ConnectionKey, _: &Connection) -> Result<(), DatapathError> {
        for entry in self.0.borrow_mut().iter_mut() {
            if entry.is_some_and(|(of, _)| of == *key) {
                *entry = None;
            }
        }
        Ok(())
    }
}

fn pod(ifindex: u32, name: &str, addresses: &[&str]) -> EndpointRecord {
    let pod = PodRef {
        namespace: "shop".into(),
        name: name.into(),
        uid: String::new(),
    };
    record(ifindex, pod, addresses)
}

fn pods() -> PodNames {
    let pods = [
        pod(5, "cart", &["10.1.0.5", "fd00:1::5"]),
        pod(6, "web", &["10.1.0.6", "fd00:1::6"]),
    ];
    PodNames::of(&pods)
}

fn view<T>(table: &Records, look: impl FnOnce(View<'_>) -> T) -> T {
    let pods = pods();
    look(View {
        table,
        pods: &pods,
        now_ns: NOW,
    })
}

fn all(table: &Records, filter: &ConnectionFilter) -> Vec<ConnectionReport> {
    view(table, |view| {
        let (mut rows, mut from) = (Vec::new(), None);
        loop {
            let page = view.page(filter, from).unwrap();
            rows.extend(page.connections);
            from = page.next;
            if from.is_none() {
                return rows;
            }
        }
    })
}

fn one(made: &Made) -> ConnectionReport {
    let rows = all(&Records::new([made.entry()]), &ConnectionFilter::default());
    let [row] = &rows[..] else { panic!("{rows:?}") };
    row.clone()
}

#[test]
fn a_record_is_shown_from_the_clients_side_whichever_end_is_higher() {
    for (client, server) in [("10.1.0.5", "192.0.2.9"), ("10.1.0.5", "1.1.1.1")] {
        let row = one(&Made {
            from: (client, 4000),
            to: (server, 443),
            ..Made::default()
        });
        assert_eq!(row.client.to_string(), "10.1.0.5:4000");
        assert_eq!(row.client.pod.as_deref(), Some("shop/cart"));
        assert_eq!(row.server.to_string(), format!("{server}:443"));
        assert_eq!(row.server.pod, None);
        let outside = row.masqueraded_as.unwrap();
        assert_eq!(outside.to_string(), "192.0.2.1:61000");
        assert_eq!(row.payer.as_deref(), Some("shop/cart"));
        assert_eq!((row.idle_seconds, row.age_seconds), (1, 11));
        assert_eq!(row.expires_seconds, 24 * 3600 - 1);
        assert_eq!(
            (row.state.as_str(), row.class),
            ("ESTABLISHED", StateClass::Established)
        );
        assert_eq!(row.frontend, None);
    }
}

#[test]
fn states_are_conntracks() {
    let both = SEEN | SYN | ACK;
    let cases = [
        (TCP, SEEN | SYN, 0, "SYN_SENT", StateClass::Unanswered),
        (
            TCP,
            SEEN | SYN,
            SEEN | SYN,
            "SYN_RECV",
            StateClass::Unanswered,
        ),
        (TCP, both, both, "ESTABLISHED", StateClass::Established),
        (TCP, both | FIN, both, "FIN_WAIT", StateClass::Closing),
        (TCP, both, both | FIN, "CLOSE_WAIT", StateClass::Closing),
        (
            TCP,
            both | FIN,
            both | FIN,
            "TIME_WAIT",
            StateClass::Closing,
        ),
        (TCP, both, both | RST, "CLOSE", StateClass::Closing),
        (UDP, SEEN, 0, "UNREPLIED", StateClass::Unanswered),
        (UDP, SEEN, SEEN, "ASSURED", StateClass::Established),
        (ICMP, SEEN, 0, "UNREPLIED", StateClass::Unanswered),
        (ICMP, SEEN, SEEN, "REPLIED", StateClass::Established),
        (47, SEEN, SEEN, "REPLIED", StateClass::Established),
    ];
    for (proto, client, server, state, class) in cases {
        let row = one(&Made {
            proto,
            states: (client, server),
            ..Made::default()
        });
        assert_eq!((row.state.as_str(), row.class), (state, class), "{row:?}");
    }
}

/// As the programs write it.
fn mapping(client: &'static str, idle: u64) -> (ConnectionKey, Connection) {
    let nat = if client.contains(':') {
        "2001:db8::1"
    } else {
        "192.0.2.1"
    };
    let made = Made {
        from: (client, 4000),
        to: (nat, 0),
        proto: UDP,
        states: (SEEN, 0),
        idle,
        nat: Some((nat, 4000)),
        ..Made::default()
    };
    let (_, record) = made.entry();
    let sent = Tuple {
        src: addr(client),
        dst: addr(nat),
        src_port: 4000u16.to_be_bytes(),
        dst_port: [0; 2],
        proto: UDP,
        pad: [0; 3],
    };
    let (key, is_high) = sent.mapping(&addr(nat)).key();
    assert!(!is_high);
    let flags = FLAG_MASQUERADED | FLAG_MAPPING;
    (
        key,
        Connection {
            states: [SEEN, 0],
            flags,
            ..record
        },
    )
}

#[test]
fn a_mapping_is_shown_as_one_and_lives_as_long_as_a_stream() {
    for (client, anybody) in [("10.1.0.5", "0.0.0.0"), ("fd00:1::5", "::")] {
        let rows = |idle| {
            let table = Records::new([mapping(client, idle)]);
            all(&table, &ConnectionFilter::default())
        };
        let [row] = &rows(120)[..] else { panic!() };
        assert_eq!(row.client.pod.as_deref(), Some("shop/cart"));
        assert_eq!(
            (row.server.to_string().as_str(), row.state.as_str()),
            (anybody, "MAPPING")
        );
        assert_eq!(row.mapping, Some(Mapped::Mapping));
        assert_eq!(row.masqueraded_as.as_ref().unwrap().port, Some(4000));
        assert_eq!(rows(121), []);
    }
}

#[test]
fn a_mapping_takes_room_and_leads_to_nobody() {
    let udp = |flag, port| {
        let (key, record) = Made {
            from: ("10.1.0.5", port),
            proto: UDP,
            ..Made::default()
        }
        .entry();
        let flags = record.flags | flag;
        (key, Connection { flags, ..record })
    };
    let table = Records::new([
        mapping("10.1.0.5", 1),
        udp(FLAG_MAPPED, 4000),
        udp(FLAG_APART, 4001),
    ]);
    let stats = view(&table, |view| view.stats().unwrap());
    assert_eq!(
        (stats.connections, stats.masqueraded, stats.apart),
        (3, 2, 1)
    );
    assert_eq!(stats.by_state["MAPPING"], 1);
    assert_eq!(stats.pods[0].connections, 3);
    assert_eq!(stats.remotes.len(), 1);
    let listed = |filter: &ConnectionFilter| all(&table, filter).len();
    let any = ConnectionFilter::default();
    // One that names where the other end is names no mapping, whatever net that is.
    for net in ["0.0.0.0/0", "::/0", "192.0.2.0/24"] {
        let remote = Some(net.parse().unwrap());
        let rows = all(
            &table,
            &ConnectionFilter {
                remote,
                ..any.clone()
            },
        );
        assert!(rows.iter().all(|row| row.mapping != Some(Mapped::Mapping)));
    }
    let port = |port| ConnectionFilter {
        port: Some(port),
        ..any.clone()
    };
    assert_eq!([0, 4000, 4001].map(|n| listed(&port(n))), [0, 2, 1]);
}

#[test]
fn what_is_over_is_not_there_and_a_protocol_without_ports_has_none() {
    let over = Made {
        proto: UDP,
        states: (SEEN, 0),
        idle: 31,
        ..Made::default()
    };
    let gre = Made {
        proto: 47,
        from: ("10.1.0.5", 0),
        to: ("192.0.2.9", 0),
        nat: Some(("192.0.2.1", 0)),
        ..Made::default()
    };
    let rows = all(
        &Records::new([over.entry(), gre.entry()]),
        &ConnectionFilter::default(),
    );
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].protocol, "gre");
    assert_eq!(rows[0].client.to_string(), "10.1.0.5");
    assert_eq!(rows[0].masqueraded_as.as_ref().unwrap().port, None);
}

fn different() -> Records {
    let v6 = Made {
        from: ("fd00:1::5", 5000),
        to: ("2001:db8::9", 53),
        proto: UDP,
        states: (SEEN, 0),
        nat: Some(("2001:db8::1", 62000)),
        ..Made::default()
    };
    let inbound = Made {
        from: ("192.0.2.77", 6000),
        to: ("10.1.0.6", 80),
        nat: None,
        payer: 6,
        ..Made::default()
    };
    let between = Made {
        from: ("10.1.0.5", 7000),
        to: ("10.1.0.6", 80),
        nat: None,
        states: (SEEN | FIN, SEEN | FIN),
        ..Made::default()
    };
    let gone = Made {
        from: ("10.1.0.99", 8000),
        to: ("198.51.100.1", 443),
        payer: 99,
        ..Made::default()
    };
    Records::new([Made::default(), v6, inbound, between, gone].map(|made| made.entry()))
}

#[test]
fn each_filter_chooses_and_all_must_hold() {
    let table = different();
    let none = ConnectionFilter::default;
    let net = |text: &str| Some(text.parse().unwrap());
    let cart = || Some("shop/cart".to_owned());
    let cases: [(ConnectionFilter, &[u16]); 13] = [
        (none(), &[4000, 5000, 6000, 7000, 8000]),
        (
            ConnectionFilter {
                pod: cart(),
                ..none()
            },
            &[4000, 5000, 7000],
        ),
        (
            ConnectionFilter {
                protocol: Some(UDP),
                ..none()
            },
            &[5000],
        ),
        (
            ConnectionFilter {
                port: Some(80),
                ..none()
            },
            &[6000, 7000],
        ),
        (
            ConnectionFilter {
                port: Some(62000),
                ..none()
            },
            &[5000],
        ),
        (
            ConnectionFilter {
                state: Some(StateClass::Closing),
                ..none()
            },
            &[7000],
        ),
        (
            ConnectionFilter {
                state: Some(StateClass::Unanswered),
                ..none()
            },
            &[5000],
        ),
        (
            ConnectionFilter {
                masqueraded: true,
                ..none()
            },
            &[4000, 5000, 8000],
        ),
        (
            ConnectionFilter {
                remote: net("192.0.2.0/24"),
                ..none()
            },
            &[4000, 6000],
        ),
        (
            ConnectionFilter {
                remote: net("2001:db8::/32"),
                ..none()
            },
            &[5000],
        ),
        // Of two pods each is the other's remote end; of a pod that is gone nobody knows which it was.
        (
            ConnectionFilter {
                remote: net("10.1.0.0/16"),
                ..none()
            },
            &[7000, 8000],
        ),
        (
            ConnectionFilter {
                pod: cart(),
                remote: net("10.1.0.5/32"),
                ..none()
            },
            &[],
        ),
        (
            ConnectionFilter {
                pod: cart(),
                protocol: Some(TCP),
                port: Some(443),
                ..none()
            },
            &[4000],
        ),
    ];
    for (filter, expected) in cases {
        let found: BTreeSet<u16> = all(&table, &filter)
            .iter()
            .map(|row| row.client.port.unwrap())
            .collect();
        assert_eq!(found, expected.iter().copied().collect(), "{filter:?}");
    }
}

#[test]
fn a_pod_that_is_not_there_is_an_error() {
    let filter = ConnectionFilter {
        pod: Some("shop/nobody".into()),
        ..ConnectionFilter::default()
    };
    view(&different(), |view| {
        let error = view.page(&filter, None).unwrap_err();
        assert!(error.to_string().contains("shop/nobody"), "{error}");
        assert!(view.flush(&filter, true, None).is_err());
    });
}

/// As many as there can be, with names as long as they can be: each page fits into a frame and takes a
/// bounded number of reads.
#[test]
fn half_a_million_fit_into_frames_page_by_page() {
    const MANY: u32 = 500_000;
    let entries = (0..MANY).map(|n| {
        let (mut key, mut record) = Made {
            from: ("fd00:1::5", 4000),
            to: ("fd00:1::6", 443),
            ..Made::default()
        }
        .entry();
        key.low_port = ((n % 65536) as u16).to_be_bytes();
        key.low.0[8..12].copy_from_slice(&(n / 65536).to_be_bytes());
        // The first is over, so that one page is not quite full without another.
        record.last_seen_ns *= u64::from(n != 0);
        (key, record)
    });
    let table = Records::new(entries);
    let name = |c: &str| format!("{}/{}", c.repeat(63), c.repeat(253));
    let mut long = [pod(5, "x", &["fd00:1::5"]), pod(6, "y", &["fd00:1::6"])];
    for (record, c) in long.iter_mut().zip(["a", "b"]) {
        record.pod.namespace = c.repeat(63);
        record.pod.name = c.repeat(253);
    }
    let pods = PodNames::of(&long);
    assert_eq!(pods.behind(5), Some(&*name("a")));
    let view = View {
        table: &table,
        pods: &pods,
        now_ns: NOW,
    };
    let page = view.page(&ConnectionFilter::default(), None).unwrap();
    assert_eq!(page.connections.len(), 2 * CONNECTIONS_OF_A_PAGE - 1);
    let reply = sinabro_common::api::ReplyEnvelope {
        version: sinabro_common::api::VERSION,
        reply: sinabro_common::api::Reply::Ok(sinabro_common::api::Response::Connections(page)),
    };
    let frame = sinabro_common::api::frame::encode(&reply).unwrap();
    assert!(frame.len() > 100_000, "{}", frame.len());
    // Where nothing is found, nobody waits for all to be read.
    let nothing = ConnectionFilter {
        protocol: Some(132),
        ..ConnectionFilter::default()
    };
    let (mut requests, mut from) = (0, None);
    loop {
        let page = view.page(&nothing, from).unwrap();
        assert_eq!(page.connections, []);
        requests += 1;
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    assert_eq!(requests, MANY.div_ceil(STEP as u32));
}

#[test]
fn a_flush_takes_what_a_filter_lets_through_and_all_only_if_asked() {
    let table = different();
    view(&table, |view| {
        let filter = ConnectionFilter {
            port: Some(80),
            ..ConnectionFilter::default()
        };
        let flushed = view.flush(&filter, false, None).unwrap();
        assert_eq!((flushed.flushed, flushed.next, table.left()), (2, None, 3));
        let none = ConnectionFilter::default();
        let error = view.flush(&none, false, None).unwrap_err();
        assert!(error.to_string().contains("--all"), "{error}");
        assert_eq!(table.left(), 3);
        assert_eq!(view.flush(&none, true, None).unwrap().flushed, 3);
        assert_eq!(table.left(), 0);
    });
}

#[test]
fn stats_count_by_pod_kind_and_remote_end() {
    let hosts = [9000, 9001].map(|port| Made {
        from: ("192.0.2.1", port),
        payer: HOST_SHARE,
        ..Made::default()
    });
    let table = different();
    let more = hosts.map(|made| Some(made.entry()));
    table.0.borrow_mut().extend(more);
    let stats = view(&table, |view| view.stats()).unwrap();
    assert_eq!(
        (stats.connections, stats.capacity, stats.masqueraded),
        (7, 131_072, 5)
    );
    let count = |word: &str| stats.by_class[word];
    assert_eq!(
        (count("established"), count("unanswered"), count("closing")),
        (5, 1, 1)
    );
    assert_eq!(stats.by_state["TIME_WAIT"], 1);
    assert_eq!((stats.by_protocol["tcp"], stats.by_protocol["udp"]), (6, 1));
    let pods: Vec<_> = stats
        .pods
        .iter()
        .map(|p| (p.pod.as_str(), p.connections))
        .collect();
    assert_eq!(pods, [("shop/cart", 3), ("shop/web", 1), ("(host)", 2)]);
    let cart = &stats.pods[0];
    assert_eq!((cart.unanswered, cart.refused), (1, 7));
    assert_eq!((cart.limit, cart.unanswered_limit), (750, 100));
    let first = &stats.remotes[0];
    assert_eq!(
        (first.remote.to_string().as_str(), first.connections),
        ("192.0.2.9:443", 3)
    );
    assert_eq!(stats.remotes.len(), 5);
    let inbound = stats
        .remotes
        .iter()
        .find(|r| r.remote.to_string() == "192.0.2.77");
    assert_eq!(inbound.map(|r| r.connections), Some(1));
}

/// However many remote ends there are: those that most lead to are found, with their exact numbers.
#[test]
fn the_greatest_remote_ends_are_found_among_many() {
    let entry = |host: u32, port: u16| {
        let (mut key, record) = Made {
            from: ("10.1.0.5", 1),
            to: ("200.0.0.1", 443),
            ..Made::default()
        }
        .entry();
        key.high = Addr::v4(Ipv4Addr::from(0xc800_0000 + host).octets());
        key.low_port = port.to_be_bytes();
        (key, record)
    };
    let many = (0..20_000).map(|host| entry(1000 + host, 1));
    let some = (0..300).flat_map(|port| [entry(1, port), entry(2, port), entry(2, 1000 + port)]);
    // The great ones first, which is when they are forgotten most easily.
    let table = Records::new(some.chain(many));
    let stats = view(&table, |view| view.stats()).unwrap();
    let first: Vec<_> = stats.remotes[..2]
        .iter()
        .map(|r| (r.remote.to_string(), r.connections))
        .collect();
    assert_eq!(
        first,
        [
            ("200.0.0.2:443".to_owned(), 600),
            ("200.0.0.1:443".to_owned(), 300)
        ]
    );
    assert_eq!(stats.remotes.len(), 20);
}

proptest! {
    /// Nothing is certain of what is in a map.
    #[test]
    fn any_bytes_are_a_row_or_none(key: [u8; 40], record in proptest::collection::vec(any::<u8>(), 88)) {
        // SAFETY: both types take any bytes of their length (`aya::Pod`).
        let (key, record) = unsafe {
            (
                key.as_ptr().cast::<ConnectionKey>().read_unaligned(),
                record.as_ptr().cast::<Connection>().read_unaligned(),
            )
        };
        let table = Records::new([(key, record)]);
        let rows = all(&table, &ConnectionFilter::default());
        prop_assert!(rows.len() <= 1);
        view(&table, |view| view.stats()).unwrap();
    }
}
