//! What `sinabroctl verify` found: which programs a kernel takes.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyReport {
    /// Its release.
    pub kernel: String,
    pub programs: Vec<VerifiedProgram>,
}

/// A program in one of the ways in which it can be attached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifiedProgram {
    pub name: String,
    /// `tcx`, `clsact`, `cgroup` or `socket map`.
    pub mode: String,
    /// That the verifier walked through; none if the program was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<u32>,
    /// Bytes of machine code; none if the kernel interprets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jited: Option<u32>,
    /// Whether a node cannot do without it.
    pub required: bool,
    /// Whether it was verified and could be attached.
    pub ok: bool,
    /// Why not: the verifier's last lines, for example.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}
