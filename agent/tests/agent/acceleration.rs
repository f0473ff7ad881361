//! A pod's wish, from the plugin's request to the record and over restarts.

use crate::support::{Node, allocate, owner};
use serde_json::Value;
use sinabro_common::api::{ErrorCode, Request, Response, TcpAcceleration};
use std::fs;

fn wishing(id: &str, wish: Option<TcpAcceleration>, told: Vec<String>) -> Request {
    let mut request = allocate(id);
    if let Request::Allocate {
        acceleration,
        warnings,
        ..
    } = &mut request
    {
        (*acceleration, *warnings) = (wish, told);
    }
    request
}

#[test]
fn a_wish_and_a_cookie_are_kept_with_the_pod_and_over_restarts() {
    let mut node = Node::new();
    node.start();
    let mut plugin = node.connect();
    let wish = Some(TcpAcceleration::Disabled);
    let answer = plugin.call(wishing("a", wish, Vec::new())).unwrap();
    let Response::Attachment(attachment) = answer else {
        panic!("{answer:?}");
    };
    let activate = Request::Activate {
        owner: owner("a"),
        ifindex: node.add_link(&attachment),
        netns_cookie: Some(u64::MAX),
        local_mtu: true,
    };
    plugin.call(activate).unwrap();
    let record = node.state(&format!("endpoints/{}.json", attachment.link));
    let read = || -> Value { serde_json::from_slice(&fs::read(&record).unwrap()).unwrap() };
    assert_eq!(read()["acceleration"], "disabled");
    assert_eq!(read()["netnsCookie"], u64::MAX);
    node.kill();
    node.start();
    node.check("a").unwrap();
    assert_eq!(read()["acceleration"], "disabled");
}

#[test]
fn warnings_cost_a_pod_nothing_as_long_as_there_are_few() {
    let mut node = Node::new();
    node.start();
    let few = vec!["annotation is passed over".to_owned()];
    node.connect().call(wishing("a", None, few)).unwrap();
    for flood in [vec![String::new(); 100], vec!["x".repeat(100_000)]] {
        let error = node.connect().call(wishing("b", None, flood)).unwrap_err();
        assert_eq!(error.code, ErrorCode::Invalid);
    }
}
