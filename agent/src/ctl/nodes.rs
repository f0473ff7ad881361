//! `sinabroctl nodes`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, join},
};
use sinabro_common::api::{NodeReport, Request, Response};

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Nodes, |response| match response {
        Response::Nodes(report) => Some(report),
        _ => None,
    })?;
    print(common, &report, |report| table(report))?;
    Ok(Exit::Well)
}

fn table(nodes: &[NodeReport]) -> String {
    let mut table = Table::new(["NODE", "ADDRESSES", "POD CIDRS", "TUNNEL", "PROBLEM"]);
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
            node.problem.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}
