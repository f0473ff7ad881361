//! Kernel refusals as variants.
//!
//! The variant follows from errno alone, never from text. Every variant says what was attempted.

use nix::errno::Errno;
use std::{fmt, io};

pub type Result<T> = std::result::Result<T, Error>;

/// What was attempted and why the kernel refused it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The attempt, such as `add route 10.0.0.0/24 dev #3`.
    pub what: String,
    pub errno: Errno,
    /// The kernel's own explanation (NLMSGERR_ATTR_MSG), where it gave one.
    pub message: Option<String>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.errno)?;
        match &self.message {
            Some(message) => write!(f, " ({message})"),
            None => Ok(()),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// EEXIST.
    #[error("{0}")]
    Exists(Refusal),
    /// ENOENT, ENODEV, ENXIO, ESRCH, EADDRNOTAVAIL: the object or its link is not there.
    #[error("{0}")]
    NotFound(Refusal),
    /// EBUSY, EAGAIN.
    #[error("{0}")]
    Busy(Refusal),
    /// EPERM, EACCES. The kernel answers EACCES also where IPv6 is disabled on the link.
    #[error("{0}")]
    Permission(Refusal),
    /// EOPNOTSUPP, EPROTONOSUPPORT, EAFNOSUPPORT.
    #[error("{0}")]
    NotSupported(Refusal),
    /// EINVAL, ERANGE.
    #[error("{0}")]
    Invalid(Refusal),
    /// ENETUNREACH, EHOSTUNREACH, ENETDOWN: no route to the gateway or destination.
    #[error("{0}")]
    Unreachable(Refusal),
    /// Any other errno.
    #[error("{0}")]
    Kernel(Refusal),

    /// A link name that no kernel accepts.
    #[error("link name {name:?}: {reason}")]
    Name { name: String, reason: &'static str },
    /// A sysctl name that could leave /proc/sys.
    #[error("sysctl {name:?}: {reason}")]
    Sysctl { name: String, reason: &'static str },
    /// A system call on a socket, file or namespace failed.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    /// No answer within the socket's deadline.
    #[error("{what}: no answer from the kernel in time")]
    Timeout { what: String },
    /// An answer that is not netlink.
    #[error("{what}: malformed answer: {reason}")]
    Malformed { what: String, reason: String },
    /// The tables changed during each of several dumps.
    #[error("{what}: changed while being listed, each time; try again")]
    Interrupted { what: String },
    /// A closure that ran in a namespace panicked.
    #[error("{what}: panicked: {message}")]
    Panicked { what: String, message: String },
}

impl Error {
    pub fn is_exists(&self) -> bool {
        matches!(self, Error::Exists(_))
    }

    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::NotFound(_))
    }
}

/// Ways to look past an outcome that is fine for an idempotent caller.
pub trait ResultExt<T> {
    /// `Ok(None)` in place of [`Error::Exists`].
    fn ignore_exists(self) -> Result<Option<T>>;
    /// `Ok(None)` in place of [`Error::NotFound`].
    fn ignore_not_found(self) -> Result<Option<T>>;
}

impl<T> ResultExt<T> for Result<T> {
    fn ignore_exists(self) -> Result<Option<T>> {
        match self {
            Err(Error::Exists(_)) => Ok(None),
            other => other.map(Some),
        }
    }

    fn ignore_not_found(self) -> Result<Option<T>> {
        match self {
            Err(Error::NotFound(_)) => Ok(None),
            other => other.map(Some),
        }
    }
}
