//! From the rounds' values to medians and ratios.

use super::case::{CROSSED, Case, LEARNT};
use crate::{
    bench::{figures::Figure, number, row::Row, slower, stats},
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
    pub rows: Vec<Row>,
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
    pub fn rows(&self, names: [&str; 3]) -> Vec<Row> {
        let both =
            |series: &Series| [PLAIN, LOCAL].map(|other| series.row(names, ACCELERATED, other));
        self.series.iter().flat_map(both).flatten().collect()
    }

    pub fn print(&self, names: [&str; 3]) {
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
        let mut last = String::new();
        for series in &self.series {
            let case = series.case.to_string();
            let median = |subject: usize| match &series.values[subject][..] {
                // It has no link to cross.
                [] => String::new(),
                values => number(stats::median(values)),
            };
            let ratio = |subject: usize| {
                let row = series.row(names, subject, PLAIN);
                let texts = row.map(|row| (format!("{:.2}", row.ratio), row.spread_text()));
                texts.unwrap_or_default()
            };
            let (accelerated, spread) = ratio(ACCELERATED);
            let (local, _) = ratio(LOCAL);
            table.push(vec![
                if case == last {
                    String::new()
                } else {
                    case.clone()
                },
                series.metric.into(),
                series.unit.into(),
                median(PLAIN),
                median(ACCELERATED),
                median(LOCAL),
                accelerated,
                spread,
                local,
            ]);
            last = case;
        }
        ui::table(&table);
    }

    /// Says which figures are, wholly or in part, of connections that were not accelerated.
    pub fn print_not_accelerated(&self, rounds: u32) {
        for series in &self.series {
            let not = series.rounds_not_accelerated();
            if not > 0 {
                println!(
                    "  not accelerated in {not} of {rounds} rounds: {}",
                    series.case
                );
            }
        }
    }
}

impl Series {
    fn row(&self, names: [&str; 3], subject: usize, other: usize) -> Option<Row> {
        let of = |subject: usize| (names[subject], &self.values[subject][..]);
        let case = self.case.to_string();
        Row::new(&case, self.metric, self.unit, of(subject), of(other))
    }

    /// Rounds of requests in which half or more of the bytes crossed the accelerated pods' link
    /// as they did the plain ones'.
    fn rounds_not_accelerated(&self) -> usize {
        let (Case::Http { .. } | Case::RoundTrips { .. }, CROSSED) = (self.case, self.metric)
        else {
            return 0;
        };
        let rounds = self.values[ACCELERATED].iter().zip(&self.values[PLAIN]);
        rounds
            .filter(|(crossed, plain)| **crossed / **plain >= 0.5)
            .count()
    }
}

/// What is slower than what is in the plain pods' place in every round. A tail of a second or less, and
/// what other work of the machine is in, is noise alone.
pub fn slower_than_plain<'a>(
    rows: &'a [Row],
    names: [&'a str; 3],
) -> impl Iterator<Item = &'a Row> {
    let counts = ["requests", "first connection", LEARNT, "p50", "CPU"];
    let rows = slower(rows).filter(move |row| row.against == names[PLAIN]);
    rows.filter(move |row| counts.contains(&&*row.metric))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HTTP: Case = Case::Http {
        connections: 50,
        body: 36,
    };

    const NAMES: [&str; 3] = ["plain", "accelerated", "127.0.0.1"];

    fn figures(
        case: Case,
        metric: &'static str,
        unit: &'static str,
        rounds: &[[f64; 3]],
    ) -> Figures {
        let mut figures = Figures::default();
        for round in rounds {
            for (subject, value) in round.iter().enumerate() {
                let value = *value;
                let figure = Figure {
                    metric,
                    unit,
                    value,
                };
                figures.add(&case, subject, vec![figure]);
            }
        }
        figures
    }

    #[test]
    fn what_is_accelerated_is_beside_plain_and_local() {
        let rounds = [[100.0, 150.0, 110.0], [10.0, 16.0, 10.0]];
        let figures = figures(HTTP, "requests", "1/s", &rounds);
        let rows = figures.rows(NAMES);
        let found: Vec<_> = rows.iter().map(|row| (&*row.against, row.value)).collect();
        assert_eq!(found, [("plain", 83.0), ("127.0.0.1", 83.0)]);
        assert_eq!(rows[0].spread, [1.5, 1.6]);
        let local = figures.series[0].row(NAMES, LOCAL, PLAIN);
        assert_eq!(local.unwrap().spread, [1.0, 1.1]);
    }

    #[test]
    fn rounds_without_acceleration_are_counted() {
        let rounds = [[357.0, 0.1, 0.0], [357.0, 356.0, 0.0], [357.0, 2.0, 0.0]];
        let not = |case, metric| {
            let figures = figures(case, metric, "B", &rounds);
            figures.series[0].rounds_not_accelerated()
        };
        assert_eq!(not(HTTP, CROSSED), 1);
        assert_eq!(not(HTTP, "requests"), 0);
        // Streams are not to be.
        assert_eq!(not(Case::Stream { message: 1 }, CROSSED), 0);
    }

    #[test]
    fn worse_is_worse_than_plain_in_every_round() {
        let worse = |metric, unit, ratios: [f64; 3]| {
            let rounds = ratios.map(|ratio| [1.0, ratio, 1.0]);
            let rows = figures(HTTP, metric, unit, &rounds).rows(NAMES);
            slower_than_plain(&rows, NAMES).count() == 1
        };
        assert!(worse("requests", "1/s", [0.99, 0.9, 0.97]));
        assert!(!worse("requests", "1/s", [0.9, 0.9, 1.01]));
        assert!(worse("p50", "µs", [1.1, 1.01, 1.2]));
        assert!(!worse("p50", "µs", [1.1, 0.99, 1.2]));
        assert!(!worse("p99", "µs", [1.1, 1.1, 1.1]));
    }
}
