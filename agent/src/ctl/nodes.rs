//! `sinabroctl nodes`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, join},
};
use sinabro_common::api::{NODES_OF_A_PAGE, NodeReport, Request, Response};

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
