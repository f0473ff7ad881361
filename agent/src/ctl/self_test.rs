//! What the TCP acceleration changes for applications, for people.

use crate::ctl::table::Table;
use sinabro_common::api::{RowReport, SelfTestReport, Verdict};

/// In one line.
pub fn line(report: &SelfTestReport) -> String {
    let verdict = match report.verdict {
        Verdict::AllPass => "fit for every pod",
        Verdict::SomeFail => "for pods that ask for it",
        Verdict::Refused => "refused",
    };
    format!("{verdict}: {}", report.reason)
}

/// The rows that differ, or all of them; nothing if there are none.
pub fn table(report: &SelfTestReport, all: bool) -> Option<String> {
    let rows = report.rows.iter().filter(|row| all || !row.passed);
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return None;
    }
    let heading = "WHAT IT MEANS FOR APPLICATIONS WHOSE TCP IS ACCELERATED";
    let mut table = match all {
        true => Table::new(["TCP CALL", "ACCELERATED", heading]),
        false => Table::new(["TCP CALL", heading]),
    };
    for row in rows {
        match all {
            true => table.row([row.title.clone(), verdict(row), meaning(row)]),
            false => table.row([row.title.clone(), meaning(row)]),
        }
    }
    Some(table.render())
}

fn verdict(row: &RowReport) -> String {
    if row.passed { "the same" } else { "differs" }.into()
}

fn meaning(row: &RowReport) -> String {
    match row.passed {
        true => "no difference".into(),
        false => row.meaning.clone(),
    }
}
