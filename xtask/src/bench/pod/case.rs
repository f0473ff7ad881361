//! What is measured.

use super::scene::Way;
use crate::bench::figures::Grouped;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// TCP connections that are filled, by messages of so many bytes.
    Streams { connections: usize, message: usize },
    /// A request and a response of so many bytes at a time, over each connection.
    RoundTrips { connections: usize, size: usize },
    /// The same over one connection, while the CPUs of both ends are kept from idling.
    RoundTripsAwake(usize),
    /// A connection for each request and response.
    Connections,
    /// nginx's answers of so many bytes, over 50 connections.
    Http { body: usize, nopush: bool },
    /// UDP packets of so many bytes, one way.
    Packets(usize),
    /// UDP packets with so many bytes of data.
    Datagrams(usize),
    /// Each round trip by itself.
    Latency,
    /// What so many connections cost that were used once.
    Idle(usize),
    /// What so many connections cost that are filled, and hardly read.
    SlowReaders(usize),
}

impl Kind {
    pub fn is_http(self) -> bool {
        matches!(self, Self::Http { .. })
    }
}

const fn bulk(connections: usize) -> Kind {
    Kind::Streams {
        connections,
        message: BULK,
    }
}

const fn round_trips(size: usize) -> Kind {
    Kind::RoundTrips {
        connections: 1,
        size,
    }
}

const fn http(body: usize) -> Kind {
    Kind::Http { body, nopush: true }
}

const fn stream(message: usize) -> Kind {
    Kind::Streams {
        connections: 1,
        message,
    }
}

/// Beside what others put between pods.
const BESIDE_OTHERS: &[(&str, Kind)] = &[
    ("one stream", bulk(1)),
    ("8 streams", bulk(8)),
    ("request/response", round_trips(REQUEST)),
    ("connect/request/response", Kind::Connections),
    ("UDP packets of 64 B", Kind::Packets(64)),
    ("UDP packets of 1400 B", Kind::Packets(1400)),
    ("round trip of 1 B", Kind::Latency),
];

/// Where many wait at once, and so processors do not: what packets cost counts then.
const ACROSS_TOO: &[(&str, Kind)] = &[
    (
        "request/response, 16 connections",
        Kind::RoundTrips {
            connections: 16,
            size: REQUEST,
        },
    ),
    ("http 36 B 50 connections", http(36)),
];

/// Where the MTU of the pods' links matters most, and where it must not matter.
const BY_LINK: &[(&str, Kind)] = &[
    ("stream 1 KB", stream(1 << 10)),
    ("stream 16 KB", stream(16 << 10)),
    ("http 16 KB 50 connections", http(16 << 10)),
    ("http 64 KB 50 connections", http(64 << 10)),
    ("rr 4 KB", round_trips(4 << 10)),
    ("rr 4 KB, CPUs awake", Kind::RoundTripsAwake(4 << 10)),
    ("UDP 60 KB", Kind::Datagrams(60 << 10)),
    ("2000 idle connections", Kind::Idle(2000)),
    ("200 slow readers", Kind::SlowReaders(200)),
];
/// Not in a short run.
const BY_LINK_TOO: &[(&str, Kind)] = &[
    ("stream 64 B", stream(64)),
    ("stream 128 KB", stream(128 << 10)),
    ("http 36 B 50 connections", http(36)),
    (
        "http 16 KB 50 connections, tcp_nopush off",
        Kind::Http {
            body: 16 << 10,
            nopush: false,
        },
    ),
    ("connections", Kind::Connections),
    ("rr 1 B", round_trips(1)),
    ("rr 1 B, CPUs awake", Kind::RoundTripsAwake(1)),
    ("rr 8 KB", round_trips(8 << 10)),
    ("rr 8 KB, CPUs awake", Kind::RoundTripsAwake(8 << 10)),
    ("rr 16 KB", round_trips(16 << 10)),
    ("rr 16 KB, CPUs awake", Kind::RoundTripsAwake(16 << 10)),
    ("rr 32 KB", round_trips(32 << 10)),
    ("rr 32 KB, CPUs awake", Kind::RoundTripsAwake(32 << 10)),
    ("rr 64 KB", round_trips(64 << 10)),
    ("rr 64 KB, CPUs awake", Kind::RoundTripsAwake(64 << 10)),
    ("rr 1 MB", round_trips(1 << 20)),
    ("rr 1 MB, CPUs awake", Kind::RoundTripsAwake(1 << 20)),
    ("UDP 8 KB", Kind::Datagrams(8 << 10)),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub way: Way,
    pub ipv6: bool,
    name: &'static str,
    pub kind: Kind,
}

pub fn cases(way: Way, short: bool) -> impl Iterator<Item = Case> {
    let kinds: &[&[(&str, Kind)]] = match (way, short) {
        (Way::SameNode, _) => &[BESIDE_OTHERS],
        (Way::Across, _) => &[BESIDE_OTHERS, ACROSS_TOO],
        (Way::LocalMtu, true) => &[BY_LINK],
        (Way::LocalMtu, false) => &[BY_LINK, BY_LINK_TOO],
    };
    let both = [false, true].into_iter();
    both.flat_map(move |ipv6| {
        let kinds = kinds.iter().copied().flatten();
        kinds.map(move |(name, kind)| Case {
            way,
            ipv6,
            name,
            kind: *kind,
        })
    })
}

impl Grouped for Case {
    type Group = Way;

    fn group(&self) -> Way {
        self.way
    }

    fn place(&self) -> String {
        let family = if self.ipv6 { "IPv6" } else { "IPv4" };
        format!("{}, {family}", self.way)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.way, self.ipv6) {
            (Way::SameNode | Way::Across, _) => write!(f, "{}: {}", self.place(), self.name),
            (Way::LocalMtu, false) => f.write_str(self.name),
            (Way::LocalMtu, true) => write!(f, "{}, IPv6", self.name),
        }
    }
}

/// As many bytes as a bulk sender passes to the kernel at once.
const BULK: usize = 1 << 17;
/// Bytes of a request, and of a response.
const REQUEST: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_of_both_families_and_has_a_name_of_its_own() {
        let ways = [Way::SameNode, Way::Across, Way::LocalMtu];
        let mut names: Vec<_> = ways
            .into_iter()
            .flat_map(|way| cases(way, false))
            .map(|case| case.to_string())
            .collect();
        let count = names.len();
        assert_eq!(count, 2 * (7 + 9 + 27));
        for name in [
            "across nodes, IPv6: UDP packets of 1400 B",
            "stream 1 KB",
            "rr 4 KB, CPUs awake, IPv6",
        ] {
            assert!(names.iter().any(|other| other == name), "{name}");
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_short_run_has_some_of_the_cases() {
        let long: Vec<Case> = cases(Way::LocalMtu, false).collect();
        let short: Vec<Case> = cases(Way::LocalMtu, true).collect();
        assert!(short.len() < long.len() / 2);
        assert!(short.iter().all(|case| long.contains(case)));
        assert!(cases(Way::Across, true).eq(cases(Way::Across, false)));
    }
}
