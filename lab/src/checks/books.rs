//! What a node keeps of its pods: leases, records, queued deletes, links.

use crate::{Node, Pod, cni::IFNAME, wait::wait_within};
use anyhow::{Context as _, Result, ensure};
use sinabro_common::{
    api::{Request, Response},
    names,
};
use std::{collections::BTreeSet, fs, io, net::IpAddr, time::Duration};

/// The agent goes through what plugins queued every minute; a delete that was queued just after
/// it looked waits as long.
const PATIENCE: Duration = Duration::from_secs(90);

/// Waits until leases, records and links are those of the living pods, no more and no fewer, and
/// no delete is queued.
pub fn exact(node: &Node, live: &[Pod]) -> Result<()> {
    let addresses: Vec<IpAddr> = live.iter().flat_map(Pod::addresses).collect();
    let unique: BTreeSet<IpAddr> = addresses.iter().copied().collect();
    ensure!(
        unique.len() == addresses.len(),
        "an address was given twice"
    );
    let links: BTreeSet<String> = live
        .iter()
        .map(|pod| names::pod_link(pod.id(), IFNAME))
        .collect();
    let records: BTreeSet<String> = links.iter().map(|link| format!("{link}.json")).collect();
    let leases: BTreeSet<String> = unique.iter().map(ToString::to_string).collect();
    let none = BTreeSet::new();
    wait_within(PATIENCE, "exactly the living pods to be known", || {
        let differences = [
            difference("lease", &files(node, names::LEASES_DIR)?, &leases),
            difference("record", &files(node, names::ENDPOINTS_DIR)?, &records),
            difference("queued delete", &files(node, names::DELETES_DIR)?, &none),
            difference("link", &pod_links(node)?, &links),
        ]
        .concat();
        ensure!(differences.is_empty(), "{}", differences.join("\n"));
        Ok(Some(()))
    })?;
    match node.ask(Request::Endpoints)? {
        Response::Endpoints(known) => ensure!(
            known.len() == live.len(),
            "the agent knows {} of {} pods",
            known.len(),
            live.len()
        ),
        other => anyhow::bail!("unexpected answer {other:?}"),
    }
    Ok(())
}

fn difference(what: &str, found: &BTreeSet<String>, wanted: &BTreeSet<String>) -> Vec<String> {
    let leaked = found
        .difference(wanted)
        .map(|name| format!("{what} {name} leaked"));
    let lost = wanted
        .difference(found)
        .map(|name| format!("{what} {name} is lost"));
    leaked.chain(lost).collect()
}

fn pod_links(node: &Node) -> Result<BTreeSet<String>> {
    let links = node.netlink()?.links()?;
    let names = links.into_iter().map(|link| link.name);
    Ok(names.filter(|name| names::is_pod_link(name)).collect())
}

/// Temporary files included. A directory that was never needed is empty.
fn files(node: &Node, dir: &str) -> Result<BTreeSet<String>> {
    let path = node.state(dir);
    let entries = match fs::read_dir(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        other => other.with_context(|| format!("cannot list {}", path.display()))?,
    };
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}
