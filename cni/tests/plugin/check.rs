//! CHECK: silent on what ADD made, and each change named.

use crate::{
    agent::Act,
    node::{Node, Pod},
};
use serde_json::{Value, json};
use sinabro_common::api::{ErrorCode, LocalMtu};
use sinabro_netlink::{addr::Addr, link, neigh::Neigh, route::Route, veth::Veth};

struct Case {
    node: Node,
    pod: Pod,
    result: Value,
}

impl Case {
    fn new() -> Self {
        let (node, pod) = (Node::new(), Pod::new());
        let result = node.call("ADD", &pod).run().result();
        Self { node, pod, result }
    }

    fn check(&self) -> crate::node::Outcome {
        self.node
            .call("CHECK", &self.pod)
            .conf("prevResult", self.result.clone())
            .run()
    }

    /// Index of the pod's interface.
    fn inner(&self) -> u32 {
        self.pod.conn().link_by_name("eth0").unwrap().index
    }

    fn outer(&self) -> u32 {
        let name = self.pod.link();
        self.node.conn().link_by_name(&name).unwrap().index
    }

    fn in_pod(&self, request: sinabro_netlink::Request) {
        self.pod.conn().execute(request).unwrap();
    }

    fn on_host(&self, request: sinabro_netlink::Request) {
        self.node.conn().execute(request).unwrap();
    }
}

fn net(text: &str) -> ipnet::IpNet {
    text.parse().unwrap()
}

fn host_route(case: &Case, to: &str) -> Route {
    Route::to(net(to))
        .dev(case.outer())
        .protocol(sinabro_common::names::ROUTE_PROTOCOL)
}

fn local(case: &Case) -> Route {
    let gateway = "169.254.1.1".parse().unwrap();
    let route = Route::to(net("10.77.0.0/24")).via(gateway);
    route.dev(case.inner()).onlink()
}

#[test]
fn a_route_with_another_mtu_is_found() {
    let (node, pod) = (Node::new(), Pod::new());
    node.agent().state().local = Some(LocalMtu {
        mtu: 9000,
        destinations: vec![net("10.77.0.0/24")],
    });
    let result = node.call("ADD", &pod).run().result();
    let mut case = Case { node, pod, result };
    case.check().silent();
    let default = Route::to(net("0.0.0.0/0")).via("169.254.1.1".parse().unwrap());
    let default = default.dev(case.inner()).onlink();
    case.in_pod(default.clone().mtu(1300).replace());
    let outcome = case.check();
    outcome.fails_with(105, "route 0.0.0.0/0 has MTU 1300 instead of MTU 1400");
    // A later plugin that changes a route says so.
    case.result["routes"][0]["mtu"] = json!(1300);
    case.check().silent();
    case.result["routes"][0]["mtu"] = json!(1400);
    case.in_pod(default.mtu(1400).replace());
    case.in_pod(local(&case).delete());
    let outcome = case.check();
    outcome.fails_with(105, "route 10.77.0.0/24 is missing");
    case.in_pod(local(&case).add());
    case.in_pod(link::set_mtu(case.inner(), 1400));
    let outcome = case.check();
    outcome.fails_with(105, "MTU 1400 instead of 9000");
}

/// Each change is found, by these words.
#[test]
fn every_change_is_found() {
    type Change = (&'static [&'static str], fn(&Case));
    let changes: &[Change] = &[
        (&["address 10.77.0.4/32", "in the pod"], |c| {
            c.in_pod(Addr::new(c.inner(), net("10.77.0.4/32")).delete());
        }),
        (&["address fd77::4/128", "in the pod"], |c| {
            c.in_pod(Addr::new(c.inner(), net("fd77::4/128")).delete());
        }),
        (&["route 0.0.0.0/0", "in the pod"], |c| {
            c.in_pod(Route::to(net("0.0.0.0/0")).delete());
        }),
        (&["route ::/0", "in the pod"], |c| {
            c.in_pod(Route::to(net("::/0")).dev(c.inner()).delete());
        }),
        (&["neighbour 169.254.1.1", "missing", "in the pod"], |c| {
            let gateway = "169.254.1.1".parse().unwrap();
            c.in_pod(Neigh::new(c.inner(), gateway, [0; 6]).delete());
        }),
        (&["neighbour fe80::5342:1", "02:00:00:00:00:09"], |c| {
            let gateway = "fe80::5342:1".parse().unwrap();
            c.in_pod(Neigh::new(c.inner(), gateway, [2, 0, 0, 0, 0, 9]).replace());
        }),
        (&["interface eth0 is down"], |c| {
            c.in_pod(link::set_down(c.inner()))
        }),
        (&["interface eth0", "MTU 1300 instead of 1400"], |c| {
            c.in_pod(link::set_mtu(c.inner(), 1300));
        }),
        (&["eth0 has MAC address 02:00:00:00:00:07", "agent"], |c| {
            c.in_pod(link::set_mac(c.inner(), [2, 0, 0, 0, 0, 7]));
        }),
        (&["is down on the host"], |c| {
            c.on_host(link::set_down(c.outer()))
        }),
        (&["MAC address 02:00:00:00:00:08 instead of 02:53"], |c| {
            c.on_host(link::set_mac(c.outer(), [2, 0, 0, 0, 0, 8]));
        }),
        (&["route 10.77.0.4/32", "on the host"], |c| {
            c.on_host(host_route(c, "10.77.0.4/32").scope_link().delete());
        }),
        (&["route fd77::4/128", "on the host"], |c| {
            c.on_host(host_route(c, "fd77::4/128").delete());
        }),
        (&["neighbour 10.77.0.4", "on the host"], |c| {
            let address = "10.77.0.4".parse().unwrap();
            c.on_host(Neigh::new(c.outer(), address, [0; 6]).delete());
        }),
        (&["missing on the host", "missing in the pod"], |c| {
            c.on_host(link::delete(c.outer()));
        }),
        (&["neighbour 169.254.1.1", "permanent"], |c| {
            let gateway = "169.254.1.1".parse().unwrap();
            let mut neigh = Neigh::new(c.inner(), gateway, sinabro_common::names::HOST_MAC);
            neigh.state = nix::libc::NUD_REACHABLE;
            c.in_pod(neigh.replace());
        }),
        (&["eth0 in the pod is not the other end"], |c| {
            c.in_pod(link::set_down(c.inner()));
            c.in_pod(link::set_name(c.inner(), "renamed"));
            let foreign = Veth {
                name: "eth0",
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1400,
                peer_name: "other",
                peer_mac: [2, 0, 0, 0, 0, 2],
                peer_netns: None,
            };
            c.in_pod(foreign.create());
        }),
        (&["interface eth0 is missing in the pod"], |c| {
            c.in_pod(link::set_down(c.inner()));
            c.in_pod(link::set_name(c.inner(), "renamed"));
        }),
    ];
    for (words, change) in changes {
        let case = Case::new();
        case.check().silent();
        change(&case);
        for word in *words {
            case.check().fails_with(105, word);
        }
    }
}

#[test]
fn prev_result_has_to_agree_with_the_agent() {
    let case = Case::new();
    let changed = |change: fn(&mut Value)| {
        let mut result = case.result.clone();
        change(&mut result);
        let call = case.node.call("CHECK", &case.pod);
        call.conf("prevResult", result).run()
    };
    changed(|r| r["ips"][0]["address"] = json!("10.77.0.99/32")).fails_with(105, "10.77.0.99");
    changed(|r| r["ips"][1]["interface"] = json!(0)).fails_with(105, "fd77::4");
    changed(|r| r["interfaces"][1]["sandbox"] = json!("/other")).fails_with(105, "eth0");
    changed(|r| r["interfaces"][0]["name"] = json!("other")).fails_with(105, &case.pod.link());
    changed(|r| r["interfaces"][1]["mac"] = json!("02:00:00:00:00:05")).fails_with(105, "MAC");
    changed(|r| r["interfaces"][1]["mtu"] = json!(1399)).fails_with(105, "MTU");
    // As a later plugin may have put it.
    changed(|r| {
        r["interfaces"][1]["mac"] =
            json!(r["interfaces"][1]["mac"].as_str().unwrap().to_uppercase());
        r["interfaces"]
            .as_array_mut()
            .unwrap()
            .push(json!({"name": "later"}));
    })
    .silent();
}

#[test]
fn a_route_that_a_later_plugin_took_over_is_not_missed() {
    let case = Case::new();
    case.in_pod(Route::to(net("0.0.0.0/0")).delete());
    case.check().fails_with(105, "0.0.0.0/0");
    let mut result = case.result.clone();
    result["routes"].as_array_mut().unwrap().remove(0);
    let call = case.node.call("CHECK", &case.pod);
    call.conf("prevResult", result).run().silent();
}

#[test]
fn results_of_every_version_that_has_check_are_understood() {
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let (node, pod) = (Node::new(), Pod::new());
        let result = node.call("ADD", &pod).version(version).run().result();
        let call = node.call("CHECK", &pod).version(version);
        call.conf("prevResult", result).run().silent();
    }
    let case = Case::new();
    for version in ["0.3.0", "0.3.1"] {
        let call = case.node.call("CHECK", &case.pod).version(version);
        let call = call.conf("prevResult", case.result.clone());
        call.run().fails_with(1, "CHECK");
    }
}

#[test]
fn what_is_not_there_is_told_from_what_is_half_there() {
    let case = Case::new();
    let call = case.node.call("CHECK", &case.pod);
    call.run().fails_with(7, "prevResult");
    case.node.agent().state().endpoints.clear();
    case.check().fails_with(105, "no record");
    case.on_host(link::delete(case.outer()));
    case.check().fails_with(3, &case.pod.id);
}

#[test]
fn an_agent_that_is_away_is_not_a_mismatch() {
    let mut case = Case::new();
    case.node
        .agent()
        .script("check", Act::Refuse(ErrorCode::NotReady));
    case.check().fails_with(11, "sinabro-agent");
    case.node.stop_agent();
    case.check().fails_with(11, "agent.sock");
}
