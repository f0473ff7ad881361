//! The first process of a machine: mounts what a machine has of its own, then reaps for ever.
//!
//! It runs in fresh namespaces, as process 1 of them; nothing that it mounts is seen outside.

use super::cgroup;
use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::wait::waitpid,
    unistd::{Pid, sethostname},
};
use std::{
    convert::Infallible,
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// What survives a reboot.
const KEPT: [&str; 8] = [
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/lib/sinabro",
    "/var/log/pods",
    "/var/log/containers",
    "/etc/cni",
    "/opt/cni",
];

/// What the kubelet wants these settings of the whole machine to be. It reads them and sets those
/// that differ, so it is shown files that say so, and the machine's own stay as they are.
const SHOWN: [(&str, &str); 4] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
];

pub fn run(name: &str, dir: &Path) -> Result<Infallible> {
    nix::sys::prctl::set_name(c"sinabro-node").context("cannot set the process's name")?;
    prepare(name, dir)?;
    fs::write(dir.join("ready"), "")?;
    loop {
        match waitpid(Pid::from_raw(-1), None) {
            Ok(_) | Err(Errno::EINTR) => {}
            // No children now; orphans come to this process later.
            Err(_) => thread::sleep(Duration::from_millis(500)),
        }
    }
}

fn prepare(name: &str, dir: &Path) -> Result<()> {
    // The machine around sees nothing of what follows, the containers inside see it all.
    let shared = MsFlags::MS_REC | MsFlags::MS_SHARED;
    mount(None::<&str>, "/", None::<&str>, shared, None::<&str>).context("cannot share mounts")?;
    attach("proc", "/proc")?;
    attach("sysfs", "/sys")?;
    mount_cgroups()?;
    // A kernel may be without; nothing here needs it.
    let _ = attach("tracefs", "/sys/kernel/tracing");
    attach("tmpfs", "/run")?;
    for sub in ["/run/netns", "/run/lock", "/run/shown"] {
        fs::create_dir_all(sub)?;
    }
    for kept in KEPT {
        bind(
            &dir.join("disk").join(kept.trim_start_matches('/')),
            Path::new(kept),
        )?;
    }
    for sub in ["/etc/cni/net.d", "/opt/cni/bin"] {
        fs::create_dir_all(sub)?;
    }
    let hosts = fs::read_to_string(dir.join("hosts"))?;
    show(
        "hosts",
        &format!("127.0.0.1 localhost\n::1 localhost\n{hosts}"),
        "/etc/hosts",
    )?;
    // Pods of the host's network would otherwise ask the machine's own server.
    show(
        "resolv.conf",
        "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
        "/etc/resolv.conf",
    )?;
    for (setting, value) in SHOWN {
        show(
            &setting.replace('/', "."),
            &format!("{value}\n"),
            &format!("/proc/sys/{setting}"),
        )?;
    }
    sethostname(name).context("cannot set the host name")?;
    Ok(())
}

/// The machine's own view of the hierarchies: the root of each is the machine's group.
fn mount_cgroups() -> Result<()> {
    if cgroup::is_unified() {
        return attach("cgroup2", cgroup::MOUNT);
    }
    let outside: Vec<(String, String)> = fs::read_to_string("/proc/self/mounts")?
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let below = fields.get(1)?.strip_prefix("/sys/fs/cgroup/")?;
            let options = fields.get(3)?.split(',').filter(|o| {
                !matches!(*o, "rw" | "ro" | "relatime" | "nosuid" | "nodev" | "noexec")
            });
            let options: Vec<&str> = options.collect();
            (fields[2].starts_with("cgroup"))
                .then(|| (format!("{} {below}", fields[2]), options.join(",")))
        })
        .collect();
    let tmpfs = Some("mode=755");
    mount(
        Some("tmpfs"),
        cgroup::MOUNT,
        Some("tmpfs"),
        MsFlags::empty(),
        tmpfs,
    )
    .context("cannot mount a tmpfs for cgroups")?;
    for (kind, options) in outside {
        let (kind, below) = kind.split_once(' ').unwrap_or((&kind, ""));
        let target = Path::new(cgroup::MOUNT).join(below);
        fs::create_dir_all(&target)?;
        let data = match kind {
            "cgroup2" => None,
            _ => Some(options.as_str()),
        };
        mount(Some(kind), &target, Some(kind), MsFlags::empty(), data)
            .with_context(|| format!("cannot mount {}", target.display()))?;
    }
    Ok(())
}

fn attach(kind: &str, target: &str) -> Result<()> {
    mount(
        Some(kind),
        target,
        Some(kind),
        MsFlags::empty(),
        None::<&str>,
    )
    .with_context(|| format!("cannot mount {kind} on {target}"))
}

fn bind(source: &Path, target: &Path) -> Result<()> {
    for path in [source, target] {
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    }
    bind_any(source, target)
}

fn bind_any(source: &Path, target: &Path) -> Result<()> {
    mount(
        Some(source),
        target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .with_context(|| format!("cannot bind {} on {}", source.display(), target.display()))
}

/// Puts a file of this content in the place of another.
fn show(name: &str, content: &str, target: &str) -> Result<()> {
    let file = PathBuf::from("/run/shown").join(name);
    fs::write(&file, content)?;
    bind_any(&file, Path::new(target))
}
