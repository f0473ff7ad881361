//! The values of a group of cases: a card for each case, a bar for each subject.

use super::{colour, in_order, matrix::judgement, number, percent, ratio, split};
use crate::bench::row::Row;
use maud::{Markup, html};

/// One subject's value.
struct Bar<'a> {
    subject: &'a str,
    value: f64,
    range: [f64; 2],
    /// Ours to this one.
    compared: Option<&'a Row>,
}

pub fn draw(rows: &[&Row], subjects: &[&str]) -> Markup {
    let cases = in_order(rows.iter().map(|row| &*row.case));
    html! {
        div.cards {
            @for case in cases {
                @let rows = rows.iter().filter(|row| row.case == case);
                @let rows: Vec<&Row> = rows.copied().collect();
                article.card {
                    h4 { (split(case).1) }
                    @for metric in in_order(rows.iter().map(|row| &*row.metric)) {
                        @let rows = rows.iter().filter(|row| row.metric == metric);
                        (metric_of_case(&rows.copied().collect::<Vec<_>>(), subjects))
                    }
                }
            }
        }
    }
}

fn metric_of_case(rows: &[&Row], subjects: &[&str]) -> Markup {
    let Some(first) = rows.first() else {
        return html! {};
    };
    let mut bars = vec![Bar {
        subject: &first.subject,
        value: first.value,
        range: first.range,
        compared: None,
    }];
    bars.extend(rows.iter().map(|row| Bar {
        subject: &row.against,
        value: row.against_value,
        range: row.against_range,
        compared: Some(row),
    }));
    let longest = bars.iter().map(|bar| bar.range[1]).fold(0.0, f64::max);
    let better = match first.more_is_better() {
        true => "more is better",
        false => "less is better",
    };
    html! {
        p.metric-name { (first.metric) ", " (first.unit) span.unit { (better) } }
        div.bars {
            @for bar in &bars {
                span.name { (bar.subject) }
                (picture(bar, longest, subjects))
                span.value { (number(bar.value)) }
                @match bar.compared {
                    Some(row) => span.cell.(judgement(row)) title={ (row.spread_text()) " over the rounds" } { (ratio(row.ratio)) },
                    None => span {},
                }
            }
        }
    }
}

fn picture(bar: &Bar<'_>, longest: f64, subjects: &[&str]) -> Markup {
    let [least, most] = bar.range.map(|end| percent(end, longest));
    let label = format!("{}: {}", bar.subject, number(bar.value));
    html! {
        svg.bar role="img" aria-label=(label) {
            rect.(colour(subjects, bar.subject)) x="0" y="15%" height="70%" rx="2"
                width=(percent(bar.value, longest)) {}
            line.whisker x1=(least) x2=(most) y1="50%" y2="50%" {}
            line.whisker x1=(least) x2=(least) y1="28%" y2="72%" {}
            line.whisker x1=(most) x2=(most) y1="28%" y2="72%" {}
        }
    }
}
