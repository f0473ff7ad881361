//! Machines that are special in some way, and what the agent has to choose there by itself.

use sinabro_guest::{Cgroups, Environment};

pub struct Special {
    pub name: &'static str,
    /// On which kernels.
    pub kernels: &'static [&'static str],
    /// For the kernel's command line.
    pub command_line: &'static str,
    pub environment: fn() -> Environment,
    /// A mode as the agent has to name it: its key and how its value begins.
    pub modes: &'static [(&'static str, &'static str)],
}

const ACCELERATED: (&str, &str) = ("tcpAcceleration", "on, ");
const PLAIN: (&str, &str) = ("tcpAcceleration", "off");
const NO_BTF: (&str, &str) = ("btf", "no");

pub const SPECIAL: &[Special] = &[
    Special {
        name: "cgroup v1 only",
        kernels: &["5.10", "6.12"],
        command_line: "",
        environment: || Environment {
            cgroups: Cgroups::V1,
            ..Environment::default()
        },
        modes: &[PLAIN],
    },
    Special {
        name: "cgroup v1 and v2",
        kernels: &["5.15", "6.12"],
        command_line: "",
        environment: || Environment {
            cgroups: Cgroups::Hybrid,
            ..Environment::default()
        },
        modes: &[ACCELERATED],
    },
    Special {
        name: "no IPv6",
        kernels: &["5.10", "6.12"],
        command_line: "ipv6.disable=1",
        environment: || Environment {
            without_ipv6: true,
            ..Environment::default()
        },
        modes: &[],
    },
    Special {
        name: "no BTF",
        kernels: &["5.10", "6.12"],
        command_line: "",
        environment: || Environment {
            without_btf: true,
            ..Environment::default()
        },
        modes: &[PLAIN, NO_BTF],
    },
    Special {
        name: "unprivileged_bpf_disabled=1",
        kernels: &["6.12"],
        command_line: "",
        environment: || with_sysctl("kernel/unprivileged_bpf_disabled", "1"),
        modes: &[ACCELERATED],
    },
    Special {
        name: "unprivileged_bpf_disabled=0",
        kernels: &["6.1"],
        command_line: "",
        environment: || with_sysctl("kernel/unprivileged_bpf_disabled", "0"),
        modes: &[ACCELERATED],
    },
    Special {
        name: "lockdown=integrity",
        kernels: &["6.12", "7.2"],
        command_line: "",
        environment: || Environment {
            lockdown: Some("integrity".into()),
            ..Environment::default()
        },
        modes: &[ACCELERATED],
    },
    Special {
        name: "lockdown=confidentiality",
        kernels: &["6.12"],
        command_line: "",
        environment: || Environment {
            lockdown: Some("confidentiality".into()),
            ..Environment::default()
        },
        // What reads the kernel's memory is refused.
        modes: &[PLAIN],
    },
    Special {
        name: "bpf_jit_enable=0",
        kernels: &["6.12"],
        command_line: "",
        environment: || with_sysctl("net/core/bpf_jit_enable", "0"),
        modes: &[],
    },
    Special {
        name: "SCTP",
        kernels: &["5.10", "6.12"],
        command_line: "",
        environment: || Environment {
            sctp: true,
            ..Environment::default()
        },
        modes: &[],
    },
];

fn with_sysctl(name: &str, value: &str) -> Environment {
    Environment {
        sysctls: [(name.to_owned(), value.to_owned())].into(),
        ..Environment::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::kernels::Kernel;

    #[test]
    fn every_special_machine_has_a_kernel() {
        for special in SPECIAL {
            assert!(!special.kernels.is_empty(), "{}", special.name);
            for kernel in special.kernels {
                assert!(Kernel::by_name(kernel).is_ok(), "{kernel}");
            }
        }
    }
}
