//! Medians and percentiles.

/// The value that `percent` of a sample do not exceed (nearest rank).
pub fn percentile(sample: &[f64], percent: f64) -> f64 {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// A 99th percentile is one only of a hundred values and more: of fewer it is the largest.
const HUNDRED: usize = 100;

/// What [`tail`] is of so many values.
pub fn tail_name(values: usize) -> &'static str {
    match values {
        HUNDRED.. => "p99",
        _ => "max",
    }
}

/// The slow end of a sample.
pub fn tail(sample: &[f64]) -> f64 {
    percentile(sample, if sample.len() < HUNDRED { 100.0 } else { 99.0 })
}

/// The middle of a sample; of an even number the mean of the two in the middle.
pub fn median(sample: &[f64]) -> f64 {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

/// Smallest and largest.
pub fn extent(sample: &[f64]) -> [f64; 2] {
    let fold = |f: fn(f64, f64) -> f64| sample.iter().copied().reduce(f).unwrap_or(f64::NAN);
    [fold(f64::min), fold(f64::max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_the_nearest() {
        let sample: Vec<f64> = (1..=50).rev().map(f64::from).collect();
        assert_eq!(percentile(&sample, 50.0), 25.0);
        assert_eq!(percentile(&sample, 99.0), 50.0);
        assert_eq!(percentile(&[7.0], 99.0), 7.0);
        assert_eq!((tail(&sample), tail_name(sample.len())), (50.0, "max"));
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!((tail(&hundred), tail_name(hundred.len())), (99.0, "p99"));
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(extent(&[2.0, 1.0, 3.0]), [1.0, 3.0]);
    }
}
