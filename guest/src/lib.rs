//! What a virtual machine of `cargo xtask vm` is to do, and what it says of it: the part that both
//! sides of its serial port share.

use serde::{Deserialize, Serialize};
use sinabro_common::api::VerifyReport;
use std::{collections::BTreeMap, path::PathBuf};

mod base64_text;

/// Where the machine finds its [`Job`].
pub const JOB_FILE: &str = "/job.json";
/// Where the programs under test are in the machine.
pub const BIN_DIR: &str = "/bin";
/// The suite of `agent/tests/datapath`, in [`BIN_DIR`].
pub const DATAPATH_SUITE: &str = "datapath-suite";
/// An agent with the tests' fail points (`sinabro_common::fail_point`), in [`BIN_DIR`] where a step
/// needs it.
pub const REFUSING_AGENT: &str = "sinabro-agent-refusing";
/// The port for messages; the kernel's log and whatever else has the first one.
pub const MESSAGE_PORT: &str = "/dev/ttyS1";

/// Among the modes: what the self-test of accelerated TCP found.
pub const SELF_TEST: &str = "tcpSelfTest";

/// What a machine is to do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Module files, in the order in which they can be loaded.
    pub modules: Vec<PathBuf>,
    pub environment: Environment,
    pub steps: Vec<Step>,
    /// Instead, a shell on the console.
    pub shell: bool,
}

/// What is special about a machine, besides its kernel and what its command line says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    pub cgroups: Cgroups,
    /// The kernel's type information cannot be read.
    pub without_btf: bool,
    /// Settings below /proc/sys, written once everything is mounted.
    pub sysctls: BTreeMap<String, String>,
    /// `integrity` or `confidentiality`, entered once the modules are there.
    pub lockdown: Option<String>,
    /// IPv6 is off by the command line.
    pub without_ipv6: bool,
    /// Pods speak SCTP, too.
    pub sctp: bool,
    pub uplink: Uplink,
}

/// What leads out of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Uplink {
    #[default]
    Veth,
    /// A VLAN on top of one.
    Vlan,
    /// A device whose packets begin with their IP header, as those of WireGuard and PPP do.
    Tun,
}

/// Which versions of cgroups are mounted, and where distributions have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cgroups {
    /// Version 2 alone, on /sys/fs/cgroup.
    #[default]
    V2,
    /// Version 1 alone, each controller below /sys/fs/cgroup.
    V1,
    /// Version 1, and version 2 on /sys/fs/cgroup/unified.
    Hybrid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// `sinabroctl verify`.
    Verify,
    /// The machine is a node: prepared, with an agent and pods by the plugin, until `uninstall`.
    Node,
    /// Two nodes in namespaces, and all checks of the demo.
    Lab,
    /// Two nodes by what else than a cable may connect them.
    Uplinks,
    /// Two nodes beside kube-proxy by IPVS.
    Ipvs,
    /// The suite of the data path; all of it takes an hour under emulation.
    Datapath { thorough: bool },
    /// The machine is a node until the power fails.
    PowerOff,
    /// It was rebooted, and its kernel refuses the agent's programs.
    Refused,
    /// It refuses those that ran last, too.
    AllRefused,
}

/// What a machine says, one line each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Message {
    /// Process 1 runs.
    Started {
        release: String,
    },
    /// A step begins.
    Step(String),
    /// What it is doing from now on.
    Doing(String),
    Programs(VerifyReport),
    /// What the agent chose by itself.
    Modes(BTreeMap<String, String>),
    Check(Check),
    /// What a step does not do here, and why.
    LeftOut(String),
    /// Is there at the machine's next boot.
    Survives(Survivor),
    /// That was all: without it, something ended the machine.
    Done,
}

/// Something that must hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub ok: bool,
    pub detail: String,
}

/// A file of the machine's disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    pub path: PathBuf,
    #[serde(with = "base64_text")]
    pub content: Vec<u8>,
}

/// Why a line is no message.
#[derive(Debug)]
pub struct NotAMessage {
    line: String,
    why: String,
}

impl std::fmt::Display for NotAMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the machine said {:?}: {}", self.line, self.why)
    }
}

impl std::error::Error for NotAMessage {}

/// First on every line, so that a line whose beginning was lost is none.
const MARK: &str = "sinabro ";

impl Message {
    /// The mark, the length of the rest, the rest.
    pub fn to_line(&self) -> serde_json::Result<String> {
        let json = serde_json::to_string(self)?;
        Ok(format!("{MARK}{} {json}\n", json.len()))
    }

    /// # Errors
    /// If the line is not one that [`Self::to_line`] makes, whole.
    pub fn from_line(line: &[u8]) -> Result<Self, NotAMessage> {
        let text = String::from_utf8_lossy(line);
        let fail = |why: &str| NotAMessage {
            line: text.chars().take(200).collect(),
            why: why.to_owned(),
        };
        let text = text.trim_end_matches(['\r', '\n']);
        let rest = text.strip_prefix(MARK).ok_or_else(|| fail("no message"))?;
        let (len, json) = rest.split_once(' ').ok_or_else(|| fail("cut off"))?;
        let len: usize = len.parse().map_err(|_| fail("no length"))?;
        if json.len() != len {
            return Err(fail("cut off, or two in one"));
        }
        serde_json::from_str(json).map_err(|error| fail(&error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check() -> Message {
        Message::Check(Check {
            name: "reach".into(),
            ok: false,
            detail: "line one\nline two, \"quoted\", ünïcode".into(),
        })
    }

    #[test]
    fn a_message_is_one_line_and_comes_back() {
        let survives = Message::Survives(Survivor {
            path: "/var/lib/x".into(),
            content: (0..=255).collect(),
        });
        for message in [check(), Message::Done, Message::Doing("x".into()), survives] {
            let line = message.to_line().expect("it is JSON");
            assert_eq!(line.matches('\n').count(), 1);
            assert_eq!(
                Message::from_line(line.as_bytes()).ok(),
                Some(message.clone())
            );
            // A terminal may have added a carriage return.
            let line = line.replace('\n', "\r\n");
            assert_eq!(Message::from_line(line.as_bytes()).ok(), Some(message));
        }
    }

    #[test]
    fn what_is_cut_off_or_garbage_is_none() {
        let line = check().to_line().expect("it is JSON");
        for end in 0..line.len() - 1 {
            assert!(
                Message::from_line(&line.as_bytes()[..end]).is_err(),
                "{end}"
            );
        }
        for begin in 1..line.len() {
            assert!(
                Message::from_line(&line.as_bytes()[begin..]).is_err(),
                "{begin}"
            );
        }
        let two = line.trim_end().repeat(2);
        let garbage = [
            two.as_bytes(),
            b"sinabro 4 true",
            b"sinabro x {}",
            b"\xff\xfe\n",
        ];
        for line in garbage {
            assert!(Message::from_line(line).is_err(), "{line:?}");
        }
    }
}
