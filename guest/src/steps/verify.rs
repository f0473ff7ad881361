//! `sinabroctl verify`, as a user runs it.

use crate::report::Report;
use anyhow::{Context as _, Result, ensure};
use sinabro_common::api::VerifyReport;
use sinabro_guest::{BIN_DIR, Message};
use std::{fs, path::Path, process::Command};

pub fn run(report: &mut Report) -> Result<()> {
    report.doing("verifying the programs")?;
    let mut command = Command::new(Path::new(BIN_DIR).join("sinabroctl"));
    let output = command.args(["verify", "-o", "json"]).output()?;
    let found: VerifyReport = serde_json::from_slice(&output.stdout).with_context(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        format!("`sinabroctl verify` gave no report: {}", said.trim())
    })?;
    let refused = found.programs.iter().any(|row| row.required && !row.ok);
    report.say(&Message::Programs(found))?;
    let verdict = || {
        let expected = if refused { 1 } else { 0 };
        let code = output.status.code();
        ensure!(code == Some(expected), "exit code {code:?}, not {expected}");
        let left: Vec<_> = fs::read_dir("/sys/fs/bpf")?
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        ensure!(left.is_empty(), "left behind in /sys/fs/bpf: {left:?}");
        Ok("its exit code is right, and nothing stays".to_owned())
    };
    report.check("verify", verdict())
}
