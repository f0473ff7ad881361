//! What is done in a machine.

use sinabro_guest::Step;

/// As `--step` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum StepName {
    /// Load, verify and attach every program
    Verify,
    /// Be a node: prepare, agent, the plugin's verbs, an agent that is killed, uninstall
    Node,
    /// The demo's checks between two nodes, and agents that restart and are killed
    Lab,
    /// Two nodes by a VLAN, a bond, WireGuard: on machines of its own
    Uplinks,
    /// Two nodes beside kube-proxy by IPVS: on machines of its own
    Ipvs,
    /// The data path's tests
    Datapath,
    /// Reboot into this kernel, which refuses the programs: on machines of its own
    Refused,
}

impl StepName {
    /// On a machine that is special in nothing.
    pub const PLAIN: &[Self] = &[Self::Verify, Self::Node, Self::Lab, Self::Datapath];

    /// What each boot of a machine does for it.
    pub fn boots(self, thorough: bool) -> Vec<Step> {
        match self {
            Self::Verify => vec![Step::Verify],
            Self::Node => vec![Step::Node],
            Self::Lab => vec![Step::Lab],
            Self::Uplinks => vec![Step::Uplinks],
            Self::Ipvs => vec![Step::Ipvs],
            Self::Datapath => vec![Step::Datapath { thorough }],
            Self::Refused => vec![Step::PowerOff, Step::Refused, Step::AllRefused],
        }
    }
}
