//! Settings of the table of connections, by the names that conntrack and kube-proxy have for the same.

use super::{ConfigError, Layers, value::number};
use crate::datapath::ConnectionLimits;
use sinabro_common::algo::lifetime::{LIFETIMES, Stage};

/// A table of fewer serves nobody; one of more takes more memory than nodes have for it.
const MIN_CONNECTIONS: u32 = 1 << 10;
const MAX_CONNECTIONS: u32 = 1 << 24;

/// When the last packet came is known to a second, and a connection counts as a stream after two.
const MIN_TIMEOUT: u32 = 5;
const MAX_TIMEOUT: u32 = 30 * 24 * 3600;

/// Which stages of a connection each setting is for.
const TIMEOUTS: [(&str, &[usize]); 6] = [
    (
        "connectionTcpTimeoutEstablished",
        &[Stage::Established as usize],
    ),
    (
        "connectionTcpTimeoutCloseWait",
        &[Stage::HalfClosed as usize],
    ),
    (
        "connectionUdpTimeout",
        &[Stage::Unreplied as usize, Stage::Replied as usize],
    ),
    ("connectionUdpTimeoutStream", &[Stage::Stream as usize]),
    (
        "connectionIcmpTimeout",
        &[Stage::Echo as usize, Stage::EchoReplied as usize],
    ),
    ("connectionGenericTimeout", &[Stage::Other as usize]),
];

/// Connections that there is room for; none if the node's memory says.
pub fn capacity(text: &str) -> Result<Option<u32>, String> {
    match text {
        "auto" => Ok(None),
        _ => number(text, MIN_CONNECTIONS, MAX_CONNECTIONS)
            .map(Some)
            .map_err(|reason| format!("{reason}, or auto")),
    }
}

pub fn limits(layers: &Layers) -> Result<ConnectionLimits, ConfigError> {
    let of_pod = |key| layers.optional(key, |text| number(text, 1, MAX_CONNECTIONS));
    let mut lifetimes = LIFETIMES;
    for (key, stages) in TIMEOUTS {
        let seconds = layers.parse(key, timeout)?;
        for stage in stages {
            lifetimes[*stage] = seconds;
        }
    }
    Ok(ConnectionLimits {
        per_pod: of_pod("connectionsPerPod")?.unwrap_or(u32::MAX),
        embryonic_per_pod: of_pod("connectionsPerPodUnanswered")?.unwrap_or(u32::MAX),
        lifetimes,
    })
}

/// Seconds, as Kubernetes writes durations, without fractions.
fn timeout(text: &str) -> Result<u32, String> {
    seconds(text)
        .filter(|seconds| (MIN_TIMEOUT..=MAX_TIMEOUT).contains(seconds))
        .ok_or_else(|| {
            let most = MAX_TIMEOUT / 3600;
            format!("expected a duration from {MIN_TIMEOUT}s to {most}h, such as 30s or 1h30m")
        })
}

fn seconds(text: &str) -> Option<u32> {
    let mut rest = text;
    let mut all: u32 = 0;
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, unit) = rest.split_at(unit_at);
        let of_unit = match unit.as_bytes()[0] {
            b'h' => 3600,
            b'm' => 60,
            b's' => 1,
            _ => return None,
        };
        all = all.checked_add(number.parse::<u32>().ok()?.checked_mul(of_unit)?)?;
        rest = &unit[1..];
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units_and_bounds() {
        for (text, seconds) in [
            ("5s", 5),
            ("90s", 90),
            ("2m", 120),
            ("1h30m", 5400),
            ("24h0m0s", 86_400),
            ("720h", MAX_TIMEOUT),
        ] {
            assert_eq!(timeout(text), Ok(seconds), "{text}");
        }
        for text in [
            "",
            "0",
            "4s",
            "90",
            "1.5h",
            "-5s",
            "5 s",
            "s",
            "10ms",
            "1d",
            "720h1s",
            "5é",
            "99999999999s",
            "1193047h",
        ] {
            let reason = timeout(text).unwrap_err();
            assert!(reason.contains("from 5s to 720h"), "{text}: {reason}");
        }
    }
}
