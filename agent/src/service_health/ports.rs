//! `healthCheckNodePort`: whether this node has endpoints of a Service with externalTrafficPolicy Local. Load balancers
//! send its clients to no other node.

use super::{ProxyHealth, answer};
use crate::{
    plan::services::{HealthCheck, ServiceName},
    troubles::{self, Standing},
};
use axum::{
    Router,
    http::{HeaderName, HeaderValue},
    response::Response,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
    time::sleep,
};

/// How soon it is tried again to listen.
const AGAIN: Duration = Duration::from_secs(5);
const TAKEN: &str = "ServiceHealthPortTaken";
/// kube-proxy's, by which load balancers may weigh nodes.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// What is to be answered, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthChecks {
    /// The node's own.
    pub addresses: BTreeSet<IpAddr>,
    pub services: BTreeMap<ServiceName, HealthCheck>,
}

/// One Service's port at one address.
struct Server {
    service: ServiceName,
    endpoints: Arc<AtomicUsize>,
    /// Ends the server when it is gone.
    _stop: oneshot::Sender<()>,
}

/// Listens where Services want it, for ever, once they are translated here: until then somebody else does.
///
/// # Errors
/// If nobody says any more what is wanted.
pub async fn serve(
    mut wanted: watch::Receiver<HealthChecks>,
    mut translates: watch::Receiver<bool>,
    health: Arc<ProxyHealth>,
    standing: Standing,
) -> anyhow::Result<()> {
    translates.wait_for(|is| *is).await?;
    let mut servers: BTreeMap<SocketAddr, Server> = BTreeMap::new();
    loop {
        let checks = wanted.borrow_and_update().clone();
        let failed = follow(&mut servers, &checks, &health).await;
        troubles::replace(&standing, TAKEN, problem(&failed));
        tokio::select! {
            changed = wanted.changed() => changed?,
            () = sleep(AGAIN), if !failed.is_empty() => {}
        }
    }
}

/// Has the servers be as wanted; what could not be listened on.
async fn follow(
    servers: &mut BTreeMap<SocketAddr, Server>,
    checks: &HealthChecks,
    health: &Arc<ProxyHealth>,
) -> Vec<(SocketAddr, ServiceName, io::Error)> {
    let mut wanted: BTreeMap<SocketAddr, (&ServiceName, usize)> = BTreeMap::new();
    let mut failed = Vec::new();
    for (service, check) in &checks.services {
        for address in &checks.addresses {
            let at = SocketAddr::new(*address, check.port);
            // The API server gives a port to one Service alone; a file may not.
            match wanted.get(&at) {
                Some(_) => failed.push((at, service.clone(), io::ErrorKind::AddrInUse.into())),
                None => drop(wanted.insert(at, (service, check.local_endpoints))),
            }
        }
    }
    servers.retain(|at, server| {
        let same = wanted
            .get(at)
            .filter(|(service, _)| **service == server.service);
        if let Some((_, endpoints)) = same {
            server.endpoints.store(*endpoints, Ordering::Relaxed);
        }
        same.is_some()
    });
    for (at, (service, endpoints)) in wanted {
        if servers.contains_key(&at) {
            continue;
        }
        match start(at, service.clone(), endpoints, health.clone()).await {
            Ok(server) => drop(servers.insert(at, server)),
            Err(error) => failed.push((at, service.clone(), error)),
        }
    }
    failed
}

async fn start(
    at: SocketAddr,
    service: ServiceName,
    endpoints: usize,
    health: Arc<ProxyHealth>,
) -> io::Result<Server> {
    let listener = TcpListener::bind(at).await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let endpoints = Arc::new(AtomicUsize::new(endpoints));
    let router = router(service.clone(), endpoints.clone(), health);
    tokio::spawn(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(async {
            // Its sender is gone: an answer of its own.
            let _ = stopped.await;
        });
        if let Err(error) = served.await {
            tracing::warn!("what answers health checks at {at} failed: {error}");
        }
    });
    Ok(Server {
        service,
        endpoints,
        _stop: stop,
    })
}

/// Whatever the path: load balancers have one of their own.
fn router(service: ServiceName, endpoints: Arc<AtomicUsize>, health: Arc<ProxyHealth>) -> Router {
    Router::new().fallback(async move || {
        let endpoints = endpoints.load(Ordering::Relaxed);
        state(&service, endpoints, health.is_serving(Instant::now()))
    })
}

fn state(service: &ServiceName, endpoints: usize, is_healthy: bool) -> Response {
    let json = serde_json::json!({
        "service": {"namespace": service.namespace(), "name": service.name()},
        "localEndpoints": endpoints,
        "serviceProxyHealthy": is_healthy,
    });
    let mut response = answer(endpoints > 0 && is_healthy, json.to_string());
    let headers = response.headers_mut();
    headers.insert(WEIGHT, HeaderValue::from(endpoints));
    response
}

/// What is wrong, if anything is.
fn problem(failed: &[(SocketAddr, ServiceName, io::Error)]) -> Option<String> {
    let (at, service, error) = failed.first()?;
    let others = match failed.len() - 1 {
        0 => String::new(),
        others => format!("; so it is with {others} others"),
    };
    Some(format!(
        "load balancers do not hear whether this node has endpoints of service {service}, its healthCheckNodePort cannot be listened on at {at}: {error}; stop who has it (kube-proxy, `ss -lptn`){others}"
    ))
}
