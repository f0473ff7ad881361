//! Ports of the node that lead to a pod.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Most of one pod: its record has them all, and is a small file.
pub const MAX_HOST_PORTS: usize = 4096;

/// A hostPort, in text `tcp/8080`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPort {
    pub protocol: PortProtocol,
    /// Not zero.
    pub port: u16,
}

/// A protocol that has ports, as Kubernetes names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PortProtocol {
    Tcp,
    Udp,
    Sctp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a protocol and a port, such as tcp/8080")]
pub struct ParseHostPortError;

impl PortProtocol {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

impl FromStr for PortProtocol {
    type Err = ParseHostPortError;

    /// In whatever case: Kubernetes writes TCP, runtimes write tcp.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter();
        let mut known = known.filter(|protocol| text.eq_ignore_ascii_case(protocol.as_str()));
        known.next().ok_or(ParseHostPortError)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.protocol.as_str(), self.port)
    }
}

impl FromStr for HostPort {
    type Err = ParseHostPortError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (protocol, port) = text.split_once('/').ok_or(ParseHostPortError)?;
        let port = port.parse().ok().filter(|port| *port > 0);
        Ok(Self {
            protocol: protocol.parse()?,
            port: port.ok_or(ParseHostPortError)?,
        })
    }
}

impl From<HostPort> for String {
    fn from(port: HostPort) -> Self {
        port.to_string()
    }
}

impl TryFrom<String> for HostPort {
    type Error = ParseHostPortError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn text_survives_the_round_trip(port in 1u16.., at in 0usize..3) {
            let port = HostPort { protocol: PortProtocol::ALL[at], port };
            prop_assert_eq!(port.to_string().parse(), Ok(port));
            let json = serde_json::to_string(&port).unwrap();
            prop_assert_eq!(serde_json::from_str::<HostPort>(&json).unwrap(), port);
        }

        #[test]
        fn what_is_taken_is_one(text in "(tcp|UDP|x)?/?[+0-9a]{0,6}") {
            if let Ok(port) = text.parse::<HostPort>() {
                prop_assert!(port.port > 0);
                prop_assert_eq!(port.to_string().parse(), Ok(port));
            }
        }
    }

    #[test]
    fn only_ports_of_protocols_are_some() {
        assert!("TCP/80".parse::<HostPort>().is_ok());
        for text in [
            "",
            "80",
            "tcp",
            "tcp/",
            "tcp/0",
            "tcp/65536",
            "icmp/1",
            "tcp/80/1",
            "tcp/ 80",
        ] {
            assert_eq!(text.parse::<HostPort>(), Err(ParseHostPortError), "{text}");
        }
    }
}
