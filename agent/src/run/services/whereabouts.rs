//! What of this node decides what Services come to: its name, its zone, its addresses. All but the name may change.

use crate::{node::NodeStatus, plan::services::Here, watch::nodes::OwnNode};
use anyhow::Context as _;
use std::{future::pending, time::Duration};
use tokio::{sync::watch, time::timeout};

/// How long the first plans wait for it. Those of an agent before stay published meanwhile. Longer it must not be: where
/// the node's addresses come from may be behind a Service.
pub const PATIENCE: Duration = Duration::from_secs(5);

pub struct Whereabouts {
    name: String,
    node: watch::Receiver<NodeStatus>,
    /// None without Kubernetes, where nothing says a zone.
    own: Option<watch::Receiver<Option<OwnNode>>>,
    /// As it was last known.
    zone: String,
    without_external_ips: bool,
}

impl Whereabouts {
    pub fn new(
        name: String,
        node: watch::Receiver<NodeStatus>,
        own: Option<watch::Receiver<Option<OwnNode>>>,
        without_external_ips: bool,
    ) -> Self {
        let zone = String::new();
        Self {
            name,
            node,
            own,
            zone,
            without_external_ips,
        }
    }

    /// As it is now.
    pub fn here(&mut self) -> Here {
        // Without its Node a node is still where it was.
        if let Some(own) = &mut self.own
            && let Some(own) = &*own.borrow_and_update()
        {
            self.zone.clone_from(&own.zone);
        }
        let node = self.node.borrow_and_update();
        let state = node.state.as_ref();
        let addresses = state.map(|state| state.node_ports_at.clone());
        let link_addresses = state.map(|state| state.link_addresses.clone());
        Here {
            node: self.name.clone(),
            zone: self.zone.clone(),
            node_ports_at: addresses.unwrap_or_default(),
            link_addresses: link_addresses.unwrap_or_default(),
            without_external_ips: self.without_external_ips,
        }
    }

    /// Waits until all of it is known, but not for ever.
    pub async fn known(&mut self, patience: Duration) {
        let known = async {
            // What ends without a word is told by `changed`.
            drop(self.node.wait_for(|node| node.state.is_some()).await);
            if let Some(own) = &mut self.own {
                drop(own.wait_for(Option::is_some).await);
            }
        };
        if timeout(patience, known).await.is_err() {
            tracing::warn!(
                "where this node is cannot be known yet: Services are published without their node ports and by no zone, until it is"
            );
        }
    }

    /// Waits until it may be another.
    ///
    /// # Errors
    /// If nobody says any more how it is.
    pub async fn changed(&mut self) -> anyhow::Result<()> {
        let own = async {
            match &mut self.own {
                Some(own) => own.changed().await,
                None => pending().await,
            }
        };
        tokio::select! {
            changed = self.node.changed() => changed.context("what follows the node ended"),
            changed = own => changed.context("the watch of the node ended"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::NodeState;
    use std::{collections::BTreeSet, sync::Arc, time::Instant};

    fn state(address: &str) -> NodeStatus {
        let state = NodeState {
            node_ports_at: BTreeSet::from([address.parse().unwrap()]),
            ..NodeState::default()
        };
        NodeStatus {
            state: Some(Arc::new(state)),
            problem: None,
        }
    }

    fn node(zone: &str) -> OwnNode {
        OwnNode {
            uid: String::new(),
            resource_version: String::new(),
            taints: Vec::new(),
            network_unavailable: None,
            zone: zone.into(),
            routing: None,
            tunnels: None,
            is_going: false,
        }
    }

    #[tokio::test]
    async fn zone_and_addresses_are_waited_for_and_followed() {
        let (states, node_status) = watch::channel(NodeStatus::default());
        let (nodes, own) = watch::channel(None);
        let mut whereabouts = Whereabouts::new("n1".into(), node_status, Some(own), false);
        let begun = Instant::now();
        let short = Duration::from_millis(20);
        whereabouts.known(short).await;
        assert!(begun.elapsed() >= short);
        let unknown = Here {
            node: "n1".into(),
            ..Here::default()
        };
        assert_eq!(whereabouts.here(), unknown);

        states.send_replace(state("192.0.2.1"));
        nodes.send_replace(Some(node("a")));
        whereabouts.known(Duration::MAX).await;
        let known = whereabouts.here();
        assert_eq!(known.zone, "a");
        assert!(known.node_ports_at.contains(&"192.0.2.1".parse().unwrap()));

        nodes.send_replace(Some(node("b")));
        whereabouts.changed().await.unwrap();
        assert_eq!(whereabouts.here().zone, "b");
        states.send_replace(state("192.0.2.2"));
        whereabouts.changed().await.unwrap();
        assert_ne!(whereabouts.here().node_ports_at, known.node_ports_at);
        // A Node that is deleted takes its zone along no more than its addresses.
        nodes.send_replace(None);
        whereabouts.changed().await.unwrap();
        assert_eq!(whereabouts.here().zone, "b");
        drop(nodes);
        assert!(whereabouts.changed().await.is_err());
    }
}
