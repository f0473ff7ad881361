//! `/healthz` and `/livez`: whether this node translates Services.
//!
//! `/healthz` is for load balancers: 200 once Services are translated, unless the node is about to go. `/livez` is for who
//! would start the proxy again: 503 only if what has changed stays unpublished.

use super::{Eligibility, ProxyHealth, answer};
use crate::troubles::{self, Standing};
use anyhow::Context as _;
use axum::{Router, extract::State, response::Response, routing::get};
use k8s_openapi::jiff::Timestamp;
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{net::TcpListener, sync::watch, time::sleep};

/// How soon it is tried again to listen.
const AGAIN: Duration = Duration::from_secs(5);
const TAKEN: &str = "ServiceHealthAddressTaken";

/// What is asked about.
#[derive(Debug)]
pub struct Asked {
    pub health: Arc<ProxyHealth>,
    pub eligibility: Eligibility,
    /// Until then somebody else answers, who translates.
    pub translates: watch::Receiver<bool>,
}

/// Serves until the agent stops. That the address is taken, as it is beside kube-proxy, is said, and tried again.
///
/// # Errors
/// Those of the server.
pub async fn serve(
    address: SocketAddr,
    mut asked: Asked,
    standing: Standing,
    mut stopping: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let translates = asked.translates.wait_for(|is| *is).await;
    drop(translates.context("what hands Services over ended")?);
    let listener = loop {
        match listen(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                let text = format!(
                    "load balancers that ask at {address} do not hear of Sinabro, it cannot be listened on: {error}; stop who has it (kube-proxy, `ss -lptn`), or set serviceHealthAddress to another, or to nothing"
                );
                troubles::replace(&standing, TAKEN, Some(text));
                sleep(AGAIN).await;
            }
        }
    };
    troubles::replace(&standing, TAKEN, None);
    let stopped = async move {
        let _ = stopping.wait_for(|stop| *stop).await;
    };
    axum::serve(listener, router(asked))
        .with_graceful_shutdown(stopped)
        .await
        .context("the server of Services' health failed")?;
    // It ends when told to; what ends unasked is an error.
    std::future::pending().await
}

/// Where there is no IPv6, all addresses are those of IPv4.
async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error)
            if error.raw_os_error() == Some(libc::EAFNOSUPPORT)
                && address.is_ipv6()
                && address.ip().is_unspecified() =>
        {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        other => other,
    }
}

pub(super) fn router(asked: Asked) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/livez", get(livez))
        .with_state(Arc::new(asked))
}

async fn healthz(State(asked): State<Arc<Asked>>) -> Response {
    let (is_current, last) = asked.health.state(Instant::now());
    let is_eligible = asked.eligibility.is_eligible();
    let is_well = is_current && last.is_some() && is_eligible;
    let times = times(is_well, last);
    answer(
        is_well,
        format!(r#"{{{times}, "nodeEligible": {is_eligible}}}"#),
    )
}

async fn livez(State(asked): State<Arc<Asked>>) -> Response {
    let (is_current, last) = asked.health.state(Instant::now());
    answer(is_current, format!("{{{}}}", times(is_current, last)))
}

/// As long as all is well, all is as of now, whenever something changed last.
fn times(is_well: bool, last: Option<Timestamp>) -> String {
    let now = Timestamp::now();
    let last = match last {
        _ if is_well => now.to_string(),
        Some(last) => last.to_string(),
        None => String::new(),
    };
    format!(r#""lastUpdated": "{last}", "currentTime": "{now}""#)
}
