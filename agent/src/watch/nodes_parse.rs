//! The nodes file's text: a YAML (and so also JSON) list of `{name, addresses, podCIDRs}`.
//!
//! Strict: nothing unknown, nothing missing but what the agent itself adds to the file it keeps
//! (`registered`, `ready`) and what need not be said (`native`, `udp6ZeroChecksum`), nothing twice. An error names the entry and the field. What the entries mean beside one another is the plan's to judge, node by node.

use crate::plan::{Facts, Node};
use serde_json::{Map, Value};
use std::str::FromStr;

/// More than twice what 15,000 nodes need.
pub const MAX_LEN: usize = 16 << 20;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    #[error("it is empty; a cluster without nodes is written `[]`")]
    Empty,
    #[error("it is longer than {MAX_LEN} bytes")]
    TooLong,
    #[error("it is not UTF-8 text")]
    Utf8,
    #[error("{0}")]
    Syntax(String),
    #[error("it must be a list of nodes, each with name, addresses and podCIDRs")]
    NotAList,
    #[error("{entry}: {reason}")]
    Entry { entry: String, reason: String },
}

const FIELDS: [&str; 7] = [
    "name",
    "addresses",
    "podCIDRs",
    "registered",
    "ready",
    "native",
    "udp6ZeroChecksum",
];
/// Longest node name, as Kubernetes has it (RFC 1123 subdomain).
const MAX_NAME: usize = 253;

/// Parses the file's bytes.
///
/// # Errors
/// The first fault in the order of the text.
pub fn parse(bytes: &[u8]) -> Result<Facts, ParseError> {
    if bytes.len() > MAX_LEN {
        return Err(ParseError::TooLong);
    }
    let text = str::from_utf8(bytes).map_err(|_| ParseError::Utf8)?;
    if text.trim().is_empty() {
        return Err(ParseError::Empty);
    }
    let value: Value = serde_saphyr::from_str(text).map_err(|e| ParseError::Syntax(short(&e)))?;
    let Value::Array(entries) = value else {
        return Err(ParseError::NotAList);
    };
    let mut facts = Facts::default();
    for (i, entry) in entries.iter().enumerate() {
        let fault = |reason| ParseError::Entry {
            entry: describe(i, entry),
            reason,
        };
        let node = node(entry).map_err(fault)?;
        let name = node.name.clone();
        if facts.nodes.insert(name.clone(), node).is_some() {
            return Err(fault(format!("name: {name} is already an earlier entry's")));
        }
    }
    Ok(facts)
}

/// The parser's message without the excerpt it may draw below it.
pub(super) fn short(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.trim_start_matches("error: ").to_owned()
}

/// `entry 3 (node-c)`: counted from one, as people count.
fn describe(index: usize, entry: &Value) -> String {
    match entry.get("name") {
        Some(Value::String(name)) => format!("entry {} ({})", index + 1, cut(name)),
        _ => format!("entry {}", index + 1),
    }
}

fn node(entry: &Value) -> Result<Node, String> {
    let Value::Object(fields) = entry else {
        return Err("it must be a mapping with name, addresses and podCIDRs".into());
    };
    if let Some(unknown) = fields.keys().find(|key| !FIELDS.contains(&key.as_str())) {
        return Err(format!(
            "{} is not a field; there are name, addresses and podCIDRs",
            cut(unknown)
        ));
    }
    Ok(Node {
        name: name(field(fields, "name")?)?,
        addresses: list(fields, "addresses", "an IP address")?,
        pod_cidrs: list(fields, "podCIDRs", "a prefix such as 10.244.1.0/24")?,
        registered: optional(fields, "registered", Value::as_u64, "seconds of Unix time")?,
        ready: optional(fields, "ready", Value::as_bool, "true or false")?,
        native: optional(fields, "native", Value::as_bool, "true or false")?,
        zero_checksum: optional(fields, "udp6ZeroChecksum", Value::as_bool, "true or false")?,
    })
}

fn field<'a>(fields: &'a Map<String, Value>, key: &str) -> Result<&'a Value, String> {
    fields.get(key).ok_or_else(|| format!("{key} is missing"))
}

fn optional<T: Default>(
    fields: &Map<String, Value>,
    key: &str,
    read: impl Fn(&Value) -> Option<T>,
    what: &str,
) -> Result<T, String> {
    match fields.get(key) {
        None => Ok(T::default()),
        Some(value) => read(value).ok_or_else(|| format!("{key}: it must be {what}")),
    }
}

fn name(value: &Value) -> Result<String, String> {
    let Value::String(name) = value else {
        return Err("name: it must be text; put quotes around a number".into());
    };
    // Kubernetes names nodes by RFC 1123 subdomains in lower case; kubelet lowers host names.
    let name = name.to_ascii_lowercase();
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
    let label = |label: &str| {
        let edge = label.starts_with('-') || label.ends_with('-');
        !label.is_empty() && !edge && label.bytes().all(allowed)
    };
    if name.len() > MAX_NAME || !name.split('.').all(label) {
        return Err(format!(
            "name: `{}` is not a node name: letters, digits, dashes and dots, at most {MAX_NAME}",
            cut(&name)
        ));
    }
    Ok(name)
}

fn list<T: FromStr + PartialEq>(
    fields: &Map<String, Value>,
    key: &str,
    what: &str,
) -> Result<Vec<T>, String> {
    let Value::Array(values) = field(fields, key)? else {
        return Err(format!("{key}: it must be a list, each {what}"));
    };
    let mut items = Vec::with_capacity(values.len());
    for value in values {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let item = text
            .parse()
            .map_err(|_| format!("{key}: `{}` is not {what}", cut(&text)))?;
        if items.contains(&item) {
            return Err(format!("{key}: {} is listed twice", cut(&text)));
        }
        items.push(item);
    }
    Ok(items)
}

/// Enough of a text to recognise it; a faulty one may be of any length.
pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(64) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    const GOOD: &str = "
- name: node-a
  addresses: [192.168.0.1, fd00::1]
  podCIDRs: [10.244.1.0/24, fd00:244:1::/64]
- name: node-b
  addresses:
    - 192.168.0.2
  podCIDRs: []
";

    #[test]
    fn yaml_and_json_say_the_same() {
        let yaml = parse(GOOD.as_bytes()).unwrap();
        assert_eq!(yaml.nodes.len(), 2);
        assert_eq!(yaml.nodes["node-a"].pod_cidrs.len(), 2);
        let nodes: Vec<_> = yaml.nodes.values().collect();
        let json = serde_json::to_vec(&nodes).unwrap();
        assert_eq!(parse(&json).unwrap(), yaml);
        assert_eq!(parse(b"[]").unwrap(), Facts::default());
    }

    #[test]
    fn what_a_node_takes_may_be_said() {
        let node = |more: &str| {
            let text = format!("[{{name: a, addresses: [], podCIDRs: []{more}}}]");
            parse(text.as_bytes()).map(|facts| facts.nodes["a"].clone())
        };
        let takes = |more: &str| node(more).map(|node| (node.native, node.zero_checksum));
        assert_eq!(takes(""), Ok((false, false)));
        assert_eq!(takes(", native: true"), Ok((true, false)));
        assert_eq!(takes(", udp6ZeroChecksum: true"), Ok((false, true)));
        assert_eq!(takes(", udp6ZeroChecksum: false"), Ok((false, false)));
        let error = takes(", udp6ZeroChecksum: 1").unwrap_err().to_string();
        assert!(
            error.ends_with("udp6ZeroChecksum: it must be true or false"),
            "{error}"
        );
    }

    #[test]
    fn an_error_names_entry_and_field() {
        let entry = |text: &str| format!("[{{name: a, addresses: [], podCIDRs: []}}, {text}]");
        let cases = [
            (" \n".into(), "empty"),
            ("nodes: []".into(), "must be a list"),
            ("- name: [".into(), "line"),
            (entry("7"), "entry 2: it must be a mapping"),
            (entry("{name: b}"), "entry 2 (b): addresses is missing"),
            (
                entry("{name: 7, addresses: [], podCIDRs: []}"),
                "entry 2: name: it must be text",
            ),
            (
                entry("{name: 'a b', addresses: [], podCIDRs: []}"),
                "entry 2 (a b): name: `a b`",
            ),
            (
                entry("{name: b, addresses: x, podCIDRs: []}"),
                "addresses: it must be a list",
            ),
            (
                entry("{name: b, addresses: [x], podCIDRs: []}"),
                "addresses: `x` is not an IP",
            ),
            (
                entry("{name: b, addresses: [], podCIDRs: [10.0.0.0]}"),
                "podCIDRs: `10.0.0.0`",
            ),
            (
                entry("{name: b, addresses: [1.1.1.1, 1.1.1.1], podCIDRs: []}"),
                "listed twice",
            ),
            (
                entry("{name: b, addresses: [], podCidrs: []}"),
                "podCidrs is not a field",
            ),
            (
                entry("{name: a, addresses: [], podCIDRs: []}"),
                "entry 2 (a): name: a is already",
            ),
            (
                entry("{name: b, name: c, addresses: [], podCIDRs: []}"),
                "duplicate",
            ),
        ];
        for (text, expected) in cases {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert_eq!(parse(&[0xff, 0xfe]), Err(ParseError::Utf8));
        assert_eq!(parse(&vec![b' '; MAX_LEN + 1]), Err(ParseError::TooLong));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn near_misses_never_panic(at in 0..GOOD.len(), with in "[-:\\[\\]{}&*!|>'\"%@` \na0]{0,3}", drop in 0usize..6) {
            let end = (at + drop).min(GOOD.len());
            let _ = parse(format!("{}{with}{}", &GOOD[..at], &GOOD[end..]).as_bytes());
        }

        #[test]
        fn truncation_never_invents_a_node(at in 0..GOOD.len()) {
            let whole = parse(GOOD.as_bytes()).unwrap();
            if let Ok(part) = parse(&GOOD.as_bytes()[..at]) {
                prop_assert!(part.nodes.keys().all(|name| whole.nodes.contains_key(name) || "node-b".starts_with(name.as_str())));
            }
        }
    }
}
