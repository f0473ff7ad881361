//! From the rounds' values to rows, curves and tables.

use super::{
    case::Case,
    measure::Outcome,
    scene::{OURS, Way},
};
use crate::{
    bench::{
        number,
        row::{Curve, Row},
        stats,
    },
    ui,
};

/// The values of one metric of one case, a list over the rounds for each subject in their order.
struct Series {
    way: Way,
    case: String,
    metric: &'static str,
    unit: &'static str,
    values: Vec<(String, Vec<f64>)>,
}

/// The curves of one case and one subject, one of each round.
struct Curves {
    place: String,
    subject: String,
    rounds: Vec<Vec<[f64; 2]>>,
}

/// Everything that was measured.
#[derive(Default)]
pub struct Figures {
    series: Vec<Series>,
    curves: Vec<Curves>,
}

impl Figures {
    /// Adds what one round showed of one subject.
    pub fn add(&mut self, case: &Case, subject: &str, outcome: Outcome) {
        let name = case.to_string();
        for figure in outcome.figures {
            let is_this = |series: &Series| series.case == name && series.metric == figure.metric;
            let at = self.series.iter().position(is_this).unwrap_or_else(|| {
                self.series.push(Series {
                    way: case.way,
                    case: name.clone(),
                    metric: figure.metric,
                    unit: figure.unit,
                    values: Vec::new(),
                });
                self.series.len() - 1
            });
            let values = &mut self.series[at].values;
            match values.iter_mut().find(|(other, _)| other == subject) {
                Some((_, values)) => values.push(figure.value),
                None => values.push((subject.into(), vec![figure.value])),
            }
        }
        if outcome.curve.is_empty() {
            return;
        }
        let place = case.place();
        let is_this = |curves: &&mut Curves| curves.place == place && curves.subject == subject;
        match self.curves.iter_mut().find(is_this) {
            Some(curves) => curves.rounds.push(outcome.curve),
            None => self.curves.push(Curves {
                place,
                subject: subject.into(),
                rounds: vec![outcome.curve],
            }),
        }
    }

    /// Ours beside every other, in the order of the cases.
    pub fn rows(&self, way: Way) -> Vec<Row> {
        let series = self.series.iter().filter(|series| series.way == way);
        series.flat_map(Series::rows).collect()
    }

    /// A point's time is the median over the rounds.
    pub fn curves(&self) -> Vec<Curve> {
        let curve = |curves: &Curves| {
            let point = |number: usize| {
                let points = curves.rounds.iter().map(|round| round[number]);
                let times: Vec<f64> = points.clone().map(|[_, time]| time).collect();
                let percent = points.map(|[percent, _]| percent).next();
                Some([percent?, stats::median(&times)])
            };
            let length = curves.rounds.iter().map(Vec::len).min().unwrap_or(0);
            Curve {
                case: curves.place.clone(),
                unit: "µs".into(),
                subject: curves.subject.clone(),
                points: (0..length).filter_map(point).collect(),
            }
        };
        self.curves.iter().map(curve).collect()
    }
}

impl Series {
    fn rows(&self) -> Vec<Row> {
        let ours = self.values.iter().find(|(name, _)| name == OURS);
        let others = self.values.iter().filter(|(name, _)| name != OURS);
        let row = |ours: &(String, Vec<f64>), other: &(String, Vec<f64>)| {
            let (ours, other) = ((&*ours.0, &*ours.1), (&*other.0, &*other.1));
            Row::new(&self.case, self.metric, self.unit, ours, other)
        };
        let rows = others.filter_map(|other| row(ours?, other));
        // Turns rotate: the first round's order is that of the subjects no longer.
        let mut rows: Vec<Row> = rows.collect();
        rows.sort_by(|a, b| a.against.cmp(&b.against));
        rows
    }
}

/// Ours, and every other with our ratio to it.
pub fn print(rows: &[Row], way: Way) {
    let Some(first) = rows.first() else {
        return;
    };
    let mut others: Vec<&str> = rows.iter().map(|row| &*row.against).collect();
    others.sort_unstable();
    others.dedup();
    let mut heading = vec![way.to_string(), String::new(), "unit".into()];
    heading.push(first.subject.clone());
    for other in &others {
        heading.extend([(*other).to_string(), "ratio".into(), "over rounds".into()]);
    }
    let mut table = vec![heading];
    let mut last = "";
    for row in rows {
        // One line for all rows of a metric.
        if row.against != *others[0] {
            continue;
        }
        let case = if row.case == last { "" } else { &row.case };
        last = &row.case;
        let case = case.strip_prefix(&format!("{way}, ")).unwrap_or(case);
        let mut line = vec![case.into(), row.metric.clone(), row.unit.clone()];
        line.push(number(row.value));
        for other in &others {
            let same = |row2: &&Row| {
                (&row2.case, &row2.metric, &*row2.against) == (&row.case, &row.metric, *other)
            };
            line.extend(match rows.iter().find(same) {
                Some(row) => [
                    number(row.against_value),
                    format!("{:.2}", row.ratio),
                    format!("{:.2}–{:.2}", row.spread[0], row.spread[1]),
                ],
                None => [const { String::new() }; 3],
            });
        }
        table.push(line);
    }
    println!();
    ui::table(&table);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::pod::{case::Kind, measure::Figure};

    const CASE: Case = Case {
        way: Way::SameNode,
        ipv6: false,
        name: "round trip of 1 B",
        kind: Kind::Latency,
    };

    #[test]
    fn ours_is_beside_every_other_whatever_the_order_of_turns() {
        let mut figures = Figures::default();
        for round in [["bridge", OURS, "ptp"], [OURS, "ptp", "bridge"]] {
            for subject in round {
                let value = if subject == OURS { 1.0 } else { 2.0 };
                let outcome = Outcome {
                    figures: vec![Figure {
                        metric: "p50",
                        unit: "µs",
                        value,
                    }],
                    curve: vec![[50.0, value], [99.0, 10.0 * value]],
                };
                figures.add(&CASE, subject, outcome);
            }
        }
        let rows = figures.rows(Way::SameNode);
        assert!(figures.rows(Way::LocalMtu).is_empty());
        let found: Vec<_> = rows.iter().map(|r| (&*r.against, r.ratio)).collect();
        assert_eq!(found, [("bridge", 0.5), ("ptp", 0.5)]);
        let curves = figures.curves();
        let ours = curves.iter().find(|curve| curve.subject == OURS).unwrap();
        assert_eq!(ours.case, "same node, IPv4");
        assert_eq!(ours.points, [[50.0, 1.0], [99.0, 10.0]]);
    }
}
