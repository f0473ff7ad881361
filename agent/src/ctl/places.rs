//! Flags that say where things are on the node, for commands that do without the agent.

use crate::config::{ConfigError, Places};
use clap::Args;
use sinabro_common::names;
use std::{env, ffi::OsString, path::PathBuf};

/// As of sinabro-agent, the same variables and the same settings file included.
#[derive(Debug, Args)]
pub struct PlaceFlags {
    /// The agent's settings file [default: /etc/sinabro/config.yaml if there is one].
    #[arg(long, value_name = "FILE")]
    config: Option<OsString>,
    /// The agent's state directory.
    #[arg(long, value_name = "DIR")]
    state_dir: Option<OsString>,
    /// Directory of pinned maps and programs.
    #[arg(long, value_name = "DIR")]
    bpf_dir: Option<OsString>,
    /// Directory of the programs that ran last.
    #[arg(long, value_name = "DIR")]
    programs_dir: Option<OsString>,
    /// Where the plugin is.
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Option<OsString>,
    /// Where the network configuration is.
    #[arg(long, value_name = "DIR")]
    cni_conf_dir: Option<OsString>,
    /// The plugin that is installed there.
    #[arg(long, value_name = "FILE")]
    cni_source: Option<OsString>,
    /// Name of this node.
    #[arg(long, value_name = "NAME")]
    node_name: Option<OsString>,
    /// List of all nodes.
    #[arg(long, value_name = "FILE")]
    nodes: Option<OsString>,
    /// Network devices that lead out of the node.
    #[arg(long, value_name = "DEVICE,…")]
    uplinks: Option<OsString>,
}

impl PlaceFlags {
    /// The settings file that is read, if it is there.
    pub fn settings_file(&self) -> PathBuf {
        let given = self.config.clone();
        let given = given.or_else(|| env::var_os("SINABRO_CONFIG"));
        given.map_or_else(|| names::CONFIG_FILE.into(), PathBuf::from)
    }

    /// The places by flags, environment, settings file and defaults.
    pub fn resolve(&self) -> Result<Places, ConfigError> {
        let flags = [
            ("--config", &self.config),
            ("--state-dir", &self.state_dir),
            ("--bpf-dir", &self.bpf_dir),
            ("--programs-dir", &self.programs_dir),
            ("--cni-bin-dir", &self.cni_bin_dir),
            ("--cni-conf-dir", &self.cni_conf_dir),
            ("--cni-source", &self.cni_source),
            ("--node-name", &self.node_name),
            ("--nodes", &self.nodes),
            ("--uplinks", &self.uplinks),
        ];
        let mut args = vec![OsString::from("sinabroctl")];
        for (flag, value) in flags {
            if let Some(value) = value {
                args.extend([flag.into(), value.clone()]);
            }
        }
        Places::load(args)
    }
}
