//! `sinabroctl metrics`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, share},
};
use sinabro_common::api::{MetricsReport, Request, Response};

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Metrics, |response| match response {
        Response::Metrics(report) => Some(*report),
        _ => None,
    })?;
    print(common, &report, table)?;
    Ok(Exit::Well)
}

fn table(report: &MetricsReport) -> String {
    let mut drops = Table::new(["DROPPED", "REASON", "MEANING"]);
    for drop in &report.drops {
        drops.row([
            drop.packets.to_string(),
            drop.reason.clone(),
            drop.text.clone(),
        ]);
    }
    let mut counters = Table::plain();
    match &report.connections {
        Some(table) => {
            let all = table.established + table.unanswered + table.closing;
            let more = format!(
                "{}, {} unanswered, {} masqueraded",
                share(all, table.capacity),
                table.unanswered,
                table.masqueraded
            );
            counters.row(["Connections:".into(), more]);
        }
        // The agent is of an earlier version.
        None => {
            let flows = share(report.nat_flows, report.nat_capacity);
            counters.row(["Masqueraded flows:".into(), flows]);
        }
    }
    for (name, value) in &report.counters {
        counters.row([format!("{name}:"), value.to_string()]);
    }
    format!("{}\n{}", drops.render(), counters.render())
}
