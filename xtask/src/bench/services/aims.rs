//! What Services are to be worth beside kube-proxy's, what they may cost beside a pod's own address, and that
//! their number costs nothing.

use super::{
    case::{CONNECTS, DIRECT, EXCHANGES, FROM_OUTSIDE},
    kube_proxy::Mode,
};
use crate::bench::{
    aim::{Aim, Bound},
    figures::OURS,
    row::Row,
};

/// Where iptables has gone along its list for long enough.
const MANY: u32 = 10_000;
const CONNECTS_DIRECT: f64 = 0.97;
const EXCHANGES_DIRECT: f64 = 0.95;
const NFTABLES: f64 = 1.15;
const IPTABLES: f64 = 2.0;
/// Most Services to fewest.
const FLAT: f64 = 0.95;
/// By a node port from outside.
const OUTSIDE: f64 = 1.0;

pub fn aims(rows: &[Row]) -> Vec<Aim> {
    let aim = |row: &Row| {
        let what = format!("{}, {}, to {}", row.case, row.metric, row.against);
        Some(Aim::new(what, row.ratio, row.spread, bound(row)?))
    };
    rows.iter().filter_map(aim).collect()
}

fn bound(row: &Row) -> Option<Bound> {
    let is_itself = row.against.starts_with(&format!("{OURS}, "));
    let is_many = row.case.starts_with(&MANY.to_string());
    let is_outside = row.case.contains(FROM_OUTSIDE);
    let least = match (&*row.metric, &*row.against) {
        (CONNECTS | EXCHANGES, _) if is_itself => FLAT,
        (CONNECTS | EXCHANGES, against) if is_outside => match against == Mode::Nftables.name() {
            true => OUTSIDE,
            false => return None,
        },
        (CONNECTS, DIRECT) => CONNECTS_DIRECT,
        (EXCHANGES, DIRECT) => EXCHANGES_DIRECT,
        (CONNECTS, against) if against == Mode::Nftables.name() => NFTABLES,
        (CONNECTS, against) if against == Mode::Iptables.name() && is_many => IPTABLES,
        _ => return None,
    };
    Some(Bound::AtLeast(least))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::services::case::cases;

    #[test]
    fn connections_are_held_against_all_and_datagrams_against_the_pods_address_and_nftables() {
        let numbers = [10, MANY];
        let mut bounds = Vec::new();
        for case in cases(&numbers) {
            for against in [DIRECT, "nftables", "iptables"] {
                let row = |metric| {
                    let of = (OURS, &[1.0][..]);
                    Row::new(&case.to_string(), metric, "1/s", of, (against, &[1.0])).unwrap()
                };
                bounds.push([CONNECTS, EXCHANGES].map(|metric| bound(&row(metric))));
                assert_eq!(bound(&row("CPU")), None);
            }
        }
        let count = |at: usize, least: f64| {
            let bounds = bounds.iter().map(|both| both[at]);
            bounds
                .filter(|found| *found == Some(Bound::AtLeast(least)))
                .count()
        };
        assert_eq!(
            [
                count(0, CONNECTS_DIRECT),
                count(0, NFTABLES),
                count(0, IPTABLES)
            ],
            [8, 8, 4]
        );
        assert_eq!(count(1, EXCHANGES_DIRECT), 8);
        assert_eq!([count(0, OUTSIDE), count(1, OUTSIDE)], [8, 8]);
        let held = |at: usize| bounds.iter().filter(|both| both[at].is_some()).count();
        assert_eq!([held(0), held(1)], [28, 16]);
        let names = ("sinabro, 10000 Services", "sinabro, 10 Services");
        let row = Row::new("TCP", CONNECTS, "1/s", (names.0, &[1.0]), (names.1, &[1.0]));
        assert_eq!(bound(&row.unwrap()), Some(Bound::AtLeast(FLAT)));
    }
}
