//! `sinabroctl endpoints`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, bytes, join},
};
use sinabro_common::api::{EndpointReport, Request, Response};

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Endpoints, |response| match response {
        Response::Endpoints(report) => Some(report),
        _ => None,
    })?;
    print(common, &report, |report| table(report))?;
    Ok(Exit::Well)
}

fn mtu(endpoint: &EndpointReport) -> String {
    match endpoint.mtu {
        Some(mtu) => both_mtus(mtu, endpoint.local_mtu.as_ref().map(|local| local.mtu)),
        // The agent is of an earlier version.
        None => "?".into(),
    }
}

/// What a pod may send, and what to the node and its pods where that is more.
pub fn both_mtus(mtu: u32, local: Option<u32>) -> String {
    match local {
        Some(local) => format!("{mtu}, local {local}"),
        None => mtu.to_string(),
    }
}

fn table(endpoints: &[EndpointReport]) -> String {
    let mut table = Table::new([
        "POD",
        "INTERFACE",
        "ADDRESSES",
        "LINK",
        "MAC",
        "MTU",
        "SERVICES",
        "SENT",
        "RECEIVED",
    ]);
    for endpoint in endpoints {
        table.row([
            endpoint.pod.display(&endpoint.owner),
            endpoint.owner.ifname.clone(),
            join(&endpoint.addresses),
            endpoint.link.clone(),
            endpoint.mac.to_string(),
            mtu(endpoint),
            match endpoint.service_translation {
                Some(translation) => translation.to_string(),
                None => "?".into(),
            },
            bytes(endpoint.tx_bytes),
            bytes(endpoint.rx_bytes),
        ]);
    }
    table.render()
}
