//! Pods of two nodes with settings of their own: with the present programs, and beside them with those of an earlier commit.

use super::scene::{Subject, across};
use crate::bench::figures::OURS;
use anyhow::Result;
use sinabro_lab::{
    Lab, Node,
    node::{KERNEL_FLAG, SERVICES_FLAGS},
};

/// Tunnels past the stack.
pub const DIRECT: &str = "sinabro, direct";
/// The same without tunnels.
pub const NATIVE: &str = "sinabro, native";

/// All by the kernel's stack, as a setting has it.
pub const KERNEL: &str = "sinabro, kernel";

/// What the names of subjects end with whose clients ask a Service that kube-proxy's rules translate.
pub const SERVICE: &str = ", Service";

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Direct,
    Native,
    Kernel,
}

pub struct Pair {
    name: String,
    /// The number of the client's node; the server's is the next one.
    first: usize,
    pub kind: Kind,
    /// Whether they have the present programs.
    pub ours: bool,
}

impl Pair {
    /// Ours, and beside them those of an earlier commit.
    pub fn all(earlier: Option<&str>) -> Vec<Self> {
        let kinds = [
            (DIRECT, Kind::Direct, [9, 5]),
            (NATIVE, Kind::Native, [13, 7]),
            (KERNEL, Kind::Kernel, [15, 11]),
        ];
        let ours = kinds.map(|(name, kind, [first, _])| Self {
            name: name.into(),
            first,
            kind,
            ours: true,
        });
        let theirs = earlier.map(|commit| {
            kinds.map(|(ours, kind, [_, first])| Self {
                name: earlier_of(ours, commit),
                first,
                kind,
                ours: false,
            })
        });
        ours.into_iter()
            .chain(theirs.into_iter().flatten())
            .collect()
    }

    pub fn numbers(&self) -> [usize; 2] {
        [self.first, self.first + 1]
    }

    pub fn nodes<'a>(&self, lab: &'a Lab) -> [&'a Node; 2] {
        self.numbers().map(|number| lab.node(number))
    }

    pub fn start(&self, lab: &Lab) -> Result<()> {
        let [on, file] = SERVICES_FLAGS;
        let flags: &[&str] = match self.kind {
            Kind::Direct => &[on, file, "--routing=tunnel"],
            Kind::Native => &[on, file, "--routing=native"],
            Kind::Kernel => &[KERNEL_FLAG],
        };
        for node in self.nodes(lab) {
            node.write_services("{kind: List, items: []}\n")?;
            // Who is not asked is believed, and there is nothing to wait for.
            node.start_agent_with(&[flags, &["--peer-probe=false"]].concat())?;
        }
        Ok(())
    }

    pub fn subject(&self, lab: &Lab) -> Result<Subject> {
        let mut subject = across(&self.name, lab, self.first)?;
        subject.through_stack = self.ours.then_some((self.first, self.kind == Kind::Kernel));
        Ok(subject)
    }
}

/// What is called like one of ours, with the programs of a commit.
pub fn earlier_of(ours: &str, commit: &str) -> String {
    ours.replacen(OURS, commit, 1)
}
