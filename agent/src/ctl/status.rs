//! `sinabroctl status`.

use crate::ctl::{
    Common, Exit, client,
    connections::room_for,
    endpoints::both_mtus,
    print, self_test,
    table::{Table, age, join, yes_no},
};
use sinabro_common::api::{
    MasqueradeReport, PeersReport, Request, Response, SourceReport, StatusReport, Trouble,
};

/// How many of the destinations that are not masqueraded are named.
const SHOWN_CIDRS: usize = 5;

pub fn show(common: &Common, verbose: bool) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Status, |response| match response {
        Response::Status(report) => Some(*report),
        _ => None,
    })?;
    print(common, &report, |report| table(report, verbose))?;
    Ok(if report.ready {
        Exit::Well
    } else {
        Exit::Problem
    })
}

fn table(report: &StatusReport, verbose: bool) -> String {
    let mut facts = Table::plain();
    let mut fact = |name: &str, value: String| facts.row([name.into(), value]);
    fact("Node:", report.node.clone());
    fact("Ready:", yes_no(report.ready));
    fact("Version:", report.version.clone());
    fact("Running for:", age(report.uptime_seconds));
    fact("Addresses:", join(&report.node_addresses));
    fact("Pod CIDRs:", join(&report.pod_cidrs));
    fact("Uplink:", report.uplink.clone());
    fact("Pod MTU:", both_mtus(report.mtu, report.local_mtu));
    fact("Pods:", report.endpoints.to_string());
    if let Some(report) = &report.masquerade {
        let (families, spared) = masquerade(report);
        fact("Masquerade:", families);
        let mapping = report.udp_mapping.as_deref();
        if mapping == Some("endpoint-independent") {
            fact("UDP mapping:", "endpoint-independent".into());
        }
        fact("Not masqueraded:", spared);
    }
    if let Some(room) = &report.connections {
        fact("Connections:", format!("room for {}", room_for(room)));
    }
    fact("Known nodes:", report.nodes.to_string());
    if let Some(report) = &report.peers {
        fact("Peers:", peers(report));
    }
    fact("Nodes from:", source(&report.source));
    for (name, mode) in &report.modes {
        fact(&format!("Mode {name}:"), mode.clone());
    }
    if let Some(report) = &report.tcp_self_test {
        fact("TCP acceleration:", self_test::line(report));
    }
    let conditions = report.conditions.iter();
    let shown: Vec<_> = conditions
        .filter(|condition| verbose || !condition.ok || !condition.detail.is_empty())
        .collect();
    if shown.is_empty() {
        fact(
            "Conditions:",
            format!("all {} hold", report.conditions.len()),
        );
        return format!("{}{}", facts.render(), troubles(&report.troubles));
    }
    let mut conditions = Table::new(["CONDITION", "OK", "DETAIL"]);
    for condition in shown {
        conditions.row([
            condition.name.clone(),
            yes_no(condition.ok),
            condition.detail.clone(),
        ]);
    }
    format!(
        "{}\n{}{}",
        facts.render(),
        conditions.render(),
        troubles(&report.troubles)
    )
}

/// What is wrong although the node serves; nothing if nothing is.
fn troubles(troubles: &[Trouble]) -> String {
    if troubles.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["TROUBLE", "WHAT IT IS, AND WHAT TO DO"]);
    for trouble in troubles {
        table.row([trouble.reason.clone(), trouble.text.clone()]);
    }
    format!("\n{}", table.render())
}

/// What pods send as their node, and to whom not: `IPv4, IPv6`, `pods, 10.0.0.0/8`.
fn masquerade(report: &MasqueradeReport) -> (String, String) {
    let families = [(report.ipv4, "IPv4"), (report.ipv6, "IPv6")];
    let families = families.iter().filter(|(is, _)| *is);
    let families: Vec<_> = families.map(|(_, name)| *name).collect();
    if families.is_empty() {
        return ("off".into(), "-".into());
    }
    let spared = [
        (true, "pods"),
        (!report.nodes, "nodes"),
        (!report.link_local, "169.254.0.0/16"),
        (!report.link_local_ipv6 && report.ipv6, "fe80::/10"),
    ];
    let spared = spared.iter().filter(|(is, _)| *is);
    let mut spared: Vec<_> = spared.map(|(_, name)| (*name).to_owned()).collect();
    let cidrs = &report.non_masquerade_cidrs;
    spared.extend(cidrs.iter().take(SHOWN_CIDRS).map(ToString::to_string));
    if let Some(more @ 1..) = cidrs.len().checked_sub(SHOWN_CIDRS) {
        spared.push(format!("{more} more"));
    }
    let file = report.file.as_ref().map(|file| format!(" ({file})"));
    let file = file.unwrap_or_default();
    (families.join(", "), spared.join(", ") + &file)
}

/// Whether the other nodes answer through their tunnels; those of which nothing is to be said are
/// left out.
fn peers(report: &PeersReport) -> String {
    if let Some(problem) = &report.problem {
        return format!("not probed: {problem}");
    }
    let PeersReport {
        answering,
        small_only,
        silent,
        unknown,
        ..
    } = *report;
    let other = [
        (small_only, "to small packets only"),
        (silent, "silent"),
        (unknown, "not known yet"),
    ];
    let other = other.iter().filter(|(count, _)| *count > 0);
    let other = other.map(|(count, what)| format!(", {count} {what}"));
    format!("{answering} answer{}", other.collect::<String>())
}

fn source(source: &SourceReport) -> String {
    let from = &source.from;
    match (source.connected, source.lost_seconds) {
        (true, _) => format!("{from} (connected)"),
        (false, None) => format!("{from} (not connected yet)"),
        (false, Some(lost)) => format!("{from} (not connected for {})", age(lost)),
    }
}
