//! Machines that are special in some way, and what the agent has to choose there by itself.

use super::{kernels::Kernel, steps::StepName};
use sinabro_guest::{Cgroups, Environment, Uplink};

pub struct Special {
    pub name: &'static str,
    /// On which kernels.
    pub kernels: &'static [&'static str],
    /// For the kernel's command line.
    pub command_line: &'static str,
    pub environment: fn() -> Environment,
    /// What it needs beside the modules of every machine.
    pub modules: &'static [&'static str],
    /// What is done there.
    pub steps: &'static [StepName],
    /// Another kernel is booted before this one, and files survive.
    pub rebooted: bool,
    /// One of the few for CI.
    pub short: bool,
    /// A mode as the agent has to name it: its key and how its value begins.
    pub modes: &'static [(&'static str, &'static str)],
}

impl Special {
    /// A machine that is usual in all else.
    const USUAL: Self = Self {
        name: "",
        kernels: &[],
        command_line: "",
        environment: Environment::default,
        modules: &[],
        // Where it is the machine that is special, and not the packets.
        steps: &[StepName::Verify, StepName::Node],
        rebooted: false,
        short: false,
        modes: &[],
    };

    /// The kernel that is booted first: an older one, and before the oldest the newest.
    pub fn before(&self, kernel: Option<&Kernel>) -> Option<&'static str> {
        let oldest = self.kernels.first()?;
        let newest = self.kernels.last()?;
        match kernel {
            Some(kernel) if self.rebooted && kernel.name == *oldest => Some(newest),
            Some(_) if self.rebooted => Some(oldest),
            _ => None,
        }
    }
}

const ACCELERATED: (&str, &str) = ("tcpAcceleration", "on, ");
const PLAIN: (&str, &str) = ("tcpAcceleration", "off");
const NO_BTF: (&str, &str) = ("btf", "no");

pub const SPECIAL: &[Special] = &[
    Special {
        name: "reboot, programs refused",
        kernels: &["5.10", "7.3"],
        steps: &[StepName::Refused],
        rebooted: true,
        short: true,
        ..Special::USUAL
    },
    Special {
        name: "cgroup v1 only",
        kernels: &["5.10", "6.12"],
        environment: || Environment {
            cgroups: Cgroups::V1,
            ..Environment::default()
        },
        modes: &[PLAIN],
        ..Special::USUAL
    },
    Special {
        name: "cgroup v1 and v2",
        kernels: &["5.15", "6.12"],
        environment: || Environment {
            cgroups: Cgroups::Hybrid,
            ..Environment::default()
        },
        modes: &[ACCELERATED],
        ..Special::USUAL
    },
    Special {
        name: "no IPv6",
        kernels: &["5.10", "6.12"],
        command_line: "ipv6.disable=1",
        environment: || Environment {
            without_ipv6: true,
            ..Environment::default()
        },
        ..Special::USUAL
    },
    Special {
        name: "no BTF",
        kernels: &["5.10", "6.12"],
        environment: || Environment {
            without_btf: true,
            ..Environment::default()
        },
        modes: &[PLAIN, NO_BTF],
        ..Special::USUAL
    },
    Special {
        name: "unprivileged_bpf_disabled=1",
        kernels: &["6.12"],
        environment: || with_sysctl("kernel/unprivileged_bpf_disabled", "1"),
        modes: &[ACCELERATED],
        ..Special::USUAL
    },
    Special {
        name: "unprivileged_bpf_disabled=0",
        kernels: &["6.1"],
        environment: || with_sysctl("kernel/unprivileged_bpf_disabled", "0"),
        modes: &[ACCELERATED],
        ..Special::USUAL
    },
    Special {
        name: "lockdown=integrity",
        kernels: &["6.12", "7.2"],
        environment: || Environment {
            lockdown: Some("integrity".into()),
            ..Environment::default()
        },
        modes: &[ACCELERATED],
        ..Special::USUAL
    },
    Special {
        name: "lockdown=confidentiality",
        kernels: &["6.12"],
        environment: || Environment {
            lockdown: Some("confidentiality".into()),
            ..Environment::default()
        },
        // What reads the kernel's memory is refused.
        modes: &[PLAIN],
        ..Special::USUAL
    },
    Special {
        name: "bpf_jit_enable=0",
        kernels: &["6.12"],
        environment: || with_sysctl("net/core/bpf_jit_enable", "0"),
        ..Special::USUAL
    },
    Special {
        name: "SCTP",
        kernels: &["5.10", "6.12"],
        environment: || Environment {
            sctp: true,
            ..Environment::default()
        },
        modules: &["sctp"],
        steps: &[StepName::Verify, StepName::Node, StepName::Lab],
        ..Special::USUAL
    },
    Special {
        name: "VLAN uplink",
        kernels: &["5.10", "6.12"],
        environment: || with_uplink(Uplink::Vlan),
        modules: &["8021q"],
        steps: &[StepName::Node],
        ..Special::USUAL
    },
    Special {
        name: "nodes on VLANs, bonds, WireGuard",
        kernels: &["5.10", "6.12"],
        modules: &["8021q", "bonding", "wireguard"],
        steps: &[StepName::Uplinks],
        ..Special::USUAL
    },
    Special {
        name: "kube-proxy by IPVS",
        kernels: &["6.12"],
        modules: &["ip_vs", "ip_vs_rr", "nf_conntrack_netlink"],
        steps: &[StepName::Ipvs],
        ..Special::USUAL
    },
    Special {
        name: "uplink without link header",
        kernels: &["5.10", "6.12"],
        environment: || with_uplink(Uplink::Tun),
        modules: &["tun"],
        steps: &[StepName::Node],
        ..Special::USUAL
    },
];

fn with_uplink(uplink: Uplink) -> Environment {
    Environment {
        uplink,
        ..Environment::default()
    }
}

fn with_sysctl(name: &str, value: &str) -> Environment {
    Environment {
        sysctls: [(name.to_owned(), value.to_owned())].into(),
        ..Environment::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reboot_is_from_another_kernel() {
        for special in SPECIAL {
            for name in special.kernels {
                let before = special.before(Some(Kernel::by_name(name).unwrap()));
                assert_eq!(before.is_some(), special.rebooted, "{}", special.name);
                assert_ne!(before, Some(*name), "{}", special.name);
            }
        }
    }

    #[test]
    fn every_special_machine_has_a_kernel() {
        for special in SPECIAL {
            assert!(!special.kernels.is_empty(), "{}", special.name);
            for kernel in special.kernels {
                assert!(Kernel::by_name(kernel).is_ok(), "{kernel}");
            }
            assert!(!special.steps.is_empty(), "{}", special.name);
        }
    }
}
