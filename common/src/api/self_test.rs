//! What the self-test of the TCP acceleration found on a kernel.

use serde::{Deserialize, Serialize};

/// What may be accelerated on this kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// Applications see no difference.
    AllPass,
    /// Some calls behave otherwise: only for who asks for it.
    SomeFail,
    /// Nothing, also on request: bytes may come in the wrong order, a sender may not be held
    /// back, or nobody knows.
    #[default]
    Refused,
}

/// What it takes away from an application if a row differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Class {
    /// Bytes come in another order, or not as they were sent.
    Order,
    /// A sender is not held back.
    BackPressure,
    /// A call behaves otherwise.
    Behaviour,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SelfTestReport {
    pub verdict: Verdict,
    /// Why the verdict is that, in one line.
    pub reason: String,
    /// Its release.
    pub kernel: String,
    /// None if the test has not run.
    pub rows: Vec<RowReport>,
}

/// Something that applications see, on plain and on accelerated connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RowReport {
    pub id: String,
    pub title: String,
    pub class: Class,
    pub passed: bool,
    /// What was seen on a plain connection, and on an accelerated one.
    pub plain: String,
    pub accelerated: String,
    /// What it means for an application if both differ.
    pub meaning: String,
}
