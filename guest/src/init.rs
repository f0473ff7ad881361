//! Process 1.

use crate::{STEPS, job};
use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::{
        reboot::{RebootMode, reboot},
        wait::wait,
    },
    unistd::Pid,
};
use sinabro_guest::{BIN_DIR, Cgroups, Environment};
use sinabro_lab::wait::SLOWNESS;
use std::{
    convert::Infallible,
    fs,
    io::{Write as _, stderr, stdout},
    os::fd::AsRawFd as _,
    path::Path,
    process::Command,
};

/// Controllers of version 1 that containers use; a kernel may be without some.
const V1_CONTROLLERS: [&str; 8] = [
    "cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "net_cls", "freezer",
];

/// Never returns: process 1 must not end.
pub fn run() -> ! {
    if let Err(error) = boot() {
        eprintln!("error: {error:#}");
    }
    let _ = (stdout().flush(), stderr().flush());
    nix::unistd::sync();
    end()
}

fn end() -> ! {
    // qemu ends instead.
    let _: Result<Infallible, _> = reboot(RebootMode::RB_AUTOBOOT);
    loop {
        nix::unistd::pause();
    }
}

fn boot() -> Result<()> {
    mount_all()?;
    let job = job()?;
    for module in &job.modules {
        load(module)?;
    }
    settle(&job.environment)?;
    let mut command = match job.shell {
        true => {
            let mut shell = Command::new("/bin/busybox");
            shell.args(["setsid", "-c", "sh", "-l"]);
            shell
        }
        false => {
            let mut steps = Command::new("/init");
            steps.arg(STEPS);
            steps
        }
    };
    command
        .env_clear()
        .env("PATH", format!("{BIN_DIR}:/usr/bin:/sbin:/usr/sbin"))
        .env("HOME", "/")
        .env(SLOWNESS, "4")
        .env("RUST_BACKTRACE", "1");
    let child = command.spawn().context("cannot start")?;
    let child = Pid::from_raw(child.id() as i32);
    // Orphans come to process 1, too.
    while wait()?.pid() != Some(child) {}
    Ok(())
}

fn mount_all() -> Result<()> {
    put("proc", "/proc", "proc", "")?;
    put("sysfs", "/sys", "sysfs", "")?;
    // The kernel may have mounted it by itself.
    if let Err(error) = put("devtmpfs", "/dev", "devtmpfs", "")
        && error.downcast_ref() != Some(&Errno::EBUSY)
    {
        return Err(error);
    }
    put("tmpfs", "/run", "tmpfs", "mode=0755")?;
    put("tmpfs", "/tmp", "tmpfs", "")?;
    put("bpf", "/sys/fs/bpf", "bpf", "mode=0700")?;
    put("securityfs", "/sys/kernel/security", "securityfs", "")
}

fn put(source: &str, on: &str, kind: &str, data: &str) -> Result<()> {
    if !Path::new(on).exists() {
        fs::create_dir_all(on).with_context(|| format!("cannot make {on}"))?;
    }
    mount(Some(source), on, Some(kind), MsFlags::empty(), Some(data))
        .with_context(|| format!("cannot mount {kind} on {on}"))
}

/// finit_module(2); its signature, if the kernel asks for one, is in the file.
fn load(path: &Path) -> Result<()> {
    let open = || -> Result<()> {
        let file = fs::File::open(path)?;
        // SAFETY: a descriptor and a terminated string, which outlive the call.
        let result =
            unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        match Errno::result(result) {
            Ok(_) | Err(Errno::EEXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    };
    open().with_context(|| format!("cannot load the module {}", path.display()))
}

/// Makes the machine what the environment says.
fn settle(environment: &Environment) -> Result<()> {
    mount_cgroups(environment.cgroups)?;
    if environment.without_btf {
        put("tmpfs", "/sys/kernel/btf", "tmpfs", "")?;
    }
    for (name, value) in &environment.sysctls {
        let path = Path::new("/proc/sys").join(name);
        fs::write(&path, value)
            .with_context(|| format!("cannot write {value} to {}", path.display()))?;
    }
    if let Some(level) = &environment.lockdown {
        fs::write("/sys/kernel/security/lockdown", level)
            .with_context(|| format!("cannot enter lockdown={level}"))?;
    }
    Ok(())
}

fn mount_cgroups(cgroups: Cgroups) -> Result<()> {
    const ROOT: &str = "/sys/fs/cgroup";
    if cgroups == Cgroups::V2 {
        return put("cgroup2", ROOT, "cgroup2", "");
    }
    put("tmpfs", ROOT, "tmpfs", "mode=0755")?;
    if cgroups == Cgroups::Hybrid {
        let unified = format!("{ROOT}/unified");
        put("cgroup2", &unified, "cgroup2", "")?;
    }
    put(
        "cgroup",
        &format!("{ROOT}/systemd"),
        "cgroup",
        "none,name=systemd",
    )?;
    let mut mounted = 0;
    for controller in V1_CONTROLLERS {
        let on = format!("{ROOT}/{controller}");
        match put("cgroup", &on, "cgroup", controller) {
            Ok(()) => mounted += 1,
            Err(_) => fs::remove_dir(&on)?,
        }
    }
    if mounted == 0 {
        bail!("this kernel has no controller of cgroup version 1");
    }
    // A pod of a kubelet that still uses version 1 has a cgroup of its own in each.
    for controller in fs::read_dir(ROOT)?.flatten() {
        let _ = fs::create_dir(controller.path().join("kubepods"));
    }
    Ok(())
}
