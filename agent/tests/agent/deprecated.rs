//! An agent starts with each setting of the release before, and says what to write instead.

use crate::support::{Node, eventually};
use sinabro_agent::config::{DEPRECATED, Deprecated};
use sinabro_common::api::{Request, Response, StatusReport};
use std::fs;

const REASON: &str = "SettingDeprecated";
const SETTINGS: &str = "/run/settings.yaml";
const SERVICES: &str = "/run/services.yaml";

/// Whether the old setting, and nothing else of the same new one, has packets go by the stack.
fn has_its_effect(old: &Deprecated, status: &StatusReport) -> bool {
    ["overlay", "forwarding"].into_iter().all(|mode| {
        let by_setting = status.modes[mode].contains("dataPath");
        by_setting == (old.key == mode && old.value == "kernel")
    })
}

#[test]
fn settings_of_the_release_before_are_taken_and_told_of() {
    let mut node = Node::new();
    let write = |node: &Node, name: &str, text: &str| {
        fs::write(node.namespace().path(name), text).unwrap();
    };
    write(&node, SERVICES, "{kind: List, items: []}\n");
    for old in &DEPRECATED {
        let Deprecated {
            key, value, new, ..
        } = old;
        let text = format!("serviceProxy: on\nservicesFile: {SERVICES}\n{key}: {value}\n");
        write(&node, SETTINGS, &text);
        node.start_with(&["--config", SETTINGS]);
        node.wait_ready();
        let mut told = String::new();
        eventually("it is in the status", || {
            let status = node.status().unwrap();
            let mut troubles = status.troubles.into_iter();
            let found = troubles.find(|trouble| trouble.reason == REASON);
            told = found.map(|trouble| trouble.text).unwrap_or_default();
            !told.is_empty()
        });
        for part in [&format!("{key}: {value}"), SETTINGS, new.0, new.1] {
            assert!(told.contains(part), "{told}");
        }
        eventually("it is in the log", || {
            match node.connect().call(Request::Log) {
                Ok(Response::Log(log)) => log
                    .lines()
                    .any(|line| line.contains("WARN") && line.contains(&told)),
                other => panic!("{other:?}"),
            }
        });
        eventually("it has its old effect", || {
            let status = node.status().unwrap();
            status.modes.contains_key("forwarding") && has_its_effect(old, &status)
        });
        assert!(node.stop());
    }
}
