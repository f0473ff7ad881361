//! What is known of Nodes, and what of it is published.

use crate::{
    plan::Facts,
    watch::nodes::{ApiNode, OwnNode, facts_of},
};

/// What is known of Nodes.
pub(super) struct Known {
    /// This node's name.
    node: String,
    pub(super) facts: Facts,
    pub(super) own: Option<OwnNode>,
}

impl Known {
    /// Nothing yet, on this node.
    pub(super) fn of(node: &str) -> Self {
        Self {
            node: node.into(),
            facts: Facts::default(),
            own: None,
        }
    }

    /// The same without any facts.
    pub(super) fn emptied(&self) -> Self {
        Self::of(&self.node)
    }

    /// Takes what a Node tells; whether that is news.
    pub(super) fn insert(&mut self, node: &ApiNode) -> bool {
        let name = &node.metadata.name;
        let Facts { nodes, unreadable } = &mut self.facts;
        let mut news = match facts_of(node) {
            Ok(facts) => {
                let same = nodes.get(name) == Some(&facts);
                if !same {
                    nodes.insert(name.clone(), facts);
                }
                unreadable.remove(name).is_some() || !same
            }
            Err(why) => {
                let same = unreadable.get(name) == Some(&why);
                unreadable.insert(name.clone(), why);
                nodes.remove(name).is_some() || !same
            }
        };
        if *name == self.node {
            let now = Some(node.into());
            news |= self.own != now;
            self.own = now;
        }
        news
    }

    /// Forgets a Node; whether that is news.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let mut news = self.facts.nodes.remove(name).is_some();
        news |= self.facts.unreadable.remove(name).is_some();
        if name == self.node {
            news |= self.own.take().is_some();
        }
        news
    }
}
