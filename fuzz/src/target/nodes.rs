//! The nodes file, and Nodes as the Kubernetes API has them.

use crate::is_planted;
use sinabro_agent::{
    plan::Facts,
    watch::{
        nodes::{ApiNode, facts_of},
        nodes_parse,
    },
};

pub fn run(bytes: &[u8]) -> bool {
    if let Ok(node) = serde_json::from_slice::<ApiNode>(bytes) {
        let _ = facts_of(&node);
    }
    let Ok(facts) = nodes_parse::parse(bytes) else {
        return false;
    };
    // What the agent keeps of it is a nodes file, too.
    let nodes: Vec<_> = facts.nodes.values().collect();
    let kept = serde_json::to_vec(&nodes).expect("nodes are written");
    let again: Facts = nodes_parse::parse(&kept).expect("what was written is read");
    assert_eq!(facts, again);
    let mut names = facts.nodes.keys();
    names.any(|name| is_planted(name))
}
