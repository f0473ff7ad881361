//! /metrics, /healthz and /readyz.
//!
//! /healthz answers 200 as long as the process does anything at all. /readyz answers 200 when
//! every condition holds, else 503 and one line per condition that does not.

use super::{Provider, metrics::Metrics};
use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use std::{future::Future, io, sync::Arc, time::Duration};
use tokio::{net::TcpListener, time::timeout};

/// Prometheus gives a scrape ten seconds by default.
const DEADLINE: Duration = Duration::from_secs(8);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

struct Shared<P> {
    provider: Arc<P>,
    metrics: Arc<Metrics>,
}

/// Serves until `stop` resolves.
///
/// # Errors
/// Those of the listener.
pub async fn serve<P: Provider>(
    listener: TcpListener,
    provider: Arc<P>,
    metrics: Arc<Metrics>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(scrape::<P>))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready::<P>))
        .with_state(Arc::new(Shared { provider, metrics }));
    axum::serve(listener, router)
        .with_graceful_shutdown(stop)
        .await
}

async fn scrape<P: Provider>(State(shared): State<Arc<Shared<P>>>) -> Response {
    let fail = |text: String| (StatusCode::INTERNAL_SERVER_ERROR, text + "\n").into_response();
    let reports = match timeout(DEADLINE, shared.provider.gather()).await {
        Ok(Ok(reports)) => reports,
        Ok(Err(error)) => return fail(error),
        Err(_) => return fail("the agent did not answer in time".into()),
    };
    match shared.metrics.render(&reports) {
        Ok(text) => ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => fail(error.to_string()),
    }
}

async fn ready<P: Provider>(State(shared): State<Arc<Shared<P>>>) -> Response {
    let unready = |text| (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    let Ok(conditions) = timeout(DEADLINE, shared.provider.conditions()).await else {
        return unready("the agent did not answer in time\n".into());
    };
    let failing = conditions.iter().filter(|condition| !condition.ok);
    let lines: String = failing
        .map(|c| format!("{}: {}\n", c.name, c.detail))
        .collect();
    match lines.is_empty() {
        true => "ready\n".into_response(),
        false => unready(lines),
    }
}
