//! The versions of the CNI specification that the plugin speaks, and what differs between them.
//!
//! 0.1.0 and 0.2.0 are left out: their results know neither interfaces nor two families.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SpecVersion {
    V0_3_0,
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl SpecVersion {
    pub const ALL: [Self; 5] = [
        Self::V0_3_0,
        Self::V0_3_1,
        Self::V0_4_0,
        Self::V1_0_0,
        Self::V1_1_0,
    ];
    pub const LATEST: Self = Self::V1_1_0;

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|v| v.as_str() == text)
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// CHECK came with 0.4.0.
    pub fn has_check(self) -> bool {
        self >= Self::V0_4_0
    }

    /// GC and STATUS came with 1.1.0.
    pub fn has_gc_and_status(self) -> bool {
        self >= Self::V1_1_0
    }

    /// Up to 0.4.0 every entry of `ips` says its family in `version`; 1.0.0 removed the field.
    pub fn has_ip_version(self) -> bool {
        self < Self::V1_0_0
    }

    /// 1.1.0 added an interface's `mtu`, `socketPath` and `pciID`, and a route's `mtu`,
    /// `advmss`, `priority`, `table` and `scope`.
    pub fn has_details(self) -> bool {
        self >= Self::V1_1_0
    }

    /// All of them, for an error's text.
    pub fn list() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

impl fmt::Display for SpecVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_parse_back_and_are_in_order() {
        for version in SpecVersion::ALL {
            assert_eq!(SpecVersion::parse(version.as_str()), Some(version));
        }
        assert!(SpecVersion::ALL.is_sorted());
        for text in ["", "0.1.0", "0.2.0", "1.1", "1.1.0 ", "v1.1.0", "2.0.0"] {
            assert_eq!(SpecVersion::parse(text), None, "{text}");
        }
    }
}
