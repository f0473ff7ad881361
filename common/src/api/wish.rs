//! What pods wish.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A wish out of a few, each with a word of its own: in annotations, CNI_ARGS and network
/// configurations as on the socket.
macro_rules! wish {
    (
        $(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $word:literal,)+ }
        $error:ident = $neither:literal
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$of])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        #[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
        #[error($neither)]
        pub struct $error;

        impl FromStr for $name {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($error),
                }
            }
        }
    };
}

wish! {
    /// What a pod wishes about the acceleration of its TCP connections to pods of its node.
    TcpAcceleration { Enabled = "enabled", Disabled = "disabled", }
    ParseTcpAccelerationError = "neither enabled nor disabled"
}

wish! {
    /// What a pod wishes about the MTU of its link, which may be larger than what leaves the node.
    LocalMtuWish {
        /// As the node has it.
        Auto = "auto",
        /// One MTU for everything.
        Off = "off",
    }
    ParseLocalMtuWishError = "neither auto nor off"
}

wish! {
    /// How a pod wishes what it sends to Services to be translated.
    ServiceTranslation {
        /// At its sockets where that can be, unless a proxy in the pod has to see Services' addresses.
        Auto = "auto",
        /// At its sockets where that can be, whatever is in the pod.
        Socket = "socket",
        /// As packets on its link: within the pod they have Services' addresses.
        Packet = "packet",
    }
    ParseServiceTranslationError = "neither auto, socket nor packet"
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_and_json_are_the_same_words() {
        for wish in [TcpAcceleration::Enabled, TcpAcceleration::Disabled] {
            assert_eq!(wish.to_string().parse(), Ok(wish));
            assert_eq!(serde_json::to_value(wish).unwrap(), wish.as_str());
        }
        for wish in [LocalMtuWish::Auto, LocalMtuWish::Off] {
            assert_eq!(wish.to_string().parse(), Ok(wish));
            assert_eq!(serde_json::to_value(wish).unwrap(), wish.as_str());
        }
        use ServiceTranslation::{Auto, Packet, Socket};
        for wish in [Auto, Socket, Packet] {
            assert_eq!(wish.to_string().parse(), Ok(wish));
            assert_eq!(serde_json::to_value(wish).unwrap(), wish.as_str());
        }
    }

    proptest! {
        #[test]
        fn nothing_else_is_understood(text in "\\PC{0,12}|[eE]nabled ?|DISABLED|true|on|[aA]uto ?|OFF|") {
            let known = matches!(text.as_str(), "enabled" | "disabled");
            prop_assert_eq!(text.parse::<TcpAcceleration>().is_ok(), known);
            let known = matches!(text.as_str(), "auto" | "off");
            prop_assert_eq!(text.parse::<LocalMtuWish>().is_ok(), known);
        }
    }
}
