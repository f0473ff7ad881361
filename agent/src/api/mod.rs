//! The agent's Unix socket (messages: [`sinabro_common::api`]).
//!
//! - [`server`]: connections, peers, deadlines, limits;
//! - [`pod`]: the CNI plugin's requests;
//! - [`status`]: reports for `sinabroctl` and telemetry, [`acceleration`], [`connections`], [`paths`] and [`services`] among them.

mod acceleration;
mod connections;
mod paths;
pub mod pod;
pub mod server;
mod services;
pub mod status;

use crate::{chain::Chain, endpoint::EndpointError, ipam::IpamError};
use sinabro_common::api::{ApiError, ErrorCode, Request};

fn api_error(error: &EndpointError) -> ApiError {
    let code = match error {
        EndpointError::Ipam(IpamError::NoRange) => ErrorCode::NotReady,
        EndpointError::Ipam(IpamError::Full(_)) => ErrorCode::RangeFull,
        EndpointError::Ipam(IpamError::Unavailable { .. }) => ErrorCode::AddressUnavailable,
        EndpointError::Ipam(IpamError::OneFamily(..))
        | EndpointError::WrongLink { .. }
        | EndpointError::Collision { .. } => ErrorCode::Invalid,
        _ => ErrorCode::Internal,
    };
    ApiError::new(code, Chain(error).to_string())
}

/// A request's name in metrics.
fn call(request: &Request) -> &'static str {
    match request {
        Request::Allocate { .. } => "allocate",
        Request::Activate { .. } => "activate",
        Request::Check { .. } => "check",
        Request::Release { .. } => "release",
        Request::Gc { .. } => "gc",
        Request::Status => "status",
        Request::Endpoints => "endpoints",
        Request::Ipam => "ipam",
        Request::Nodes { .. } => "nodes",
        Request::Metrics => "metrics",
        Request::Acceleration => "acceleration",
        Request::Log => "log",
        Request::DropEvents { .. } => "dropEvents",
        Request::Connections { .. } => "connections",
        Request::FlushConnections { .. } => "flushConnections",
        Request::ConnectionStats => "connectionStats",
        Request::Services { .. } => "services",
    }
}

/// An outcome's name in metrics.
fn result<T>(outcome: &Result<T, ApiError>) -> &'static str {
    match outcome {
        Ok(_) => "ok",
        Err(error) => match error.code {
            ErrorCode::NotReady => "notReady",
            ErrorCode::RangeFull => "rangeFull",
            ErrorCode::AddressUnavailable => "addressUnavailable",
            ErrorCode::NotFound => "notFound",
            ErrorCode::Invalid => "invalid",
            ErrorCode::Version => "version",
            ErrorCode::Internal => "internal",
        },
    }
}
