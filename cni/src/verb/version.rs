//! VERSION: what the plugin speaks. Answers whatever is on stdin, also nothing.

use crate::{input::peek_version, spec::SpecVersion};
use serde::Serialize;

pub fn run(input: &[u8]) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Wire<'a> {
        cni_version: &'a str,
        supported_versions: [&'static str; SpecVersion::ALL.len()],
    }
    // The specification echoes the input's version, spoken or not.
    let asked = peek_version(input).filter(|text| is_version(text));
    let wire = Wire {
        cni_version: asked.as_deref().unwrap_or(SpecVersion::LATEST.as_str()),
        supported_versions: SpecVersion::ALL.map(SpecVersion::as_str),
    };
    // Plain strings always serialise.
    serde_json::to_string(&wire).unwrap_or_default()
}

/// Short, and of the form of a semantic version.
fn is_version(text: &str) -> bool {
    (5..=32).contains(&text.len())
        && text.bytes().filter(|b| *b == b'.').count() >= 2
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'+'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn asked(input: &str) -> Value {
        let json: Value = serde_json::from_str(&run(input.as_bytes())).unwrap();
        assert_eq!(
            json["supportedVersions"],
            json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"])
        );
        json["cniVersion"].clone()
    }

    #[test]
    fn the_version_asked_for_is_echoed() {
        for version in ["0.3.1", "0.1.0", "2.0.0-rc.1"] {
            assert_eq!(asked(&json!({"cniVersion": version}).to_string()), version);
        }
    }

    #[test]
    fn any_input_is_answered() {
        for input in [
            "",
            "{}",
            "[",
            "{\"cniVersion\": 7}",
            "{\"cniVersion\": \"all of them\"}",
        ] {
            assert_eq!(asked(input), "1.1.0", "{input}");
        }
    }
}
