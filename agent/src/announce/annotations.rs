//! What a Node says that others may send to it.

use crate::{plan::Routing, watch::nodes::OwnNode};
use serde_json::{Value, json};
use sinabro_common::names::{ROUTING_ANNOTATION, TUNNELS_ANNOTATION, UDP6_ZERO_CHECKSUM};

/// What a node takes that others send to those alone that say so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Takes {
    /// Packets of other nodes' pods without a tunnel.
    pub native: bool,
    /// UDP over IPv6 without a checksum.
    pub zero_checksum: bool,
}

/// By what a Node says what it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Annotation {
    Routing,
    Tunnels,
}

impl Annotation {
    pub const EVERY: [Self; 2] = [Self::Routing, Self::Tunnels];

    pub fn key(self) -> &'static str {
        match self {
            Self::Routing => ROUTING_ANNOTATION,
            Self::Tunnels => TUNNELS_ANNOTATION,
        }
    }

    /// What it is to be, if there is to be one.
    pub fn value(self) -> String {
        match self {
            Self::Routing => Routing::Native.to_string(),
            Self::Tunnels => UDP6_ZERO_CHECKSUM.into(),
        }
    }

    /// What it is.
    pub fn of(self, node: &OwnNode) -> Option<&String> {
        match self {
            Self::Routing => node.routing.as_ref(),
            Self::Tunnels => node.tunnels.as_ref(),
        }
    }

    pub fn is_wanted(self, takes: Takes) -> bool {
        match self {
            Self::Routing => takes.native,
            Self::Tunnels => takes.zero_checksum,
        }
    }

    /// What a Node with it says.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Routing => "its pods are reached without a tunnel",
            Self::Tunnels => "its tunnels take UDP over IPv6 without a checksum",
        }
    }

    /// Null takes an annotation away (RFC 7396).
    pub fn patch(self, wanted: bool) -> Value {
        let value = wanted.then(|| self.value());
        json!({ "metadata": { "annotations": { self.key(): value } } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_are_set_and_taken_away_one_by_one() {
        let patches = [(Annotation::Routing, true), (Annotation::Tunnels, true)]
            .map(|(annotation, wanted)| annotation.patch(wanted));
        let annotations = |said: Value| json!({"metadata": {"annotations": said}});
        assert_eq!(
            patches,
            [
                annotations(json!({"sinabro.io/routing": "native"})),
                annotations(json!({"sinabro.io/tunnels": "udp6-zero-checksum"})),
            ]
        );
        assert_eq!(
            Annotation::Tunnels.patch(false),
            annotations(json!({"sinabro.io/tunnels": null}))
        );
    }
}
