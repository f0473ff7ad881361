//! The lab itself, before any agent: what the other tests stand on.

use sinabro_lab::{
    Binaries, Lab, Lifetime, Namespace, holder,
    residue::{Kind, Snapshot},
    traffic::{PATIENCE, icmp, tcp, udp},
    wait::eventually,
};
use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

#[test]
fn nodes_reach_each_other_and_the_outside() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    let (n1, n2) = (lab.node(1), lab.node(2));
    for address in n2.addresses() {
        icmp::ping(n1.place(), address, PATIENCE).unwrap();
        let seen = tcp::transfer(n1.place(), n2.place(), address, 100_000)
            .unwrap()
            .seen;
        assert!(n1.addresses().contains(&seen), "{seen}");
        // 1472 + 8 + 20 = 1500, 1452 + 8 + 40 = 1500
        let payload = if address.is_ipv4() { 1472 } else { 1452 };
        udp::echo(n1.place(), n2.place(), address, payload, true).unwrap();
        udp::is_too_long(n1.place(), address, payload + 1).unwrap();
    }
    for address in lab.outside_addresses().unwrap() {
        let seen = icmp::ping_seen(n1.place(), lab.outside().place(), address).unwrap();
        assert!(n1.addresses().contains(&seen), "{seen}");
    }
}

#[test]
fn a_bare_sandbox_reaches_nothing() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let sandbox = lab.node(1).make_sandbox("bare").unwrap();
    let node = lab.node(1).addresses()[0];
    icmp::ping(&sandbox, node, Duration::from_millis(300)).unwrap_err();
    icmp::ping(&sandbox, "127.0.0.1".parse().unwrap(), PATIENCE).unwrap();
    lab.node(1).remove_sandbox("bare").unwrap();
}

#[test]
fn a_namespace_ends_with_its_owner() {
    let namespace = Namespace::new("brief", Lifetime::Process).unwrap();
    let pid = namespace.pid();
    std::fs::write(namespace.path("/run/file"), "x").unwrap();
    assert!(
        !std::path::Path::new("/run/file").exists(),
        "its /run must be its own"
    );
    drop(namespace);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

/// Started by the test below in a process of its own; does nothing otherwise.
#[test]
#[ignore = "a part of another test"]
fn make_a_lab_and_wait() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    println!("\nready {:?}", lab.pids());
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_process_takes_its_lab_along() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "underlay::make_a_lab_and_wait",
            "--nocapture",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = lines
        .map(Result::unwrap)
        .find(|line| line.starts_with("ready"))
        .unwrap();
    let pids: Vec<&str> = ready
        .trim_start_matches("ready [")
        .trim_end_matches(']')
        .split(", ")
        .collect();
    assert_eq!(pids.len(), 3);
    child.kill().unwrap();
    child.wait().unwrap();
    let left = || -> Vec<String> {
        let all = Snapshot::take().unwrap().ours();
        all.into_iter()
            .filter(|item| item.kind == Kind::Process)
            .map(|item| item.name)
            .filter(|name| pids.iter().any(|pid| name.contains(&format!("({pid})"))))
            .collect()
    };
    eventually("the lab's processes to end", || left().is_empty());
}

/// Started by the test below in a process of its own; it would end other tests' labs.
#[test]
#[ignore = "a part of another test"]
fn end_everything_while_labs_are_made() {
    let maker = thread::spawn(|| {
        for number in 0..1000 {
            match Namespace::new(&format!("brief{number}"), Lifetime::Process) {
                // Only the end of everything ends it.
                Ok(namespace) => std::mem::forget(namespace),
                Err(error) => return format!("{error:#}"),
            }
        }
        "nothing stopped it".to_string()
    });
    thread::sleep(Duration::from_millis(100));
    holder::end_all();
    let error = maker.join().unwrap();
    assert!(error.contains("has been ended"), "{error}");
    let parent = std::process::id();
    let alive = || {
        let stat = |path: std::path::PathBuf| std::fs::read_to_string(path.join("stat")).ok();
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|entry| stat(entry.path()))
            .filter(|stat| {
                let mut fields = stat.rsplit(')').next().unwrap().split_ascii_whitespace();
                fields.next() != Some("Z") && fields.next() == Some(&parent.to_string())
            })
            .count()
    };
    eventually("every process to end", || alive() == 0);
}

#[test]
fn nothing_starts_once_everything_was_ended() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "underlay::end_everything_while_labs_are_made",
        ])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}
