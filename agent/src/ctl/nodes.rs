//! `sinabroctl nodes`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, age, join},
};
use sinabro_common::api::{
    NODES_OF_A_PAGE, NodeReport, PathPackets, PeerPath, PeerProbe, Request, Response,
};

/// All nodes, asked for page by page.
pub fn all(common: &Common) -> Result<Vec<NodeReport>, client::Error> {
    let mut nodes: Vec<NodeReport> = Vec::new();
    loop {
        let after = nodes.last().map(|node| node.name.clone());
        let page = client::ask(
            common,
            Request::Nodes { after },
            |response| match response {
                Response::Nodes(page) => Some(page),
                _ => None,
            },
        )?;
        let last = page.len() < NODES_OF_A_PAGE;
        nodes.extend(page);
        if last {
            return Ok(nodes);
        }
    }
}

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = all(common)?;
    print(common, &report, |report| table(report))?;
    Ok(Exit::Well)
}

fn table(nodes: &[NodeReport]) -> String {
    let mut table = Table::new([
        "NODE",
        "ADDRESSES",
        "POD CIDRS",
        "TUNNEL",
        "ANSWERS",
        "DIRECT",
        "NATIVE",
        "KERNEL",
        "PATH",
        "PROBLEM",
    ]);
    for node in nodes {
        let tunnel = match node.tunnel {
            Some(tunnel) => tunnel.to_string(),
            None if node.local => "this node".into(),
            None => "none".into(),
        };
        table.row([
            node.name.clone(),
            join(&node.addresses),
            join(&node.pod_cidrs),
            tunnel,
            node.probe.as_ref().map(answers).unwrap_or_default(),
            packets(node.packets.map(|packets| packets.direct)),
            packets(node.packets.map(|packets| packets.native)),
            packets(node.packets.map(|packets| packets.kernel)),
            node.path.as_ref().map(path).unwrap_or_default(),
            node.problem.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}

/// What a node's answers through the tunnel say.
fn answers(probe: &PeerProbe) -> String {
    match *probe {
        PeerProbe::Unknown => "not known yet".into(),
        PeerProbe::Answers {
            round_trip_microseconds,
        } => milliseconds(round_trip_microseconds),
        PeerProbe::SmallOnly { largest: None, .. } => "to small packets only".into(),
        PeerProbe::SmallOnly {
            largest: Some(largest),
            ..
        } => format!("up to {largest} bytes"),
        PeerProbe::Silent { seconds } => format!("silent {}", age(seconds)),
    }
}

/// `812 out, 790 in`.
fn packets(packets: Option<PathPackets>) -> String {
    packets.map_or(String::new(), |PathPackets { sent, received }| {
        format!("{sent} out, {received} in")
    })
}

/// `direct`, `direct: …`, `native`, `kernel: …`.
fn path(path: &PeerPath) -> String {
    match path {
        PeerPath::Direct { why: None } => "direct".into(),
        PeerPath::Direct { why: Some(why) } => format!("direct: {why}"),
        PeerPath::Native => "native".into(),
        PeerPath::Kernel { why } => format!("kernel: {why}"),
    }
}

/// `0.31 ms`, `12 ms`.
fn milliseconds(microseconds: u64) -> String {
    match microseconds {
        0..10_000 => format!("{:.2} ms", microseconds as f64 / 1000.0),
        _ => format!("{} ms", microseconds / 1000),
    }
}
