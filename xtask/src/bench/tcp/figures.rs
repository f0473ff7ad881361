//! From the rounds' values to medians, ratios and the aims they are held against.

use super::case::{CROSSED, Case, Figure, LEARNT};
use crate::{
    bench::{
        self,
        aim::{Aim, Bound},
        number, stats,
    },
    report, ui,
};
use serde::Serialize;

/// The subjects' order.
const PLAIN: usize = 0;
const ACCELERATED: usize = 1;
const LOCAL: usize = 2;

/// The values of one metric of one case, a list over the rounds for each subject.
struct Series {
    case: Case,
    metric: &'static str,
    unit: &'static str,
    values: [Vec<f64>; 3],
}

/// Everything that was measured.
#[derive(Default)]
pub struct Figures {
    series: Vec<Series>,
}

/// One metric of one case; every value is the median over the rounds.
#[derive(Clone, Debug)]
pub struct Row {
    of: Case,
    pub case: String,
    pub metric: &'static str,
    pub unit: &'static str,
    pub plain: f64,
    pub accelerated: f64,
    /// Over loopback in one pod; none where there is no link to cross.
    pub local: Option<f64>,
    /// Accelerated to plain: the median of each round's own ratio.
    pub ratio: f64,
    /// Smallest and largest of the rounds' ratios.
    pub spread: [f64; 2],
    /// Rounds of requests in which half or more of the bytes crossed the accelerated pods' link
    /// as they did the plain ones'.
    pub rounds_not_accelerated: usize,
    /// Local to plain.
    pub local_ratio: Option<f64>,
}

/// The JSON file.
#[derive(Serialize)]
pub struct Report {
    pub machine: report::Machine,
    pub client_cpu: usize,
    pub server_cpu: usize,
    pub rounds: u32,
    /// How much of the CPUs' time other work took before the first round.
    pub background: f64,
    pub ipv6: bool,
    /// Whether nothing was accelerated.
    pub control: bool,
    /// The earlier commit whose pods are in the place of the plain ones.
    pub against: Option<String>,
    pub rows: Vec<bench::Row>,
    pub aims: Vec<Aim>,
}

impl Figures {
    /// Adds what one round showed of one subject.
    pub fn add(&mut self, case: &Case, subject: usize, figures: Vec<Figure>) {
        for figure in figures {
            let known = self
                .series
                .iter_mut()
                .find(|series| series.case == *case && series.metric == figure.metric);
            match known {
                Some(series) => series.values[subject].push(figure.value),
                None => {
                    let mut values = [const { Vec::new() }; 3];
                    values[subject].push(figure.value);
                    self.series.push(Series {
                        case: *case,
                        metric: figure.metric,
                        unit: figure.unit,
                        values,
                    });
                }
            }
        }
    }

    /// What is accelerated beside what is plain, and beside what is local, as all benches say it.
    pub fn compared(&self, names: [&str; 3]) -> Vec<bench::Row> {
        let against = |series: &Series, other: usize| {
            let of = |subject: usize| (names[subject], &series.values[subject][..]);
            let case = series.case.to_string();
            bench::Row::new(
                &case,
                series.metric,
                series.unit,
                of(ACCELERATED),
                of(other),
            )
        };
        let both = |series| [against(series, PLAIN), against(series, LOCAL)];
        self.series.iter().flat_map(both).flatten().collect()
    }

    /// Rows in the order of the cases.
    pub fn rows(&self) -> Vec<Row> {
        self.series.iter().map(Series::row).collect()
    }
}

impl Series {
    fn row(&self) -> Row {
        let [plain, accelerated, local] = &self.values;
        let ratios = self.ratios(ACCELERATED);
        let has_local = !local.is_empty();
        Row {
            of: self.case,
            case: self.case.to_string(),
            metric: self.metric,
            unit: self.unit,
            plain: stats::median(plain),
            accelerated: stats::median(accelerated),
            local: has_local.then(|| stats::median(local)),
            ratio: stats::median(&ratios),
            spread: stats::extent(&ratios),
            rounds_not_accelerated: match (self.case, self.metric) {
                (Case::Http { .. } | Case::RoundTrips { .. }, CROSSED) => {
                    ratios.iter().filter(|ratio| **ratio >= 0.5).count()
                }
                _ => 0,
            },
            local_ratio: has_local.then(|| stats::median(&self.ratios(LOCAL))),
        }
    }

    fn ratios(&self, subject: usize) -> Vec<f64> {
        let pairs = self.values[subject].iter().zip(&self.values[PLAIN]);
        pairs.map(|(value, plain)| value / plain).collect()
    }
}

impl Row {
    /// Noise is now on this side and now on that. A tail of a second or less, and what other work
    /// of the machine is in, is noise alone.
    pub fn is_worse_in_every_round(&self) -> bool {
        match self.metric {
            "requests" | "first connection" | LEARNT => self.spread[1] < 1.0,
            "p50" | "CPU" => self.spread[0] > 1.0,
            _ => false,
        }
    }
}

/// Half again the requests in little more than half the time where many are on their way; nothing
/// lost where acceleration cannot help.
pub fn aims(rows: &[Row]) -> Vec<Aim> {
    let aim = |row: &Row| {
        let bound = match (row.of, row.metric) {
            (Case::Http { connections, .. }, "requests") if connections > 1 => Bound::AtLeast(1.5),
            (Case::Http { connections, .. }, "p50") if connections > 1 => Bound::AtMost(0.6),
            (Case::Stream { .. }, LEARNT) => Bound::AtLeast(0.98),
            (Case::Brief, "requests") => Bound::AtLeast(0.95),
            _ => return None,
        };
        let what = format!("{}, {}", row.case, row.metric);
        Some(Aim::new(what, row.ratio, row.spread, bound))
    };
    rows.iter().filter_map(aim).collect()
}

pub fn print(rows: &[Row], names: [&str; 3]) {
    let mut table = vec![vec![
        "case".to_string(),
        String::new(),
        "unit".into(),
        names[PLAIN].into(),
        names[ACCELERATED].into(),
        names[LOCAL].into(),
        "ratio".into(),
        "over rounds".into(),
        "local ratio".into(),
    ]];
    let mut last = "";
    for row in rows {
        let case = if row.case == last { "" } else { &row.case };
        last = &row.case;
        table.push(vec![
            case.into(),
            row.metric.into(),
            row.unit.into(),
            number(row.plain),
            number(row.accelerated),
            row.local.map(number).unwrap_or_default(),
            format!("{:.2}", row.ratio),
            spread(row.spread),
            row.local_ratio
                .map(|ratio| format!("{ratio:.2}"))
                .unwrap_or_default(),
        ]);
    }
    ui::table(&table);
}

/// Says which figures are, wholly or in part, of connections that were not accelerated.
pub fn print_not_accelerated(rows: &[Row], rounds: u32) {
    for row in rows.iter().filter(|row| row.rounds_not_accelerated > 0) {
        println!(
            "  not accelerated in {} of {rounds} rounds: {}",
            row.rounds_not_accelerated, row.case
        );
    }
}

fn spread([least, most]: [f64; 2]) -> String {
    format!("{least:.2}–{most:.2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HTTP: Case = Case::Http {
        connections: 50,
        body: 36,
    };

    fn rows(case: Case, metric: &'static str, rounds: &[[f64; 3]]) -> Vec<Row> {
        let mut figures = Figures::default();
        for round in rounds {
            for (subject, value) in round.iter().enumerate() {
                let unit = "1/s";
                let value = *value;
                figures.add(
                    &case,
                    subject,
                    vec![Figure {
                        metric,
                        unit,
                        value,
                    }],
                );
            }
        }
        figures.rows()
    }

    #[test]
    fn a_slow_round_does_not_change_the_ratio() {
        let rows = rows(
            HTTP,
            "requests",
            &[
                [100.0, 150.0, 110.0],
                [10.0, 16.0, 10.0],
                [90.0, 140.0, 99.0],
            ],
        );
        let [row] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!((row.plain, row.accelerated), (90.0, 140.0));
        assert_eq!(row.ratio, 140.0 / 90.0);
        assert_eq!(row.spread, [1.5, 1.6]);
        assert_eq!(row.local_ratio, Some(1.1));
    }

    #[test]
    fn rounds_without_acceleration_are_counted() {
        let rounds = [[357.0, 0.1, 0.0], [357.0, 356.0, 0.0], [357.0, 2.0, 0.0]];
        let not = |case, metric| rows(case, metric, &rounds)[0].rounds_not_accelerated;
        assert_eq!(not(HTTP, CROSSED), 1);
        assert_eq!(not(HTTP, "requests"), 0);
        // Streams are not to be.
        assert_eq!(not(Case::Stream { message: 1 }, CROSSED), 0);
    }

    #[test]
    fn worse_is_worse_in_every_round() {
        let worse = |metric, ratios: [f64; 3]| {
            let rounds = ratios.map(|ratio| [1.0, ratio, 1.0]);
            rows(HTTP, metric, &rounds)[0].is_worse_in_every_round()
        };
        assert!(worse("requests", [0.99, 0.9, 0.97]));
        assert!(!worse("requests", [0.9, 0.9, 1.01]));
        assert!(worse("p50", [1.1, 1.01, 1.2]));
        assert!(!worse("p50", [1.1, 0.99, 1.2]));
        assert!(!worse("p99", [1.1, 1.1, 1.1]));
    }

    #[test]
    fn aims_have_a_direction() {
        let met = |case, metric, ratio: f64| {
            let aims = aims(&rows(case, metric, &[[1.0, ratio, 1.0]]));
            aims.first().map(|aim| aim.met)
        };
        assert_eq!(met(HTTP, "requests", 1.6), Some(true));
        assert_eq!(met(HTTP, "requests", 1.4), Some(false));
        assert_eq!(met(HTTP, "p50", 0.5), Some(true));
        assert_eq!(met(HTTP, "p50", 0.7), Some(false));
        assert_eq!(met(HTTP, "p99", 0.7), None);
        let stream = Case::Stream { message: 1 };
        assert_eq!(met(stream, LEARNT, 0.97), Some(false));
        assert_eq!(met(stream, "first connection", 0.5), None);
        assert_eq!(met(Case::Brief, "requests", 0.96), Some(true));
    }
}
