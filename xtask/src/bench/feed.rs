//! Programs of a node that read a text: rules, or entries of a table.

use anyhow::{Context as _, Result, ensure};
use sinabro_lab::Node;
use std::{
    io::{Seek as _, Write as _},
    process::{Command, Stdio},
};

/// Runs a program on a node, which reads this text.
pub fn feed(node: &Node, program: &str, arguments: &[&str], text: &str) -> Result<()> {
    // A file: nobody needs to feed it while the program runs.
    let mut input = tempfile::tempfile()?;
    input.write_all(text.as_bytes())?;
    input.rewind()?;
    // In the node's mount namespace, too: the lock of iptables is a file.
    node.namespace().run(|| {
        let mut command = Command::new(program);
        command.args(arguments).stdin(input).stdout(Stdio::null());
        let output = command.output();
        let output = output.with_context(|| format!("cannot run {program}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        // It may say the same of each line.
        let said: Vec<&str> = said.lines().take(5).collect();
        let (name, said) = (node.name(), said.join("\n"));
        ensure!(output.status.success(), "{program} on {name}: {said}");
        Ok(())
    })
}
