//! Which pods' TCP connections are accelerated.
//!
//! Three have a say: the node's setting, the kernel as the self-test found it, and the pod's wish.

use crate::{datapath::PodAcceleration, endpoint::EndpointRecord};
use serde::{Deserialize, Serialize};
use sinabro_common::api::{TcpAcceleration, Verdict};
use std::fmt;

/// The node's setting `tcpAcceleration`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Every pod that does not wish otherwise, where applications cannot tell; else as `OptIn`.
    Auto,
    /// None, whatever it wishes.
    Off,
    /// Those that wish it.
    OptIn,
    /// Every one, whatever it wishes.
    All,
}

impl Mode {
    pub const EVERY: [Self; 4] = [Self::Auto, Self::Off, Self::OptIn, Self::All];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
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

/// Whether the connections of a pod with this wish are accelerated.
pub fn accelerate(mode: Mode, verdict: Verdict, wish: Option<TcpAcceleration>) -> bool {
    let wished = wish == Some(TcpAcceleration::Enabled);
    match (mode, verdict) {
        (Mode::Off, _) | (_, Verdict::Refused) => false,
        (Mode::All, _) => true,
        (Mode::Auto, Verdict::AllPass) => wish != Some(TcpAcceleration::Disabled),
        (Mode::Auto, Verdict::SomeFail) | (Mode::OptIn, _) => wished,
    }
}

/// What all pods of the node have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    pub mode: Mode,
    pub verdict: Verdict,
    /// Connections inside a pod, too, if the pod's others are accelerated.
    pub loopback: bool,
}

impl Policy {
    /// Whether the pod is accelerated, as far as it was said.
    pub fn wants(&self, wish: Option<TcpAcceleration>) -> bool {
        accelerate(self.mode, self.verdict, wish)
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

    #[test]
    fn the_whole_table() {
        use Mode::{All, Auto, Off, OptIn};
        use TcpAcceleration::{Disabled, Enabled};
        use Verdict::{AllPass, Refused, SomeFail};
        let table = [
            //                    none   enabled disabled
            (Auto, AllPass, [true, true, false]),
            (Auto, SomeFail, [false, true, false]),
            (Auto, Refused, [false, false, false]),
            (Off, AllPass, [false, false, false]),
            (Off, SomeFail, [false, false, false]),
            (Off, Refused, [false, false, false]),
            (OptIn, AllPass, [false, true, false]),
            (OptIn, SomeFail, [false, true, false]),
            (OptIn, Refused, [false, false, false]),
            (All, AllPass, [true, true, true]),
            (All, SomeFail, [true, true, true]),
            (All, Refused, [false, false, false]),
        ];
        for (mode, verdict, expected) in table {
            let wishes = [None, Some(Enabled), Some(Disabled)];
            let found = wishes.map(|wish| accelerate(mode, verdict, wish));
            assert_eq!(found, expected, "{mode:?} {verdict:?}");
        }
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
            verdict: Verdict::SomeFail,
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
            verdict: Verdict::AllPass,
            loopback: true,
        };
        assert_eq!(policy.of(&record(None)), None);
        assert_eq!(policy.of(&record(Some(0))), None);
    }
}
