//! The ratios of a group of cases at a glance: a line for each case, a column for each other subject.

use super::{in_order, number, ratio, split};
use crate::bench::row::Row;
use maud::{Markup, html};

/// What a case is mostly about; all else is among all values.
const HEADLINES: [&str; 10] = [
    "throughput",
    "requests",
    "received",
    "CPU",
    "p50",
    "p99",
    "max",
    "memory",
    "all done",
    "later connections",
];

pub fn draw(rows: &[&Row]) -> Markup {
    let is_headline = |row: &&&Row| HEADLINES.contains(&&*row.metric);
    let rows: Vec<&Row> = rows.iter().filter(is_headline).copied().collect();
    let others = in_order(rows.iter().map(|row| &*row.against));
    let Some(ours) = rows.first().map(|row| &*row.subject) else {
        return html! {};
    };
    let mut lines: Vec<(&str, &str)> = Vec::new();
    for row in &rows {
        if !lines.contains(&(&row.case, &row.metric)) {
            lines.push((&row.case, &row.metric));
        }
    }
    html! {
        div.wide {
            table.matrix {
                thead {
                    tr {
                        th scope="col" { "case" }
                        th scope="col" { (ours) }
                        @for other in &others { th scope="col" { "to " (other) } }
                    }
                }
                tbody {
                    @for (case, metric) in lines {
                        @let of_line = |row: &&&Row| row.case == case && row.metric == metric;
                        @let line: Vec<&Row> = rows.iter().filter(of_line).copied().collect();
                        tr {
                            th scope="row" { (split(case).1) span.metric { (metric) } }
                            @if let Some(row) = line.first() {
                                td.value { (number(row.value)) " " span.unit { (row.unit) } }
                            }
                            @for other in &others {
                                @match line.iter().find(|row| row.against == *other) {
                                    Some(row) => (cell(row)),
                                    None => td {},
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn cell(row: &Row) -> Markup {
    html! {
        td.cell.(judgement(row)) {
            (ratio(row.ratio))
            span.spread { (row.spread_text()) }
        }
    }
}

/// Noise is now on this side and now on that.
pub fn judgement(row: &Row) -> &'static str {
    let [least, most] = row.spread;
    match row.more_is_better() {
        true if least > 1.0 => "better",
        true if most < 1.0 => "worse",
        false if most < 1.0 => "better",
        false if least > 1.0 => "worse",
        _ => "even",
    }
}
