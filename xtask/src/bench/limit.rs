//! What figures may be at most, however busy the machine is, and whether they are.

use super::number;
use crate::ui;
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct Limit {
    pub what: String,
    pub value: f64,
    pub limit: f64,
    pub met: bool,
}

impl Limit {
    pub fn new(what: String, value: f64, limit: f64) -> Self {
        Self {
            met: value <= limit,
            what,
            value,
            limit,
        }
    }
}

/// Shows them; whether all are met.
pub fn print(limits: &[Limit]) -> bool {
    for limit in limits {
        println!(
            "  {}  {}: {}, limit {}",
            ui::verdict(limit.met),
            limit.what,
            number(limit.value),
            number(limit.limit)
        );
    }
    limits.iter().all(|limit| limit.met)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_met_at_the_limit_and_below() {
        let met = |value| Limit::new("a".into(), value, 3.0).met;
        assert!(met(3.0) && met(0.0));
        assert!(!met(3.01) && !met(f64::NAN));
    }
}
