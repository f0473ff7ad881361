//! The API servers by their own addresses, for a node on which nobody but this agent translates the Service
//! `kubernetes`: what translates it needs the API first.
//!
//! Asked are, in this order: the addresses that the Service's endpoints had when they were last seen and those that the
//! setting `apiServers` names, or else the one that the [kubelet] has, by turns; and after them all the Service's own, which may be
//! translated by somebody. The next connection begins with the next of the first two kinds: one that accepts and then fails, such as a
//! machine that got a former server's address, costs an attempt and not the connection. So the Service's own takes its turn, too, where the
//! kubelet's is all that is known: its file may be stale.

use super::kubelet::{self, Found};
use crate::state_file;
use hyper_util::client::legacy::connect::dns::Name;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fmt,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

/// Longest list that is kept.
const MAX_SEEN: usize = 32;

/// An API server as the settings name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiServer {
    /// A name or an address, without brackets.
    pub host: String,
    pub port: u16,
}

impl fmt::Display for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Where to look for API servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiPlaces {
    pub named: Vec<ApiServer>,
    /// The file that keeps what was seen,
    pub seen: PathBuf,
    /// and that which has what the kubelet knows.
    pub kubelets: PathBuf,
}

/// Where the API servers are.
#[derive(Debug)]
pub struct Servers {
    places: ApiPlaces,
    /// The Service's own address, as the kubelet tells every container.
    service: Option<SocketAddr>,
    /// What the kubelet knows, unless the settings name servers.
    found: Found,
    seen: Mutex<BTreeSet<SocketAddr>>,
    connections: AtomicUsize,
}

#[derive(Serialize, Deserialize)]
struct Seen {
    servers: BTreeSet<SocketAddr>,
}

impl Servers {
    /// Nothing is connected to. A file that is missing or damaged is as good as none.
    pub fn new(places: ApiPlaces, service: Option<SocketAddr>) -> Self {
        let seen = match state_file::read_small(&places.seen) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(|Seen { servers }| servers)
                .unwrap_or_else(|error| {
                    let path = places.seen.display();
                    tracing::warn!("what was seen of the API servers is not used, {path}: {error}");
                    BTreeSet::new()
                }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
            Err(error) => {
                let path = places.seen.display();
                tracing::warn!("cannot read what was seen of the API servers, {path}: {error}");
                BTreeSet::new()
            }
        };
        let found = match places.named.is_empty() {
            true => kubelet::read(&places.kubelets),
            false => Found::default(),
        };
        Self {
            places,
            service,
            found,
            seen: Mutex::new(seen.into_iter().take(MAX_SEEN).collect()),
            connections: AtomicUsize::new(0),
        }
    }

    /// Keeps what the Service `kubernetes` leads to. An empty list changes nothing: servers that stop take themselves out of
    /// it, and there must be a way back to the next one.
    pub fn learn(&self, servers: BTreeSet<SocketAddr>) {
        if servers.is_empty() {
            return;
        }
        let servers: BTreeSet<SocketAddr> = servers.into_iter().take(MAX_SEEN).collect();
        {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if *seen == servers {
                return;
            }
            seen.clone_from(&servers);
        }
        let kept = serde_json::to_vec(&Seen { servers })
            .map(|bytes| state_file::replace(&self.places.seen, &bytes));
        match kept {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("{}", crate::chain::Chain(&error)),
            Err(error) => tracing::warn!("cannot keep the API servers' addresses: {error}"),
        }
    }

    /// Why the kubelet's kubeconfig does not say where the API server is, although there is one and nothing else says it.
    pub fn trouble(&self) -> Option<String> {
        let Found {
            server, problems, ..
        } = &self.found;
        (server.is_none() && !problems.is_empty()).then(|| {
            format!(
                "{}: without kube-proxy the API server may not be found after a reboot, set apiServers",
                problems.join("; ")
            )
        })
    }

    /// The addresses to connect to, the best one first.
    async fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let mut all: Vec<SocketAddr> = {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.iter().copied().collect()
        };
        let mut failed = None;
        let kubelets = self.found.api_server();
        let may_be_stale = all.is_empty() && kubelets.is_some();
        for server in self.places.named.iter().chain(&kubelets) {
            match tokio::net::lookup_host((server.host.as_str(), server.port)).await {
                Ok(found) => all.extend(found),
                Err(error) => {
                    let from = match kubelets {
                        Some(_) => "of the kubelet",
                        None => "(setting apiServers)",
                    };
                    let text = format!("cannot find the API server {server} {from}: {error}");
                    failed = Some(io::Error::new(error.kind(), text));
                }
            }
        }
        if may_be_stale {
            all.extend(self.service);
        }
        if !all.is_empty() {
            let first = self.connections.fetch_add(1, Ordering::Relaxed) % all.len();
            all.rotate_left(first);
        }
        all.extend(self.service);
        let mut known = BTreeSet::new();
        all.retain(|address| known.insert(*address));
        match (all.is_empty(), failed) {
            (false, _) => Ok(all),
            (true, Some(error)) => Err(error),
            (true, None) => Err(io::Error::new(
                io::ErrorKind::NotFound,
                "no address of an API server is known: set apiServers",
            )),
        }
    }
}

/// The Service's address from the variables that every container has.
pub fn service_from_environment() -> Option<SocketAddr> {
    let host: IpAddr = std::env::var("KUBERNETES_SERVICE_HOST")
        .ok()?
        .parse()
        .ok()?;
    let port = std::env::var("KUBERNETES_SERVICE_PORT")
        .ok()?
        .parse()
        .ok()?;
    Some(SocketAddr::new(host, port))
}

/// Answers every name with the API servers' addresses, which bring their ports along: the client asks by a URL without
/// one. Without servers it answers as the system does.
#[derive(Clone)]
pub struct Resolver(pub Option<Arc<Servers>>);

impl tower::Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let servers = self.0.clone();
        Box::pin(async move {
            let found = match servers {
                Some(servers) => servers.addresses().await?,
                None => tokio::net::lookup_host((name.as_str(), 0)).await?.collect(),
            };
            Ok(found.into_iter())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(dir: &tempfile::TempDir, named: &[(&str, u16)]) -> ApiPlaces {
        let named = named.iter().map(|(host, port)| ApiServer {
            host: (*host).into(),
            port: *port,
        });
        ApiPlaces {
            named: named.collect(),
            seen: dir.path().join("api-servers.json"),
            kubelets: dir.path().join("kubelets.json"),
        }
    }

    fn of(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn each_connection_begins_with_the_next_server_and_the_service_is_last() {
        let dir = tempfile::tempdir().unwrap();
        let servers = Servers::new(
            places(&dir, &[("192.0.2.3", 6443), ("fd00::4", 443)]),
            Some("10.96.0.1:443".parse().unwrap()),
        );
        servers.learn(
            of(&["192.0.2.2:6443", "192.0.2.3:6443"])
                .into_iter()
                .collect(),
        );
        let [a, b, c, service] = [
            "192.0.2.2:6443",
            "192.0.2.3:6443",
            "[fd00::4]:443",
            "10.96.0.1:443",
        ];
        for expected in [
            [a, b, c, service],
            [b, c, a, service],
            [b, c, a, service],
            [c, a, b, service],
        ] {
            assert_eq!(servers.addresses().await.unwrap(), of(&expected));
        }
    }

    #[tokio::test]
    async fn the_kubelets_server_is_asked_unless_one_is_named_and_by_turns_with_the_service() {
        let dir = tempfile::tempdir().unwrap();
        let found = Found {
            server: Some("https://192.0.2.7:6443".into()),
            ..Default::default()
        };
        kubelet::keep(&found, &places(&dir, &[]).kubelets).unwrap();
        let service = "10.96.0.1:443";
        let servers = Servers::new(places(&dir, &[]), Some(service.parse().unwrap()));
        let kubelets = "192.0.2.7:6443";
        for expected in [[kubelets, service], [service, kubelets]] {
            assert_eq!(servers.addresses().await.unwrap(), of(&expected));
        }
        let seen = "192.0.2.8:6443";
        servers.learn(of(&[seen]).into_iter().collect());
        for expected in [[seen, kubelets, service], [kubelets, seen, service]] {
            assert_eq!(servers.addresses().await.unwrap(), of(&expected));
        }
        let named = Servers::new(places(&dir, &[("192.0.2.3", 6443)]), None);
        let expected = of(&[seen, "192.0.2.3:6443"]);
        assert_eq!(named.addresses().await.unwrap(), expected);
        assert_eq!((servers.trouble(), named.trouble()), (None, None));
        let unusable = Found {
            problems: vec!["/f is no kubeconfig".into()],
            ..Default::default()
        };
        kubelet::keep(&unusable, &places(&dir, &[]).kubelets).unwrap();
        let [servers, named] = [&[][..], &[("192.0.2.3", 6443)]]
            .map(|named| Servers::new(places(&dir, named), None).trouble());
        assert!(servers.unwrap().starts_with("/f is no kubeconfig: "));
        assert_eq!(named, None, "another one is asked");
    }

    #[tokio::test]
    async fn what_was_seen_survives_a_restart_and_an_empty_list() {
        let dir = tempfile::tempdir().unwrap();
        let seen = of(&["192.0.2.2:6443", "[fd00::2]:6443"]);
        let servers = Servers::new(places(&dir, &[]), None);
        assert!(
            servers
                .addresses()
                .await
                .unwrap_err()
                .to_string()
                .contains("apiServers")
        );
        servers.learn(seen.iter().copied().collect());
        servers.learn(BTreeSet::new());
        let servers = Servers::new(places(&dir, &[]), None);
        assert_eq!(servers.addresses().await.unwrap(), seen);
    }

    #[tokio::test]
    async fn a_damaged_file_is_as_good_as_none() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(&dir, &[("192.0.2.3", 6443)]);
        for damaged in ["", "{", "{\"servers\": [\"x\"]}", "[]"] {
            std::fs::write(&places.seen, damaged).unwrap();
            let servers = Servers::new(places.clone(), None);
            assert_eq!(
                servers.addresses().await.unwrap(),
                of(&["192.0.2.3:6443"]),
                "{damaged}"
            );
        }
    }

    #[tokio::test]
    async fn a_name_that_cannot_be_found_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let servers = Servers::new(places(&dir, &[("no-such-server.invalid", 6443)]), None);
        let error = servers.addresses().await.unwrap_err().to_string();
        assert!(error.contains("no-such-server.invalid:6443"), "{error}");
    }
}
