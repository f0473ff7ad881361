//! What a failed call prints: the specification's error object with its code.

use crate::spec::SpecVersion;
use serde::Serialize;

/// Every code the plugin uses. Below 100 they are the specification's ("Error", section 5);
/// from 100 they are this plugin's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The configuration's `cniVersion` is not spoken, or does not know the verb.
    IncompatibleVersion = 1,
    /// CHECK of an attachment of which nothing exists: there is nothing to clean up either.
    UnknownContainer = 3,
    /// A CNI_* variable is missing or wrong; the message names it.
    InvalidEnvironment = 4,
    /// Reading stdin, a namespace or a state file failed.
    Io = 5,
    /// stdin is not JSON, or the agent's answer could not be understood.
    Decode = 6,
    /// The network configuration is JSON, but a value in it cannot be used; the message names
    /// the key.
    InvalidConfig = 7,
    /// The agent is away, starting or stopping: the same call will succeed later.
    TryAgainLater = 11,
    /// STATUS: an ADD would fail.
    NotAvailable = 50,
    /// STATUS: an ADD would fail, and pods already there may be cut off from a part of the
    /// cluster.
    LimitedConnectivity = 51,
    /// The agent answered with an error of its own.
    Agent = 100,
    /// Every address of a range is taken.
    RangeFull = 101,
    /// An address asked for is taken or not one of this node's.
    AddressUnavailable = 102,
    /// The pod has an interface of the name asked for already.
    InterfaceExists = 103,
    /// The kernel refused to make, change or remove something.
    Kernel = 104,
    /// CHECK: something of the attachment is missing or not as it was made.
    Mismatch = 105,
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{msg}: {details}")]
pub struct Error {
    pub code: Code,
    /// Short, lower case, names the object.
    pub msg: String,
    /// The cause, and the next step where there is one. May be empty.
    pub details: String,
}

impl Error {
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: String::new(),
        }
    }

    pub fn details(mut self, details: impl std::fmt::Display) -> Self {
        self.details = details.to_string();
        self
    }

    /// Adds what else went wrong on the way back.
    pub fn also(mut self, more: impl std::fmt::Display) -> Self {
        if !self.details.is_empty() {
            self.details.push_str("; ");
        }
        self.details.push_str(&more.to_string());
        self
    }

    /// The JSON that goes to stdout.
    pub fn to_json(&self, version: SpecVersion) -> String {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Wire<'a> {
            cni_version: &'a str,
            code: u32,
            msg: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            details: &'a str,
        }
        let wire = Wire {
            cni_version: version.as_str(),
            code: self.code as u32,
            msg: &self.msg,
            details: &self.details,
        };
        // Strings and a number always serialise; the fallback only keeps this free of panics.
        serde_json::to_string(&wire).unwrap_or_else(|_| format!("{{\"code\":{}}}", wire.code))
    }
}

/// An error and everything beneath it, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        // Some errors repeat their source in their own text.
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_specifications_keys() {
        let error = Error::new(Code::InvalidConfig, "`mac` is \"odd\"").details("ask again");
        let json: serde_json::Value =
            serde_json::from_str(&error.to_json(SpecVersion::V1_0_0)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "cniVersion": "1.0.0", "code": 7, "msg": "`mac` is \"odd\"", "details": "ask again"
            })
        );
    }

    #[test]
    fn chain_names_each_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::io::Error);
        let io = std::io::Error::from_raw_os_error(2);
        let expected = format!("outer: {io}");
        assert_eq!(chain(&Outer(io)), expected);
    }
}
