//! `sinabroctl endpoints`.

use crate::ctl::{
    Common, Exit, client, print,
    table::{Table, bytes, join},
};
use sinabro_common::api::{EndpointReport, Owner, PodRef, Request, Response};

pub fn show(common: &Common) -> Result<Exit, client::Error> {
    let report = client::ask(common, Request::Endpoints, |response| match response {
        Response::Endpoints(report) => Some(report),
        _ => None,
    })?;
    print(common, &report, |report| table(report))?;
    Ok(Exit::Well)
}

/// `namespace/name`, or the container where the runtime named no pod.
pub fn pod(pod: &PodRef, owner: &Owner) -> String {
    match pod.name.is_empty() {
        true => owner.container_id.chars().take(16).collect(),
        false => format!("{}/{}", pod.namespace, pod.name),
    }
}

fn table(endpoints: &[EndpointReport]) -> String {
    let mut table = Table::new([
        "POD",
        "INTERFACE",
        "ADDRESSES",
        "LINK",
        "MAC",
        "SENT",
        "RECEIVED",
    ]);
    for endpoint in endpoints {
        table.row([
            pod(&endpoint.pod, &endpoint.owner),
            endpoint.owner.ifname.clone(),
            join(&endpoint.addresses),
            endpoint.link.clone(),
            endpoint.mac.to_string(),
            bytes(endpoint.tx_bytes),
            bytes(endpoint.rx_bytes),
        ]);
    }
    table.render()
}
