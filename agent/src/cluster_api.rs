//! The connection to the Kubernetes API.
//!
//! As kube makes it (addresses, certificates, tokens read again as they rotate), with one
//! difference: TCP keepalive, so that a connection whose other end vanished without a word ends
//! in half a minute and not with the watch's own timeout after five.

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
use std::{
    path::{Path, PathBuf},
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
}

impl ClusterApi {
    /// Reads what is needed to connect.
    ///
    /// # Errors
    /// If it is missing or wrong.
    pub async fn new(access: &ClusterAccess) -> Result<Self, ClusterApiError> {
        let config = match access {
            ClusterAccess::Kubeconfig(path) => kubeconfig(path).await?,
            ClusterAccess::InCluster => Config::incluster().map_err(ClusterApiError::InCluster)?,
        };
        let server = config.cluster_url.to_string();
        let server = server.trim_end_matches('/').to_owned();
        match connect(&config) {
            Ok(client) => Ok(Self { client, server }),
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

fn connect(config: &Config) -> kube::Result<Client> {
    let mut tcp = HttpConnector::new();
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
