//! What happens to a cluster's network in its life. Each scenario begins on a healthy cluster
//! and leaves one.

mod acceleration;
mod agents;
mod api;
mod confined;
mod files;
mod masquerade;
mod nodes;
mod pods;
mod routing;
mod runtime_class;
mod services;
mod sizes;
mod upgrade;

use super::world::World;
use crate::cluster::{Proxy, Variant};
use anyhow::Result;

pub struct Scenario {
    pub name: &'static str,
    /// For people, one line.
    pub shows: &'static str,
    /// Played each night, and not on every change.
    pub nightly: bool,
    /// What was seen, or what went wrong.
    pub run: fn(&mut World) -> Result<String>,
}

impl Scenario {
    /// Whether it can be played on such a cluster.
    pub fn is_for(&self, variant: Variant) -> bool {
        let is_ours = variant.proxy == Proxy::None;
        match self.name {
            // A datagram may follow netfilter's memory of a pod that is gone until kube-proxy has it forgotten.
            ROLLED => is_ours,
            // What netfilter translates has to pass it both ways.
            NATIVE => is_ours,
            _ => true,
        }
    }

    /// What a cluster has to be like, for who asked for another.
    pub fn needs(&self) -> &'static str {
        match self.name {
            ROLLED | NATIVE => "it needs `--proxy none`",
            _ => "it is none of `--tests`",
        }
    }
}

pub const UPGRADE: &str = "upgrade";
const ROLLED: &str = "service-rolled";
const NATIVE: &str = "routing-native";

const fn scenario(
    name: &'static str,
    shows: &'static str,
    run: fn(&mut World) -> Result<String>,
) -> Scenario {
    Scenario {
        name,
        shows,
        nightly: false,
        run,
    }
}

const fn nightly(scenario: Scenario) -> Scenario {
    Scenario {
        nightly: true,
        ..scenario
    }
}

/// In the order they run: those that take nodes or the whole network away come last.
pub const ALL: &[Scenario] = &[
    scenario("size", "image and agents are small", agents::size),
    scenario(
        "rights",
        "the agent's token changes its own node and nothing else",
        api::rights,
    ),
    scenario(
        "confined",
        "the agent's process has the power that its manifest gives it, and no other",
        confined::confined,
    ),
    scenario(
        "families",
        "pods have an address of each family and reach each other, nodes and Services",
        pods::families,
    ),
    scenario(
        "acceleration",
        "a pod's annotation has its TCP bypass the stack",
        acceleration::annotated,
    ),
    scenario(
        "host-port",
        "a pod's hostPort answers from near and far",
        pods::host_port,
    ),
    scenario(
        "packet-sizes",
        "packets that leave a node are as large as its uplink takes, and none is larger or lost",
        sizes::on_the_wire,
    ),
    scenario(
        "runtime-class",
        "pods of a RuntimeClass have one MTU, by their runtime's own networks",
        runtime_class::with_one_mtu,
    ),
    scenario(
        "services",
        "pods and nodes reach names, the API server and themselves by Services",
        services::reached,
    ),
    scenario(
        ROLLED,
        "no request fails while a Deployment behind a Service is rolled out",
        services::rolled_out,
    ),
    nightly(scenario(
        "masquerade-config",
        "the ConfigMap of ip-masq-agent says who sees pods' own addresses, without a restart",
        masquerade::config_map,
    )),
    nightly(scenario(
        NATIVE,
        "nodes do without tunnels between them and have them again, by a setting and under load",
        routing::native,
    )),
    scenario(
        UPGRADE,
        "agents go back to the last released state, and forth, under load",
        upgrade::upgrade,
    ),
    scenario(
        "agents-replaced",
        "no node is taken for not ready while agents are upgraded under load",
        agents::replaced,
    ),
    scenario(
        "agent-killed",
        "agents are killed on every node under load",
        agents::killed,
    ),
    scenario(
        "agents-stay-away",
        "a runtime that asks for STATUS hears of agents that do not come back",
        agents::stay_away,
    ),
    nightly(scenario(
        "kubelet-restart",
        "kubelets are restarted under load",
        nodes::kubelet_restart,
    )),
    nightly(scenario(
        "hundred-pods",
        "100 pods start on one node at once",
        pods::hundred,
    )),
    scenario(
        "force-delete",
        "pods that are force-deleted leave nothing",
        pods::force_deleted,
    ),
    scenario(
        "other-conflist",
        "another network's configuration lies around",
        files::other_conflist,
    ),
    nightly(scenario(
        "disk-full",
        "the state directory's disk is full",
        files::disk_full,
    )),
    nightly(scenario(
        "api-away",
        "pods start and run while the API server is away",
        api::away,
    )),
    scenario(
        "service-alone",
        "Services go on without agents and without the API server",
        services::alone,
    ),
    nightly(scenario(
        "node-reboot",
        "a node loses power and comes back",
        nodes::reboot,
    )),
    nightly(scenario(
        "node-added",
        "a node joins and leaves",
        nodes::added_and_removed,
    )),
    scenario(
        "uninstall",
        "nothing is left after uninstalling, and it can be installed again",
        files::uninstall,
    ),
];
