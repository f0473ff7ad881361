use super::{
    node::{self, Asked},
    ports::{self, HealthChecks},
    *,
};
use crate::{
    plan::services::{HealthCheck, ServiceName},
    stand_in::own_address,
    troubles::Standing,
    watch::nodes::Taint,
};
use sinabro_lab::traffic::close::close;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::sleep,
};

/// Status line, headers in lower case, body.
async fn get(at: SocketAddr, path: &str) -> std::io::Result<(u16, String, String)> {
    let mut stream = TcpStream::connect(at).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    // A server that ends closes connections that it has begun nothing on.
    let ended = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(ended)?;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Ok((status, head.to_lowercase(), body.into()))
}

fn own(taints: &[&str], is_going: bool) -> OwnNode {
    let taint = |key: &&str| Taint {
        key: (*key).into(),
        ..Taint::default()
    };
    OwnNode {
        uid: String::new(),
        resource_version: String::new(),
        taints: taints.iter().map(taint).collect(),
        network_unavailable: None,
        zone: String::new(),
        routing: None,
        tunnels: None,
        is_going,
    }
}

#[tokio::test]
async fn a_node_is_well_once_it_translates_and_while_it_stays() {
    let (nodes, own_node) = watch::channel(None);
    let health = Arc::new(ProxyHealth::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let router = node::router(Asked {
        health: health.clone(),
        eligibility: Eligibility::new(Some(own_node)),
        translates: watch::channel(true).1,
    });
    tokio::spawn(async { axum::serve(listener, router).await });
    let states = async || {
        let (healthz, head, body) = get(at, "/healthz").await.unwrap();
        assert!(head.contains("content-type: application/json"), "{head}");
        let json: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert!(json["lastUpdated"].is_string() && json["currentTime"].is_string());
        let (livez, _, body) = get(at, "/livez").await.unwrap();
        assert!(!body.contains("nodeEligible"));
        (healthz, livez, json["nodeEligible"].as_bool().unwrap())
    };
    assert_eq!(states().await, (503, 200, true), "nothing is published yet");
    health.published();
    assert_eq!(states().await, (200, 200, true));
    nodes.send_replace(Some(own(&["other"], false)));
    assert_eq!(states().await, (200, 200, true));
    nodes.send_replace(Some(own(&["other", AUTOSCALERS], false)));
    assert_eq!(states().await, (503, 200, false));
    nodes.send_replace(Some(own(&[], true)));
    assert_eq!(states().await, (503, 200, false));
    nodes.send_replace(None);
    assert_eq!(states().await, (503, 200, false));
    nodes.send_replace(Some(own(&[], false)));
    assert_eq!(states().await, (200, 200, true));

    // What waits is no reason until it waits for long.
    let now = Instant::now();
    health.waits(now);
    health.waits(now + LATE);
    assert!(health.is_serving(now + LATE - Duration::from_nanos(1)));
    assert!(!health.is_serving(now + LATE));
    health.published();
    assert!(health.is_serving(now + LATE));
}

#[tokio::test]
async fn a_services_port_says_whether_there_are_endpoints_here() {
    let own = own_address();
    let free = || std::net::TcpListener::bind((own, 0)).unwrap();
    let (one, taken) = (free(), free());
    let port = one.local_addr().unwrap().port();
    close(one).unwrap();
    let name = |name: &str| ServiceName::new("lab", name);
    let checks = |services: &[(&str, u16, usize)]| HealthChecks {
        addresses: BTreeSet::from([own.into()]),
        services: services
            .iter()
            .map(|(service, port, local_endpoints)| {
                let check = HealthCheck {
                    port: *port,
                    local_endpoints: *local_endpoints,
                };
                (name(service), check)
            })
            .collect::<BTreeMap<_, _>>(),
    };
    let health = Arc::new(ProxyHealth::default());
    health.published();
    let standing = Standing::default();
    let (sender, wanted) = watch::channel(checks(&[("web", port, 2)]));
    let (translating, translates) = watch::channel(false);
    tokio::spawn(ports::serve(wanted, translates, health, standing.clone()));
    let at = SocketAddr::from((own, port));
    let until = async |status: Option<u16>, weight: &str| {
        for _ in 0..500 {
            let answer = get(at, "/any").await.ok();
            let is = match (&answer, status) {
                (None, None) => true,
                (Some((is, head, body)), Some(status)) => {
                    let json: serde_json::Value = serde_json::from_str(body).unwrap();
                    assert_eq!(json["service"]["name"], "web");
                    let weight = format!("x-load-balancing-endpoint-weight: {weight}");
                    *is == status && head.contains(&weight)
                }
                _ => false,
            };
            if is {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("it never answered {status:?}");
    };
    sleep(Duration::from_millis(50)).await;
    assert!(get(at, "/").await.is_err(), "others may have the port");
    translating.send_replace(true);
    until(Some(200), "2").await;
    sender.send_replace(checks(&[("web", port, 0)]));
    until(Some(503), "0").await;

    // Who has another's port is named; the others go on.
    let taken_port = taken.local_addr().unwrap().port();
    sender.send_replace(checks(&[("web", port, 1), ("db", taken_port, 1)]));
    until(Some(200), "1").await;
    let text = || {
        standing
            .lock()
            .unwrap()
            .first()
            .map(|trouble| trouble.text.clone())
    };
    for _ in 0..500 {
        if text().is_some() {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
    let said = text().unwrap();
    assert!(
        said.contains("lab/db") && said.contains(&taken_port.to_string()),
        "{said}"
    );
    sender.send_replace(checks(&[]));
    until(None, "").await;
    assert_eq!(text(), None);
}
