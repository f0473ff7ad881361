//! Arguments, output that nobody reads, and what needs no agent.

use crate::kit::{Agent, ctl, status, text};
use sinabro_common::api::*;
use std::{path::Path, process::Command, thread};

#[test]
fn usage_errors_are_exit_code_2_and_help_documents_the_codes() {
    let nowhere = Path::new("/nonexistent");
    for args in [
        &["nonsense"][..],
        &[],
        &["status", "-o", "xml"],
        &["--timeout", "0", "status"],
    ] {
        assert_eq!(ctl(nowhere, args).status.code(), Some(2), "{args:?}");
    }
    let help = ctl(nowhere, &["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let text = text(&help.stdout);
    for part in ["Exit codes:", "SINABRO_SOCKET", "Examples:", "endpoints"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_closed_reader_is_no_error() {
    let response = Response::Status(Box::new(status(true)));
    let agent = Agent::replying(Request::Status, VERSION, Reply::Ok(response));
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    let mut command = Command::new(env!("CARGO_BIN_EXE_sinabroctl"));
    command.env("SINABRO_SOCKET", &agent.socket).arg("status");
    let mut child = command.stdout(write).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    agent.thread.join().unwrap();
}

#[test]
fn pause_waits_until_it_is_told_to_end_and_ends_well() {
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    let mut pause = Command::new(env!("CARGO_BIN_EXE_sinabroctl"))
        .arg("pause")
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", pause.id());
    let waits = || {
        let status = std::fs::read_to_string(&status).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
        mask & (1 << (Signal::SIGTERM as u64 - 1)) != 0
    };
    while !waits() {
        assert_eq!(pause.try_wait().unwrap(), None);
        thread::yield_now();
    }
    kill(Pid::from_raw(pause.id() as i32), Signal::SIGTERM).unwrap();
    // Killed by the signal it would have no code.
    assert_eq!(pause.wait().unwrap().code(), Some(0));
}

/// As in the image, where one program is both.
#[test]
fn the_agent_called_sinabroctl_is_sinabroctl() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("sinabroctl");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sinabro-agent"), &link).unwrap();
    let output = Command::new(&link).arg("--version").output().unwrap();
    assert!(text(&output.stdout).starts_with("sinabroctl "));
    let output = Command::new(&link).arg("no-such-command").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
