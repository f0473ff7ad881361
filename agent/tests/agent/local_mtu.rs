//! What may be larger than all else: offered, wished away, not known to a plugin, not wanted by the
//! node.

use crate::support::{Node, allocate, owner};
use sinabro_common::api::{Attachment, EndpointReport, LocalMtu, LocalMtuWish, Request, Response};

/// An ADD by a plugin that knows of it or not.
fn add(node: &Node, id: &str, wish: Option<LocalMtuWish>, knows: bool) -> Attachment {
    let mut request = allocate(id);
    if let Request::Allocate { local_mtu, .. } = &mut request {
        *local_mtu = wish;
    }
    let mut plugin = node.connect();
    let Response::Attachment(attachment) = plugin.call(request).unwrap() else {
        panic!("no attachment");
    };
    let activate = Request::Activate {
        owner: owner(id),
        ifindex: node.add_link(&attachment),
        netns_cookie: None,
        local_mtu: knows,
    };
    plugin.call(activate).unwrap();
    attachment
}

fn endpoint(node: &Node, id: &str) -> EndpointReport {
    let Response::Endpoints(all) = node.connect().call(Request::Endpoints).unwrap() else {
        panic!("no endpoints");
    };
    let found = all.into_iter().find(|e| e.owner == owner(id));
    found.unwrap()
}

#[test]
fn pods_get_what_they_and_their_plugin_can_have() {
    let mut node = Node::new();
    node.start();
    let status = node.status().unwrap();
    assert_eq!((status.mtu, status.local_mtu), (1450, Some(65_535)));
    // Ranges, then the node's addresses.
    let mut nets = status.pod_cidrs.clone();
    nets.extend(status.node_addresses.iter().map(|&a| ipnet::IpNet::from(a)));
    nets.sort_unstable();

    let offered = add(&node, "a", None, true).local;
    let mut sorted = offered.clone().unwrap();
    sorted.destinations.sort_unstable();
    let expected = LocalMtu {
        mtu: 65_535,
        destinations: nets,
    };
    assert_eq!(sorted, expected);
    assert_eq!(node.check("a").unwrap().local, offered);
    let report = endpoint(&node, "a");
    assert_eq!((report.mtu, &report.local_mtu), (Some(1450), &offered));

    assert_eq!(add(&node, "b", Some(LocalMtuWish::Off), true).local, None);
    assert_eq!(endpoint(&node, "b").local_mtu, None);
    // A plugin of an earlier version makes the link as it always did.
    assert!(
        add(&node, "c", Some(LocalMtuWish::Auto), false)
            .local
            .is_some()
    );
    assert_eq!(endpoint(&node, "c").local_mtu, None);
    assert_eq!(node.check("c").unwrap().local, None);

    // Who runs keeps what it has; who comes gets what the node has now.
    node.kill();
    node.start_with(&["--local-mtu=off"]);
    node.wait_ready();
    assert_eq!(node.check("a").unwrap().local, offered);
    assert_eq!(add(&node, "d", Some(LocalMtuWish::Auto), true).local, None);
    node.kill();
    node.start_with(&["--local-mtu=9000"]);
    node.wait_ready();
    assert_eq!(add(&node, "e", None, true).local.unwrap().mtu, 9000);
    // Not less than all else.
    node.kill();
    node.start_with(&["--local-mtu=1300"]);
    node.wait_ready();
    assert_eq!(add(&node, "f", None, true).local, None);
}
