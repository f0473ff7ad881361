//! Why a watch ended.

use crate::chain::Chain;
use kube::core::Status;
use std::io;

#[derive(Debug, thiserror::Error)]
pub(super) enum WatchError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("the server refuses")]
    Refused(#[source] Box<Status>),
    #[error("the server does not answer")]
    NoAnswer,
    #[error("the server is silent")]
    Silent,
    #[error("the server ends the watch at once")]
    TooShort,
    #[error("the server sends no {0}")]
    Missing(&'static str),
    #[error("the list breaks off")]
    Broken(#[source] io::Error),
    #[error(transparent)]
    Request(#[from] kube::core::request::Error),
}

impl WatchError {
    fn status(&self) -> Option<&Status> {
        match self {
            Self::Api(kube::Error::Api(status)) | Self::Refused(status) => Some(status),
            _ => None,
        }
    }

    /// The point to go on from is not known to the server any more.
    pub(super) fn is_gone(&self) -> bool {
        self.status().is_some_and(|status| status.code == 410)
    }

    /// The server has not come as far as the point it was asked for: its data are older than what
    /// it once told, for example put back from a backup.
    pub(super) fn is_ahead(&self) -> bool {
        let details = self.status().and_then(|status| status.details.as_ref());
        let mut causes = details.into_iter().flat_map(|details| &details.causes);
        causes.any(|cause| cause.reason == "ResourceVersionTooLarge")
    }

    /// Streamed lists are refused as an invalid request where there are none.
    pub(super) fn is_invalid(&self) -> bool {
        let code = self.status().map(|status| status.code);
        matches!(code, Some(400 | 405 | 406 | 415 | 422))
    }

    /// The server has no objects of the kind, or does not show them.
    pub(super) fn is_absent(&self) -> bool {
        let code = self.status().map(|status| status.code);
        matches!(code, Some(403 | 404))
    }

    /// For people, without what kube wraps around it.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Refused(status) | Self::Api(kube::Error::Api(status)) => {
                format!("{} ({})", status.message, status.code)
            }
            Self::Api(kube::Error::Service(error)) => Chain(error.as_ref()).to_string(),
            other => Chain(other).to_string(),
        }
    }
}
