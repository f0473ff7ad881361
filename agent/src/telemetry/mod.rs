//! Metrics and health over HTTP, and the last lines of the log.
//!
//! The agent's state is asked on scrape through [`Provider`]; only API requests are counted as
//! they happen, through [`metrics::Metrics`].

pub mod drops;
pub mod http;
pub mod metrics;
pub mod recent_log;

#[cfg(test)]
mod tests;

use crate::{apply::OverlayStatus, datapath::Level, probe::NamedPeers};
use sinabro_common::api::{
    Condition, EndpointReport, IpamReport, MetricsReport, NodeReport, StatusReport,
};
use std::{future::Future, sync::Arc};

/// Everything a scrape shows, as the agent's core has it.
#[derive(Clone, Debug)]
pub struct Reports {
    pub status: StatusReport,
    pub endpoints: Vec<EndpointReport>,
    pub ipam: IpamReport,
    pub nodes: Arc<Vec<NodeReport>>,
    pub metrics: MetricsReport,
    pub overlay: OverlayStatus,
    /// The peers that have series of their own.
    pub named_peers: NamedPeers,
    /// Which programs run.
    pub programs: Level,
    /// Whether each pod has series of its own.
    pub per_pod: bool,
}

/// The agent's core, as telemetry sees it.
pub trait Provider: Send + Sync + 'static {
    /// Reads everything for a scrape; the error is shown to the scraper.
    fn gather(&self) -> impl Future<Output = Result<Reports, String>> + Send;

    /// What must hold for the node to serve; cheap.
    fn conditions(&self) -> impl Future<Output = Vec<Condition>> + Send;
}
