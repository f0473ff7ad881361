//! From a packet that a pod sends out of the node to a row of `sinabroctl connections`.

use crate::support::{Node, allocate, eventually};
use aya::maps::{HashMap, Map, MapData};
use sinabro_agent::datapath::monotonic_ns;
use sinabro_common::{
    abi::{
        Addr,
        connection::{Connection, ConnectionKey, FLAG_CLIENT_IS_HIGH, FLAG_MASQUERADED, Tuple},
    },
    algo::ct_state::{ACK, SEEN},
    api::{
        Attachment, ConnectionFilter, ConnectionReport, ConnectionStats, ErrorCode, Request,
        Response,
    },
    names,
};
use sinabro_netlink::{Family, neigh::Neigh, route::Route};
use socket2::{Domain, Socket, Type};
use std::{
    fs,
    net::{IpAddr, SocketAddr},
    process::{Command, Output},
};

const POD: &str = "shop/cart-0";
const SERVER: &str = "198.51.100.9";
/// Of the uplink's other end, where nobody is.
const ROUTER: &str = "192.0.2.9";

/// A node with a pod whose packets leave by the uplink.
pub fn node() -> (Node, IpAddr) {
    let mut node = Node::new();
    let router: IpAddr = ROUTER.parse().unwrap();
    let mut conn = node.conn();
    let uplink = conn.link_by_name("up0").unwrap().index;
    let default = Route::default_of(Family::V4).via(router).dev(uplink);
    conn.execute_all([
        Neigh::new(uplink, router, [2, 0, 0, 0, 1, 2]).add(),
        default.add(),
    ])
    .unwrap();
    node.start();
    let attachment = add_cart(&node);
    let address = *attachment.addresses.iter().find(|a| a.is_ipv4()).unwrap();
    let interface = attachment.link.replace("snb", "pod");
    let eth0 = node.pods().set_up(&interface, &[address.into()]).unwrap();
    let gateway: IpAddr = names::GATEWAY_V4.into();
    let mut pods = node.pods().conn().unwrap();
    let default = Route::default_of(Family::V4).via(gateway).dev(eth0);
    pods.execute_all([
        Neigh::new(eth0, gateway, attachment.host_mac.0).add(),
        default.onlink().add(),
    ])
    .unwrap();
    (node, address)
}

/// An ADD of the pod shop/cart-0.
fn add_cart(node: &Node) -> Attachment {
    let mut request = allocate("a");
    if let Request::Allocate { pod, .. } = &mut request {
        pod.namespace = "shop".into();
        pod.name = "cart-0".into();
    }
    let mut plugin = node.connect();
    let Ok(Response::Attachment(attachment)) = plugin.call(request) else {
        panic!("the pod gets no addresses");
    };
    let ifindex = node.add_link(&attachment);
    plugin.activate("a", ifindex).unwrap()
}

/// Asks for a connection to each of these ports, once; nobody answers.
pub fn connect(node: &Node, from: IpAddr, ports: std::ops::Range<u16>) {
    let connect = || {
        for port in ports {
            let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None)?;
            socket.bind(&SocketAddr::new(from, 0).into())?;
            let server = SocketAddr::new(SERVER.parse()?, port);
            let error = socket.connect(&server.into()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{error}");
        }
        Ok(())
    };
    node.pods().run(connect).unwrap();
}

pub fn ctl(node: &Node, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sinabroctl"));
    command.env("SINABRO_SOCKET", node.state(names::SOCKET));
    command.args(args.split_whitespace()).output().unwrap()
}

pub fn list(node: &Node, filters: &str) -> Vec<ConnectionReport> {
    let output = ctl(
        node,
        &format!("connections list --limit 0 -o json {filters}"),
    );
    assert!(output.status.success(), "{output:?}");
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    serde_json::from_value(shown["connections"].clone()).unwrap()
}

#[test]
fn what_a_pod_begins_is_listed_counted_and_forgotten() {
    let (node, pod) = node();
    connect(&node, pod, 1000..1700);
    let rows = list(&node, "");
    assert_eq!(rows.len(), 700);
    let row = rows
        .iter()
        .find(|row| row.server.port == Some(1000))
        .unwrap();
    assert_eq!(row.protocol, "tcp");
    assert_eq!(row.client.address, pod);
    assert_eq!(row.client.pod.as_deref(), Some(POD));
    assert_eq!(row.payer.as_deref(), Some(POD));
    assert_eq!(row.server.to_string(), format!("{SERVER}:1000"));
    let outside = row.masqueraded_as.as_ref().unwrap();
    assert_eq!(outside.address.to_string(), "192.0.2.1");
    assert_eq!(row.state, "SYN_SENT");
    assert!((1..=120).contains(&row.expires_seconds), "{row:?}");

    assert_eq!(
        list(&node, "--pod shop/cart-0 --port 1699 --state unanswered").len(),
        1
    );
    assert_eq!(
        list(&node, "--remote 198.51.100.0/24 --masqueraded").len(),
        700
    );
    assert_eq!(list(&node, "--remote 192.0.2.0/24").len(), 0);
    let nobody = ctl(&node, "connections list --pod shop/web");
    assert_eq!(nobody.status.code(), Some(1));
    let told = String::from_utf8_lossy(&nobody.stderr);
    assert!(told.contains("there is no pod shop/web"), "{told}");

    let stats = ctl(&node, "connections stats -o json");
    let stats: ConnectionStats = serde_json::from_slice(&stats.stdout).unwrap();
    assert_eq!((stats.connections, stats.masqueraded), (700, 700));
    assert_eq!(stats.by_state["SYN_SENT"], 700);
    assert_eq!(
        (stats.pods[0].pod.as_str(), stats.pods[0].unanswered),
        (POD, 700)
    );
    assert_eq!(stats.remotes.len(), 20);

    for args in ["list --remote 198.51.100.9 --port 1699", "stats"] {
        let shown = ctl(&node, &format!("connections {args}")).stdout;
        println!("{}", String::from_utf8_lossy(&shown));
    }

    let flushed = ctl(&node, "connections flush --port 1000");
    assert_eq!(flushed.stdout, b"1 connection forgotten\n");
    assert_eq!(list(&node, "").len(), 699);
    let flushed = ctl(&node, "connections flush --all");
    assert_eq!(flushed.stdout, b"699 connections forgotten\n");
    assert_eq!(list(&node, "").len(), 0);
    // The ports are free again: the same connections get in.
    connect(&node, pod, 1000..1700);
    assert_eq!(list(&node, "").len(), 700);
    // Whoever speaks to the socket directly has to say what is meant, too.
    let everything = Request::FlushConnections {
        filter: ConnectionFilter::default(),
        all: false,
        from: None,
    };
    let error = node.connect().call(everything).unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid);
    // A place that no reply gave.
    let nowhere = Request::Connections {
        filter: ConnectionFilter::default(),
        from: Some(u32::MAX),
    };
    let Ok(Response::Connections(page)) = node.connect().call(nowhere) else {
        panic!("the end is no error");
    };
    assert_eq!((page.connections.len(), page.next), (0, None));
}

/// Of the room that is left one pod's unanswered connections may take an eighth.
#[test]
fn a_pod_that_floods_is_refused_and_named() {
    let (node, pod) = node();
    connect(&node, pod, 1..20_001);
    let stats = ctl(&node, "connections stats -o json");
    let stats: ConnectionStats = serde_json::from_slice(&stats.stdout).unwrap();
    let cart = &stats.pods[0];
    assert_eq!(cart.pod, POD);
    assert!(cart.refused > 0 && cart.connections < 20_000, "{cart:?}");
    assert_eq!(cart.connections, cart.unanswered);
    assert_eq!(cart.connections, stats.connections);
    let drops = ctl(&node, "drops --reason connection_share --pod shop/cart-0");
    let drops = String::from_utf8_lossy(&drops.stdout).into_owned();
    assert!(drops.contains(" (shop/cart-0) > 198.51.100.9:"), "{drops}");
    eventually("the log names it", || {
        let Ok(Response::Log(log)) = node.connect().call(Request::Log) else {
            panic!("there is no log");
        };
        let told = |line: &str| {
            line.contains("new connections of a pod are refused") && line.contains(POD)
        };
        log.lines().any(told)
    });
}

/// Half a million connections: whatever is asked about them costs the agent a few megabytes at most, and is answered in
/// frames that are not too long.
#[test]
fn half_a_million_connections_cost_the_agent_no_memory() {
    const MANY: u32 = 500_000;
    let (mut node, pod) = node();
    node.kill();
    node.start_with(&["--connections", "600000"]);
    node.wait_ready();
    let map = MapData::from_pin(node.bpf("v3/CONNECTIONS")).unwrap();
    let mut map = HashMap::<_, ConnectionKey, Connection>::try_from(Map::HashMap(map)).unwrap();
    let now = monotonic_ns();
    for n in 0..MANY {
        let sent = Tuple {
            src: pod.into(),
            dst: Addr::v4((0xc800_0000 + n / 50_000).to_be_bytes()),
            src_port: ((n % 50_000) as u16).to_be_bytes(),
            dst_port: [1, 187],
            proto: 6,
            pad: [0; 3],
        };
        let (key, client_is_high) = sent.key();
        let high = match client_is_high {
            true => FLAG_CLIENT_IS_HIGH,
            false => 0,
        };
        let record = Connection {
            last_seen_ns: now,
            began_ns: now,
            nat: Addr::v4([192, 0, 2, 1]),
            nat_port: sent.src_port,
            states: [SEEN | ACK; 2],
            flags: FLAG_MASQUERADED | high,
            ..Connection::NONE
        };
        map.insert(key, record, 0).unwrap();
    }
    let memory = || {
        let status = fs::read_to_string(format!("/proc/{}/status", node.agent_pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next());
        kilobytes.unwrap().parse::<u64>().unwrap()
    };
    // The most that it had is what it has now (proc_pid_clear_refs(5)).
    fs::write(format!("/proc/{}/clear_refs", node.agent_pid()), "5").unwrap();
    let before = memory();
    let stats = ctl(&node, "--timeout 60 connections stats -o json");
    let stats: ConnectionStats = serde_json::from_slice(&stats.stdout).unwrap();
    assert_eq!(stats.connections, u64::from(MANY));
    assert_eq!(stats.remotes[0].connections, 50_000);
    assert_eq!(
        list(&node, "--timeout 60 --remote 200.0.0.3 --port 77").len(),
        1
    );
    let page = ctl(&node, "--timeout 60 connections list --limit 3000 -o json");
    let page: serde_json::Value = serde_json::from_slice(&page.stdout).unwrap();
    assert_eq!(page["more"], true);
    let flushed = ctl(&node, "--timeout 60 connections flush --all");
    assert_eq!(
        flushed.stdout, b"500000 connections forgotten\n",
        "{flushed:?}"
    );
    assert_eq!(list(&node, "").len(), 0);
    let more = memory() - before;
    println!("the agent took {more} KB more than {before} KB");
    assert!(more < 32 * 1024, "{more} KB");
}
