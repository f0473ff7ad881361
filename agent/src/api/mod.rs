//! The agent's Unix socket (messages: [`sinabro_common::api`]).
//!
//! - [`server`]: connections, peers, deadlines, limits;
//! - [`pod`]: the CNI plugin's requests;
//! - [`status`]: reports for `sinabroctl` and telemetry.

pub mod pod;
pub mod server;
pub mod status;

use crate::{endpoint::EndpointError, ipam::IpamError};
use sinabro_common::api::{ApiError, ErrorCode, Request};

/// An error with every cause behind it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // thiserror's `transparent` repeats its source.
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

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
    ApiError::new(code, chain(error))
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
        Request::Nodes => "nodes",
        Request::Metrics => "metrics",
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
