//! What the kernel is and says.

use super::{Part, files, text};
use anyhow::Context as _;
use nix::errno::Errno;
use sinabro_netlink::sysctl;
use std::path::Path;

/// Read as they are.
const FILES: [&str; 13] = [
    "/etc/os-release",
    "/proc/version",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/self/mountinfo",
    "/proc/net/dev",
    // Tables of iptables of old, which nf_tables does not list.
    "/proc/net/ip_tables_names",
    "/proc/net/ip6_tables_names",
    "/proc/net/snmp",
    "/proc/net/snmp6",
    "/proc/net/sockstat",
    "/proc/net/softnet_stat",
];

/// Of all links and, where the kernel keeps one per link, of the defaults.
const SYSCTLS: [&[&str]; 19] = [
    &["net", "ipv4", "ip_forward"],
    &["net", "ipv4", "ping_group_range"],
    &["net", "ipv4", "icmp_echo_ignore_all"],
    &["net", "ipv4", "ip_local_port_range"],
    &["net", "ipv4", "ip_local_reserved_ports"],
    &["net", "ipv4", "conf", "all", "rp_filter"],
    &["net", "ipv4", "conf", "default", "rp_filter"],
    &["net", "ipv4", "conf", "all", "arp_ignore"],
    &["net", "ipv4", "neigh", "default", "gc_thresh3"],
    &["net", "ipv6", "conf", "all", "forwarding"],
    &["net", "ipv6", "conf", "all", "disable_ipv6"],
    &["net", "ipv6", "conf", "default", "disable_ipv6"],
    &["net", "ipv6", "conf", "default", "accept_ra"],
    &["net", "ipv6", "neigh", "default", "gc_thresh3"],
    &["net", "ipv6", "route", "max_size"],
    &["net", "core", "bpf_jit_enable"],
    &["net", "core", "bpf_jit_harden"],
    &["net", "core", "netdev_max_backlog"],
    &["kernel", "unprivileged_bpf_disabled"],
];

/// Of the kernel's log as much as its end.
const LOG: usize = 256 * 1024;

pub fn parts() -> Vec<(String, Part)> {
    let file = |path: &str| {
        let name = path.trim_start_matches('/').replace('/', "-");
        (
            format!("kernel/{name}.txt"),
            files::content(Path::new(path)),
        )
    };
    let mut parts: Vec<_> = FILES.into_iter().map(file).collect();
    parts.push(("kernel/sysctls.txt".into(), Ok(sysctls())));
    parts.push(("kernel/log.txt".into(), log()));
    parts
}

fn sysctls() -> Vec<u8> {
    let value = |name: &[&str]| match sysctl::read(name) {
        Ok(value) => format!("{} = {value}", name.join(".")),
        Err(error) => format!("{}: {error}", name.join(".")),
    };
    let mut lines: Vec<_> = SYSCTLS.into_iter().map(value).collect();
    let links = sinabro_netlink::Conn::new().and_then(|mut conn| conn.links());
    for link in links.unwrap_or_default() {
        lines.push(value(&["net", "ipv4", "conf", &link.name, "rp_filter"]));
        lines.push(value(&["net", "ipv6", "conf", &link.name, "accept_ra"]));
    }
    text(lines)
}

/// The log's ring as syslog(2) reads it.
fn log() -> Part {
    const READ_ALL: libc::c_int = 3;
    let mut buffer = vec![0u8; LOG];
    // SAFETY: the buffer has the length given.
    let read = unsafe { libc::klogctl(READ_ALL, buffer.as_mut_ptr().cast(), LOG as libc::c_int) };
    let length = Errno::result(read).context("cannot read the kernel's log")?;
    buffer.truncate(length.unsigned_abs() as usize);
    Ok(buffer)
}
