//! How long something took: percentiles to the right, on a scale that gives every further nine as much
//! room as the one before; time upwards, by its logarithm.

use super::{colour, number};
use crate::bench::row::Curve;
use maud::{Markup, html};

/// Percentiles that have a mark on the axis.
const MARKS: [f64; 5] = [0.0, 50.0, 90.0, 99.0, 99.9];

/// From the scale's values to percent of the picture.
struct Scale {
    least: f64,
    most: f64,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let width = self.most - self.least;
        match width > 0.0 {
            true => ((value - self.least) / width).clamp(0.0, 1.0) * 100.0,
            false => 0.0,
        }
    }
}

/// Nines: 90 % is 1, 99 % is 2.
fn nines(percent: f64) -> f64 {
    -(1.0 - percent.clamp(0.0, 99.999) / 100.0).log10()
}

pub fn draw(curves: &[&Curve], subjects: &[&str]) -> Markup {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let times = || points().map(|[_, time]| *time).filter(|time| *time > 0.0);
    let (least, most) = (
        times().fold(f64::INFINITY, f64::min),
        times().fold(0.0, f64::max),
    );
    let Some(first) = curves.first().filter(|_| most > 0.0) else {
        return html! {};
    };
    let marks = time_marks(least, most);
    let (Some(lowest), Some(highest)) = (marks.first(), marks.last()) else {
        return html! {};
    };
    let x = Scale {
        least: 0.0,
        most: nines(points().map(|[percent, _]| *percent).fold(0.0, f64::max)),
    };
    let y = Scale {
        least: lowest.log10(),
        most: highest.log10(),
    };
    let up = |time: f64| 100.0 - y.at(time.max(*lowest).log10());
    html! {
        figure {
            figcaption { "Round trips of one byte: time in " (first.unit) " that so many percent did not exceed" }
            div.plot {
                div.y-axis {
                    @for mark in &marks {
                        span style={ "top:" (format!("{:.2}%", up(*mark))) } { (plain(*mark)) }
                    }
                }
                svg.curves viewBox="0 0 100 100" preserveAspectRatio="none" role="img"
                    aria-label="latency percentiles" {
                    @for mark in &marks {
                        @let y = format!("{:.2}", up(*mark));
                        line.grid x1="0" x2="100" y1=(y) y2=(y) {}
                    }
                    @for mark in MARKS {
                        @let x = format!("{:.2}", x.at(nines(mark)));
                        line.grid x1=(x) x2=(x) y1="0" y2="100" {}
                    }
                    @for curve in curves {
                        polyline.(colour(subjects, &curve.subject)) points=(line(curve, &x, up)) {}
                    }
                }
                div.x-axis {
                    @for mark in MARKS {
                        span style={ "left:" (format!("{:.2}%", x.at(nines(mark)))) } { (plain(mark)) }
                    }
                }
            }
            p.legend {
                @for curve in curves {
                    span {
                        i.(colour(subjects, &curve.subject)) {}
                        (curve.subject)
                        @if let Some([_, time]) = curve.points.iter().find(|[percent, _]| *percent == 50.0) {
                            span.unit { " " (number(*time)) " " (curve.unit) " at 50 %" }
                        }
                    }
                }
            }
        }
    }
}

fn line(curve: &Curve, x: &Scale, up: impl Fn(f64) -> f64) -> String {
    let points = curve.points.iter();
    let points =
        points.map(|[percent, time]| format!("{:.2},{:.2}", x.at(nines(*percent)), up(*time)));
    points.collect::<Vec<_>>().join(" ")
}

/// 1, 2 and 5 times powers of ten that enclose all values.
fn time_marks(least: f64, most: f64) -> Vec<f64> {
    let steps = (-3..9).flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(power)));
    let steps: Vec<f64> = steps.collect();
    let from = steps.iter().rposition(|step| *step <= least).unwrap_or(0);
    let to = steps.iter().position(|step| *step >= most);
    let to = to.unwrap_or(steps.len() - 1).max(from + 1);
    steps.get(from..=to).unwrap_or_default().to_vec()
}

fn plain(value: f64) -> String {
    format!("{}", (value * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nine_has_the_same_room() {
        assert!((nines(90.0) - 1.0).abs() < 1e-9);
        assert!((nines(99.9) - 3.0).abs() < 1e-9);
        assert!(nines(100.0).is_finite());
        assert_eq!(nines(0.0), 0.0);
    }

    #[test]
    fn marks_enclose_all_values() {
        assert_eq!(
            time_marks(17.0, 230.0),
            [10.0, 20.0, 50.0, 100.0, 200.0, 500.0]
        );
        assert_eq!(time_marks(20.0, 20.0), [20.0, 50.0]);
        assert!(time_marks(1e-9, 1e12).len() > 2);
    }
}
