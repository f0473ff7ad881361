//! `sinabroctl`: looks at this node's agent, and looks after the node where there is none.
//!
//! One file per command. A noun asks the agent one question ([`client`]) and prints the report
//! as a table ([`table`]) or as JSON; a verb works on the node itself, where [`places`] says.

mod acceleration;
mod client;
mod connections;
mod debug;
mod drops;
mod endpoints;
mod ipam;
mod metrics;
mod nodes;
mod pause;
mod places;
mod prepare;
mod self_test;
mod services;
mod status;
mod table;
mod uninstall;
mod verify;

use crate::config::ConfigError;
use clap::{Args, CommandFactory as _, Parser, Subcommand, error::ErrorKind};
use places::PlaceFlags;
use serde::Serialize;
use sinabro_common::names;
use std::{
    ffi::OsString,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

/// What the program is called.
pub const NAME: &str = "sinabroctl";

const AFTER_HELP: &str = "\
Exit codes:
  0  all is well
  1  the agent reports a problem: it is not ready (status), or it refused the request; or what
     was to be done failed
  2  the command line is wrong
  3  the agent cannot be reached, or its answer cannot be understood

Examples:
  sinabroctl status                     is this node serving pods, and if not, why?
  sinabroctl status -o json | jq .conditions
  sinabroctl endpoints                  which pods are here, with addresses and traffic
  sinabroctl ipam                       who has which address, how full each range is
  sinabroctl nodes                      which nodes are known, which cannot be reached and why
  sinabroctl connections list           who talks to whom, how far that is, under which address outside
  sinabroctl connections stats          how many, of which pods, how full the table is
  sinabroctl services                   what each Service leads to from here, and why not
  sinabroctl drops                      what was dropped and why; with --follow as it happens
  sinabroctl metrics                    the same counters, how full the NAT table is
  sinabroctl acceleration               which pods' TCP goes from socket to socket, and how much
  sinabroctl acceleration --kernel      whether this kernel keeps order and back-pressure by that
  sinabroctl prepare                    as root, before an agent that runs without privileges
  sinabroctl verify                     as root: does this kernel take every eBPF program?
  sinabroctl uninstall                  as root, once the agent is gone: takes everything away
  sinabroctl debug -o node.tar          everything needed to look at this node from afar
  kubectl -n kube-system exec ds/sinabro -- sinabroctl debug -o - > node.tar";

/// Shows what the Sinabro agent of this node knows, and prepares the node for it.
#[derive(Debug, Parser)]
#[command(name = NAME, version, max_term_width = 100, after_help = AFTER_HELP)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Args)]
struct Common {
    /// How to print: table (aligned columns, for people) or json (the whole report, for
    /// programs; fields are only ever added) [default: table]. For debug: the archive to write,
    /// - for standard output.
    #[arg(short, long, global = true, value_name = "FORMAT|FILE")]
    output: Option<OsString>,

    /// The agent's socket.
    #[arg(long, global = true, env = "SINABRO_SOCKET", value_name = "PATH",
          default_value_os_t = default_socket())]
    socket: PathBuf,

    /// How long to wait for the agent, in seconds.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 5,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Table,
    Json,
}

impl Common {
    fn format(&self) -> Option<Format> {
        match self.output.as_ref().map(|text| text.to_str()) {
            None | Some(Some("table")) => Some(Format::Table),
            Some(Some("json")) => Some(Format::Json),
            Some(_) => None,
        }
    }
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Whether this node serves pods, and what stands in the way.
    ///
    /// Ends with code 1 if the node is not ready.
    Status {
        /// Also the conditions that hold.
        #[arg(short, long)]
        verbose: bool,
    },
    /// The pods of this node: addresses, link, traffic.
    Endpoints,
    /// Address ranges and leases.
    Ipam,
    /// The nodes of the cluster and how they are reached.
    Nodes,
    /// Drops by reason, NAT table, counters.
    Metrics,
    /// The table of connections: list, flush, stats.
    #[command(subcommand)]
    Connections(connections::Verb),
    /// What Services lead to from this node: frontends, endpoints, and why one is not as it should be.
    ///
    /// A row is what leads to the same endpoints. CLIENTS are inside (pods and nodes) or outside of the
    /// cluster, or all of them; DRAINING are endpoints that finish the connections they have.
    Services {
        /// This one alone, with all of its endpoints.
        #[arg(value_name = "NAMESPACE/NAME")]
        name: Option<String>,
    },
    /// Packets that the data path dropped: how many for which reason, and the last of them.
    Drops(drops::DropFlags),
    /// TCP between pods of this node that goes from socket to socket: how much of it, what went
    /// through TCP and why, what it costs the kernel, and which servers' connections are left
    /// alone.
    Acceleration {
        /// Instead, whether accelerated connections of this kernel keep order and back-pressure, as
        /// the self-test found.
        #[arg(short, long)]
        kernel: bool,
    },
    /// Do nothing until asked to end.
    ///
    /// For a DaemonSet whose pods have done their work and must stay.
    #[command(hide = true)]
    Pause,
    /// Makes the node ready for an agent without privileges: sets what the kernel needs to
    /// forward packets, and mounts a bpffs if there is none.
    ///
    /// Needs root. Changes nothing that is right already.
    Prepare(prepare::PrepareFlags),
    /// Loads and verifies every program on this kernel, attaches each in every way that the kernel
    /// has for it, and takes it away again.
    ///
    /// Needs root, and changes nothing: an agent that runs goes on with its own. INSTRUCTIONS is how
    /// many the verifier walked through. Ends with code 1 if the kernel refuses a program that a
    /// node cannot do without.
    Verify(PlaceFlags),
    /// Takes everything of Sinabro off this node: configuration, plugin, pod links, VXLAN device,
    /// routes, programs, pins, state.
    ///
    /// Needs root, and that no agent runs on the node. What is not there is no error, and what
    /// was interrupted can be done again. The node's sysctls stay as they are.
    Uninstall(PlaceFlags),
    /// Writes one tar archive with what is needed to look at this node from afar.
    ///
    /// Status and reports of the agent, links, addresses, routes, neighbours, sysctls, pins,
    /// state files, network configurations, settings, the end of the kernel's log. A part that
    /// cannot be had is named in it; the agent may be away. Keys and tokens are not in it. No
    /// file is overwritten.
    Debug(PlaceFlags),
}

fn default_socket() -> PathBuf {
    [names::STATE_DIR, names::SOCKET].iter().collect()
}

/// How the process ends; see [`AFTER_HELP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Well = 0,
    Problem = 1,
    /// As clap's own.
    Usage = 2,
    Unreachable = 3,
}

/// Why a command did not do what it should.
struct Failure {
    text: String,
    exit: Exit,
}

impl From<client::Error> for Failure {
    fn from(error: client::Error) -> Self {
        Self {
            text: error.to_string(),
            exit: error.exit(),
        }
    }
}

impl From<nix::Error> for Failure {
    fn from(error: nix::Error) -> Self {
        Self {
            text: error.to_string(),
            exit: Exit::Problem,
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        let exit = match error.downcast_ref::<ConfigError>() {
            Some(_) => Exit::Usage,
            None => Exit::Problem,
        };
        Self {
            text: format!("{error:#}"),
            exit,
        }
    }
}

/// The whole program.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let common = &cli.common;
    if common.format().is_none() && !matches!(cli.command, Action::Debug(_)) {
        let text = "--output must be table or json";
        Cli::command().error(ErrorKind::InvalidValue, text).exit();
    }
    let done = match &cli.command {
        Action::Status { verbose } => status::show(common, *verbose).map_err(Failure::from),
        Action::Endpoints => endpoints::show(common).map_err(Failure::from),
        Action::Ipam => ipam::show(common).map_err(Failure::from),
        Action::Nodes => nodes::show(common).map_err(Failure::from),
        Action::Metrics => metrics::show(common).map_err(Failure::from),
        Action::Connections(verb) => connections::run(common, verb),
        Action::Services { name } => services::show(common, name.as_deref()).map_err(Failure::from),
        Action::Drops(flags) => drops::run(common, flags),
        Action::Acceleration { kernel } => match kernel {
            true => acceleration::kernel(common),
            false => acceleration::show(common),
        }
        .map_err(Failure::from),
        Action::Pause => pause::pause().map(|()| Exit::Well).map_err(Failure::from),
        Action::Debug(places) => debug::run(common, places).map_err(Failure::from),
        Action::Uninstall(places) => uninstall::run(common, places).map_err(Failure::from),
        Action::Verify(places) => verify::run(common, places).map_err(Failure::from),
        Action::Prepare(flags) => prepare::run(common, flags).map_err(Failure::from),
    };
    let exit = done.unwrap_or_else(|failure| {
        // Nowhere to complain to if stderr is closed.
        let _ = writeln!(io::stderr(), "sinabroctl: {}", failure.text);
        failure.exit
    });
    ExitCode::from(exit as u8)
}

/// Prints a report in the format asked for.
fn print<T: Serialize>(
    common: &Common,
    report: &T,
    table: impl FnOnce(&T) -> String,
) -> io::Result<()> {
    let text = match common.format() {
        None | Some(Format::Table) => table(report),
        Some(Format::Json) => serde_json::to_string_pretty(report).map_err(io::Error::from)? + "\n",
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // The reader has seen enough (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
