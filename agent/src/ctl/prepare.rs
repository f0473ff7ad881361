//! `sinabroctl prepare`.

use crate::{
    chain::Chain,
    config::Places,
    ctl::{Common, Exit, places::PlaceFlags, print},
    own_node::{self, OwnNodeError},
    prepare::{self, Families, Prepared},
};
use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct PrepareFlags {
    #[command(flatten)]
    places: PlaceFlags,
    /// Where the root of the node's file system is seen, in which the kubelet's kubeconfig is looked for: the agent is left the URL
    /// of its API server, for nodes without kube-proxy [default: none is looked for].
    #[arg(long, value_name = "DIR")]
    host_dir: Option<PathBuf>,
}

pub fn run(common: &Common, flags: &PrepareFlags) -> anyhow::Result<Exit> {
    let places = flags.places.resolve()?;
    let mut prepared = Prepared::default();
    let done = steps(&places, flags.host_dir.as_deref(), &mut prepared);
    // What was done stays, also if no more could be.
    if done.is_ok() || prepared != Prepared::default() {
        print(common, &prepared, text)?;
    }
    done?;
    Ok(Exit::Well)
}

fn steps(places: &Places, host_dir: Option<&Path>, prepared: &mut Prepared) -> anyhow::Result<()> {
    // First: what follows asks the API.
    if let Some(root) = host_dir {
        prepared.add(prepare::api_server(places, root)?);
    }
    prepared.add(prepare::bpffs(&places.bpf_dir)?);
    prepared.add(prepare::plugin(places)?);
    let families = match own_node::pod_cidrs(places) {
        Ok(cidrs) => Families::of(&cidrs),
        // By hand, beside no cluster.
        Err(OwnNodeError::Unknown) => Families::BOTH,
        Err(error) => {
            let why = Chain(&error);
            prepared.warnings.push(format!(
                "IPv4 and IPv6 are forwarded, since it is not known which of them pods have: {why}"
            ));
            Families::BOTH
        }
    };
    prepared.add(prepare::forwarding(&places.uplinks, families)?);
    if families.v6 {
        prepared.add(prepare::pod_links()?);
    }
    prepared.add(prepare::announcements());
    if places.peer_probe {
        prepared.add(prepare::ping_sockets());
    }
    prepared.add(prepare::self_test(places));
    Ok(())
}

fn text(prepared: &Prepared) -> String {
    let warnings = prepared
        .warnings
        .iter()
        .map(|text| format!("warning: {text}\n"));
    let changes = prepared.changes.iter().map(|text| format!("{text}\n"));
    let text: String = changes.chain(warnings).collect();
    match text.is_empty() {
        true => "nothing to do: the node is prepared\n".into(),
        false => text,
    }
}
