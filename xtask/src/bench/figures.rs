//! From the rounds' values to rows, curves and tables.

use super::{
    number,
    row::{Curve, Row},
    stats,
};
use crate::ui;
use sinabro_lab::traffic::seat::Measured;
use std::{fmt::Display, time::Duration};

/// What the present programs are called.
pub const OURS: &str = "sinabro";
pub const MACHINE_CPU: &str = "machine CPU";

/// One value of one case.
pub struct Figure {
    pub metric: &'static str,
    pub unit: &'static str,
    pub value: f64,
}

/// What one round shows of one subject.
#[derive(Default)]
pub struct Outcome {
    pub figures: Vec<Figure>,
    /// Percent and microseconds.
    pub curve: Vec<[f64; 2]>,
}

impl From<Vec<Figure>> for Outcome {
    fn from(figures: Vec<Figure>) -> Self {
        let curve = Vec::new();
        Self { figures, curve }
    }
}

/// How much of something there was in a time, and what CPU time each, or each gigabyte, took: that of
/// the threads of both ends, and all that the machine did meanwhile.
pub fn rates(
    metric: &'static str,
    unit: &'static str,
    measured: &Measured,
    machine: Duration,
) -> Vec<Figure> {
    let (value, per, cpu_unit, in_unit) = match unit {
        "Gbit/s" => (measured.per_second() * 8.0 / 1e9, 1e9, "ms/GB", 1e3),
        _ => (measured.per_second(), 1.0, "µs", 1e6),
    };
    let per = measured.count.max(1) as f64 / per;
    let cpu = |metric, time: Duration| Figure {
        metric,
        unit: cpu_unit,
        value: time.as_secs_f64() * in_unit / per,
    };
    vec![
        Figure {
            metric,
            unit,
            value,
        },
        cpu("CPU", measured.cpu),
        cpu(MACHINE_CPU, machine),
    ]
}

/// The values of one metric of one case, a list over the rounds for each subject in their order.
struct Series<G> {
    group: G,
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

/// What is measured in groups of cases that are shown together.
pub trait Grouped: Display {
    type Group: Copy + PartialEq + Display;

    fn group(&self) -> Self::Group;

    /// What is common to all cases that have a curve together.
    fn place(&self) -> String;
}

/// Everything that was measured.
pub struct Figures<G> {
    series: Vec<Series<G>>,
    curves: Vec<Curves>,
}

impl<G> Default for Figures<G> {
    fn default() -> Self {
        Self {
            series: Vec::new(),
            curves: Vec::new(),
        }
    }
}

impl<G: Copy + PartialEq + Display> Figures<G> {
    /// Adds what one round showed of one subject.
    pub fn add(&mut self, case: &impl Grouped<Group = G>, subject: &str, outcome: Outcome) {
        let name = case.to_string();
        for figure in outcome.figures {
            let is_this =
                |series: &Series<G>| series.case == name && series.metric == figure.metric;
            let at = self.series.iter().position(is_this).unwrap_or_else(|| {
                self.series.push(Series {
                    group: case.group(),
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
    pub fn rows(&self, group: G) -> Vec<Row> {
        self.rows_of(group, OURS)
    }

    /// One subject beside every other, in the order of the cases.
    pub fn rows_of(&self, group: G, subject: &str) -> Vec<Row> {
        let series = self.series.iter().filter(|series| series.group == group);
        series.flat_map(|series| series.rows(subject)).collect()
    }

    /// The values of one metric of one case, of a subject, in the order of the rounds.
    pub fn values(&self, case: &str, metric: &str, subject: &str) -> Option<&[f64]> {
        let is_this = |series: &&Series<G>| series.case == case && series.metric == metric;
        let series = self.series.iter().find(is_this)?;
        let mut values = series.values.iter();
        let (_, values) = values.find(|(name, _)| name == subject)?;
        Some(values)
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

impl<G> Series<G> {
    fn rows(&self, subject: &str) -> Vec<Row> {
        let one = self.values.iter().find(|(name, _)| name == subject);
        let others = self.values.iter().filter(|(name, _)| name != subject);
        let row = |one: &(String, Vec<f64>), other: &(String, Vec<f64>)| {
            let (one, other) = ((&*one.0, &*one.1), (&*other.0, &*other.1));
            Row::new(&self.case, self.metric, self.unit, one, other)
        };
        let rows = others.filter_map(|other| row(one?, other));
        // Turns rotate: the first round's order is that of the subjects no longer.
        let mut rows: Vec<Row> = rows.collect();
        rows.sort_by(|a, b| a.against.cmp(&b.against));
        rows
    }
}

/// Ours, and every other with our ratio to it.
pub fn print(rows: &[Row], group: impl Display) {
    let Some(first) = rows.first() else {
        return;
    };
    let mut others: Vec<&str> = rows.iter().map(|row| &*row.against).collect();
    others.sort_unstable();
    others.dedup();
    let mut heading = vec![group.to_string(), String::new(), "unit".into()];
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
        let case = case.strip_prefix(&format!("{group}, ")).unwrap_or(case);
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
                    row.spread_text(),
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
    use std::fmt;

    struct Case(&'static str);

    impl fmt::Display for Case {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{}: round trip", self.0)
        }
    }

    impl Grouped for Case {
        type Group = &'static str;

        fn group(&self) -> Self::Group {
            self.0
        }

        fn place(&self) -> String {
            self.0.into()
        }
    }

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
                figures.add(&Case("here"), subject, outcome);
            }
        }
        let rows = figures.rows("here");
        assert!(figures.rows("there").is_empty());
        let found: Vec<_> = rows.iter().map(|r| (&*r.against, r.ratio)).collect();
        assert_eq!(found, [("bridge", 0.5), ("ptp", 0.5)]);
        let of_ptp = figures.rows_of("here", "ptp");
        let found: Vec<_> = of_ptp.iter().map(|r| (&*r.against, r.ratio)).collect();
        assert_eq!(found, [("bridge", 1.0), (OURS, 2.0)]);
        let curves = figures.curves();
        let ours = curves.iter().find(|curve| curve.subject == OURS).unwrap();
        assert_eq!(ours.case, "here");
        assert_eq!(ours.points, [[50.0, 1.0], [99.0, 10.0]]);
        let name = Case("here").to_string();
        assert_eq!(figures.values(&name, "p50", "ptp"), Some(&[2.0, 2.0][..]));
        assert_eq!(figures.values(&name, "p90", "ptp"), None);
    }

    #[test]
    fn rates_have_the_unit_that_they_name() {
        let measured = Measured {
            count: 2_000_000_000,
            time: Duration::from_secs(2),
            cpu: Duration::from_millis(500),
        };
        let values = |unit, measured: &Measured| -> Vec<_> {
            let found = rates("carried", unit, measured, Duration::from_secs(1));
            found.iter().map(|f| (f.value, f.unit)).collect()
        };
        assert_eq!(
            values("Gbit/s", &measured),
            [(8.0, "Gbit/s"), (250.0, "ms/GB"), (500.0, "ms/GB")]
        );
        let measured = Measured {
            count: 1000,
            ..measured
        };
        assert_eq!(
            values("1/s", &measured),
            [(500.0, "1/s"), (500.0, "µs"), (1000.0, "µs")]
        );
    }
}
