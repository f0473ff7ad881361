//! Errors for people: with every cause behind them, in one line.

use std::{error::Error, fmt};

/// Displays an error and its causes, each after a colon.
pub(crate) struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        write!(f, "{said}")?;
        let mut error = self.0;
        while let Some(source) = error.source() {
            let text = source.to_string();
            // Some repeat their source in their own text.
            if !said.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            (said, error) = (text, source);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot write x")]
    struct Outer(#[source] Middle);

    #[derive(Debug, thiserror::Error)]
    #[error("disk: {0}")]
    struct Middle(#[source] io::Error);

    #[test]
    fn every_cause_is_said_once() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let text = Chain(&Outer(Middle(full))).to_string();
        assert_eq!(
            text,
            "cannot write x: disk: No space left on device (os error 28)"
        );
    }
}
