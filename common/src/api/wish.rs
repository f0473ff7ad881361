//! What pods wish.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// What a pod wishes about the acceleration of its TCP connections to pods of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TcpAcceleration {
    Enabled,
    Disabled,
}

impl TcpAcceleration {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Disabled => "disabled",
        }
    }
}

impl fmt::Display for TcpAcceleration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither enabled nor disabled")]
pub struct ParseTcpAccelerationError;

impl FromStr for TcpAcceleration {
    type Err = ParseTcpAccelerationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Enabled, Self::Disabled]
            .into_iter()
            .find(|wish| wish.as_str() == text)
            .ok_or(ParseTcpAccelerationError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_and_json_are_the_same_two_words() {
        for wish in [TcpAcceleration::Enabled, TcpAcceleration::Disabled] {
            assert_eq!(wish.to_string().parse(), Ok(wish));
            assert_eq!(serde_json::to_value(wish).unwrap(), wish.as_str());
        }
    }

    proptest! {
        #[test]
        fn nothing_else_is_understood(text in "\\PC{0,12}|[eE]nabled ?|DISABLED|true|on|") {
            let known = matches!(text.as_str(), "enabled" | "disabled");
            prop_assert_eq!(text.parse::<TcpAcceleration>().is_ok(), known);
        }
    }
}
