//! kube-proxy's answers.

use crate::objects::World;
use ipnet::IpNet;
use serde::Deserialize;
use serde_json::json;
use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// A port in one family.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Port {
    family: String,
    pub name: String,
    pub protocol: String,
    #[serde(rename = "clusterIP")]
    pub cluster_ip: IpAddr,
    pub port: u16,
    pub node_port: u16,
    #[serde(rename = "externalIPs")]
    pub external_ips: Vec<IpAddr>,
    pub load_balancers: Vec<IpAddr>,
    pub source_ranges: BTreeSet<IpNet>,
    pub affinity: u32,
    pub health_check: u16,
    pub internal: Outcome,
    pub cluster: Outcome,
    pub external: Outcome,
}

impl Port {
    pub fn is_v4(&self) -> bool {
        self.family == "IPv4"
    }
}

#[derive(Debug, Deserialize)]
pub struct Outcome {
    /// `refuse` or `drop`.
    pub verdict: Option<String>,
    #[serde(default)]
    pub endpoints: BTreeSet<SocketAddr>,
}

/// The program, which answers a line with a line.
pub struct Oracle {
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Oracle {
    pub fn start(program: &OsStr) -> Self {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", program.display()));
        Self {
            questions: child.stdin.take().unwrap(),
            answers: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    pub fn ask(&mut self, world: &World) -> Vec<Port> {
        let question = json!({
            "node": world.node, "zone": world.zone, "service": world.service(), "slices": world.slices(),
        });
        writeln!(self.questions, "{question}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer)
            .unwrap_or_else(|error| panic!("{error} in the answer {answer:?} to {question}"))
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
