//! `sinabroctl acceleration`.

use crate::ctl::{
    Common, Exit, client, print, self_test,
    table::{Table, bytes},
};
use sinabro_common::api::{AccelerationReport, MemoryReport, Request, Response};

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Acceleration, |response| match response {
        Response::Acceleration(report) => Some(report),
        _ => None,
    })?;
    print(common, &report, text)?;
    Ok(Exit::Well)
}

/// `sinabroctl acceleration --kernel`: what the self-test found.
pub fn kernel(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Status, |response| match response {
        Response::Status(report) => Some(report.tcp_self_test),
        _ => None,
    })?;
    print(common, &report, |report| match report {
        Some(report) => format!("{}\n", self_test::line(report)),
        None => "the setting tcpAcceleration is off, or no pod has asked for it yet\n".into(),
    })?;
    Ok(Exit::Well)
}

fn text(report: &AccelerationReport) -> String {
    let mut pods = Table::new([
        "POD",
        "SOCKETS",
        "REDIRECTED",
        "MEMORY",
        "THROUGH TCP",
        "NOT ENROLLED",
    ]);
    for one in &report.pods {
        let counters = &one.counters;
        let passed = counters.passed.iter();
        let passed = passed.map(|(reason, count)| format!("{} {reason}", bytes(count.bytes)));
        let skipped = counters.skipped.iter();
        let skipped = skipped.map(|(reason, sockets)| format!("{sockets} {reason}"));
        pods.row([
            one.pod.display(&one.owner),
            counters.enrolled.to_string(),
            bytes(counters.redirected.bytes),
            memory(&counters.memory),
            list(passed),
            list(skipped),
        ]);
    }
    let mut servers = Table::new(["SERVER", "NEW CONNECTIONS", "ENDED", "RECEIVED", "SENT"]);
    for server in &report.servers {
        let [received, sent] = server.bytes;
        servers.row([
            std::net::SocketAddr::new(server.address, server.port).to_string(),
            server.verdict.clone(),
            server.connections.to_string(),
            bytes(received),
            bytes(sent),
        ]);
    }
    let mut text = format!("{}\n{}", pods.render(), servers.render());
    if let Some(of_node) = &report.memory {
        text = format!("{text}\nMemory of all: {}\n", memory(of_node));
    }
    text
}

/// What is charged, and what may be.
fn memory(report: &MemoryReport) -> String {
    format!("{} of {}", bytes(report.used), bytes(report.limit))
}

fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<_> = items.collect();
    match items.is_empty() {
        true => "-".to_owned(),
        false => items.join(", "),
    }
}
