//! The connection to the Kubernetes API.
//!
//! As kube makes it (addresses, certificates, tokens read again as they rotate), with one
//! difference: TCP keepalive, so that a connection whose other end vanished without a word ends
//! in half a minute and not with the watch's own timeout after five. And the servers may be asked by their own
//! addresses ([`servers`]).

pub mod kubelet;
pub mod servers;

use crate::config::ClusterAccess;
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ClientBuilder, ConfigExt as _},
    config::{KubeConfigOptions, Kubeconfig},
};
use servers::{Resolver, Servers, service_from_environment};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tower::{BoxError, ServiceExt as _};

const CONNECT: Duration = Duration::from_secs(10);
/// Silence after which the other end is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
/// How long what was sent may stay unacknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum ClusterApiError {
    #[error("cannot use kubeconfig {}", path.display())]
    Kubeconfig {
        path: PathBuf,
        source: kube::config::KubeconfigError,
    },
    #[error("cannot use the pod's service account, or give --kubeconfig or --nodes")]
    InCluster(#[source] kube::config::InClusterError),
    #[error("cannot connect to the Kubernetes API at {server}")]
    Client {
        server: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// A client, and where it connects to. Nothing is sent yet.
#[derive(Clone)]
pub struct ClusterApi {
    pub client: Client,
    pub server: String,
    /// Where the servers are, if they are asked by their own addresses.
    pub servers: Option<Arc<Servers>>,
}

impl ClusterApi {
    /// Reads what is needed to connect.
    ///
    /// # Errors
    /// If it is missing or wrong.
    pub async fn new(access: &ClusterAccess) -> Result<Self, ClusterApiError> {
        let (config, servers) = match access {
            ClusterAccess::Kubeconfig(path) => (kubeconfig(path).await?, None),
            ClusterAccess::InCluster => {
                let config = Config::incluster().map_err(ClusterApiError::InCluster)?;
                (config, None)
            }
            ClusterAccess::Servers(places) => {
                // By the name that their certificates have, and without a port.
                let config = Config::incluster_dns().map_err(ClusterApiError::InCluster)?;
                let servers = Servers::new(places.clone(), service_from_environment());
                (config, Some(Arc::new(servers)))
            }
        };
        Self::with(&config, servers)
    }

    fn with(config: &Config, servers: Option<Arc<Servers>>) -> Result<Self, ClusterApiError> {
        let server = config.cluster_url.to_string();
        let server = server.trim_end_matches('/').to_owned();
        match connect(config, servers.clone()) {
            Ok(client) => Ok(Self {
                client,
                server,
                servers,
            }),
            Err(source) => Err(ClusterApiError::Client {
                server,
                source: Box::new(source),
            }),
        }
    }
}

async fn kubeconfig(path: &Path) -> Result<Config, ClusterApiError> {
    let failed = |source| ClusterApiError::Kubeconfig {
        path: path.to_owned(),
        source,
    };
    let file = Kubeconfig::read_from(path).map_err(failed)?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(failed)
}

fn connect(config: &Config, servers: Option<Arc<Servers>>) -> kube::Result<Client> {
    let mut tcp = HttpConnector::new_with_resolver(Resolver(servers));
    // The scheme is the TLS layer's to look at.
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT));
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let tls = config.rustls_https_connector_with_connector(tcp)?;
    let http: legacy::Client<_, Body> = legacy::Client::builder(TokioExecutor::new()).build(tls);
    // The layers speak of any error.
    let http = http.map_err(BoxError::from);
    let builder = ClientBuilder::new(http, config.default_namespace.clone())
        .with_layer(&config.extra_headers_layer()?);
    let base = config.base_uri_layer();
    Ok(match config.auth_layer()? {
        Some(auth) => builder.with_layer(&auth).with_layer(&base).build(),
        None => builder.with_layer(&base).build(),
    })
}

#[cfg(test)]
mod tests {
    use super::{servers::ApiPlaces, *};
    use crate::stand_in::{Answer, StandIn};
    use k8s_openapi::api::core::v1::Node;
    use kube::Api;
    use rcgen::CertifiedKey;
    use std::{collections::BTreeSet, io::ErrorKind, net::SocketAddr};
    use tokio::{io::AsyncReadExt as _, net::TcpListener};
    use tokio_rustls::{
        TlsAcceptor,
        rustls::{self, pki_types::PrivatePkcs8KeyDer},
    };

    #[tokio::test]
    async fn a_server_that_is_gone_costs_an_attempt() {
        let mut server = StandIn::start().await;
        let mut gone = StandIn::start().await;
        gone.stop().await;
        let gone = gone.address;
        let dir = tempfile::tempdir().unwrap();
        let places = ApiPlaces {
            named: Vec::new(),
            seen: dir.path().join("api-servers.json"),
            kubelets: dir.path().join("kubelets-api-server.json"),
        };
        let servers = Arc::new(Servers::new(places, None));
        servers.learn(BTreeSet::from([gone, server.address]));
        let mut config = Config::new("http://kubernetes.default.svc".parse().unwrap());
        config.auth_info.token = Some("secret".to_owned().into());
        let api = ClusterApi::with(&config, Some(servers)).unwrap();
        let nodes: Api<Node> = Api::all(api.client);
        // Whichever is tried first.
        for _ in 0..2 {
            server.answer(Answer::Whole(
                200,
                r#"{"kind":"NodeList","apiVersion":"v1","metadata":{},"items":[]}"#.into(),
            ));
            nodes.list(&Default::default()).await.unwrap();
            assert!(server.request().await.0.starts_with("GET /api/v1/nodes"));
        }
    }

    type Asked = tokio::task::JoinHandle<std::io::Result<String>>;

    /// A server with a certificate of its own, and what it is asked, once somebody trusts that.
    async fn of_another_ca() -> (Vec<u8>, SocketAddr, Asked) {
        let CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["kubernetes.default.svc".to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der()).into();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = tokio::spawn(async move {
            let (stream, _) = listener.accept().await?;
            let mut stream = TlsAcceptor::from(Arc::new(config)).accept(stream).await?;
            let mut request = vec![0; 4096];
            let len = stream.read(&mut request).await?;
            Ok(String::from_utf8_lossy(&request[..len]).into_owned())
        });
        (cert.der().to_vec(), address, asked)
    }

    /// Whoever is behind the address that the kubelet's file has.
    #[tokio::test]
    async fn a_server_of_another_ca_gets_no_token() {
        for is_trusted in [true, false] {
            let (own, address, asked) = of_another_ca().await;
            let (other, ..) = of_another_ca().await;
            let dir = tempfile::tempdir().unwrap();
            let places = ApiPlaces {
                named: Vec::new(),
                seen: dir.path().join("api-servers.json"),
                kubelets: dir.path().join("kubelets-api-server.json"),
            };
            let found = kubelet::Found {
                server: Some(format!("https://{address}")),
                ..Default::default()
            };
            kubelet::keep(&found, &places.kubelets).unwrap();
            let mut config = Config::new("https://kubernetes.default.svc".parse().unwrap());
            config.root_cert = Some(vec![if is_trusted { own } else { other }]);
            config.auth_info.token = Some("secret".to_owned().into());
            let servers = Arc::new(Servers::new(places, None));
            let api = ClusterApi::with(&config, Some(servers)).unwrap();
            let nodes: Api<Node> = Api::all(api.client);
            // The server hangs up in any case.
            nodes.list(&Default::default()).await.unwrap_err();
            let asked = asked.await.unwrap();
            match is_trusted {
                true => assert!(asked.unwrap().contains("Bearer secret")),
                false => assert_eq!(asked.unwrap_err().kind(), ErrorKind::InvalidData),
            }
        }
    }
}
