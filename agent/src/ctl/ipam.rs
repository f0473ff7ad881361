//! `sinabroctl ipam`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, age, share},
};
use sinabro_common::api::{IpamReport, Request, Response};
use std::time::{SystemTime, UNIX_EPOCH};

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Ipam, |response| match response {
        Response::Ipam(report) => Some(report),
        _ => None,
    })?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    print(common, &report, |report| table(report, now))?;
    Ok(Exit::Well)
}

fn table(report: &IpamReport, now: u64) -> String {
    let mut ranges = Table::new(["RANGE", "LEASED"]);
    for range in &report.ranges {
        ranges.row([range.cidr.to_string(), share(range.leased, range.capacity)]);
    }
    let mut leases = Table::new(["ADDRESS", "POD", "INTERFACE", "STATE", "AGE"]);
    for lease in &report.leases {
        let state = if lease.active {
            "active"
        } else {
            "being set up"
        };
        leases.row([
            lease.address.to_string(),
            lease.pod.display(&lease.owner),
            lease.owner.ifname.clone(),
            state.into(),
            age(now.saturating_sub(lease.leased_at)),
        ]);
    }
    let mut text = format!("{}\n{}", ranges.render(), leases.render());
    if !report.problems.is_empty() {
        let mut problems = Table::new(["PROBLEM"]);
        for problem in &report.problems {
            problems.row([problem.clone()]);
        }
        text.push('\n');
        text.push_str(&problems.render());
    }
    text
}
