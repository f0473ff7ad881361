//! ADD: the result, and what the kernel has afterwards.

use crate::{
    agent::Act,
    node::{Node, Pod, disable_ipv6, snapshot},
    traffic::{addresses, flows},
};
use nix::libc::RT_SCOPE_LINK;
use serde_json::{Value, json};
use sinabro_common::{
    api::{ErrorCode, LocalMtu, Request, TcpAcceleration},
    names,
};
use sinabro_netlink::{
    Conn, link,
    route::{Route, RouteFilter},
    sysctl, tc,
    veth::Veth,
};
use std::fs;

/// As hardening guides have it for links that come later.
#[test]
fn a_pods_link_forwards_whatever_new_links_do() {
    let node = Node::new();
    let pod = Pod::new();
    let link = pod.link();
    let path = |link| ["net", "ipv4", "conf", link, "forwarding"];
    for (link, value) in [("all", "1"), ("default", "0")] {
        let write = || Ok(sysctl::write(&path(link), value)?);
        node.place.run(write).unwrap();
    }
    node.call("ADD", &pod).run().result();
    let forwards = node.place.run(|| Ok(sysctl::read(&path(&link))?));
    assert_eq!(forwards.unwrap(), "1");
}

#[test]
fn every_version_gets_its_own_result() {
    let node = Node::new();
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let pod = Pod::new();
        let call = node
            .call("ADD", &pod)
            .version(version)
            .conf("dns", json!({"nameservers": ["10.96.0.10"]}));
        let result = call.run().result();
        let [v4, v6] = addresses(&result);
        let last: u8 = v4.rsplit('.').next().unwrap().parse().unwrap();
        let mut expected = json!({
            "cniVersion": version,
            "interfaces": [
                {"name": pod.link(), "mac": "02:53:4e:42:00:01"},
                {
                    "name": "eth0",
                    "mac": format!("0a:58:0a:4d:00:{last:02x}"),
                    "sandbox": pod.path(),
                },
            ],
            "ips": [
                {"address": format!("{v4}/32"), "gateway": "169.254.1.1", "interface": 1},
                {"address": format!("{v6}/128"), "gateway": "fe80::5342:1", "interface": 1},
            ],
            "routes": [
                {"dst": "0.0.0.0/0", "gw": "169.254.1.1"},
                {"dst": "::/0", "gw": "fe80::5342:1"},
            ],
            "dns": {"nameservers": ["10.96.0.10"]},
        });
        if version.starts_with("0.") {
            expected["ips"][0]["version"] = json!("4");
            expected["ips"][1]["version"] = json!("6");
        }
        if version == "1.1.0" {
            expected["interfaces"][0]["mtu"] = json!(1400);
            expected["interfaces"][1]["mtu"] = json!(1400);
        }
        assert_eq!(result, expected, "{version}");
    }
}

/// The agent of these tests puts nothing there.
#[test]
fn the_qdisc_for_filters_is_there_before_they_come_and_not_if_none_do() {
    let (node, pod) = (Node::new(), Pod::new());
    for filters in [true, false] {
        node.agent().state().clsact = filters;
        node.call("ADD", &pod).run().result();
        let mut host = node.conn();
        let link = host.link_by_name(&pod.link()).unwrap();
        let again = host.execute(tc::add_clsact(link.index));
        assert_eq!(again.is_err_and(|error| error.is_exists()), filters);
        node.call("DEL", &pod).run();
    }
}

#[test]
fn the_kernel_has_what_the_agent_gave() {
    let (node, pod) = (Node::new(), Pod::new());
    node.call("ADD", &pod).run().result();
    let record = {
        let state = node.agent().state();
        state.endpoints.values().next().unwrap().clone()
    };

    let (mut host, mut inside) = (node.conn(), pod.conn());
    let outer = host.link_by_name(&pod.link()).unwrap();
    let inner = inside.link_by_name("eth0").unwrap();
    assert!(outer.up && outer.carrier && inner.up && inner.carrier);
    assert_eq!((outer.mtu, inner.mtu), (1400, 1400));
    assert_eq!(outer.mac, Some(names::HOST_MAC));
    assert_eq!(inner.mac, Some(record.mac.0));

    let addrs = inside.addrs(Some(inner.index)).unwrap();
    let gateways: [std::net::IpAddr; 2] = [names::GATEWAY_V4.into(), names::GATEWAY_V6.into()];
    let neighs = inside.neighs(inner.index).unwrap();
    for (address, gateway) in record.addresses.iter().zip(gateways) {
        assert!(addrs.iter().any(|a| a.net == (*address).into()));
        assert!(
            neighs
                .iter()
                .any(|n| n.address == gateway && n.mac == outer.mac && n.is_permanent())
        );
        let route = inside.route_get("8.8.8.8".parse().unwrap()).unwrap();
        assert_eq!(
            (route.gateway, route.oif),
            (Some(gateways[0]), Some(inner.index))
        );
    }
    let ours = host
        .routes(&RouteFilter {
            protocol: Some(names::ROUTE_PROTOCOL),
            oif: Some(outer.index),
            ..RouteFilter::default()
        })
        .unwrap();
    // The kernel ignores an IPv6 route's scope.
    let scopes = ours.iter().filter(|r| r.dst.addr().is_ipv4());
    assert!(scopes.into_iter().all(|r| r.scope == RT_SCOPE_LINK));
    let mut to: Vec<_> = ours.iter().map(|r| r.dst).collect();
    to.sort();
    assert_eq!(
        to,
        record
            .addresses
            .iter()
            .map(|a| (*a).into())
            .collect::<Vec<_>>()
    );
    for neigh in host.neighs(outer.index).unwrap() {
        if record.addresses.contains(&neigh.address) {
            assert!(neigh.is_permanent() && neigh.mac == inner.mac);
        }
    }
    let with_mac = host.neighs(outer.index).unwrap();
    assert_eq!(with_mac.iter().filter(|n| n.is_permanent()).count(), 2);
}

#[test]
fn the_agent_is_told_what_was_asked() {
    let (node, pod) = (Node::new(), Pod::new());
    let wishes = json!({
        "ips": ["10.77.0.200/24", "fd77::200"],
        "mac": "0a:58:00:00:00:99",
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
    });
    let call = node.call("ADD", &pod).conf("runtimeConfig", wishes);
    let result = call.run().result();
    assert_eq!(addresses(&result), ["10.77.0.200", "fd77::200"]);
    assert_eq!(result["interfaces"][1]["mac"], "0a:58:00:00:00:99");
    let calls = node.agent().state().calls.clone();
    let Request::Allocate {
        owner,
        network,
        netns,
        pod: who,
        addresses: asked,
        mac,
        acceleration,
        local_mtu,
        service_translation,
        host_ports,
        warnings,
    } = &calls[0]
    else {
        panic!("{calls:?}");
    };
    assert_eq!((&*owner.container_id, &*owner.ifname), (&*pod.id, "eth0"));
    assert_eq!((&**network, &**netns), ("pods", &*pod.path()));
    assert_eq!(
        (&*who.namespace, &*who.name, &*who.uid),
        ("shop", "cart", "7")
    );
    assert_eq!(asked.len(), 2);
    assert_eq!(mac.unwrap().to_string(), "0a:58:00:00:00:99");
    assert_eq!((*local_mtu, *service_translation), (None, None));
    assert_eq!(*host_ports, Some(vec!["tcp/8080".parse().unwrap()]));
    assert_eq!((*acceleration, &warnings[..]), (None, &[][..]));

    let second = Pod::new();
    let call = node.call("ADD", &second).var("CNI_ARGS", "IP=10.77.0.201");
    assert_eq!(addresses(&call.run().result())[0], "10.77.0.201");
}

#[test]
fn the_agent_is_told_the_wish_for_acceleration_and_the_namespaces_cookie() {
    let (node, pod, second) = (Node::new(), Pod::new(), Pod::new());
    let annotated = |text: &str| json!({"io.kubernetes.cri.pod-annotations": {"sinabro.io/tcp-acceleration": text}});
    let call = node
        .call("ADD", &pod)
        .conf("runtimeConfig", annotated("enabled"));
    call.run().result();
    // What no plugin understands costs the pod nothing.
    let call = node
        .call("ADD", &second)
        .conf("runtimeConfig", annotated("of course"));
    call.run().result();
    let calls = node.agent().state().calls.clone();
    let told = calls.iter().filter_map(|call| match call {
        Request::Allocate {
            acceleration,
            warnings,
            ..
        } => Some((*acceleration, warnings.len())),
        _ => None,
    });
    let told: Vec<_> = told.collect();
    assert_eq!(told, [(Some(TcpAcceleration::Enabled), 0), (None, 1)]);
    let cookies = calls.iter().filter_map(|call| match call {
        Request::Activate { netns_cookie, .. } => Some(*netns_cookie),
        _ => None,
    });
    let cookies: Vec<_> = cookies.collect();
    assert_eq!(cookies[0], pod.conn().netns_cookie().unwrap());
    assert!(cookies[0].is_none() || cookies[0] != cookies[1]);

    let third = Pod::new();
    let call = node
        .call("ADD", &third)
        .conf("tcpAcceleration", json!("of course"));
    call.run().fails_with(7, "tcpAcceleration");
}

#[test]
fn an_earlier_plugins_result_comes_first() {
    let (node, pod) = (Node::new(), Pod::new());
    let earlier = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "net1", "sandbox": pod.path(), "pciID": "0000:01:00.0"}],
        "ips": [{"address": "198.51.100.4/24", "interface": 0}],
        "routes": [{"dst": "198.51.100.0/24"}],
        "dns": {"domain": "first"},
    });
    let call = node
        .call("ADD", &pod)
        .version("1.0.0")
        .conf("dns", json!({"domain": "second"}))
        .conf("prevResult", earlier.clone());
    let result = call.run().result();
    for key in ["interfaces", "ips", "routes"] {
        assert_eq!(result[key][0], earlier[key][0]);
    }
    assert_eq!(result["dns"], earlier["dns"]);
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 3);
    assert_eq!(result["interfaces"][2]["name"], "eth0");
    assert_eq!(result["ips"][1]["interface"], 2);

    // What cannot be read is refused before the agent hears of it.
    let before = node.agent().calls().len();
    let call = node
        .call("ADD", &Pod::new())
        .conf("prevResult", json!({"ips": [{}]}));
    call.run().fails_with(7, "prevResult");
    assert_eq!(node.agent().calls().len(), before);
}

#[test]
fn an_interface_that_exists_is_left_alone() {
    let (node, pod) = (Node::new(), Pod::new());
    let mut inside = pod.conn();
    let foreign = Veth {
        name: "eth0",
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        peer_name: "other",
        peer_mac: [2, 0, 0, 0, 0, 2],
        peer_netns: None,
    };
    inside.create_veth(&foreign).unwrap();
    let before = (snapshot(&node.place), snapshot(&pod.place));
    node.call("ADD", &pod).run().fails_with(103, "eth0");
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
    // Asked whether it is this attachment's own, and for nothing more.
    assert_eq!(node.agent().calls(), ["check"]);
}

#[test]
fn a_second_add_is_refused_and_the_first_goes_on_working() {
    let (node, pod) = (Node::new(), Pod::new());
    let result = node.call("ADD", &pod).run().result();
    node.call("ADD", &pod).run().fails_with(103, "eth0");
    assert_eq!(node.agent().state().endpoints.len(), 1);
    let [v4, v6] = addresses(&result);
    flows(&node, &pod, [&v4, &v6]);
}

#[test]
fn what_an_add_that_was_cut_short_left_is_replaced() {
    // The whole pair, where neither the plugin nor the agent lived to remove it.
    let (node, pod) = (Node::new(), Pod::new());
    node.call("ADD", &pod).run().result();
    node.agent().state().endpoints.clear();
    let result = node.call("ADD", &pod).run().result();
    let [v4, v6] = addresses(&result);
    flows(&node, &pod, [&v4, &v6]);

    // The same in a namespace that the sandbox no longer uses.
    node.agent().state().endpoints.clear();
    let moved = Pod {
        id: pod.id.clone(),
        ..Pod::new()
    };
    let result = node.call("ADD", &moved).run().result();
    let [v4, v6] = addresses(&result);
    flows(&node, &moved, [&v4, &v6]);
    assert!(pod.conn().link_by_name("eth0").unwrap_err().is_not_found());
}

#[test]
fn ipv6_is_switched_on_where_it_is_off() {
    let (node, pod) = (Node::new(), Pod::new());
    disable_ipv6(&node.place);
    disable_ipv6(&pod.place);
    let result = node.call("ADD", &pod).run().result();
    let [v4, v6] = addresses(&result);
    flows(&node, &pod, [&v4, &v6]);
}

#[test]
fn the_first_default_route_of_a_pod_stays() {
    let (node, pod) = (Node::new(), Pod::new());
    node.call("ADD", &pod).run().result();
    let before = pod
        .conn()
        .default_route(sinabro_netlink::Family::V4)
        .unwrap();
    let call = node.call("ADD", &pod).var("CNI_IFNAME", "net1");
    let result = call.run().result();
    assert_eq!(result.get("routes"), None);
    assert_eq!(result["interfaces"][1]["name"], "net1");
    let after = pod
        .conn()
        .default_route(sinabro_netlink::Family::V4)
        .unwrap();
    assert_eq!(before, after);
}

#[test]
fn what_stays_on_the_node_may_be_as_large_as_the_link() {
    let (node, pod) = (Node::new(), Pod::new());
    let ranges = ["10.77.0.0/24", "10.9.8.7/32", "fd77::/64", "fd09::7/128"];
    node.agent().state().local = Some(LocalMtu {
        mtu: 65_535,
        destinations: ranges.map(|range| range.parse().unwrap()).to_vec(),
    });
    let result = node.call("ADD", &pod).run().result();
    let interfaces = result["interfaces"].as_array().unwrap();
    assert!(interfaces.iter().all(|link| link["mtu"] == 65_535));
    let (v4, v6) = ("169.254.1.1", "fe80::5342:1");
    let routes = json!([
        {"dst": "0.0.0.0/0", "gw": v4, "mtu": 1400},
        {"dst": "10.77.0.0/24", "gw": v4},
        {"dst": "10.9.8.7/32", "gw": v4},
        {"dst": "::/0", "gw": v6, "mtu": 1400},
        {"dst": "fd77::/64", "gw": v6},
        {"dst": "fd09::7/128", "gw": v6},
    ]);
    assert_eq!(result["routes"], routes);
    let (mut inner, mut outer) = (pod.conn(), node.conn());
    let eth0 = inner.link_by_name("eth0").unwrap();
    assert_eq!(
        (eth0.mtu, outer.link_by_name(&pod.link()).unwrap().mtu),
        (65_535, 65_535)
    );
    let there = inner.routes(&RouteFilter::default()).unwrap();
    for route in routes.as_array().unwrap() {
        let same = |r: &&sinabro_netlink::route::Route| {
            r.dst.to_string() == route["dst"] && r.gateway.is_some()
        };
        let mtu = there.iter().find(same).unwrap().mtu;
        assert_eq!(mtu.map(Into::into), route["mtu"].as_u64(), "{route}");
    }

    // A link that is not the pod's way out has no shortcuts either.
    let second = node.call("ADD", &pod).var("CNI_IFNAME", "net1");
    assert_eq!(second.run().result().get("routes"), None);
    let other = Pod::new();
    let lo = other.conn().link_by_name("lo").unwrap().index;
    other.conn().execute(link::set_up(lo)).unwrap();
    let default = Route::default_of(sinabro_netlink::Family::V4).dev(lo);
    other.conn().execute(default.add()).unwrap();
    let result = node.call("ADD", &other).run().result();
    let routes = result["routes"].as_array().unwrap();
    assert!(routes.iter().all(|route| route["gw"] == v6), "{result}");
    let there = other.conn().routes(&RouteFilter::default()).unwrap();
    assert!(!there.iter().any(|r| r.dst.to_string() == "10.77.0.0/24"));
}

#[test]
fn what_tcp_queues_by_large_segments_has_a_limit() {
    const SETTING: [&str; 3] = ["net", "ipv4", "tcp_notsent_lowat"];
    let unsent = |pod: &Pod| pod.place.run(|| Ok(sysctl::read(&SETTING)?)).unwrap();
    let (node, plain, large, set) = (Node::new(), Pod::new(), Pod::new(), Pod::new());
    let before = unsent(&plain);
    node.call("ADD", &plain).run().result();
    assert_eq!(unsent(&plain), before);
    node.agent().state().local = Some(LocalMtu {
        mtu: 65_535,
        destinations: Vec::new(),
    });
    node.call("ADD", &large).run().result();
    assert_eq!(unsent(&large), (512 << 10).to_string());
    // What somebody set stays.
    set.place
        .run(|| Ok(sysctl::write(&SETTING, "16384")?))
        .unwrap();
    node.call("ADD", &set).run().result();
    assert_eq!(unsent(&set), "16384");
}

#[test]
fn cni_netns_has_to_be_another_network_namespace() {
    let (node, pod) = (Node::new(), Pod::new());
    let call = |path: &str| node.call("ADD", &pod).var("CNI_NETNS", path);
    call("/nonexistent/ns").run().fails_with(4, "CNI_NETNS");
    call("/etc/passwd").run().fails_with(4, "CNI_NETNS");
    call("/proc/self/ns/mnt").run().fails_with(4, "CNI_NETNS");
    call("/proc/self/ns/net")
        .run()
        .fails_with(4, "CNI_NETNS_OVERRIDE");
    assert!(node.agent().calls().is_empty());
    let meant = call("/proc/self/ns/net").var("CNI_NETNS_OVERRIDE", "true");
    meant.run().result();
    assert!(node.conn().link_by_name("eth0").unwrap().up);
}

#[test]
fn without_an_agent_the_runtime_is_told_to_try_again() {
    let (node, pod) = (Node::without_agent(), Pod::new());
    let before = (snapshot(&node.place), snapshot(&pod.place));
    node.call("ADD", &pod).run().fails_with(11, "agent.sock");
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);

    let node = Node::new();
    node.agent()
        .script("allocate", Act::Refuse(ErrorCode::NotReady));
    node.call("ADD", &pod).run().fails_with(11, "sinabro-agent");
}

#[test]
fn fifty_at_once_all_work() {
    let node = Node::new();
    let pods: Vec<_> = (0..50).map(|_| Pod::new()).collect();
    let results: Vec<Value> = std::thread::scope(|scope| {
        let calls: Vec<_> = pods
            .iter()
            .map(|pod| scope.spawn(|| node.call("ADD", pod).run().result()))
            .collect();
        calls.into_iter().map(|c| c.join().unwrap()).collect()
    });
    for (pod, result) in pods.iter().zip(&results) {
        let [v4, v6] = addresses(result);
        flows(&node, pod, [&v4, &v6]);
    }
    std::thread::scope(|scope| {
        for pod in &pods {
            scope.spawn(|| node.call("DEL", pod).run().silent());
        }
    });
    assert!(node.agent().state().endpoints.is_empty());
    assert_eq!(node.conn().links().unwrap().len(), 1);
}

#[test]
fn a_result_nobody_reads_is_taken_back() {
    let (node, pod) = (Node::new(), Pod::new());
    let before = (snapshot(&node.place), snapshot(&pod.place));
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let status = node.call("ADD", &pod).spawn(full.into()).wait().unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(node.agent().state().endpoints.is_empty());
    assert_eq!((snapshot(&node.place), snapshot(&pod.place)), before);
}

#[test]
fn a_link_the_runtime_moved_does_not_stop_an_add() {
    // The name is taken by a link that is no pair at all.
    let (node, pod) = (Node::new(), Pod::new());
    let mut host: Conn = node.conn();
    let squatter = Veth {
        name: &pod.link(),
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        peer_name: "squatter",
        peer_mac: [2, 0, 0, 0, 0, 2],
        peer_netns: None,
    };
    let made = host.create_veth(&squatter).unwrap();
    host.execute(link::set_down(made.index)).unwrap();
    let result = node.call("ADD", &pod).run().result();
    let [v4, v6] = addresses(&result);
    flows(&node, &pod, [&v4, &v6]);
}
