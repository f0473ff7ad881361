//! `sinabroctl acceleration`.

use crate::ctl::{
    Common, Exit, client,
    endpoints::pod,
    print,
    table::{Table, bytes},
};
use sinabro_common::api::{AccelerationReport, Request, Response};

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Acceleration, |response| match response {
        Response::Acceleration(report) => Some(report),
        _ => None,
    })?;
    print(common, &report, text)?;
    Ok(Exit::Well)
}

fn text(report: &AccelerationReport) -> String {
    let mut pods = Table::new([
        "POD",
        "SOCKETS",
        "REDIRECTED",
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
            pod(&one.pod, &one.owner),
            counters.enrolled.to_string(),
            bytes(counters.redirected.bytes),
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
    format!("{}\n{}", pods.render(), servers.render())
}

fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<_> = items.collect();
    match items.is_empty() {
        true => "-".to_owned(),
        false => items.join(", "),
    }
}
