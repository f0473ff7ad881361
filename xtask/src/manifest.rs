//! The Kubernetes objects in deploy/, as data.

use crate::workspace;
use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::PathBuf};

/// Objects by kind, namespace and name: a file may hold each once.
pub type Objects = BTreeMap<String, Value>;

pub fn deploy() -> PathBuf {
    workspace::root().join("deploy")
}

/// The objects of a file in deploy/.
pub fn read(name: &str) -> Result<Objects> {
    let path = deploy().join(name);
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| format!("{} is not valid", path.display()))
}

/// The objects of a YAML stream.
pub fn parse(yaml: &str) -> Result<Objects> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml)?;
    let mut objects = Objects::new();
    // A document of nothing but comments is null.
    for object in documents.into_iter().filter(|value| !value.is_null()) {
        let text = |pointer| object.pointer(pointer).and_then(Value::as_str);
        let (Some(kind), Some(name)) = (text("/kind"), text("/metadata/name")) else {
            bail!("an object has no kind or no name");
        };
        let key = match text("/metadata/namespace") {
            Some(namespace) => format!("{kind} {namespace}/{name}"),
            None => format!("{kind} {name}"),
        };
        if objects.insert(key.clone(), object).is_some() {
            bail!("{key} is there twice");
        }
    }
    Ok(objects)
}

/// Where two values differ, each with its JSON pointer; nothing if they are equal.
pub fn differences(left: &Value, right: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", left, right, &mut found);
    found
}

fn compare(at: &str, left: &Value, right: &Value, found: &mut Vec<String>) {
    match (left, right) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let side = |map: &serde_json::Map<String, Value>| {
                    map.get(key).cloned().unwrap_or(Value::Null)
                };
                compare(&format!("{at}/{key}"), &side(a), &side(b), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (number, (left, right)) in a.iter().zip(b).enumerate() {
                compare(&format!("{at}/{number}"), left, right, found);
            }
        }
        _ if left == right => {}
        _ => found.push(format!("{at}: {left} and {right}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_stream_becomes_objects_by_name() {
        let yaml = "# only a comment\n---\nkind: A\nmetadata: {name: x}\na: &l [1]\nb: *l\n---\nkind: A\nmetadata: {name: x, namespace: sys}\n";
        let objects = parse(yaml).unwrap();
        assert_eq!(objects.keys().collect::<Vec<_>>(), ["A sys/x", "A x"]);
        assert_eq!(objects["A x"]["b"], json!([1]));
        let twice = "kind: A\nmetadata: {name: x}\n---\nkind: A\nmetadata: {name: x}\n";
        assert!(parse(twice).unwrap_err().to_string().contains("twice"));
        assert!(parse("kind: A\n").is_err());
    }

    #[test]
    fn every_difference_is_named_once() {
        let left = json!({"a": {"b": [1, 2]}, "c": 1, "d": "x"});
        assert!(differences(&left, &left).is_empty());
        let right = json!({"a": {"b": [1, 3]}, "d": "x", "e": true});
        assert_eq!(
            differences(&left, &right),
            ["/a/b/1: 2 and 3", "/c: 1 and null", "/e: null and true"]
        );
        assert_eq!(differences(&json!([1]), &json!([1, 2])).len(), 1);
    }
}
