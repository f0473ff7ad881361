//! What every bench reports: comparisons, and distributions.

use super::stats;
use crate::ui;
use serde::{Deserialize, Serialize};

/// One comparison. Values are medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub case: String,
    pub metric: String,
    pub unit: String,
    pub subject: String,
    pub value: f64,
    /// Smallest and largest of the rounds.
    pub range: [f64; 2],
    pub against: String,
    pub against_value: f64,
    pub against_range: [f64; 2],
    /// Median over the rounds of each round's own ratio: what slows a whole round cancels out.
    pub ratio: f64,
    /// Smallest and largest of the rounds' ratios.
    pub spread: [f64; 2],
}

impl Row {
    /// From two subjects' names and values, one of each round. None if they cannot be compared: one
    /// has no values, or the other's are zero.
    pub fn new(
        case: &str,
        metric: &str,
        unit: &str,
        (subject, values): (&str, &[f64]),
        (against, others): (&str, &[f64]),
    ) -> Option<Self> {
        let ratios: Vec<f64> = values.iter().zip(others).map(|(a, b)| a / b).collect();
        if ratios.is_empty() || !ratios.iter().all(|ratio| ratio.is_finite()) {
            return None;
        }
        Some(Self {
            case: case.into(),
            metric: metric.into(),
            unit: unit.into(),
            subject: subject.into(),
            value: stats::median(values),
            range: stats::extent(values),
            against: against.into(),
            against_value: stats::median(others),
            against_range: stats::extent(others),
            ratio: stats::median(&ratios),
            spread: stats::extent(&ratios),
        })
    }

    /// From the smallest ratio of a round to the largest.
    pub fn spread_text(&self) -> String {
        let [least, most] = self.spread;
        format!("{least:.2}–{most:.2}")
    }

    /// Whether more of this is better: more in a time is, more time or bytes for a thing are not.
    pub fn more_is_better(&self) -> bool {
        self.unit.ends_with("/s")
    }
}

/// How long something took one subject: the times that so many percent of it did not exceed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    pub case: String,
    pub unit: String,
    pub subject: String,
    /// Percent and time, both rising; times are medians over the rounds.
    pub points: Vec<[f64; 2]>,
}

/// Shows rows that are all of one unit and of the same two subjects. `columns` say what cases and
/// metrics are.
pub fn print(rows: &[Row], columns: [&str; 2], decimals: usize) {
    let Some(first) = rows.first() else {
        return println!("  nothing was measured");
    };
    let [case, metric] = columns;
    let mut table = vec![vec![
        case.to_owned(),
        metric.into(),
        format!("{} {}", first.subject, first.unit),
        format!("{} {}", first.against, first.unit),
        "ratio".into(),
        "over rounds".into(),
    ]];
    for row in rows {
        table.push(vec![
            row.case.clone(),
            row.metric.clone(),
            format!("{:.decimals$}", row.value),
            format!("{:.decimals$}", row.against_value),
            format!("{:.2}", row.ratio),
            row.spread_text(),
        ]);
    }
    ui::table(&table);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[f64], others: &[f64]) -> Option<Row> {
        Row::new("c", "m", "1/s", ("a", values), ("b", others))
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_own() {
        // The second round was slow for both.
        let row = row(&[150.0, 16.0, 140.0], &[100.0, 10.0, 90.0]).unwrap();
        assert_eq!((row.value, row.against_value), (140.0, 90.0));
        assert_eq!(
            (row.range, row.against_range),
            ([16.0, 150.0], [10.0, 100.0])
        );
        assert_eq!(row.ratio, 140.0 / 90.0);
        assert_eq!(row.spread, [1.5, 1.6]);
    }

    #[test]
    fn what_cannot_be_compared_is_no_row() {
        assert!(row(&[], &[]).is_none());
        assert!(row(&[1.0], &[]).is_none());
        assert!(row(&[1.0, 1.0], &[1.0, 0.0]).is_none());
        assert!(row(&[0.0], &[0.0]).is_none());
        assert!(row(&[f64::NAN], &[1.0]).is_none());
        assert_eq!(row(&[0.0], &[1.0]).unwrap().ratio, 0.0);
    }

    #[test]
    fn direction_follows_from_the_unit() {
        let mut row = row(&[1.0], &[1.0]).unwrap();
        for (unit, more) in [("1/s", true), ("Gbit/s", true), ("ms", false), ("B", false)] {
            row.unit = unit.into();
            assert_eq!(row.more_is_better(), more, "{unit}");
        }
    }
}
