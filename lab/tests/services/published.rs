//! What Services lead to follows a file that changes while the agent runs, and outlives the agent.

use anyhow::Context as _;
use sinabro_common::api::{
    Request, Response, ServiceOutcome, ServiceReport, ServiceUsage, ServicesPage,
};
use sinabro_lab::{Binaries, Lab, Lifetime, Node, wait::wait_for};
use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    time::Duration,
};

const FLAGS: [&str; 2] = [
    "--service-proxy=on",
    "--services-file=/run/lab/services/services.yaml",
];

fn file(node: &Node) -> PathBuf {
    let path = node.namespace().path("/run/lab/services/services.yaml");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    path
}

/// At one blow, as whoever writes such a file has to do it.
fn write(node: &Node, objects: &[String]) {
    let path = file(node);
    let items: String = objects
        .iter()
        .map(|object| format!("- {object}\n"))
        .collect();
    let text = match objects {
        [] => "{kind: List, items: []}\n".into(),
        _ => format!("kind: List\nitems:\n{items}"),
    };
    let beside = path.with_extension("new");
    fs::write(&beside, text).unwrap();
    fs::rename(beside, path).unwrap();
}

fn service(name: &str, address: &str) -> String {
    format!(
        "{{kind: Service, metadata: {{namespace: lab, name: {name}}}, spec: {{type: ClusterIP, clusterIP: {address}, clusterIPs: [{address}], ports: [{{name: http, protocol: TCP, port: 80}}]}}}}"
    )
}

fn slice(name: &str, hosts: &[u8]) -> String {
    let endpoint = |host: &u8| {
        format!(
            "{{addresses: [10.244.9.{host}], conditions: {{ready: true, serving: true, terminating: false}}}}"
        )
    };
    let endpoints: Vec<_> = hosts.iter().map(endpoint).collect();
    format!(
        "{{kind: EndpointSlice, metadata: {{namespace: lab, name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}, addressType: IPv4, ports: [{{name: http, protocol: TCP, port: 8080}}], endpoints: [{}]}}",
        endpoints.join(", ")
    )
}

fn ask(node: &Node) -> anyhow::Result<Vec<ServiceReport>> {
    let request = Request::Services {
        after: None,
        only: None,
    };
    match node.ask(request)? {
        Response::Services(ServicesPage { services, more }) => {
            assert!(!more);
            Ok(services)
        }
        other => panic!("{other:?}"),
    }
}

fn usage(node: &Node) -> ServiceUsage {
    match node.ask(Request::Metrics).unwrap() {
        Response::Metrics(metrics) => metrics.services.unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Where a Service's one frontend is and what that leads to; none where it is out.
type Way = Option<(SocketAddr, ServiceOutcome, Vec<SocketAddr>)>;

/// By name.
type Short = Vec<(String, Way)>;

fn short(services: &[ServiceReport]) -> Short {
    let of = |service: &ServiceReport| {
        let set = service.ports.first().and_then(|port| port.sets.first());
        let set = set.map(|set| (set.frontends[0], set.outcome, set.endpoints.clone()));
        (service.name.clone(), set)
    };
    services.iter().map(of).collect()
}

fn leads(name: &str, address: &str, hosts: &[u8]) -> (String, Way) {
    let at = format!("{address}:80").parse().unwrap();
    let hosts: Vec<SocketAddr> = hosts
        .iter()
        .map(|host| ([10, 244, 9, *host], 8080).into())
        .collect();
    let outcome = match hosts[..] {
        [] => ServiceOutcome::Refuse,
        _ => ServiceOutcome::Balance,
    };
    (name.into(), Some((at, outcome, hosts)))
}

fn follows(node: &Node, expected: Short) {
    let followed = wait_for("the file to be followed", || {
        let now = short(&ask(node)?);
        anyhow::ensure!(
            now == expected,
            "{now:?} is published, and not {expected:?}"
        );
        Ok(Some(()))
    });
    followed.unwrap();
}

#[test]
fn services_follow_their_file_and_outlive_the_agent() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    // The file may come later.
    node.start_agent_with(&FLAGS).unwrap();
    node.wait_ready().unwrap();
    assert_eq!(ask(node).unwrap(), []);
    write(node, &[service("web", "10.96.0.10"), slice("web", &[1, 2])]);
    follows(node, vec![leads("web", "10.96.0.10", &[1, 2])]);

    // Endpoints come and go, and so do Services.
    let both = |hosts: &[u8]| {
        [
            service("web", "10.96.0.10"),
            slice("web", hosts),
            service("db", "10.96.0.11"),
        ]
    };
    write(node, &both(&[2, 3]));
    follows(
        node,
        vec![
            leads("db", "10.96.0.11", &[]),
            leads("web", "10.96.0.10", &[2, 3]),
        ],
    );
    let table = node.ctl(&["services", "lab/web"]).unwrap();
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(
        text.contains("10.96.0.10:80") && text.contains("10.244.9.2:8080, 10.244.9.3:8080"),
        "{text}"
    );
    assert!(!text.contains("lab/db"), "{text}");
    let none = node.ctl(&["services", "lab/nobody"]).unwrap();
    assert_eq!(none.status.code(), Some(1));

    // Who wants what another has waits for it, and says so.
    let mut third = both(&[2, 3]).to_vec();
    third.push(service("thief", "10.96.0.10"));
    write(node, &third);
    let waits = wait_for("who comes second to wait", || {
        let thief = ask(node)?
            .into_iter()
            .find(|service| service.name == "thief");
        let problem = thief.and_then(|thief| thief.problem).unwrap_or_default();
        anyhow::ensure!(problem.contains("lab/web"), "{problem}");
        Ok(Some(()))
    });
    waits.unwrap();
    assert_eq!(usage(node).waiting, 1);
    write(
        node,
        &[service("thief", "10.96.0.10"), both(&[])[2].clone()],
    );
    follows(
        node,
        vec![
            leads("db", "10.96.0.11", &[]),
            leads("thief", "10.96.0.10", &[]),
        ],
    );
    write(node, &both(&[2, 3]));
    let as_before = vec![
        leads("db", "10.96.0.11", &[]),
        leads("web", "10.96.0.10", &[2, 3]),
    ];
    follows(node, as_before.clone());

    // An agent that knows of no Service takes none away.
    node.kill_agent().unwrap();
    fs::remove_file(file(node)).unwrap();
    node.start_agent_with(&FLAGS).unwrap();
    node.wait_ready().unwrap();
    assert_eq!(ask(node).unwrap(), []);
    let map = |usage: ServiceUsage, name: &str| {
        usage
            .maps
            .into_iter()
            .find(|map| map.map == name)
            .unwrap()
            .taken
    };
    // Two addresses, and a port of each.
    assert_eq!(map(usage(node), "FRONTENDS"), 4);
    assert_eq!(map(usage(node), "SLOTS"), 2);
    write(node, &both(&[2, 3]));
    follows(node, as_before);
    assert_eq!(
        map(usage(node), "SLOTS"),
        2,
        "nothing changed, and something was written"
    );
    write(node, &[]);
    follows(node, vec![]);
    assert_eq!(map(usage(node), "FRONTENDS"), 0);

    // Where others translate, there is nothing to see.
    node.stop_agent().unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let off = wait_for("nothing to be translated any more", || {
        let off = node.ctl(&["services"])?;
        Ok((off.status.code() == Some(1)).then_some(off))
    });
    let why = String::from_utf8(off.unwrap().stderr).unwrap();
    assert!(why.contains("serviceProxy: off"), "{why}");
}

/// Status and body of an answer that the node itself gets.
fn get(node: &Node, at: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let text = node.place().run(|| {
        let mut stream = TcpStream::connect_timeout(&at, Duration::from_secs(2))?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })?;
    let (head, body) = text.split_once("\r\n\r\n").context("no HTTP")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, body.to_owned()))
}

#[test]
fn load_balancers_hear_whether_a_node_translates_and_has_endpoints() {
    const PORT: u16 = 32_100;
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.start_agent_with(&FLAGS).unwrap();
    node.wait_ready().unwrap();
    let [healthz, livez] = ["/healthz", "/livez"];
    for address in node.addresses() {
        let at = SocketAddr::new(address, 10_256);
        let says = |path, expected| {
            wait_for(&format!("{expected} at {at}{path}"), || {
                Ok((get(node, at, path)?.0 == expected).then_some(()))
            })
            .unwrap();
        };
        if address.is_ipv4() {
            // Until Services are translated, somebody else may answer there.
            assert!(get(node, at, livez).is_err());
            write(node, &[]);
        }
        says(livez, 200);
        says(healthz, 200);
    }

    let balanced = format!(
        "{{kind: Service, metadata: {{namespace: lab, name: lb}}, spec: {{type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: {PORT}, clusterIP: 10.96.0.12, clusterIPs: [10.96.0.12], ports: [{{name: http, protocol: TCP, port: 80}}]}}}}"
    );
    let on = |name: &str| {
        let endpoint = "conditions: {ready: true";
        slice("lb", &[1]).replace(endpoint, &format!("nodeName: {name}, {endpoint}"))
    };
    let asked = SocketAddr::new(node.addresses()[0], PORT);
    for (at, expected, count) in [("elsewhere", 503, 0), (node.name(), 200, 1)] {
        write(node, &[balanced.clone(), on(at)]);
        wait_for(&format!("{expected} with an endpoint on {at}"), || {
            let (status, body) = get(node, asked, "/any")?;
            Ok(
                (status == expected && body.contains(&format!("\"localEndpoints\":{count}")))
                    .then_some(()),
            )
        })
        .unwrap();
        let said = node.ctl(&["services", "lab/lb"]).unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        let why = "externalTrafficPolicy is Local, and it is on elsewhere";
        assert_eq!(said.contains(why), count == 0, "{said}");
    }
    // Nobody asks for it any more.
    write(node, &[]);
    wait_for("the port to be let go", || {
        Ok(get(node, asked, "/").is_err().then_some(()))
    })
    .unwrap();
}
