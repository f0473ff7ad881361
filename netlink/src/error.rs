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
    /// EBUSY, EAGAIN, EADDRINUSE.
    #[error("{0}")]
    Busy(Refusal),
    /// EPERM, EACCES, EROFS. The kernel answers EACCES also where IPv6 is disabled on the link.
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
    /// No answer within the socket's deadline.
    #[error("{what}: no answer from the kernel in time")]
    Timeout { what: String },
    /// An answer that makes no sense.
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
    /// The variant for an errno.
    pub(crate) fn refused(what: impl Into<String>, errno: Errno, message: Option<String>) -> Error {
        let refusal = Refusal {
            what: what.into(),
            errno,
            message,
        };
        match errno {
            Errno::EEXIST => Error::Exists(refusal),
            Errno::ENOENT | Errno::ENODEV | Errno::ENXIO | Errno::ESRCH | Errno::EADDRNOTAVAIL => {
                Error::NotFound(refusal)
            }
            Errno::EBUSY | Errno::EAGAIN | Errno::EADDRINUSE => Error::Busy(refusal),
            Errno::EPERM | Errno::EACCES | Errno::EROFS => Error::Permission(refusal),
            Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => {
                Error::NotSupported(refusal)
            }
            Errno::EINVAL | Errno::ERANGE => Error::Invalid(refusal),
            Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::ENETDOWN => {
                Error::Unreachable(refusal)
            }
            _ => Error::Kernel(refusal),
        }
    }

    /// Of a failed system call.
    pub(crate) fn system(what: impl Into<String>, error: &io::Error) -> Error {
        match error.raw_os_error() {
            Some(code) => Error::refused(what, Errno::from_raw(code), None),
            None => Error::refused(what, Errno::UnknownErrno, Some(error.to_string())),
        }
    }

    /// What the kernel or a system call refused, if that is what happened.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Error::Exists(refusal)
            | Error::NotFound(refusal)
            | Error::Busy(refusal)
            | Error::Permission(refusal)
            | Error::NotSupported(refusal)
            | Error::Invalid(refusal)
            | Error::Unreachable(refusal)
            | Error::Kernel(refusal) => Some(refusal),
            _ => None,
        }
    }

    pub fn errno(&self) -> Option<Errno> {
        self.refusal().map(|refusal| refusal.errno)
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: Errno) -> Error {
        Error::refused("do it", errno, None)
    }

    #[test]
    fn errno_alone_decides_the_variant() {
        use Errno::*;
        for errno in [ENOENT, ENODEV, ENXIO, ESRCH, EADDRNOTAVAIL] {
            assert!(refused(errno).is_not_found(), "{errno}");
        }
        assert!(refused(EEXIST).is_exists());
        for errno in [EBUSY, EADDRINUSE] {
            assert!(matches!(refused(errno), Error::Busy(_)));
        }
        for errno in [EPERM, EACCES, EROFS] {
            assert!(matches!(refused(errno), Error::Permission(_)));
        }
        for errno in [EOPNOTSUPP, EPROTONOSUPPORT, EAFNOSUPPORT] {
            assert!(matches!(refused(errno), Error::NotSupported(_)));
        }
        for errno in [EINVAL, ERANGE] {
            assert!(matches!(refused(errno), Error::Invalid(_)));
        }
        for errno in [ENETUNREACH, EHOSTUNREACH, ENETDOWN] {
            assert!(matches!(refused(errno), Error::Unreachable(_)));
        }
        let other = refused(ENOSPC);
        assert!(matches!(other, Error::Kernel(_)));
        assert_eq!(other.errno(), Some(ENOSPC));
        // A text that says otherwise changes nothing.
        let text = Some("File exists".to_string());
        assert!(!Error::refused("do it", EINVAL, text).is_exists());
    }

    #[test]
    fn only_the_named_outcome_is_ignored() {
        assert_eq!(Ok(7).ignore_exists().unwrap(), Some(7));
        assert_eq!(
            Err::<(), _>(refused(Errno::EEXIST))
                .ignore_exists()
                .unwrap(),
            None
        );
        assert_eq!(
            Err::<(), _>(refused(Errno::ESRCH))
                .ignore_not_found()
                .unwrap(),
            None
        );
        assert!(Err::<(), _>(refused(Errno::ESRCH)).ignore_exists().is_err());
        assert!(
            Err::<(), _>(refused(Errno::EEXIST))
                .ignore_not_found()
                .is_err()
        );
    }

    #[test]
    fn the_text_names_the_attempt_the_errno_and_the_kernel_s_reason() {
        let error = Error::refused("add it", Errno::EINVAL, Some("not like this".into()));
        assert_eq!(
            error.to_string(),
            "add it: EINVAL: Invalid argument (not like this)"
        );
    }
}
