//! Pods of two nodes whose packets go past the stack: with the present programs, and beside them with those of an earlier
//! commit.

use super::scene::{Subject, across};
use crate::bench::figures::OURS;
use anyhow::Result;
use sinabro_lab::{Lab, Node, node::SERVICES_FLAGS};

/// Tunnels past the stack.
pub const DIRECT: &str = "sinabro, direct";
/// The same without tunnels.
pub const NATIVE: &str = "sinabro, native";

/// Two nodes between which packets go past the stack.
pub struct Pair {
    name: String,
    /// The number of the client's node; the server's is the next one.
    first: usize,
    pub native: bool,
    /// Whether they have the present programs.
    pub ours: bool,
}

impl Pair {
    /// Ours, and beside them those of an earlier commit.
    pub fn all(earlier: Option<&str>) -> Vec<Self> {
        let ours = [(DIRECT, 9, false), (NATIVE, 13, true)].map(|(name, first, native)| Self {
            name: name.into(),
            first,
            native,
            ours: true,
        });
        let theirs = earlier.map(|commit| {
            [(DIRECT, 5, false), (NATIVE, 7, true)].map(|(ours, first, native)| Self {
                name: earlier_of(ours, commit),
                first,
                native,
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
        let routing = if self.native { "native" } else { "tunnel" };
        let routing = format!("--routing={routing}");
        // Who is not asked is believed, and there is nothing to wait for.
        let flags: [&str; 2] = [&routing, "--peer-probe=false"];
        for node in self.nodes(lab) {
            node.write_services("{kind: List, items: []}\n")?;
            node.start_agent_with(&[&SERVICES_FLAGS[..], &flags].concat())?;
        }
        Ok(())
    }

    pub fn subject(&self, lab: &Lab) -> Result<Subject> {
        let mut subject = across(&self.name, lab, self.first)?;
        subject.through_stack = self.ours.then_some((self.first, false));
        Ok(subject)
    }
}

/// What is called like one of ours, with the programs of a commit.
pub fn earlier_of(ours: &str, commit: &str) -> String {
    ours.replacen(OURS, commit, 1)
}
