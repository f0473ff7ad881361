//! Which pods' TCP connections are accelerated.
//!
//! Three have a say: the node's setting, the kernel as the self-test found it, and the pod's wish.

use super::self_test::SelfTest;
use crate::{datapath::PodAcceleration, endpoint::EndpointRecord};
use serde::{Deserialize, Serialize};
use sinabro_common::api::{TcpAcceleration, Verdict};
use std::{fmt, sync::Arc};

/// The node's setting `tcpAcceleration`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// None, whatever it wishes.
    Off,
    /// Those that wish it.
    OptIn,
    /// Every one, whatever it wishes.
    All,
}

impl Mode {
    pub const EVERY: [Self; 3] = [Self::Off, Self::OptIn, Self::All];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::OptIn => "opt-in",
            Self::All => "all",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Mode {
    /// Whether the connections of a pod with this wish are to be accelerated, if the kernel can.
    pub fn asks(self, wish: Option<TcpAcceleration>) -> bool {
        match self {
            Self::Off => false,
            Self::OptIn => wish == Some(TcpAcceleration::Enabled),
            Self::All => true,
        }
    }
}

/// What all pods of the node have in common.
#[derive(Clone)]
pub struct Policy {
    pub mode: Mode,
    /// Run for the first pod that asks.
    pub self_test: Arc<SelfTest>,
    /// Connections inside a pod, too, if the pod's others are accelerated.
    pub loopback: bool,
}

impl Policy {
    /// Whether a pod with this wish is accelerated. Only one that asks may have to wait for the
    /// self-test.
    pub fn wants(&self, wish: Option<TcpAcceleration>) -> bool {
        self.mode.asks(wish) && self.self_test.verdict() == Verdict::Accelerate
    }

    /// What is accelerated of a pod. Nothing without the cookie, by which its sockets are known
    /// from others with the same addresses.
    pub fn of(&self, record: &EndpointRecord) -> Option<PodAcceleration> {
        // Zero: a namespace that never gave out its cookie.
        let netns = record.netns_cookie.filter(|cookie| *cookie != 0)?;
        self.wants(record.acceleration).then_some(PodAcceleration {
            netns,
            pods: true,
            loopback: self.loopback,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acceleration::self_test;
    use sinabro_common::api::SelfTestReport;

    fn known(verdict: Verdict) -> Arc<SelfTest> {
        Arc::new(SelfTest::known(SelfTestReport {
            verdict,
            ..SelfTestReport::default()
        }))
    }

    #[test]
    fn the_whole_table() {
        use Mode::{All, Off, OptIn};
        use TcpAcceleration::{Disabled, Enabled};
        use Verdict::{Accelerate, Refused};
        let table = [
            //                        none   enabled disabled
            (Off, Accelerate, [false, false, false]),
            (Off, Refused, [false, false, false]),
            (OptIn, Accelerate, [false, true, false]),
            (OptIn, Refused, [false, false, false]),
            (All, Accelerate, [true, true, true]),
            (All, Refused, [false, false, false]),
        ];
        for (mode, verdict, expected) in table {
            let policy = Policy {
                mode,
                self_test: known(verdict),
                loopback: false,
            };
            let wishes = [None, Some(Enabled), Some(Disabled)];
            let found = wishes.map(|wish| policy.wants(wish));
            assert_eq!(found, expected, "{mode:?} {verdict:?}");
        }
    }

    #[test]
    fn only_a_pod_that_asks_has_the_self_test_run() {
        use TcpAcceleration::{Disabled, Enabled};
        let policy = |mode| Policy {
            mode,
            self_test: Arc::new(SelfTest::untried(|| self_test::refused("of a test".into()))),
            loopback: false,
        };
        for (mode, wish, runs) in [
            (Mode::Off, Some(Enabled), false),
            (Mode::OptIn, None, false),
            (Mode::OptIn, Some(Disabled), false),
            (Mode::OptIn, Some(Enabled), true),
            (Mode::All, None, true),
        ] {
            let policy = policy(mode);
            assert!(!policy.wants(wish));
            assert_eq!(policy.self_test.found().is_some(), runs, "{mode} {wish:?}");
        }
        // Nor one whose sockets no program knows.
        let policy = policy(Mode::All);
        assert_eq!(policy.of(&record(None)), None);
        assert!(policy.self_test.found().is_none());
    }

    fn record(netns_cookie: Option<u64>) -> EndpointRecord {
        let record = serde_json::json!({
            "owner": {"containerID": "c1", "ifname": "eth0"},
            "network": "pods",
            "netns": "/run/netns/c1",
            "link": "snb0",
            "ifindex": 7,
            "mac": "02:00:00:00:00:01",
            "hostMac": "02:00:00:00:00:02",
            "addresses": ["10.0.0.2"],
            "mtu": 1500,
            "acceleration": "enabled",
            "netnsCookie": netns_cookie,
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn a_pod_is_accelerated_with_its_loopback_only_if_that_is_set() {
        let policy = |loopback| Policy {
            mode: Mode::OptIn,
            self_test: known(Verdict::Accelerate),
            loopback,
        };
        for loopback in [false, true] {
            let expected = PodAcceleration {
                netns: 9,
                pods: true,
                loopback,
            };
            assert_eq!(policy(loopback).of(&record(Some(9))), Some(expected));
            let off = Policy {
                mode: Mode::Off,
                ..policy(loopback)
            };
            assert_eq!(off.of(&record(Some(9))), None);
        }
    }

    #[test]
    fn a_pod_whose_namespace_is_not_known_is_not() {
        let policy = Policy {
            mode: Mode::All,
            self_test: known(Verdict::Accelerate),
            loopback: true,
        };
        assert_eq!(policy.of(&record(None)), None);
        assert_eq!(policy.of(&record(Some(0))), None);
    }
}
