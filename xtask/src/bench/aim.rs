//! What ratios are to reach, and whether they do.

use super::output::Report;
use crate::ui;
use serde::Serialize;

/// The JSON file of a bench that has aims.
#[derive(Serialize)]
pub struct WithAims {
    #[serde(flatten)]
    pub report: Report,
    pub aims: Vec<Aim>,
}

/// A ratio that is bounded on one side.
#[derive(Clone, Debug, Serialize)]
pub struct Aim {
    pub what: String,
    pub ratio: f64,
    pub spread: [f64; 2],
    pub at_least: Option<f64>,
    pub at_most: Option<f64>,
    pub met: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Aim {
    pub fn new(what: String, ratio: f64, spread: [f64; 2], bound: Bound) -> Self {
        let (at_least, at_most, met) = match bound {
            Bound::AtLeast(least) => (Some(least), None, ratio >= least),
            Bound::AtMost(most) => (None, Some(most), ratio <= most),
        };
        Self {
            what,
            ratio,
            spread,
            at_least,
            at_most,
            met,
        }
    }
}

pub fn print(aims: &[Aim]) {
    if aims.is_empty() {
        return;
    }
    let mut table = vec![vec![
        "aim".to_string(),
        String::new(),
        "ratio".into(),
        "over rounds".into(),
        String::new(),
    ]];
    for aim in aims {
        let bound = match (aim.at_least, aim.at_most) {
            (Some(least), _) => format!("at least {least}"),
            (None, most) => format!("at most {}", most.unwrap_or(f64::NAN)),
        };
        let [least, most] = aim.spread;
        table.push(vec![
            aim.what.clone(),
            bound,
            format!("{:.2}", aim.ratio),
            format!("{least:.2}–{most:.2}"),
            if aim.met { "met" } else { "missed" }.into(),
        ]);
    }
    println!();
    ui::table(&table);
    let met = aims.iter().filter(|aim| aim.met).count();
    println!("\n  {met} of {} aims met", aims.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_met_at_the_bound_and_on_its_side() {
        let met = |ratio, bound| Aim::new("a".into(), ratio, [ratio; 2], bound).met;
        assert!(met(2.0, Bound::AtLeast(2.0)) && !met(1.99, Bound::AtLeast(2.0)));
        assert!(met(1.1, Bound::AtMost(1.1)) && !met(1.11, Bound::AtMost(1.1)));
        assert!(!met(f64::NAN, Bound::AtLeast(0.0)) && !met(f64::NAN, Bound::AtMost(9.0)));
    }
}
