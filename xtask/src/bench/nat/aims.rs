//! What the masquerade is to be worth beside that of iptables, and that it does not grow.

use super::translators::IPTABLES;
use crate::bench::{
    aim::{Aim, Bound},
    figures::OURS,
    row::Row,
};

const REQUESTS: f64 = 1.2;
const STREAMS: f64 = 1.0;
/// Beside any number of other connections, to none.
const FLAT: f64 = 0.9;
/// Of netfilter's entries for each connection: what else a node does may be one in a hundred.
const ENTRIES: f64 = 0.01;

pub const ENTRIES_METRIC: &str = "nf_conntrack";

pub fn aims(rows: &[Row]) -> Vec<Aim> {
    let aim = |row: &Row| {
        let what = match row.subject == OURS {
            true => format!("{}, {}, to {}", row.case, row.metric, row.against),
            false => format!("{}, {}, {}", row.case, row.metric, row.subject),
        };
        Some(Aim::new(what, row.ratio, row.spread, bound(row)?))
    };
    rows.iter().filter_map(aim).collect()
}

fn bound(row: &Row) -> Option<Bound> {
    let beside_none = row.against == format!("{OURS}, no others");
    match &*row.metric {
        "requests" | "throughput" if beside_none => Some(Bound::AtLeast(FLAT)),
        // With others in the tables, each is held against itself.
        _ if row.against != IPTABLES || row.case.contains("others") => None,
        "requests" => Some(Bound::AtLeast(REQUESTS)),
        "throughput" => Some(Bound::AtLeast(STREAMS)),
        ENTRIES_METRIC => Some(Bound::AtMost(ENTRIES)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::nat::case::{Part, cases};

    #[test]
    fn bounds_are_to_iptables_and_to_none() {
        let bound = |case: &str, metric, subject, against| {
            let row = Row::new(case, metric, "", (subject, &[1.0]), (against, &[1.0]));
            bound(&row.unwrap())
        };
        for case in cases(Part::Plain, false) {
            let to_nftables = bound(&case.to_string(), "requests", OURS, "nftables");
            assert_eq!(to_nftables, None);
            let to_iptables = bound(&case.to_string(), "requests", OURS, IPTABLES);
            assert_eq!(to_iptables, Some(Bound::AtLeast(REQUESTS)));
        }
        let least = |least| Some(Bound::AtLeast(least));
        assert_eq!(bound("s", "throughput", OURS, IPTABLES), least(STREAMS));
        let entries = bound("s", ENTRIES_METRIC, OURS, IPTABLES);
        assert_eq!(entries, Some(Bound::AtMost(ENTRIES)));
        let beside = cases(Part::Flows, false).last().unwrap().to_string();
        assert_eq!(bound(&beside, "requests", OURS, IPTABLES), None);
        let ours = ("sinabro, 500000 others", "sinabro, no others");
        for metric in ["requests", "throughput"] {
            assert_eq!(bound("s", metric, ours.0, ours.1), least(FLAT));
        }
        let theirs = ("iptables, 500000 others", "iptables, no others");
        assert_eq!(bound("s", "requests", theirs.0, theirs.1), None);
    }
}
