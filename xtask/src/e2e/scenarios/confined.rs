//! What the agent's process may do, as the kernel has it: no more than its manifest says, and that
//! no more than it needs.

use crate::e2e::world::{DAEMON_SET, SYSTEM, World};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Links and traffic control; maps and programs; programs that read packets by pointers. By the
/// manifest's name and the kernel's number (linux/capability.h).
const NEEDED: [(&str, u32); 3] = [("NET_ADMIN", 12), ("BPF", 39), ("PERFMON", 38)];
/// `SECCOMP_MODE_FILTER`.
const FILTERED: &str = "2";
/// What a runtime mounts into every container.
const OF_THE_RUNTIME: [&str; 7] = [
    "/dev",
    "/proc",
    "/sys",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/var/run/secrets/kubernetes.io/serviceaccount",
];

pub fn confined(world: &mut World) -> Result<String> {
    let daemon_set = world.get(&["-n", SYSTEM, DAEMON_SET])?;
    let container = container(&daemon_set, "agent")?;
    asks_for_what_is_needed(container)?;
    let mut seen = 0;
    for node in world.nodes() {
        for pid in world.agents(&node)? {
            let read = |file: &str| world.on_node(&node, "cat", &[&format!("/proc/{pid}/{file}")]);
            has_what_it_needs(&read("status")?).with_context(|| format!("the agent of {node}"))?;
            writes_where_it_may(container, &read("mountinfo")?)
                .with_context(|| format!("the agent of {node}"))?;
            seen += 1;
        }
    }
    ensure!(
        seen == world.nodes().len(),
        "{seen} agents on {} nodes",
        world.nodes().len()
    );
    let names = NEEDED.map(|(name, _)| name).join(", ");
    Ok(format!(
        "{seen} agents: {names}, no new privileges, seccomp, a read-only root"
    ))
}

fn container<'a>(daemon_set: &'a Value, name: &str) -> Result<&'a Value> {
    let containers = daemon_set["spec"]["template"]["spec"]["containers"].as_array();
    let mut containers = containers.context("no containers")?.iter();
    let found = containers.find(|container| container["name"] == name);
    found.with_context(|| format!("no container {name}"))
}

fn asks_for_what_is_needed(container: &Value) -> Result<()> {
    let context = &container["securityContext"];
    let names: BTreeSet<_> = NEEDED.iter().map(|(name, _)| *name).collect();
    let added = context["capabilities"]["add"].as_array();
    let added = added.into_iter().flatten().filter_map(Value::as_str);
    let added: BTreeSet<_> = added.collect();
    ensure!(added == names, "the manifest adds {added:?}");
    let expected = [
        ("/capabilities/drop", serde_json::json!(["ALL"])),
        ("/privileged", false.into()),
        ("/allowPrivilegeEscalation", false.into()),
        ("/readOnlyRootFilesystem", true.into()),
        ("/seccompProfile/type", "RuntimeDefault".into()),
    ];
    for (pointer, value) in expected {
        let found = context.pointer(pointer);
        ensure!(
            found == Some(&value),
            "the manifest has {pointer} {found:?}"
        );
    }
    Ok(())
}

/// By proc_pid_status(5).
fn has_what_it_needs(status: &str) -> Result<()> {
    let fields: BTreeMap<_, _> = status
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name, value.trim()))
        .collect();
    let mask = NEEDED.iter().fold(0u64, |mask, (_, bit)| mask | 1 << bit);
    let needed = format!("{mask:016x}");
    let none = format!("{:016x}", 0);
    let expected = [
        ("CapInh", [&needed, &none]),
        ("CapPrm", [&needed, &needed]),
        ("CapEff", [&needed, &needed]),
        ("CapBnd", [&needed, &needed]),
        ("CapAmb", [&none, &none]),
    ];
    for (name, may_be) in expected {
        let found = fields.get(name).copied().unwrap_or("missing");
        ensure!(
            may_be.iter().any(|value| *value == found),
            "{name} is {found}, not {needed}"
        );
    }
    for (name, value) in [("NoNewPrivs", "1"), ("Seccomp", FILTERED)] {
        let found = fields.get(name).copied().unwrap_or("missing");
        ensure!(found == value, "{name} is {found}, not {value}");
    }
    Ok(())
}

/// By proc_pid_mountinfo(5): the root cannot be written to, and of the node's directories those
/// only that the manifest does not have read-only.
fn writes_where_it_may(container: &Value, mountinfo: &str) -> Result<()> {
    let mounts = container["volumeMounts"].as_array();
    let read_only: BTreeMap<&str, bool> = mounts
        .context("no volumes are mounted")?
        .iter()
        .filter_map(|mount| {
            let path = mount["mountPath"].as_str()?;
            Some((path, mount["readOnly"].as_bool().unwrap_or(false)))
        })
        .collect();
    let mut seen = BTreeSet::new();
    for line in mountinfo.lines() {
        let mut words = line.split(' ').skip(4);
        let (Some(path), Some(options)) = (words.next(), words.next()) else {
            bail!("not a mount: {line}");
        };
        let is_read_only = options.split(',').any(|option| option == "ro");
        let below = |of: &str| path == of || path.starts_with(&format!("{of}/"));
        let of_manifest = read_only.iter().find(|(of, _)| below(of));
        match of_manifest.map(|(of, read_only)| (*of, *read_only)) {
            // What is mounted below it on the node comes with it, as it is there.
            Some((of, expected)) => {
                ensure!(
                    path != of || is_read_only == expected,
                    "{path} is mounted {options}"
                );
                seen.insert(of);
            }
            None if path == "/" => ensure!(is_read_only, "the root is mounted {options}"),
            None => {
                let known = OF_THE_RUNTIME.iter().any(|of| below(of));
                ensure!(known, "{path} is mounted, the manifest has no such mount");
                // With cgroup v1 runc leaves the directory of the hierarchies writable, a tmpfs that
                // holds nothing but them.
                let holds_cgroups = path == "/sys/fs/cgroup" && line.contains(" - tmpfs ");
                let guarded = path.starts_with("/proc/sys") || path.starts_with("/sys");
                ensure!(
                    !guarded || is_read_only || holds_cgroups,
                    "{path} is mounted {options}"
                );
            }
        }
    }
    let missing: Vec<_> = read_only.keys().filter(|of| !seen.contains(*of)).collect();
    ensure!(missing.is_empty(), "{missing:?} are not mounted");
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::manifest;
    use serde_json::json;

    fn manifest() -> Value {
        let objects = manifest::read("sinabro.yaml").unwrap();
        objects["DaemonSet kube-system/sinabro"].clone()
    }

    /// As a kernel shows a container of the manifest.
    const STATUS: &str = "Name:\tsinabro-agent\nCapInh:\t0000000000000000\n\
        CapPrm:\t000000c000001000\nCapEff:\t000000c000001000\nCapBnd:\t000000c000001000\n\
        CapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";

    fn mountinfo(container: &Value) -> String {
        let line = |path: &str, options: &str| {
            format!("700 600 0:50 / {path} {options},relatime shared:1 - overlay overlay rw\n")
        };
        let volumes = container["volumeMounts"].as_array().unwrap().iter();
        let volumes = volumes.map(|mount| {
            let read_only = mount["readOnly"] == true;
            let options = if read_only { "ro" } else { "rw" };
            line(mount["mountPath"].as_str().unwrap(), options)
        });
        let of_runtime = [
            line("/", "ro"),
            line("/proc", "rw"),
            line("/proc/sys", "ro"),
            line("/sys", "ro"),
            "701 600 0:51 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n".to_owned(),
            line("/sys/fs/cgroup/memory", "ro"),
            line("/dev/pts", "rw"),
            line("/etc/hosts", "rw"),
            line("/var/run/secrets/kubernetes.io/serviceaccount", "ro"),
        ];
        of_runtime.into_iter().chain(volumes).collect()
    }

    #[test]
    fn the_manifest_asks_for_what_is_needed_and_each_change_of_it_is_noticed() {
        let daemon_set = manifest();
        let container = container(&daemon_set, "agent").unwrap();
        asks_for_what_is_needed(container).unwrap();
        let changes: [(&str, Value); 6] = [
            ("/capabilities/add", json!(["NET_ADMIN", "BPF"])),
            (
                "/capabilities/add",
                json!(["NET_ADMIN", "BPF", "PERFMON", "SYS_ADMIN"]),
            ),
            ("/capabilities/drop", json!([])),
            ("/privileged", true.into()),
            ("/readOnlyRootFilesystem", false.into()),
            ("/seccompProfile/type", "Unconfined".into()),
        ];
        for (pointer, value) in changes {
            let mut changed = container.clone();
            let context = changed.pointer_mut("/securityContext").unwrap();
            *context.pointer_mut(pointer).unwrap() = value;
            assert!(asks_for_what_is_needed(&changed).is_err(), "{pointer}");
        }
    }

    #[test]
    fn a_process_with_another_power_is_noticed() {
        has_what_it_needs(STATUS).unwrap();
        for (from, to) in [
            ("CapEff:\t000000c000001000", "CapEff:\t000001ffffffffff"),
            ("CapBnd:\t000000c000001000", "CapBnd:\t000000c000201000"),
            ("CapAmb:\t0000000000000000", "CapAmb:\t000000c000001000"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
            ("Seccomp:\t2", "Seccomp:\t0"),
            ("Seccomp:\t2", "Other:\t2"),
        ] {
            let changed = STATUS.replace(from, to);
            assert_ne!(changed, STATUS);
            assert!(has_what_it_needs(&changed).is_err(), "{to}");
        }
    }

    #[test]
    fn a_mount_that_can_be_written_to_is_noticed() {
        let daemon_set = manifest();
        let container = container(&daemon_set, "agent").unwrap();
        let mounts = mountinfo(container);
        writes_where_it_may(container, &mounts).unwrap();
        for (from, to) in [
            (" / / ro", " / / rw"),
            ("/proc/sys ro", "/proc/sys rw"),
            ("/host/sys/fs/cgroup ro", "/host/sys/fs/cgroup rw"),
            ("/host/sys/fs/cgroup ro", "/elsewhere ro"),
            ("/dev/pts rw", "/host rw"),
        ] {
            let changed = mounts.replace(from, to);
            assert_ne!(changed, mounts, "{from}");
            assert!(writes_where_it_may(container, &changed).is_err(), "{to}");
        }
        // One that the manifest has, and the process has not.
        let others = mounts
            .lines()
            .filter(|line| !line.contains("/host/sys/fs/cgroup"));
        let others: Vec<_> = others.collect();
        assert!(others.len() < mounts.lines().count());
        assert!(writes_where_it_may(container, &others.join("\n")).is_err());
    }
}
